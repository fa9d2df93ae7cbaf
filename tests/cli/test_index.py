"""The index directory: its settings file, what is refused, and that nothing half-made stays."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lazyrag.cli.index import (
    Index,
    IndexSettings,
    check_same,
    check_weights,
    resolve_name,
)
from lazyrag.errors import LazyRagError, ModelError, RequestError, StoreError

SETTINGS = IndexSettings(
    model="smollm2",
    weights_digest="ab" * 32,
    embedding="minilm",
    embedding_dim=384,
    chunk_size=384,
    chunk_overlap=32,
    sink="template",
    kv_dtype="float16",
    compute_dtype="float32",
    versions={"lazyrag": "0.1.0"},
)


def made(path: Path) -> Index:
    index = Index(path)
    with index.writing():
        index.write_settings(SETTINGS)
    return index


def test_settings_come_back_and_are_private(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    assert index.settings() == SETTINGS
    assert stat.S_IMODE((tmp_path / "i").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "i" / "lazyrag.json").stat().st_mode) == 0o600
    assert not list((tmp_path / "i").glob(".lazyrag-*"))


DAMAGED = [
    pytest.param("{", "it is not JSON", id="cut"),
    pytest.param("[1]", "no format_version", id="foreign"),
    pytest.param('{"format_version": 2}', "reads format 1", id="newer"),
    pytest.param('{"format_version": 1}', "model is missing", id="lacking"),
    pytest.param('{"format_version": 1, "model": 3}', "model is 3", id="wrong-type"),
    pytest.param("\x00\xff", "it is not JSON", id="binary"),
]


@pytest.mark.parametrize(("content", "reason"), DAMAGED)
def test_damaged_settings_are_one_sentence(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "lazyrag.json").write_text(content, encoding="latin-1")
    with pytest.raises(StoreError, match=reason) as caught:
        Index(tmp_path).settings()
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_index_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="lazyrag ingest"):
        Index(tmp_path / "none").settings()


OTHER = [
    pytest.param("model", "other/model", ModelError, id="model"),
    pytest.param("embedding", "other", RequestError, id="embedding"),
    pytest.param("chunk_size", 100, RequestError, id="chunk-size"),
    pytest.param("chunk_overlap", 1, RequestError, id="chunk-overlap"),
    pytest.param("kv_dtype", "float32", RequestError, id="dtype"),
    pytest.param("sink", "none", RequestError, id="sink"),
]


@pytest.mark.parametrize(("name", "value", "kind"), OTHER)
def test_other_settings_are_refused_with_both_names(
    tmp_path: Path, name: str, value: object, kind: type[LazyRagError]
) -> None:
    with pytest.raises(kind) as caught:
        check_same(Index(tmp_path), SETTINGS, {name: value})
    assert str(value) in str(caught.value)
    assert str(getattr(SETTINGS, name)) in str(caught.value)
    check_same(Index(tmp_path), SETTINGS, {name: None})
    check_same(Index(tmp_path), SETTINGS, {name: getattr(SETTINGS, name)})


def test_replaced_weights_are_refused(tmp_path: Path) -> None:
    check_weights(Index(tmp_path), SETTINGS, SETTINGS.weights_digest)
    with pytest.raises(ModelError, match=r"abababababab.*cdcdcdcdcdcd"):
        check_weights(Index(tmp_path), SETTINGS, "cd" * 32)


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(StoreError, match=r"not an index.*thesis\.txt"), Index(tmp_path).writing():
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("existed", [True, False])
def test_unfinished_creation_leaves_nothing(tmp_path: Path, existed: bool) -> None:
    place = tmp_path / "a" / "i"
    if existed:
        place.mkdir(parents=True)
    with pytest.raises(RuntimeError), Index(place).writing():
        (place / "kv").mkdir()
        raise RuntimeError
    assert place.exists() is existed
    assert not existed or not list(place.iterdir())


def test_creation_killed_before_its_settings_is_taken_up(tmp_path: Path) -> None:
    """A killed process leaves its lock file and part of the folders, which are no foreign data."""
    place = tmp_path / "i"
    (place / "kv").mkdir(parents=True)
    (place / "lazyrag.lock").touch()
    assert made(place).settings() == SETTINGS


def test_second_writer_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    other = (
        "import sys; from pathlib import Path; from lazyrag.cli.index import Index\n"
        "with Index(Path(sys.argv[1])).writing(): pass"
    )
    place = tmp_path / "i"
    with Index(place).writing():
        (place / "kv").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", other, str(place)], capture_output=True, text=True, check=False
        )
        assert "another lazyrag process is writing" in done.stderr
        assert (place / "kv").exists()
        Index(place).write_settings(SETTINGS)
    assert json.loads((place / "lazyrag.json").read_text())["format_version"] == 1


def test_local_names_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_name("model") == str(tmp_path.resolve() / "model")
    assert resolve_name("smollm2") == "smollm2"
    assert resolve_name("org/name") == "org/name"
