"""Runs the Triton cases in a process of their own: the interpreter must be chosen before import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LAZYRAG_TEST_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(CASES)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
