"""Runs `triton_cases.py` under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreter import run_interpreted


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("triton_cases.py"))
