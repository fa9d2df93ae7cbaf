"""Fixtures for every test: a private cache folder, tiny checkpoints, no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin starve shared machines
os.environ["ANONYMIZED_TELEMETRY"] = "False"
if os.environ.get("LAZYRAG_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the default suite is that of the CPU, on any machine

import pytest

from tests.support.tiny import save_tiny


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test touches the user's cache; dequantised weights are kept between runs if asked to."""
    before = os.environ.get("LAZYRAG_CACHE")
    kept = os.environ.get("LAZYRAG_TEST_CACHE")
    path = Path(kept) if kept else tmp_path_factory.mktemp("cache")
    os.environ["LAZYRAG_CACHE"] = str(path)
    yield path
    if before is None:
        del os.environ["LAZYRAG_CACHE"]
    else:
        os.environ["LAZYRAG_CACHE"] = before


@pytest.fixture(autouse=True)
def stored_nodes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny nodes are computed in a moment, and on a busy machine that may be faster than reading
    them. Tests of the choice itself set this back.
    """
    monkeypatch.setattr("lazyrag.engine.costs._CLEARLY", 0.0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a tiny checkpoint to its folder, made once a session."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(tmp_path_factory.mktemp(name) / name, name)
        return made[name]

    return get
