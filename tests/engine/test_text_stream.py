from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lazyrag.engine.text_stream import TextStream
from lazyrag.errors import RequestError

Decode = Callable[[Sequence[int]], str]

WORDS = ["▁", "▁the", "▁a", "the", "a", "b", "ab", "▁ab", "##", "#", "\n", "Q", ":", "\nQ:", "▁▁"]


def byte_level_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges), "<|end|>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", *WORDS, "é", "한"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "▁the": 2, "a": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(Regex(" "), "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


BYTES = byte_level_tokenizer()
PAIRS = byte_level_tokenizer([("Ã", "©"), ("ð", "Ł")])
METASPACE = metaspace_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def run(
    decode: Decode, ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], TextStream]:
    """Every delta, the last one from `finish`; no token is pushed after a stop."""
    stream = TextStream(decode, stop)
    deltas = []
    for token in ids:
        deltas.append(stream.push(token))
        if stream.stopped:
            break
    deltas.append(stream.finish())
    return deltas, stream


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Brute force: read character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [end - len(s) for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: min(complete)], True
    return text, False


def check(decode: Decode, ids: Sequence[int], stop: Sequence[str] = ()) -> None:
    deltas, stream = run(decode, ids, stop)
    expected = cut(decode(ids), stop)
    assert ("".join(deltas), stream.stopped) == expected
    assert stream.text == expected[0]
    assert stream.finish() == ""


@pytest.mark.parametrize(
    "text",
    ["🤗", "한", "e\u0301", "👩\u200d👩\u200d👧", "naïve 한국어 🤗🤗!", "\U0001f1f8\U0001f1ea"],
)
@pytest.mark.parametrize(
    "tokenizer", [BYTES, PAIRS, BYTE_FALLBACK], ids=["bytes", "pairs", "fallback"]
)
def test_no_delta_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    """Streams once sent U+FFFD for a character that several tokens spell."""
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text) or "a" in text
    deltas, stream = run(tokenizer.decode, ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == stream.text == text


@pytest.mark.parametrize("stop", [("\n\nQ:", "###"), ["###"], "###"], ids=["tuple", "list", "str"])
def test_stop_string_over_several_tokens_is_never_emitted(stop: Sequence[str]) -> None:
    """Stops of more than one token once failed to match, or were streamed before they did."""
    ids = BYTES.encode("One.\n\nTwo ## three ### four").ids
    deltas, stream = run(BYTES.decode, ids, stop)
    assert "".join(deltas) == "One.\n\nTwo ## three "
    assert stream.stopped


def test_what_could_begin_a_stop_waits_and_then_goes_out_whole() -> None:
    stream = TextStream(BYTES.decode, ("###",))
    assert [stream.push(i) for i in BYTES.encode("a##b#").ids] == ["a", "", "", "##b", ""]
    assert stream.finish() == "#"
    assert not stream.stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xx end STOP more", ("STOP", "end"), "xx "),
        ("abcd", ("abcd", "bc"), "a"),
        ("abcd", ("cd", "bcd"), "a"),
        ("aab", ("ab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("STOP", ("STOP",), ""),
        ("no", ("nope",), "no"),
    ],
)
def test_the_stop_complete_first_wins(text: str, stop: tuple[str, ...], expected: str) -> None:
    _, by_bytes = run(BYTES.decode, BYTES.encode(text).ids, stop)
    _, at_once = run(lambda ids: text * len(ids), [0], stop)
    assert by_bytes.text == at_once.text == expected


def test_stop_inside_one_long_token_cuts_the_token() -> None:
    pieces = {0: "Paris.\n\nQ: and", 1: " then"}
    stream = TextStream(lambda ids: "".join(pieces[i] for i in ids), ("\n\nQ:",))
    assert stream.push(0) == "Paris."
    assert stream.stopped


def test_tokens_after_the_end_are_refused() -> None:
    stream = TextStream(BYTES.decode, ("b",))
    stream.push(id_of(BYTES, "b"))
    with pytest.raises(RuntimeError, match="ended"):
        stream.push(0)
    finished = TextStream(BYTES.decode)
    finished.finish()
    with pytest.raises(RuntimeError, match="ended"):
        finished.push(0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        TextStream(BYTES.decode, ("a", ""))


def test_leading_space_is_dropped_once_and_at_the_start_only() -> None:
    ids = [id_of(METASPACE, w) for w in ["▁the", "▁a", "b", "▁", "▁the", "▁▁", "▁"] * 9]
    deltas, _ = run(METASPACE.decode, ids)
    assert deltas[:3] == ["the", " a", "b"]
    check(METASPACE.decode, ids)


def test_a_character_cut_short_at_the_end_comes_with_finish() -> None:
    ids = BYTES.encode("a🤗").ids[:-1]
    deltas, _ = run(BYTES.decode, ids)
    assert deltas == ["a", "", "", "", "\ufffd"]


def test_a_genuine_replacement_character_is_not_held_for_ever() -> None:
    mark = BYTES.encode("\ufffd").ids
    stream = TextStream(BYTES.decode)
    assert [stream.push(i) for i in [*mark, *BYTES.encode("a").ids]] == ["", "", "", "\ufffda"]

    silent = id_of(BYTES, "<|end|>")
    alone = TextStream(BYTES.decode)
    assert "".join(alone.push(i) for i in [*mark, silent, silent, silent]) == "\ufffd"


def test_broken_bytes_flow_and_a_character_after_them_is_whole() -> None:
    broken = id_of(BYTES, sorted(pre_tokenizers.ByteLevel.alphabet())[0])
    byte_ff = BYTES.encode("ÿ").ids[:1]
    ids = [*(byte_ff * 40), *BYTES.encode("한").ids, broken]
    deltas, stream = run(BYTES.decode, ids)
    assert stream.text == BYTES.decode(ids)
    assert "".join(deltas[:40]) == "\ufffd" * 37
    assert "한" in stream.text


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (BYTES, [id_of(BYTES, "a"), id_of(BYTES, "b")]),
        (METASPACE, [id_of(METASPACE, "a"), id_of(METASPACE, "b")]),
        (BYTES, [id_of(BYTES, "<|end|>"), 9_999]),
    ],
    ids=["bytes", "metaspace", "no text"],
)
def test_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return str(tokenizer.decode(ids))

    run(decode, ids * 1000)
    assert decoded < 20 * 2000


