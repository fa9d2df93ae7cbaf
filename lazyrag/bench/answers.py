"""Answer quality of sinks and KV dtypes: NLL of the gold answer on real questions.

    python -m lazyrag.bench.answers --data FILE --count 30

FILE is JSON lines with ``question``, ``answers`` and ``documents`` (``title``, ``text``). Per
example the best gold answer counts; figures are nats a token, mean over examples, with the paired
difference to ``full`` and its standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from lazyrag.engine.engine import Engine
from lazyrag.engine.sink import DOCUMENTS, NONE, PASSAGES, TEMPLATE
from lazyrag.types import KVDType

SYSTEM = "Answer the query using the provided context information, and not prior knowledge."
USER = (
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\n"
    "Query: {query}\nAnswer: "
)

Example = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", nargs="*", help="only these rows")
    arguments = parser.parse_args()
    with arguments.data.open(encoding="utf-8") as lines:
        examples = [
            json.loads(line) for _, line in zip(range(arguments.count), lines, strict=False)
        ]
    settings: dict[str, tuple[str, KVDType, str]] = {
        "full": (NONE, KVDType.FLOAT32, "full"),
        "no documents": (NONE, KVDType.FLOAT32, "full"),
        "sink none": (NONE, KVDType.FLOAT32, "fast"),
        "sink template": (TEMPLATE, KVDType.FLOAT32, "fast"),
        "sink documents": (DOCUMENTS, KVDType.FLOAT32, "fast"),
        "sink passages": (PASSAGES, KVDType.FLOAT32, "fast"),
        "sink passages, balanced": (PASSAGES, KVDType.FLOAT32, "balanced"),
        "sink template, float16 KV": (TEMPLATE, KVDType.FLOAT16, "fast"),
        "sink template, bfloat16 KV": (TEMPLATE, KVDType.BFLOAT16, "fast"),
    }
    full: list[float] = []
    for name, (sink, kv_dtype, quality) in settings.items():
        if arguments.rows and name not in (*arguments.rows, "full"):
            continue
        with (
            tempfile.TemporaryDirectory() as store,
            Engine.from_pretrained(
                arguments.model, store=store, sink=sink, kv_dtype=kv_dtype
            ) as engine,
        ):
            if name == "full" and engine.model_note:
                print(engine.model_note)
            bare = name == "no documents"
            scores = [_nll(engine, example, quality, bare) for example in examples]
        full = full or scores
        differences = [mine - theirs for mine, theirs in zip(scores, full, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        print(
            f"{name:28} NLL {statistics.mean(scores):6.3f}   "
            f"against full {statistics.mean(differences):+7.3f} ± {error:.3f}",
            flush=True,
        )


def passages(example: Example) -> list[str]:
    """The documents as they stand in the prompt."""
    return [f"{one['title']}\n{one['text']}".strip() for one in example["documents"]]


def _nll(engine: Engine, example: Example, quality: str, bare: bool) -> float:
    texts = [] if bare else passages(example)
    if quality != "full":
        engine.precompute(texts)
    user = USER.format(context="\n\n".join(texts), query=example["question"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    scores = [engine.score(messages, answer, quality=quality) for answer in example["answers"]]
    return min(-statistics.mean(score) for score in scores)


if __name__ == "__main__":
    main()
