"""How long recognition takes: ``python -m lazyrag.bench.recognise [TEXTS [CHARACTERS]]``.

Synthetic English-like words; every text begins with one of 200 headers. The prompt holds known
texts, every tenth changed by one character. The naive way (``text in prompt`` for every text) is
timed on a sample and scaled up.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median

from lazyrag.prompt.recognise import Recogniser, sign
from lazyrag.types import TextId

_TEXT_LENGTH = 2_000
_SAMPLE = 500
_REPEATS = 21


def make_texts(count: int, rng: random.Random) -> list[str]:
    """``count`` texts of up to 2,000 characters."""
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5_000)]
    texts = []
    for number in range(count):
        body = " ".join(rng.choices(words, k=_TEXT_LENGTH // 5))
        header = f"file_name: pep-{number % 200:04}.rst\n\n"
        texts.append((header + body)[: _TEXT_LENGTH - number % 100].strip())
    return texts


def make_prompt(texts: list[str], characters: int, rng: random.Random) -> str:
    """Known texts, every tenth with one changed character, and a question."""
    pieces: list[str] = []
    room = characters - 100
    while room > 0:
        text = rng.choice(texts)[:room]
        if len(pieces) % 10 == 9:
            middle = len(text) // 3
            text = text[:middle] + "#" + text[middle + 1 :]
        pieces.append(text)
        room -= len(text) + 2
    return "\n\n".join([*pieces, "Question: what does the third document say?"])


def main() -> None:
    """Print how long registration and one lookup take."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    characters = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    rng = random.Random(7)
    texts = make_texts(count, rng)
    prompt = make_prompt(texts, characters, rng)

    begin = time.perf_counter()
    signatures = [sign(text) for text in texts]
    signed = time.perf_counter()
    recogniser = Recogniser(texts.__getitem__)
    recogniser.add((TextId(row), signature) for row, signature in enumerate(signatures))
    recogniser.find("")
    added = time.perf_counter()
    print(f"{count:,} texts: signed in {signed - begin:.2f} s, indexed in {added - signed:.2f} s")

    medians = {}
    for name, content in (("known texts", prompt), ("nothing known", prompt[::-1])):
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            found = recogniser.find(content)
            times.append(time.perf_counter() - begin)
        times.sort()
        medians[name] = median(times)
        print(
            f"{len(content):,} characters, {name}: {len(found.matches)} matches, "
            f"{len(found.near)} near, median {1e3 * medians[name]:.1f} ms "
            f"({1e3 * times[0]:.1f} to {1e3 * times[-1]:.1f})"
        )

    sample = texts[:_SAMPLE]
    begin = time.perf_counter()
    hits = sum(text in prompt for text in sample)
    naive = (time.perf_counter() - begin) * count / len(sample)
    print(
        f"known texts by `text in prompt` for every text: {naive:.1f} s, "
        f"{naive / medians['known texts']:.0f} times as long (from {len(sample)}, {hits} found)"
    )


if __name__ == "__main__":
    main()
