"""The commands end to end, with real models, Chroma and store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import Result

from lazyrag.engine.library import MOST_BEHIND
from lazyrag.store import KVStore
from lazyrag.store.format import read_node
from lazyrag.types import NodeKey
from tests.cli.support import FILES, Corpus, run, run_json

HEAVY = ("torch", "transformers", "llama_index", "chromadb", "sentence_transformers")


def sentence(result: Result, *words: str) -> None:
    """Exit code 1 and one sentence on stderr that holds ``words``; nothing on stdout."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert last.endswith(".")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last, last


def files_below(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_help_waits_for_no_heavy_package() -> None:
    check = f"import sys, lazyrag.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "ingest" in run("--help").stdout
    assert run("--version").stdout.startswith("lazyrag ")


def test_ingest_counts_what_it_did(corpus: Corpus) -> None:
    summary = corpus.summary
    assert (summary["read"], summary["unchanged"], summary["skipped"]) == (len(FILES), 0, [])
    assert summary["chunks"] > len(FILES)
    stats = run_json("store", "stats", "--index", corpus.index)
    assert stats["nodes"] == summary["chunks"]
    assert stats["tokens"] == summary["tokens"]
    assert stats["bytes"] == summary["bytes"]


def test_index_is_private(corpus: Corpus) -> None:
    for path in (corpus.index, *corpus.index.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_same_folder_again_writes_nothing(corpus: Corpus) -> None:
    before = files_below(corpus.index)
    summary = corpus.ingest()
    assert (summary["read"], summary["unchanged"], summary["bytes"]) == (0, len(FILES), 0)
    changed = {
        path.name for path, at in files_below(corpus.index).items() if before.get(path) != at
    }
    assert not {name for name in changed if not name.startswith(("lazyrag.lock", "index.sqlite-"))}
    shown = run("ingest", corpus.docs, "--index", corpus.index)
    assert "Nothing was written." in shown.stdout


def test_ask_as_json(corpus: Corpus) -> None:
    question = "Who is the keeper of the lighthouse?"
    answer = run_json("ask", question, "--index", corpus.index, "-k", "3", "--max-new-tokens", "16")
    assert set(answer) == {"answer", "sources", "report"}
    assert answer["answer"]
    first = answer["sources"][0]
    assert set(first) == {"file", "score", "text"}
    assert first["file"] == "lighthouse.md"
    assert "Marta Ekholm" in first["text"]
    report = answer["report"]
    assert (report["nodes_reused"], report["nodes_recomputed"]) == (3, 0)
    assert {"version", "tokens_reused", "tokens_computed", "bytes_by_tier", "ttft_s"} <= set(report)


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_ask_for_people(corpus: Corpus, stream: tuple[str, ...]) -> None:
    result = run(
        "ask", "When does the ferry leave?", "--index", corpus.index, "-k", "2",
        "--max-new-tokens", "8", *stream,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    answer, sources = result.stdout.split("\nSources:\n")
    assert answer.strip()
    assert "1. ferry.txt (" in sources
    assert "2 of 2 nodes reused" in sources


def test_chat_remembers_and_says_what_was_reused(corpus: Corpus) -> None:
    lines = "When does the ferry leave?\n\nAnd {braces}?\n" + "word " * 9000 + "\n/new\n/quit\nno\n"
    result = run("chat", "--index", corpus.index, "-k", "2", "--max-new-tokens", "8", input=lines)
    assert result.exit_code == 0, result.output
    reports = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(reports) == 2
    assert all("2 of 2 nodes reused" in report for report in reports)
    assert "the question has 9" in result.stderr


def test_damaged_file_is_found_recomputed_and_reported(copied: Corpus) -> None:
    verify = ("store", "verify", "--index", copied.index)
    assert run_json(*verify)["problems"] == []
    for file in (copied.index / "kv" / "nodes").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    found = run(*verify, "--json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["problems"]
    assert len(problems) == copied.summary["chunks"]
    assert {problem["reason"] for problem in problems} == {"checksum differs"}
    ask = ("ask", "When does the ferry leave?", "--index", copied.index, "-k", "2")
    report = run_json(*ask, "--max-new-tokens", "4")["report"]
    assert [node["reason"] for node in report["nodes"]] == ["damaged", "damaged"]
    again = run_json(*ask, "--max-new-tokens", "4")["report"]
    assert again["nodes_reused"] == 2


def kept_keys(index: Path) -> set[str]:
    return {file.stem for file in (index / "kv" / "nodes").rglob("*.safetensors")}


def nodes_by_text(index: Path) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each passage its ids and those that it was encoded behind."""
    store = KVStore.open(index / "kv")
    query = "SELECT text, key FROM texts WHERE NOT alias ORDER BY id"
    with closing(sqlite3.connect(index / "kv" / "index.sqlite")) as db:
        keys = {text: NodeKey(key) for text, key in db.execute(query)}
    nodes = {text: read_node(store.file(key), key) for text, key in keys.items()}
    store.close()
    return {text: (node.ids, node.behind) for text, node in nodes.items()}


def test_passages_of_a_file_are_encoded_behind_the_one_before(corpus: Corpus) -> None:
    """Behind the end of it and a blank line."""
    nodes = nodes_by_text(corpus.index)
    lamps = [node for text, node in nodes.items() if text.startswith("file_name: long.rst")]
    assert len(lamps) > 1 and not lamps[0][1]
    for (ids, _), (_, behind) in pairwise(lamps):
        assert 8 < len(behind) <= MOST_BEHIND
        assert behind[:-1] == ids[1 - len(behind) :]
    assert not any(node[1] for node in nodes.values() if node not in lamps)


def test_lost_store_is_filled_again(copied: Corpus) -> None:
    keys, nodes = kept_keys(copied.index), nodes_by_text(copied.index)
    for path in (copied.index / "kv").rglob("*"):
        if path.is_file():
            path.unlink()
    summary = copied.ingest()
    assert summary["repaired"] == copied.summary["chunks"]
    assert (kept_keys(copied.index), nodes_by_text(copied.index)) == (keys, nodes)
    assert run_json("store", "stats", "--index", copied.index)["nodes"] == copied.summary["chunks"]


def test_changed_deleted_and_bad_files(tmp_path: Path) -> None:
    docs, index = tmp_path / "docs", tmp_path / "index"
    docs.mkdir()
    for name in ("a.md", "b.md", "c.md", "d.md"):
        (docs / name).write_text(f"This is the text of {name}, which nobody has read before.")
    (docs / "bad.txt").write_bytes(b"\x00\x01")
    (docs / "latin.txt").write_bytes(b"caf\xe9")
    (docs / "empty.txt").touch()
    (docs / "blank.txt").write_text(" \n")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    ingest = ("ingest", docs, docs / "gone.md", "--index", index)
    first = run_json(*ingest)
    assert first["read"] == 4
    reasons = {Path(skipped["file"]).name: skipped["reason"] for skipped in first["skipped"]}
    assert set(reasons) == {"bad.txt", "latin.txt", "empty.txt", "blank.txt", "gone.md"}
    assert first["unsupported"] == {".png": 1}
    assert [row["file"] for row in _sources(index)] == ["a.md", "b.md", "c.md", "d.md"]

    (docs / "a.md").write_text("The text of a.md is another one now, and twice.\n" * 2)
    (docs / "b.md").unlink()
    (docs / "c.md").write_text("")
    second = run_json(*ingest)
    assert (second["read"], second["unchanged"], second["removed"]) == (1, 1, 2)
    rows = _sources(index)
    assert [row["file"] for row in rows] == ["a.md", "d.md"]
    assert "another one now" in rows[0]["text"]
    assert run_json(*ingest)["read"] == 0


def _sources(index: Path) -> list[dict[str, str]]:
    """What Chroma holds, by file."""
    from lazyrag.cli.vectors import Vectors

    nodes = Vectors(index / "chroma").nodes()
    rows = [{"file": n.metadata["file_name"], "text": n.get_content()} for n in nodes]
    return sorted(rows, key=lambda row: row["file"])


def test_nothing_readable_makes_no_index(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_bytes(b"\x00")
    result = run("ingest", tmp_path / "docs", tmp_path / "no.md", "--index", tmp_path / "index")
    assert result.exit_code == 1
    assert "Skipped" in result.stderr
    assert "binary data" in result.stderr
    assert "no.md: does not exist" in result.stderr
    assert "nothing was ingested" in result.stderr
    assert not (tmp_path / "index").exists()


def test_too_little_space_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB of text; the disk is asked through a stand-in, because no test can fill a real one."""
    lines = (f"Fox {n} jumps over the lazy dog and goes on to hill {n}.\n" for n in range(85_000))
    (tmp_path / "big.txt").write_text("".join(lines))
    usage = type("usage", (), {"free": 10_000_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    result = run("ingest", tmp_path / "big.txt", "--index", tmp_path / "index")
    sentence(result, "GB", "10.0 GB are free", "nothing was written")
    assert "tokens to compute" in result.stderr
    assert not (tmp_path / "index").exists()


def test_index_of_another_model_is_refused(corpus: Corpus, copied: Corpus) -> None:
    for option, value, had in (
        ("--model", "some/other", "smollm2"),
        ("--embedding", "some/other", "minilm"),
        ("--chunk-size", "128", "96"),
        ("--dtype", "float32", "float16"),
    ):
        sentence(run("ingest", corpus.docs, "--index", corpus.index, option, value), value, had)
    file = copied.index / "lazyrag.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "weights_digest": "0" * 64}))
    sentence(run("ask", "x", "--index", copied.index), "smollm2", "0" * 12)
    file.write_text(json.dumps({**settings, "embedding_dim": 7}))
    sentence(run("ask", "x", "--index", copied.index), "minilm", "384", "7")


@pytest.mark.parametrize(
    "command", [("ask", "Why?"), ("chat",), ("store", "stats"), ("store", "verify")]
)
def test_missing_and_damaged_index(tmp_path: Path, command: tuple[str, ...]) -> None:
    sentence(run(*command, "--index", tmp_path / "no"), "there is no index", "lazyrag ingest")
    assert not (tmp_path / "no").exists()
    (tmp_path / "lazyrag.json").write_text("{")
    sentence(run(*command, "--index", tmp_path), "damaged", "lazyrag.json")


def test_questions_that_cannot_be_asked(corpus: Corpus) -> None:
    sentence(run("ask", " \n", "--index", corpus.index), "question is empty")
    long = run("ask", "word " * 9000, "--index", corpus.index)
    sentence(long, "the question has 9,0", "8,192")


def test_damaged_chroma_is_one_sentence(copied: Corpus) -> None:
    (copied.index / "chroma" / "chroma.sqlite3").write_bytes(b"no database" * 1000)
    sentence(run("ask", "x", "--index", copied.index), "Chroma database", "lazyrag ingest")


def test_interrupted_ingestion_leaves_whole_nodes_and_goes_on(tmp_path: Path) -> None:
    docs, index = tmp_path / "docs", tmp_path / "index"
    docs.mkdir()
    for n in range(8):
        (docs / f"{n}.md").write_text(
            " ".join(f"Stone {n}.{i} lies on hill {i * n}." for i in range(30))
        )
    command = [sys.executable, "-m", "lazyrag.cli.main", "ingest", str(docs), "--index", str(index)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
        # a shell without job control has what it starts in the background ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list(index.glob("kv/nodes/*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    verify = ("store", "verify", "--index", index)
    problems = json.loads(run(*verify, "--json").stdout)["problems"]
    assert {problem["reason"] for problem in problems} <= {"not listed in the index"}
    done = run_json("ingest", docs, "--index", index)
    assert done["read"] == 8
    assert run_json("ingest", docs, "--index", index)["unchanged"] == 8
    assert run_json(*verify)["problems"] == []


def test_an_index_without_a_whole_file_says_so(copied: Corpus) -> None:
    """Passages are stored first, files listed last: in between there is nothing to ask."""
    shutil.rmtree(copied.index / "chroma")
    sentence(run("ask", "Where?", "--index", copied.index), "interrupted", "`lazyrag ingest` again")
    shutil.rmtree(copied.index / "kv")
    sentence(run("ask", "Where?", "--index", copied.index), "is empty")


def test_a_calibration_that_fails_is_no_loss(tmp_path: Path, monkeypatch) -> None:
    """It ends the first ingestion of a model that leaves enough passages; all is stored by then."""
    from lazyrag import Engine

    def failing(self: Engine) -> None:
        raise RuntimeError("no memory.")

    monkeypatch.setattr(Engine, "calibration", property(lambda self: None))
    monkeypatch.setattr(Engine, "calibrate", failing)
    docs = tmp_path / "docs"
    docs.mkdir()
    for n in range(8):
        (docs / f"{n}.txt").write_text(f"Stone {n} lies on hill {n * 7}.")
        if n < 6:  # too few for it
            continue
        result = run("ingest", docs, "--index", tmp_path / "index")
        assert result.exit_code == 0, result.output
        assert ("Not now (no memory). `lazyrag calibrate`" in result.stderr) == (n == 7)
    assert run_json("ingest", docs, "--index", tmp_path / "index")["unchanged"] == 8


def test_env_says_what_a_bug_report_needs() -> None:
    facts = run_json("env")
    assert facts["packages"]["torch"] != "not installed"
    assert facts["default models"] == {"smollm2": "found", "minilm": "found"}
    shown = run("env").stdout
    assert "free disk" in shown
    assert str(Path.home()) not in shown


def test_documented_help_is_the_help() -> None:
    """docs/cli.md is made by ``python -m lazyrag.cli.reference``; run it again when this fails."""
    from lazyrag.cli.reference import render

    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert render() in page.read_text()
