"""One model on several GPUs of a machine (or, to try it, in several processes on the CPU).

    torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL [STORE]

MODEL is a folder or hub id of a llama, mistral, qwen2 or qwen3 checkpoint with an even number of KV
heads. Rank 0 runs what follows `Engine.from_pretrained`; the others serve it and end with it.
"""

from __future__ import annotations

import sys
import time

from lazyrag import Engine

PASSAGES = (
    "The lighthouse of Norrhamn was built in 1874 and is painted red and white.",
    "The ferry to Norrhamn leaves at nine in the morning and at five in the afternoon.",
)
QUESTION = "When does the ferry leave?"


def main(model: str, store: str | None = None) -> None:
    with Engine.from_pretrained(model, store=store, tensor_parallel=True) as engine:
        engine.precompute(PASSAGES)
        for passages in (PASSAGES, PASSAGES[::-1]):
            started = time.perf_counter()
            answer = engine.generate("\n\n".join((*passages, QUESTION)), max_new_tokens=32)
            seconds = time.perf_counter() - started
            reused, nodes = answer.report.nodes_reused, len(answer.report.nodes)
            print(f"{reused} of {nodes} nodes reused, {seconds:.2f} s: {answer.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
