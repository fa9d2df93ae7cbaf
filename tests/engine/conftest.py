"""Most tests here are about what is reused and where it lies: nothing else happens by itself."""

from __future__ import annotations

import pytest

from lazyrag.engine.engine import Engine
from lazyrag.types import Quality


@pytest.fixture(autouse=True)
def reuse_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fast` unless a test says otherwise, and no calibration behind an ingestion."""
    monkeypatch.setattr("lazyrag.engine.engine.DEFAULT_QUALITY", Quality.FAST)
    monkeypatch.setattr(Engine, "_calibrate_once", lambda self: None)
