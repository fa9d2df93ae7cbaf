"""Time to the first token of a question over resident nodes, and to each further one.

    lazyrag bench ttft --csv FILE --plot FILE

One request, a question of 64 tokens, on one GPU, Llama-3.1-8B's shape with random weights. Times
are from the prompt as ids to the chosen id on the host: placing, planning, the pass, the way back.
Every ask has another order of nodes, except where a hit needs the order of before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lazyrag.bench.modes import Bed, BlockAttention, Full, Lazy, Mode, Prefix, ask, decode, read
from lazyrag.bench.shape import LLAMA_8B, random_model
from lazyrag.model.load import LoadedModel

CASES = ((10, 512), (20, 1024))
"""Nodes of a prompt, and their tokens."""
POOL_TOKENS = 300_000
DECODED = 65


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement.

    Attributes:
        nodes, node_tokens: of the prompt.
        what: first token, or token (of an answer).
        mode: see `lazyrag.bench.modes`.
        ms: median; low, high: 20th and 80th percentile.
        floor_ms: weights and KV over the bandwidth of reads.
    """

    nodes: int
    node_tokens: int
    what: str
    mode: str
    ms: float
    low: float
    high: float
    floor_ms: float


def measure(repeats: int, say: Callable[[str], None]) -> Iterator[Timing]:
    """Every mode over every case; the first call compiles and captures, which ``say`` tells."""
    device = torch.device("cuda")
    model = random_model(LLAMA_8B, device, torch.bfloat16)
    bandwidth = read_bandwidth(device)
    say(f"reads: {bandwidth / 1e12:.2f} TB/s")
    for nodes, node_tokens in CASES:
        bed = Bed(model, nodes + 2, node_tokens, POOL_TOKENS)
        start = time.perf_counter()
        bed.forward.warm_up()
        say(f"compiled and captured in {time.perf_counter() - start:.1f} s")
        kv = nodes * node_tokens * model.geometry.kv_bytes_per_token(model.dtype)
        floor = (weight_bytes(model) + kv) / bandwidth * 1e3
        with torch.inference_mode():
            for what, mode, samples in _samples(bed, nodes, repeats):
                low, *_, high = statistics.quantiles(samples, n=5)
                middle = statistics.median(samples)
                yield Timing(nodes, node_tokens, what, mode, middle, low, high, floor)
        del bed


def _samples(bed: Bed, nodes: int, repeats: int) -> Iterator[tuple[str, str, list[float]]]:
    lazy, block, prefix = Lazy(bed), BlockAttention(bed), Prefix(bed)
    orders = itertools.permutations(range(len(bed.ids)), nodes)
    same = next(orders)

    def reversed_order() -> tuple[int, ...]:
        return next(orders)[::-1]

    yield "first token", "lazy", [_first(bed, lazy, reversed_order()) for _ in range(repeats)]
    _first(bed, block, same)
    yield "first token", "block_attention, hit", [_first(bed, block, same) for _ in range(repeats)]
    samples = []
    for _ in range(repeats):
        block.forget()
        samples.append(_first(bed, block, reversed_order()))
    block.forget()
    yield "first token", "block_attention, miss", samples
    _first(bed, prefix, same)
    yield "first token", "prefix, hit", [_first(bed, prefix, same) for _ in range(repeats)]
    samples = []
    for _ in range(max(3, repeats // 3)):
        prefix.forget()
        samples.append(_first(bed, prefix, reversed_order()))
    prefix.forget()
    yield "first token", "prefix, other order", samples
    full = Full(bed)
    yield "first token", "full", [_first(bed, full, same) for _ in range(max(3, repeats // 3))]
    yield "token", "lazy", _tokens(bed, lazy, same, repeats)


def _first(bed: Bed, mode: Mode, order: tuple[int, ...]) -> float:
    """Milliseconds to the first token."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    asked = ask(bed, mode, order, 1)
    asked.tokens += read(bed, [asked.reading])
    ms = (time.perf_counter() - start) * 1e3
    asked.end(bed)
    return ms


def _tokens(bed: Bed, mode: Mode, order: tuple[int, ...], repeats: int) -> list[float]:
    """Milliseconds a token of whole answers."""
    samples = []
    for _ in range(repeats):
        asked = ask(bed, mode, order, DECODED)
        asked.tokens += read(bed, [asked.reading])
        start = time.perf_counter()
        decode(bed, [asked], DECODED)
        samples.append((time.perf_counter() - start) * 1e3 / (DECODED - 1))
        asked.end(bed)
    return samples


def weight_bytes(model: LoadedModel) -> int:
    """What a pass reads: everything but the table of embeddings."""
    embedding: Any = model.model.get_input_embeddings().weight
    head: Any = model.model.get_output_embeddings().weight
    every = sum(one.numel() * one.element_size() for one in model.model.parameters())
    tied = embedding.data_ptr() == head.data_ptr()
    return every - (0 if tied else int(embedding.numel() * embedding.element_size()))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large sum of whole numbers."""
    data = torch.zeros(2**29, dtype=torch.int64, device=device).random_()
    times: list[float] = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.amax()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(data.numel() * data.element_size() / statistics.median(times[1:]))
