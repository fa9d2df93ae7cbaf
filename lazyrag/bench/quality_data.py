"""Questions with documents and gold answers, and who would have retrieved which document first."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from lazyrag.bench.quality_settings import Told
from lazyrag.errors import RequestError
from lazyrag.quality.words import by_words, words


class Half(StrEnum):
    """Settings tuned on one half are reported on the other."""

    A = "A"
    B = "B"


@dataclass(frozen=True, slots=True)
class Example:
    """One question.

    Attributes:
        set: name of the file it is from.
        id: unique in its set.
        question: as asked.
        answers: gold answers, at least one.
        texts: the documents as they stand in a prompt, title first.
        gold: numbers of the documents that hold the answer; empty = not known.
        documents: of each text the number of its document.
        titles: of each document.
    """

    set: str
    id: str
    question: str
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    gold: frozenset[int]
    documents: tuple[int, ...] = ()
    titles: tuple[str, ...] = ()

    @property
    def half(self) -> Half:
        """By a hash of the id, so that it never changes."""
        return Half.A if self.seed % 2 == 0 else Half.B

    @property
    def seed(self) -> int:
        """Of whatever is chosen at random for this example."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "big")

    def before(self, number: int, told: Told) -> str:
        """Text that a text is encoded behind; none for the first one of its document."""
        if told is Told.NOTHING:
            return ""
        first = self.documents.index(self.documents[number])
        if number == first:
            return ""
        if told is Told.TITLE:
            title = self.titles[self.documents[number]]
            return title and f"{title}\n"
        return f"{self.texts[first if told is Told.LEAD else number - 1]}\n\n"


def read_examples(path: Path, count: int | None = None) -> list[Example]:
    """The first ``count`` examples of a file of JSON lines.

    A line has ``id``, ``question``, ``answers`` (a list), ``documents`` (a list of ``id``,
    ``title``, ``text``) and may have ``gold`` (ids of documents).

    Raises:
        RequestError: the file cannot be read, or a line lacks something; says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}.") from None
    examples: list[Example] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if count is not None and len(examples) >= count:
            break
        if not line.strip():
            continue
        example = _example(path.stem, line, f"{path}, line {number}")
        if example.id in seen:
            raise RequestError(f"{path}, line {number}: the id {example.id!r} occurs twice.")
        seen.add(example.id)
        examples.append(example)
    if not examples:
        raise RequestError(f"{path} holds no example.")
    return examples


def _example(name: str, line: str, where: str) -> Example:
    try:
        raw: dict[str, Any] = json.loads(line)
        documents = raw["documents"]
        texts = [f"{one.get('title', '')}\n{one['text']}".strip() for one in documents]
        gold = set(raw.get("gold", ()))
        made = Example(
            set=name,
            id=str(raw["id"]),
            question=str(raw["question"]),
            answers=tuple(str(answer) for answer in raw["answers"]),
            texts=tuple(texts),
            gold=frozenset(n for n, one in enumerate(documents) if one.get("id") in gold),
            documents=tuple(range(len(texts))),
            titles=tuple(str(one.get("title", "")) for one in documents),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{where} is no example: {error!r}. Needed: id, question, answers, documents (each "
            "with title and text)."
        ) from None
    if not made.answers or not all(made.answers) or not all(texts) or len(set(texts)) < len(texts):
        raise RequestError(f"{where}: answers and documents must not be empty, nor occur twice.")
    return made


def split(example: Example, words_each: int) -> Example:
    """The example with its documents cut behind sentences into texts of about equal length.

    Args:
        example: whose texts are whole documents.
        words_each: of a text, at most, unless one sentence is longer.
    """
    texts: dict[str, int] = {}  # a text that occurs again is left out
    for number, document in enumerate(example.texts):
        for text in _parts(document, words_each):
            texts.setdefault(text, number)
    return replace(
        example,
        set=f"{example.set} by {words_each} words",
        texts=tuple(texts),
        gold=frozenset(n for n, number in enumerate(texts.values()) if number in example.gold),
        documents=tuple(texts.values()),
    )


def _parts(document: str, words_each: int) -> Iterator[str]:
    start = end = 0
    for sentence in re.finditer(r"\S.*?(?:[.!?](?=\s)|\Z)", document, re.DOTALL):
        if end > start and len(document[start : sentence.end()].split()) > words_each:
            yield document[start:end].strip()
            start = sentence.start()
        end = sentence.end()
    yield document[start:end].strip()


def bm25_ranking(question: str, texts: Sequence[str]) -> list[int]:
    """Numbers of the texts, the best match first; document frequencies are those of ``texts``."""
    asked = dict.fromkeys(words(question), 1.0)
    found = by_words(asked, [Counter(words(text)) for text in texts])
    return list(range(len(texts))) if found is None else found
