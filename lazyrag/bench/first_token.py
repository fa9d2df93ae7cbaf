"""Time to first token and decode speed, ours against the alternatives, in one run on the same work.

    python -m lazyrag.bench.first_token

Compared over the same token ids: `fast` (nodes reused in place), `balanced` (the nodes the question
needs most computed anew, last; the look that chooses them is part of its time), `materialized`
(nodes copied and re-rotated, as Block-Attention does), `full` (this engine, nothing reused) and
plain transformers with its own cache. Rounds are interleaved, so that a noisy machine hurts all
alike.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass, field

import torch
import transformers

from lazyrag.bench.corpus import passages, take
from lazyrag.engine.engine import Engine
from lazyrag.model.source import find_model
from lazyrag.types import Live, Node, Segment

QUESTION = (
    "\n\nQuestion: which of the proposals above changes how modules are imported, and what does a "
    "relative import with leading dots mean? Answer in one short sentence.\nAnswer:"
)

REUSING = ("fast", "balanced", "materialized")
"""Qualities that reuse nodes."""
CALIBRATED_WITH = 8
"""Nodes that are ingested at least, so that `balanced` knows how to choose."""


@dataclass(slots=True)
class Samples:
    """Seconds to the first token and seconds a decoded token, one entry a round."""

    first: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def prompt_of(nodes: list[str]) -> list[Segment]:
    """Opening, nodes with separators, question."""
    segments: list[Segment] = [Live(text="Use these documents.\n\n")]
    for text in nodes:
        segments += [Node(text=text), Live(text="\n\n")]
    return [*segments, Live(text=QUESTION)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of a node, about")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--full-rounds", type=int, default=3)
    arguments = parser.parse_args()

    with Engine.from_pretrained(arguments.model, reuse_live=False) as engine:  # asked repeatedly
        texts = take(passages(engine, arguments.tokens), max(CALIBRATED_WITH, arguments.nodes))
        engine.precompute(texts, progress=True)
        nodes = texts[: arguments.nodes]
        segments = prompt_of(nodes)
        samples = {name: Samples() for name in (*REUSING, "full", "transformers")}
        plain = _Plain(engine, arguments.model)
        ids = plain.ids(segments)
        print(
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, {engine.model_name}, {len(ids):,} prompt "
            f"tokens in {arguments.nodes} nodes"
        )
        for quality in REUSING:  # loads nodes, calibrates, warms up
            report = engine.generate(segments, quality=quality, max_new_tokens=2).report
            print(report.summary())
        plain.run(ids[:64], 2, Samples())
        for round_ in range(arguments.rounds):
            for quality in REUSING:
                _measure(engine, segments, quality, arguments.new_tokens, samples[quality])
            if round_ < arguments.full_rounds:
                _measure(engine, segments, "full", arguments.new_tokens, samples["full"])
                plain.run(ids, arguments.new_tokens, samples["transformers"])
    _print(samples)


def _measure(
    engine: Engine, segments: list[Segment], quality: str, new_tokens: int, samples: Samples
) -> None:
    report = engine.generate(segments, quality=quality, max_new_tokens=new_tokens).report
    if report.ttft_s is not None:
        samples.first.append(report.ttft_s)
    if report.decode_tokens_per_s is not None:
        samples.decode.append(1 / report.decode_tokens_per_s)


class _Plain:
    """transformers alone: sdpa attention, its own cache, greedy."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        folder = find_model(name, torch.float32).folder
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def ids(self, segments: list[Segment]) -> list[int]:
        """The prompt as plain ids."""
        return self._engine.token_ids(segments)

    @torch.inference_mode()
    def run(self, ids: list[int], new_tokens: int, samples: Samples) -> None:
        start = time.perf_counter()
        cache = transformers.DynamicCache(config=self._model.config)
        tokens = torch.tensor([ids])
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            output = self._model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        samples.first.append(first - start)
        samples.decode.append((time.perf_counter() - first) / (new_tokens - 1))


def _print(samples: dict[str, Samples]) -> None:
    print(
        f"{'':14}{'first token s':>16}{'spread':>18}{'x fast':>8}{'of full':>9}{'ms a token':>13}"
        f"{'x fast':>8}"
    )
    base, full = samples["fast"], statistics.median(samples["full"].first)
    for name, sample in samples.items():
        first, decode = statistics.median(sample.first), statistics.median(sample.decode)
        spread = f"{min(sample.first):.3f}..{max(sample.first):.3f}"
        print(
            f"{name:14}{first:16.3f}{spread:>18}{first / statistics.median(base.first):8.1f}"
            f"{first / full:9.0%}{1000 * decode:13.1f}"
            f"{decode / statistics.median(base.decode):8.2f}"
        )


if __name__ == "__main__":
    main()
