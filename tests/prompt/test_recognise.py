"""Recognition: what is found is what a plain search finds, and a miss is explained."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag.prompt.recognise import (
    Match,
    NearMatch,
    Recogniser,
    Recognition,
    TextSignature,
    sign,
)
from lazyrag.types import TextId


class Texts:
    """A recogniser over a list of texts, counting what it fetches."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts: list[str] = []
        self.fetched: list[TextId] = []
        self.recogniser = Recogniser(self.fetch)
        self.add(texts)

    def fetch(self, text_id: TextId) -> str | None:
        self.fetched.append(text_id)
        return self.texts[text_id]

    def add(self, texts: Iterable[str]) -> None:
        first = len(self.texts)
        self.texts += texts
        rows = [(TextId(row), sign(self.texts[row])) for row in range(first, len(self.texts))]
        self.recogniser.add(rows)

    def find(self, content: str) -> Recognition:
        self.fetched.clear()
        return self.recogniser.find(content)


def plain_search(texts: Sequence[str], content: str) -> list[Match]:
    """The same rules, spelled out with ``str.find``."""
    found = []
    for number, text in enumerate(texts):
        start = content.find(text) if len(text) >= 8 else -1
        while start >= 0:
            stop = start + len(text)
            before, behind = content[:start].rstrip(" \t"), content[stop:].lstrip(" \t")
            alone = before[-1:] in ("", "\n", "\r") and behind[:1] in ("", "\n", "\r")
            if alone or len(text) >= 64:
                found.append((-len(text), start, number))
            start = content.find(text, start + 1)
    matches: list[Match] = []
    for negative_length, start, number in sorted(found):
        match = Match(TextId(number), start, start - negative_length)
        if all(match.stop <= other.start or other.stop <= match.start for other in matches):
            matches.append(match)
    return sorted(matches, key=lambda match: match.start)


def prose(length: int, seed: int = 0) -> str:
    """Letters and spaces without any repetition to speak of."""
    rng = random.Random(seed)
    return "".join(rng.choices(string.ascii_lowercase + "    ", k=length - 2)).join("[]")


ALPHABETS = ["ab", "a \n", "ab\t\n", "é\u0301🤗\n "]


@st.composite
def puzzles(draw: st.DrawFn) -> tuple[list[str], str]:
    """Texts, some of them parts of others, and a content put together from them and noise."""
    letters = draw(st.sampled_from(ALPHABETS))
    texts = draw(st.lists(st.text(letters, min_size=1, max_size=150), min_size=1, max_size=6))
    for _ in range(draw(st.integers(0, 3))):
        parent = draw(st.sampled_from(texts))
        start = draw(st.integers(0, len(parent) - 1))
        texts.append(parent[start : start + draw(st.integers(1, 150))] * draw(st.integers(1, 3)))
    noise = st.text(letters, max_size=20)
    pieces = draw(st.lists(st.one_of(st.sampled_from(texts), noise), max_size=8))
    return texts, draw(st.sampled_from(["", "\n", "\n\n", " "])).join(pieces)


@settings(max_examples=400, deadline=None)
@given(puzzles())
def test_equals_plain_search(puzzle: tuple[list[str], str]) -> None:
    texts, content = puzzle
    found = Texts(texts).find(content)
    assert list(found.matches) == plain_search(texts, content)
    taken = [(match.start, match.stop) for match in (*found.matches, *found.near)]
    assert all(a[1] <= b[0] for a, b in zip(sorted(taken), sorted(taken)[1:], strict=False))
    for near in found.near:
        assert content[near.start : near.stop] in texts[near.text_id]
        assert near.text_id not in {match.text_id for match in found.matches}


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(64, 700),
    piece=st.floats(0.5, 1.0),
    place=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_half_a_text_in_one_piece_is_near(
    length: int, piece: float, place: float, seed: int
) -> None:
    text = prose(length, seed)
    size = max(length // 2, min(length - 1, int(piece * length)))
    start = int(place * (length - size))
    content = f"Before:\n{text[start : start + size]}\n~ behind"
    [near] = Texts([text, prose(length, seed + 1)]).find(content).near
    assert (near.text_id, near.start, near.stop) == (0, 8, 8 + size)
    if size * 20 >= length * 19:
        assert near.kind == "changed"
    elif size * 10 < length * 9:
        assert near.kind == "cut"


LENGTHS = [64, 65, 127, 128, 129, 500, 1001, 2000]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("where", [0.0, 0.03, 0.25, 0.5, 0.8, 1.0])
def test_one_changed_character(length: int, where: float) -> None:
    text = prose(length)
    place = int(where * (length - 1))
    content = "Documents:\n" + text[:place] + "#" + text[place + 1 :] + "\nQuestion"
    found = Texts([prose(length, 1), text]).find(content)
    assert found.matches == ()
    [near] = found.near
    assert (near.text_id, near.kind) == (1, "changed")
    assert near.stop - near.start == max(place, length - 1 - place)


@pytest.mark.parametrize("where", [0.2, 0.45, 0.5, 0.8])
@pytest.mark.parametrize(
    ("old", "new"), [(7, "a word"), (7, "many more words"), (0, "so "), (5, "")]
)
def test_a_changed_word(where: float, old: int, new: str) -> None:
    """Also in the middle, where neither piece is a half of the text."""
    text = prose(800)
    place = int(where * 800)
    found = Texts([text]).find(text[:place] + new + text[place + old :])
    assert [(near.text_id, near.kind) for near in found.near] == [(0, "changed")]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (slice(0, 600), "cut"),
        (slice(400, 1000), "cut"),
        (slice(200, 800), "cut"),
        (slice(0, 499), None),
        (slice(501, 1000), None),
        (slice(0, 970), "changed"),
    ],
)
def test_pieces(piece: slice, expected: str | None) -> None:
    found = Texts([prose(1000)]).find(f"Context\n{prose(1000)[piece]}\n\nQuestion?")
    assert [near.kind for near in found.near] == ([expected] if expected else [])


