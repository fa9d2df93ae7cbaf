"""Most tests here are about what is reused and where it lies: nothing else happens by itself."""

from __future__ import annotations

import pytest

from lazyrag.types import Quality


@pytest.fixture(autouse=True)
def reuse_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fast` unless a test says otherwise."""
    monkeypatch.setattr("lazyrag.engine.engine.DEFAULT_QUALITY", Quality.FAST)
