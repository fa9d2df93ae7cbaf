"""Runs `interpreted_cases.py` under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreter import run_interpreted


def test_engine_over_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_cases.py"))