def test_a_trailing_space_is_part_of_the_text() -> None:
    """Ingested with it, it must be there; without it, the text is there all the same."""
    text = prose(300)
    assert Texts([text]).find(f"A\n{text} \nB").matches == (Match(TextId(0), 2, 302),)
    found = Texts([text + " "]).find(f"A\n{text}\nB")
    assert found.matches == ()
    assert found.near == (NearMatch(TextId(0), 2, 302, "changed"),)


def test_a_neighbour_that_shares_an_overlap_is_not_near() -> None:
    whole = prose(2200)
    chunks = [whole[:1000], whole[600:1600], whole[1200:2200]]
    texts = Texts(chunks)
    for number, chunk in enumerate(chunks):
        found = texts.find(f"Context:\n{chunk}\nQuestion")
        assert [match.text_id for match in found.matches] == [number]
        assert found.near == ()
    found = texts.find("\n\n".join(reversed(chunks)))
    assert [match.text_id for match in found.matches] == [2, 1, 0]
    assert found.near == ()
    changed = texts.find(chunks[1][:450] + "#" + chunks[1][451:])
    assert [near.text_id for near in changed.near] == [1]


def test_a_matched_text_is_not_near_elsewhere() -> None:
    text = prose(400)
    found = Texts([text]).find(f"{text}\n\n{text[:300]}")
    assert (len(found.matches), found.near) == (1, ())


def test_the_longest_wins_and_the_rest_is_looked_at() -> None:
    body = prose(500)
    texts = Texts([body, f"file_name: a.rst\n\n{body}"])
    content = f"Source 1:\n{texts.texts[1]}\n\nSource 2:\n{body}\n"
    assert texts.find(content).matches == (
        Match(TextId(1), 10, 528),
        Match(TextId(0), 540, 1040),
    )


def test_a_changed_header_leaves_the_body_a_match() -> None:
    body = prose(500)
    texts = Texts([body, f"file_name: a.rst\n\n{body}"])
    found = texts.find(f"file_name: b.rst\n\n{body}")
    assert (found.matches, found.near) == ((Match(TextId(0), 18, 518),), ())


def test_twice_the_same_text() -> None:
    text = prose(100)
    texts = Texts([text, text])
    assert [match.text_id for match in texts.find(text + text).matches] == [0, 0]


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("Is short text here?", 0),
        ("short text", 1),
        ("Q:\n \tshort text\t\nshort text\r\nshort text", 3),
        ("short text?", 0),
        ("-short text", 0),
        ("\n\nshort text\n\n", 1),
    ],
)
def test_short_texts_stand_alone(content: str, count: int) -> None:
    assert len(Texts(["short text", "tiny", ""]).find(content).matches) == count


@pytest.mark.parametrize("length", [8, 9, 15, 31, 32, 33, 63, 64, 127, 128, 129, 10_000, 70_000])
def test_every_length(length: int) -> None:
    text = prose(length)
    content = f"Before\n{text}\nafter"
    assert Texts([text]).find(content).matches == (Match(TextId(0), 7, 7 + length),)


@pytest.mark.parametrize("length", [1, 7])
def test_too_short_to_be_looked_for(length: int) -> None:
    texts = Texts(["x" * length])
    assert texts.find("x" * length) == Recognition((), ())
    assert len(texts.recogniser) == 1


