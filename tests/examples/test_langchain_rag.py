"""The LangChain example runs as a user runs it, twice, on a part of its corpus."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAYS = ("LCEL", "Retrieval chain", "Conversation", "LangGraph", "Few-shot")


def run(corpus: Path, place: Path) -> str:
    command = [sys.executable, str(EXAMPLES / "langchain_rag.py"), "--corpus", str(corpus)]
    done = subprocess.run(
        [*command, "--place", str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_retrieved_is_reused_and_a_second_run_computes_nothing(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "zen.rst").write_text((EXAMPLES / "corpus/pep-0020.rst").read_text())
    (corpus / "union.rst").write_text((EXAMPLES / "corpus/pep-0604.rst").read_text()[:3000])
    first = run(corpus, tmp_path / "place")
    assert re.search(r"2 files, \d passages: .*'num_added': [1-9]", first)
    for way in WAYS:
        assert f"\n{way}: " in first
    reports = re.findall(r"(\d) of (\d) nodes reused, ([\d,]+) tokens reused", first)
    assert len(reports) >= 7
    assert all(reused == known for reused, known, _ in reports)
    assert sum(int(known) for _, known, _ in reports) >= 12

    (corpus / "zen.rst").unlink()
    second = run(corpus, tmp_path / "place")
    assert re.search(r"'num_added': 0, .*'num_deleted': [1-9]", second)
