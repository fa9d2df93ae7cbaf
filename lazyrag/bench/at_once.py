"""Many requests at once over few nodes, each in another order: ``lazyrag bench throughput``.

64 requests, each over 10 of 12 nodes of 512 tokens with a question of 64 and 128 new tokens, on one
GPU, Llama-3.1-8B's shape with random weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lazyrag.bench.modes import Bed, BlockAttention, Full, Lazy, Mode, Prefix, ask, decode, read
from lazyrag.bench.shape import LLAMA_8B, random_model

REQUESTS, NODES, ASKED, NODE_TOKENS, NEW_TOKENS = 64, 12, 10, 512, 128
POOL_TOKENS = 480_000


@dataclass(frozen=True, slots=True)
class Run:
    """All requests once.

    Attributes:
        mode: see `lazyrag.bench.modes`.
        seconds: from the prompts as ids to the last token.
        first_s: until every request has its first token.
        step_ms: of a pass in which all write.
        tokens_per_s: new ones.
    """

    mode: str
    seconds: float
    first_s: float
    step_ms: float
    tokens_per_s: float


def measure(repeats: int, say: Callable[[str], None]) -> Iterator[Run]:
    """Every mode; of the quick ones several runs."""
    model = random_model(LLAMA_8B, torch.device("cuda"), torch.bfloat16)
    bed = Bed(model, NODES, NODE_TOKENS, POOL_TOKENS)
    start = time.perf_counter()
    bed.forward.warm_up()
    say(f"compiled and captured in {time.perf_counter() - start:.1f} s")
    rng = random.Random(0)
    orders = [tuple(rng.sample(range(NODES), ASKED)) for _ in range(REQUESTS)]
    with torch.inference_mode():
        _run(bed, Lazy(bed), orders, "")  # captures what was not captured ahead
        lazy, block, prefix = Lazy(bed), BlockAttention(bed), Prefix(bed)
        for _ in range(repeats):
            yield _run(bed, lazy, orders, "lazy")
        for _ in range(repeats):
            block.forget()
            yield _run(bed, block, orders, "block_attention, no copy yet")
        for _ in range(repeats):
            yield _run(bed, block, orders, "block_attention, every copy there")
        block.forget()
        yield _run(bed, prefix, orders, "prefix, in the order of frequency, nothing there", True)
        yield _run(bed, prefix, orders, "prefix, in the order of frequency, again", True)
        prefix.forget()
        yield _run(bed, Full(bed), orders, "full")


def _run(
    bed: Bed, mode: Mode, orders: list[tuple[int, ...]], name: str, by_frequency: bool = False
) -> Run:
    if by_frequency:
        counts = [sum(node in order for order in orders) for node in range(NODES)]
        orders = [tuple(sorted(order, key=lambda node: -counts[node])) for order in orders]
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [ask(bed, mode, order, NEW_TOKENS) for order in orders]
    for one, id in zip(requests, read(bed, [one.reading for one in requests]), strict=True):
        one.tokens.append(id)
    first = time.perf_counter() - start
    decode(bed, requests, NEW_TOKENS)
    seconds = time.perf_counter() - start
    for one in requests:
        one.end(bed)
    return Run(
        name,
        seconds,
        first,
        (seconds - first) / (NEW_TOKENS - 1) * 1e3,
        REQUESTS * NEW_TOKENS / seconds,
    )
