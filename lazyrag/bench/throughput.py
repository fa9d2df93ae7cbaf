"""Tokens a second of concurrent requests over shared nodes, against one after another.

    python -m lazyrag.bench.throughput

The same requests in both cases, same engine, nodes in memory. Rounds are interleaved, so that a
noisy machine hurts both alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lazyrag.bench.corpus import passages, take
from lazyrag.engine.engine import Engine
from lazyrag.engine.generation import Generation
from lazyrag.types import Live, Node, Segment

QUESTIONS = (
    "Which proposal changes how modules are imported?",
    "What does a relative import with leading dots mean?",
    "Who should read these documents first?",
    "Name one thing that is no longer allowed.",
    "What is the oldest idea in these documents?",
    "Which words does the author define?",
    "What would break if none of this were done?",
    "Give the reason behind the last document.",
)


@dataclass(slots=True)
class Samples:
    """Of each round the generated tokens a second; of each request the seconds to first token."""

    speed: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def prompts_of(nodes: list[str], count: int) -> list[list[Segment]]:
    """Requests over the same nodes, each in another order and with another question."""
    prompts = []
    for number in range(count):
        turn = number % len(nodes)
        segments: list[Segment] = [Live(text="Use these documents.\n\n")]
        for text in nodes[turn:] + nodes[:turn]:
            segments += [Node(text=text), Live(text="\n\n")]
        question = QUESTIONS[number % len(QUESTIONS)]
        prompts.append([*segments, Live(text=f"Question: {question}\nAnswer:")])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of a node, about")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    with Engine.from_pretrained(arguments.model, reuse_live=False) as engine:  # asked repeatedly
        nodes = take(passages(engine, arguments.tokens), arguments.nodes)
        engine.precompute(nodes, progress=True)
        prompts = prompts_of(nodes, arguments.requests)
        print(
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"{engine.model_name}, {arguments.requests} requests, {arguments.nodes} nodes, "
            f"{len(engine.token_ids(prompts[0])):,} prompt tokens, {arguments.new_tokens} new"
        )

        def ask(prompt: list[Segment]) -> Generation:
            return engine.generate(prompt, max_new_tokens=arguments.new_tokens)

        engine.generate(prompts[0], max_new_tokens=2)  # loads nodes, warms up
        alone, together = Samples(), Samples()
        with ThreadPoolExecutor(arguments.requests) as threads:
            for _ in range(arguments.rounds):
                one_by_one = _measure(lambda: [ask(prompt) for prompt in prompts], alone)
                at_once = _measure(lambda: list(threads.map(ask, prompts)), together)
                same = sum(
                    one.token_ids == other.token_ids
                    for one, other in zip(one_by_one, at_once, strict=True)
                )
                print(
                    f"one after another {alone.speed[-1]:.1f}, together {together.speed[-1]:.1f} "
                    f"tokens/s, {same} of {len(prompts)} answers the same, load "
                    f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
                    flush=True,
                )
    _print(alone, together)


def _measure(run: Callable[[], list[Generation]], samples: Samples) -> list[Generation]:
    start = time.perf_counter()
    answers = run()
    seconds = time.perf_counter() - start
    samples.speed.append(sum(len(answer.token_ids) for answer in answers) / seconds)
    samples.first += [answer.report.ttft_s or 0.0 for answer in answers]
    return answers


def _print(alone: Samples, together: Samples) -> None:
    print(f"{'':20}{'tokens/s':>10}{'spread':>16}{'first token s':>16}{'spread':>16}")
    for name, samples in (("one after another", alone), ("together", together)):
        speed = f"{min(samples.speed):.1f}..{max(samples.speed):.1f}"
        first = f"{min(samples.first):.2f}..{max(samples.first):.2f}"
        print(
            f"{name:20}{statistics.median(samples.speed):10.1f}{speed:>16}"
            f"{statistics.median(samples.first):16.2f}{first:>16}"
        )
    ratios = [after / before for before, after in zip(alone.speed, together.speed, strict=True)]
    print(
        f"ratio {statistics.median(ratios):.2f} (spread {min(ratios):.2f}..{max(ratios):.2f}, "
        "each of one round)"
    )


if __name__ == "__main__":
    main()