def test_shared_headers() -> None:
    """5,000 texts share 200 characters; what they share is neither a match nor a reason."""
    header = prose(200, seed=9)
    texts = Texts([header + "\n\n" + prose(600, seed=row) for row in range(5_000)])
    wanted = [17, 4_999, 0]
    found = texts.find("\n\n".join(texts.texts[row] for row in wanted))
    assert [match.text_id for match in found.matches] == wanted
    assert texts.fetched == wanted
    assert found.near == ()
    assert texts.find(f"{header}\n\n{prose(600, seed=10**6)}" * 20) == Recognition((), ())
    assert len(texts.fetched) <= 64
    changed = texts.texts[321][:500] + "#" + texts.texts[321][501:]
    found = texts.find(f"{texts.texts[7]}\n\n{changed}")
    assert [match.text_id for match in found.matches] == [7]
    assert [(near.text_id, near.kind) for near in found.near] == [(321, "changed")]


def test_texts_that_differ_in_a_number_only() -> None:
    """No window is rare; the hash of the whole text tells them apart."""
    front, back = prose(500, 1), prose(500, 2)
    texts = Texts([f"{front} {row:05} {back}" for row in range(5_000)])
    found = texts.find("\n\n".join(texts.texts[row] for row in (4_321, 7, 7)))
    assert [match.text_id for match in found.matches] == [4_321, 7, 7]
    assert len(texts.fetched) == 2
    found = texts.find(f"{front} abcde {back}")
    assert [near.kind for near in found.near] == ["changed"]
    assert len(texts.fetched) <= 64


def test_periodic_texts_and_content() -> None:
    texts = Texts(["-" * length for length in range(60, 300)])
    found = texts.find("-" * 20_000)
    spans = [match.stop - match.start for match in found.matches]
    assert spans[:66] == [299] * 66
    assert sum(spans) > 19_900


def test_discard_and_add_again() -> None:
    texts = Texts([prose(100 + row, seed=row) for row in range(50)])
    content = "\n".join(texts.texts)
    assert len(texts.find(content).matches) == 50
    gone = [TextId(row) for row in range(0, 50, 3)]
    texts.recogniser.discard([*gone, TextId(999)])
    assert len(texts.recogniser) == 50 - len(gone)
    left = [match.text_id for match in texts.find(content).matches]
    assert left == [row for row in range(50) if row % 3]
    assert texts.find(content).near == ()
    texts.recogniser.discard([TextId(row) for row in range(40)])
    assert [match.text_id for match in texts.find(content).matches] == [
        row for row in range(40, 50) if row % 3
    ]
    texts.recogniser.add((row, sign(texts.texts[row])) for row in gone)
    assert len(texts.find(content).matches) == len(gone) + 7
    texts.recogniser.discard(TextId(row) for row in range(50))
    assert texts.find(content) == Recognition((), ())


@pytest.mark.parametrize("step", [1, 7, 100])
def test_added_little_by_little(step: int) -> None:
    made = [prose(20 + 5 * row % 300, seed=row) for row in range(200)]
    texts = Texts()
    for begin in range(0, 200, step):
        texts.add(made[begin : begin + step])
        texts.recogniser.add([(TextId(begin), sign(made[begin]))])
        newest = made[min(begin + step, 200) - 1]
        assert len(texts.find(f"{made[0]}\n{newest}").matches) == 2
    assert len(texts.recogniser) == 200
    assert list(texts.find("\n".join(made)).matches) == plain_search(made, "\n".join(made))


def test_the_text_decides_not_the_hash() -> None:
    """The store answers with other texts than were signed, or with none: nothing is served."""
    texts = Texts([prose(300), prose(400)])
    content = "\n".join(texts.texts)
    texts.texts[0] = prose(300, seed=5)
    assert [match.text_id for match in texts.find(content).matches] == [1]
    gone = Recogniser(lambda text_id: None)
    gone.add([(TextId(0), sign(prose(300)))])
    assert gone.find(prose(300)) == Recognition((), ())
    assert len(gone) == 0, "what is gone is forgotten"


def test_the_repr_of_a_list_holds_no_match() -> None:
    """What `simple_summarize` sends: line ends and quotes are escaped."""
    texts = Texts([f"First line {row}.\n{prose(60, row)}\n'quoted' \"twice\"" for row in range(3)])
    content = f"Context: {texts.texts!r}"
    found = texts.find(content)
    assert found.matches == ()
    assert [(near.kind, content[near.start : near.stop]) for near in found.near] == [
        ("quoted", repr(text)) for text in texts.texts
    ]


@pytest.mark.parametrize(
    ("texts", "content"),
    [
        (["username"], '{"username": "x"}'),
        (["positive"], '{"enum": ["positive", "negative"]}'),
        ([f"first one\n{prose(20, 1)}\nlast one"], f"['first one', {prose(20, 1)!r}, 'last one']"),
    ],
)
def test_words_in_quotes_are_no_quoted_texts(texts: list[str], content: str) -> None:
    assert Texts(texts).find(content).near == ()


