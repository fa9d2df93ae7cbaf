"""Texts of a wanted length for benchmarks, cut from real documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lazyrag.engine.engine import Engine
from lazyrag.errors import RequestError

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"


def passages(engine: Engine, tokens: int, folder: Path = CORPUS) -> Iterator[str]:
    """Texts of about ``tokens`` tokens, paragraph by paragraph, from the text files of a folder.

    Raises:
        RequestError: the folder holds no text file.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".rst", ".md", ".txt"))
    if not files:
        raise RequestError(f"{folder} holds no .rst, .md or .txt file.")
    for file in files:
        text, count = "", 0
        for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
            text = f"{text}\n\n{paragraph}" if text else paragraph
            count = engine.count_tokens(text)
            if count >= tokens:
                yield text.strip()
                text, count = "", 0


def take(texts: Iterator[str], count: int) -> list[str]:
    """The first ``count`` texts.

    Raises:
        RequestError: there are fewer.
    """
    taken = [text for _, text in zip(range(count), texts, strict=False)]
    if len(taken) < count:
        raise RequestError(f"the corpus gives {len(taken)} passages, {count} are needed.")
    return taken
