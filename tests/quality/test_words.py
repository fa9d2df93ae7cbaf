"""Which nodes share the words of a question."""

from __future__ import annotations

import math
import threading
from collections import Counter

import pytest

from lazyrag.model.load import load_model
from lazyrag.prompt.segments import LiveRun, NodeRun, Run
from lazyrag.quality import words as words_module
from lazyrag.quality.words import COMMON, WordRanking, by_words, words
from lazyrag.types import NodeKey


def counts(*texts: str) -> list[Counter[str]]:
    return [Counter(words(text)) for text in texts]


def alike(*asked: str) -> dict[str, float]:
    return dict.fromkeys(asked, 1.0)


def test_as_by_hand():
    """Rare "b" outweighs "a", which two of three have; of equal counts the shorter is first."""
    nodes = counts("a x x", "a x", "b x x x")
    assert by_words(alike("a", "b"), nodes) == [2, 1, 0]
    assert math.log(1 + 2.5 / 1.5) > 2 * math.log(1 + 1.5 / 2.5)
    assert by_words({"a": 9.0, "b": 1.0}, nodes) == [1, 0, 2]
    assert by_words({"a": 1.0, "b": 0.0}, nodes) == [1, 0, 2]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("x", "y", "z"), None),
        (("a x", "a y"), None),
        (("x", "a", "a"), [1, 2, 0]),
        (("", "a"), [1, 0]),
        (("", ""), None),
        ((), None),
    ],
)
def test_ties_are_in_the_order_of_the_prompt(texts, found):
    assert by_words(alike("a"), counts(*texts)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A Dog's day-to-day", ["a", "dog", "s", "day", "to", "day"]),
        ("ẞ 12,5 naïve", ["ss", "12", "5", "naïve"]),
        ("東京都 x猫", ["東京", "京都", "x", "猫"]),
        ("x2東京 ひとb", ["x2", "東京", "ひと", "b"]),
        ("กขค ບໍ", ["กข", "ขค", "ບໍ"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("... --", []),
    ],
)
def test_words(text, found):
    assert words(text) == found


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("smollm2", device="cpu", dtype="float32").tokenizer


def runs(tokenizer, *parts: str) -> list[Run]:
    """Every second one is a node; control tokens of live text are read."""
    made: list[Run] = []
    for number, part in enumerate(parts):
        if number % 2:
            ids = tuple(tokenizer.encode_text(part))
            made.append(NodeRun(NodeKey(part.encode().ljust(32, b".")[:32]), ids, len(ids)))
        else:
            made.append(LiveRun(tuple(tokenizer.encode_control(part))))
    return made


CAT, DOG, SUN = "The cat Felix sleeps.", "The dog Bello barks.", "The sun shines on the query."
LLAMA_INDEX = (
    "Context information is below.\n---------------------\n",
    "\n---------------------\nGiven the context information and not prior knowledge, answer the "
    "query.\nQuery: {}\nAnswer: ",
)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        LLAMA_INDEX,
        ("<|im_start|>user\nRead:\n", "\n\n{}<|im_end|>\n<|im_start|>assistant\n"),
        (
            "<|im_start|>system\nRead:\n",
            "<|im_end|>\n<|im_start|>user\nWho are Felix and Bello, cat and dog? What sleeps, what "
            "barks?<|im_end|>\n<|im_start|>assistant\nThe cat Felix sleeps, the dog Bello barks."
            "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("Question: {}\nContext:\n", "\nAnswer:"),
        ("The dog Bello barks, the cat Felix sleeps. Read of them:\n", "\n\n{}"),
    ],
    ids=["template behind", "chat", "follow-up", "question first", "words before"],
)
@pytest.mark.parametrize(
    ("question", "best"), [("Where does Felix sleep?", 0), ("Why does Bello bark?", 1)]
)
def test_the_question_is_found(tokenizer, before, behind, question, best):
    """Words of instructions weigh little, those of earlier messages nothing."""
    texts = [before.format(question), CAT, "\n\n", DOG, "\n\n", SUN, behind.format(question)]
    ranking = WordRanking(tokenizer).rank(runs(tokenizer, *texts))
    assert ranking is not None and ranking[0] == best


def test_nothing_told(tokenizer):
    ranker = WordRanking(tokenizer)
    assert (
        ranker.rank(runs(tokenizer, "Read:\n", CAT, "\n\n", DOG, "\n\nWhy, how and what?")) is None
    )
    assert ranker.rank(runs(tokenizer, "Read:\n", CAT, "\n\nWho is Felix?")) is None
    assert ranker.rank(runs(tokenizer, "Who is Felix?")) is None
    one_word = runs(tokenizer, "", CAT, "\n\n", DOG, "<|im_start|>Felix")
    assert ranker.rank(one_word) is None, "it may be the name of a role"


def test_common_words_weigh_nothing(tokenizer):
    ranker = WordRanking(tokenizer)
    assert ranker._weight("the") == ranker._weight("of") == 0
    assert 0 < ranker._weight("answer") < ranker._weight("photosynthesis")
    assert ranker._weight("photosynthesis") < ranker._weight("norrhamn")
    (id,) = tokenizer.encode_text(" photosynthesis")
    assert ranker._weight("photosynthesis") == pytest.approx(math.log(2 + id) - COMMON)


def test_what_is_not_used_of_a_node_does_not_count(tokenizer):
    first, node, *rest = runs(tokenizer, "x", f"{SUN} {CAT}", "\n", DOG, "Who is Felix?")
    assert isinstance(node, NodeRun)
    ranker = WordRanking(tokenizer)
    assert ranker.rank([first, node, *rest]) == [0, 1]
    used = len(tokenizer.encode_text(SUN))
    assert ranker.rank([first, NodeRun(node.key, node.ids, used), *rest]) is None


def test_the_memory_is_bounded_and_shared_by_threads(tokenizer, monkeypatch):
    monkeypatch.setattr(words_module, "KEPT_NODES", 3)
    ranker = WordRanking(tokenizer)
    prompts = [runs(tokenizer, "x", f"{CAT} {n}", "\n", DOG, "Who is Felix?") for n in range(9)]
    found: list[object] = []

    def rank() -> None:
        found.extend(ranker.rank(prompt) for prompt in prompts)

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1]] * 36
    assert ranker._counted.cache_info().currsize == 3
