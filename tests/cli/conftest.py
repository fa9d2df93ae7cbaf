"""A small index made by the real command, with the real models, once for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.support import FILES, Corpus, run_json


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Read it, do not change it."""
    root = tmp_path_factory.mktemp("cli").resolve()
    for name, text in FILES.items():
        (root / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "docs" / name).write_text(text)
    options = ("--chunk-size", "96", "--chunk-overlap", "0")
    summary = run_json("ingest", root / "docs", "--index", root / "index", *options)
    return Corpus(root / "docs", root / "index", summary)


@pytest.fixture
def copied(corpus: Corpus, tmp_path: Path) -> Corpus:
    """The index over the same folder, to change."""
    shutil.copytree(corpus.index, tmp_path / "index")
    return Corpus(corpus.docs, tmp_path / "index", corpus.summary)