def test_a_quoted_text_inside_a_verbatim_one_or_beside_itself() -> None:
    inner = prose(70, 5)
    outer = f"ANSWER = {inner!r}\n{prose(80, 6)}"
    found = Texts([inner, outer]).find(f"{outer}\n\nWhat is it?")
    assert (len(found.matches), found.near) == (1, ())
    text = f"{prose(70, 7)}\n{prose(20, 8)}"
    found = Texts([text]).find(f"{text}\n\n[{text!r}]")
    assert (len(found.matches), found.near) == (1, ())


def test_short_document_in_the_repr_of_a_list_is_quoted() -> None:
    short = "Go home now."
    content = f"[Document(id='1', metadata={{}}, page_content={short!r})]"
    assert [near.kind for near in Texts([short]).find(content).near] == ["quoted"]


def test_quoted_texts_beside_verbatim_and_changed_ones() -> None:
    one, two, short = prose(80, 1), f"{prose(60, 2)}\n{prose(9, 3)}", "Go home."
    three = prose(70, 4)
    texts = Texts([one, two, three, short])
    content = f"{one}\n[page_content={short!r}, {two!r}, {one!r}]\n{three[:-1]}X"
    found = texts.find(content)
    assert [texts.texts[match.text_id] for match in found.matches] == [one, one]
    assert [(texts.texts[near.text_id], near.kind) for near in found.near] == [
        (short, "quoted"), (two, "quoted"), (three, "changed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "🤗𝔘" * 40,
        "e\u0301a\u0308\u200d" * 30,
        "한국어 텍스트 조각입니다. " * 8,
        "\0" * 70,
        "\U0010ffff" * 66,
    ],
)
def test_unicode(text: str) -> None:
    content = f"\ud800 lone\n{text}\n\udfff"
    assert Texts([text]).find(content).matches == (Match(TextId(0), 7, 7 + len(text)),)
    assert Texts([text]).find("\ud83e\udd17" * 50).matches == ()


def test_normal_forms_differ() -> None:
    composed = "é" * 100
    assert Texts([composed]).find("e\u0301" * 100) == Recognition((), ())


@pytest.mark.parametrize("content", ["", "short", " " * 1000, "\n" * 1000])
def test_nothing_to_find(content: str) -> None:
    assert Texts().find(content) == Recognition((), ())
    assert Texts([prose(100), "a line of words"]).find(content) == Recognition((), ())


def test_answers_do_not_depend_on_the_order_of_adding() -> None:
    made = [prose(200, seed=row) for row in range(30)] + ["shared words " * 20] * 2
    content = "\n".join(made[row][:150] if row % 2 else made[row] for row in range(32))
    forward, backward = Texts(), Texts()
    forward.add(made)
    backward.texts = made
    for row in reversed(range(32)):
        backward.recogniser.add([(TextId(row), sign(made[row]))])
        backward.find("settle in between")
    assert forward.find(content) == backward.find(content)


@pytest.mark.parametrize("length", [0, 7, 8, 64, 2000])
def test_signature_round_trip(length: int) -> None:
    signature = sign(prose(2000)[:length])
    assert signature.length == length
    assert TextSignature.from_bytes(signature.to_bytes()) == signature
    assert len(signature.to_bytes()) <= 84


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", "0 bytes"),
        (lambda data: data[:-1], "83 bytes"),
        (lambda data: data * 1000, "84000 bytes"),
        (lambda data: b"\2" + data[1:], "version 2"),
        (lambda data: data[:4] + bytes(8) + data[12:], "length 0"),
        (lambda data: data[:4] + b"\xff" * 8 + data[12:], f"length {2**64 - 1}"),
        (lambda data: data[:20], "cannot have length 100"),
    ],
)
def test_signature_garbage(damage: object, sentence: str) -> None:
    data = sign(prose(100)).to_bytes()
    assert callable(damage)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TextSignature.from_bytes(damage(data))


def test_signatures_stay_what_they_are() -> None:
    """They lie in stores: another value needs another SIGNATURE_VERSION."""
    text = "A text of thirty-one characters"
    base = 0x9E3779B97F4A7C15

    def value(piece: str) -> int:
        return sum((ord(c) + 1) * base**place for place, c in enumerate(piece)) % 2**64

    starts = [23 * number // 7 for number in range(8)]
    windows = tuple(value(text[start : start + 8]) for start in starts)
    assert sign(text) == TextSignature(31, value(text), windows)
    assert sign(text).whole == 7190103934482297873
