"""Test files that need Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(cases: Path) -> None:
    """Run a file of tests in a process of its own, on the CPU; fail with its output."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LAZYRAG_TEST_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(cases)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