pieces_of_text = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.text("ab #\nQ:", max_size=8),
        st.sampled_from(
            ["🤗", "한", "e\u0301", "👩\u200d👧", "\ufffd", "\n\nQ:", "###", "<|end|>"]
        ),
    ),
    max_size=12,
).map("".join)
stops = st.lists(
    st.one_of(
        st.text("ab #\nQ:", min_size=1, max_size=4), st.sampled_from(["\n\nQ:", "🤗", "\ufffd"])
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=300)
@given(text=pieces_of_text, stop=stops)
def test_any_text_comes_out_as_decoded_and_cut(text: str, stop: list[str]) -> None:
    for tokenizer in (BYTES, PAIRS):
        check(tokenizer.decode, tokenizer.encode(text).ids, stop)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 260), max_size=60), stop=stops)
def test_any_bytes_come_out_as_decoded_and_cut(ids: list[int], stop: list[str]) -> None:
    check(BYTES.decode, ids, stop)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(1, len(WORDS) + 2), max_size=60), stop=stops)
def test_any_metaspace_ids_come_out_as_decoded_and_cut(ids: list[int], stop: list[str]) -> None:
    check(METASPACE.decode, ids, stop)


@settings(deadline=None, max_examples=200)
@given(text=pieces_of_text, stop=stops, data=st.data())
def test_how_the_text_is_split_into_tokens_changes_nothing(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    check(lambda ids: "".join(pieces[i] for i in ids), range(len(pieces)), stop)


def byte_fallback_ids(text: bytes) -> list[int]:
    return [id_of(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in text]


def test_byte_fallback_characters_follow_each_other_and_words() -> None:
    """A second emoji in a run once turned the whole run into U+FFFD until its last byte came."""
    the = id_of(BYTE_FALLBACK, "▁the")
    ids = [the, *byte_fallback_ids(" 한🤗👩\u200d👧".encode()), the] * 5
    deltas, stream = run(BYTE_FALLBACK.decode, ids)
    assert stream.text == BYTE_FALLBACK.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("after", [b"", b"\xff\xff\xff\xff\xff\xff"], ids=["cut", "broken"])
def test_byte_fallback_keeps_what_it_gave_out(after: bytes) -> None:
    the = id_of(BYTE_FALLBACK, "▁the")
    ids = [the, *byte_fallback_ids("🤗🤗".encode()), *byte_fallback_ids(after or b"\xf0\x9f")]
    _, stream = run(BYTE_FALLBACK.decode, ids)
    assert stream.text == "the🤗🤗" + "\ufffd" * len(after or b"12")


@settings(deadline=None, max_examples=200)
@given(text=pieces_of_text, stop=stops)
def test_any_byte_fallback_text_comes_out_as_decoded_and_cut(text: str, stop: list[str]) -> None:
    """Text without U+FFFD: byte fallback cannot tell that one from a byte still incomplete."""
    text = text.replace("\ufffd", "")
    check(BYTE_FALLBACK.decode, BYTE_FALLBACK.encode(text).ids, stop)
