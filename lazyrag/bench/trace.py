"""Request traces through the whole engine, in four modes: ``lazyrag bench trace``.

One GPU, Llama-3.1-8B's shape with random weights, one engine for all runs. Between runs the tiers
are emptied, not the store; nodes are encoded once. Every mode gets the same requests over the same
pool; a question is asked once in a run, so that nothing but nodes comes again. Parts:

    alone     one request after the other over 10 of 12 nodes of 512 tokens, in ever other orders
    at-once   64 requests, each over 10 of 12 nodes of 512 tokens in an order of its own
    zipf      100 requests over 5 of 100 nodes of 2,048 tokens, 10 GiB of KV on the device
    compare   the same nodes, a closed loop and Poisson arrivals, budgets for what is idle
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from lazyrag.bench.hit_ratio import Prompt
from lazyrag.bench.shape import LLAMA_8B, random_model
from lazyrag.bench.trace_engine import TraceEngine
from lazyrag.bench.trace_run import (
    Ask,
    AtOnce,
    Closed,
    InTurn,
    Load,
    Poisson,
    Row,
    asks,
    random_texts,
    row_of,
    send,
)
from lazyrag.bench.trace_settings import Mode, Part, Settings, Start
from lazyrag.types import NodeText, Reference

UTILISATION = 0.7
"""Poisson arrivals, of what block_attention serves in the closed loop."""


def measure(
    parts: Sequence[Part], settings: Settings, store: Path | None, say: Callable[[str], None]
) -> Iterator[Row]:
    """Run parts on the GPU.

    Args:
        parts: in order.
        settings: sizes.
        store: keeps nodes from one call to the next; None = a temporary folder.
        say: told what goes on.
    """
    with ExitStack() as stack:
        folder = store or stack.enter_context(tempfile.TemporaryDirectory(prefix="lazyrag-"))
        timer = Timer(say)
        model = random_model(LLAMA_8B, torch.device("cuda"), torch.bfloat16)
        engine = stack.enter_context(
            TraceEngine(
                model,
                store=folder,
                pool_bytes=settings.pool_bytes,
                host_bytes=settings.host_bytes,
            )
        )
        timer.lap("model made")
        engine.warm_up()
        timer.lap("compiled and captured")
        trace = Trace(engine, settings, timer)
        for part in parts:
            yield from trace.run(part)
            timer.lap(f"{part} done")


class Timer:
    """Tells what took how long.

    Args:
        say: told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = self._begin = time.perf_counter()

    def lap(self, what: str) -> None:
        """``what`` has been done since the last call."""
        now = time.perf_counter()
        self._say(f"{what}: {now - self._last:.1f} s, {now - self._begin:.0f} s in all")
        self._last = now

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Tells every tenth of a work of known size."""
        told = 0

        def done(count: int, total: int) -> None:
            nonlocal told
            if total and count * 10 // total > told:
                told = count * 10 // total
                self._say(f"{what}: {told * 10}%")

        return done


class Trace:
    """The parts over one engine.

    Args:
        engine: nothing else uses it.
        settings: sizes.
        timer: told what goes on.
    """

    def __init__(self, engine: TraceEngine, settings: Settings, timer: Timer) -> None:
        self._engine, self._settings, self._timer = engine, settings, timer
        many = settings.many
        self._texts = random_texts(f"many {settings.seed}", many.documents, many.tokens)
        self._host_filled = False
        self._warm: set[Mode] = set()
        engine.measure_encoding(random_texts(f"speed {settings.seed}", 5, many.tokens))

    def run(self, part: Part) -> Iterator[Row]:
        """One part."""
        runs = {
            Part.ALONE: self.alone,
            Part.AT_ONCE: self.at_once,
            Part.ZIPF: self.zipf,
            Part.COMPARE: self.compare,
        }
        yield from runs[part]()

    def alone(self) -> Iterator[Row]:
        """One request after the other, nodes resident."""
        settings = self._settings
        texts, orders = self._few()
        few = orders[: max(1, len(orders) // 8)]
        half = orders[: max(1, len(orders) // 2)]
        for mode in filter(_reuses_nodes, settings.modes):
            self._bring_few(mode, texts)
            send(
                self._engine,
                self._asks(texts, few, settings.new_tokens, "warm-up"),
                InTurn(len(few)),
            )
            trace = self._asks(texts, half, settings.new_tokens, "alone")
            yield self._row(trace, InTurn(len(half)), Part.ALONE, mode, 0.0, Start.DEVICE)

    def at_once(self) -> Iterator[Row]:
        """Few nodes in many orders."""
        settings, engine = self._settings, self._engine
        requests, nodes, *_, new_tokens = settings.few
        texts, orders = self._few()
        counts = [sum(node in order for order in orders) for node in range(nodes)]
        by_frequency = [tuple(sorted(order, key=lambda n: (-counts[n], n))) for order in orders]

        def trace(mode: Mode, repeat: object) -> list[Ask]:
            chosen = by_frequency if mode is Mode.PREFIX else orders
            return self._asks(texts, chosen, new_tokens, f"few {repeat}")

        def begin(mode: Mode) -> None:
            if _reuses_nodes(mode):
                self._bring_few(mode, texts)
            else:
                engine.start_anew(mode)

        load = AtOnce(requests)
        for mode in filter(_reuses_nodes, settings.modes):
            begin(mode)
            send(engine, trace(mode, "warm-up"), load)
        self._timer.lap("warmed up")
        for mode in settings.modes:
            start = Start.DEVICE if _reuses_nodes(mode) else Start.COLD
            begin(mode)
            for repeat in range(1 if mode is Mode.FULL else settings.repeats):
                then = Start.AGAIN if repeat else start
                yield self._row(trace(mode, repeat), load, Part.AT_ONCE, mode, 0.0, then)

    def zipf(self) -> Iterator[Row]:
        """Many nodes, some popular, little room on the device."""
        settings = self._settings
        if Mode.LAZY in settings.modes:
            for alpha in settings.zipf_alphas:
                yield self._cold(alpha)
            self._prepare()
            for alpha in reversed(settings.zipf_alphas):  # what the last one has read stays
                yield self._from_disk(alpha)
        self._fill_host()
        for number, alpha in enumerate(settings.zipf_alphas):
            for mode in settings.modes:
                if mode is Mode.FULL and number:
                    continue  # it reuses nothing: popularity is nothing to it
                if _reuses_nodes(mode):
                    self._warm_up(mode, alpha)
                yield self._zipf(mode, alpha, Start.HOST if _reuses_nodes(mode) else Start.COLD)

    def compare(self) -> Iterator[Row]:
        """Position-aware copies against ours, in a closed loop and with Poisson arrivals."""
        settings = self._settings
        self._fill_host()
        modes = [m for m in (Mode.BLOCK_ATTENTION, Mode.LAZY) if m in settings.modes]
        for mode in modes:
            self._warm_up(mode, settings.alphas[0])
        for alpha, idle in itertools.product(settings.alphas, settings.idle_gb):
            rate = settings.rate
            closed = Closed(settings.clients, settings.seconds)
            for mode in modes:
                row = self._timed(mode, alpha, idle, closed)
                rate = rate or max(1 / settings.seconds, UTILISATION * row.requests_per_s)
                yield row
            assert rate is not None, "there is a mode"
            seed = f"arrivals {settings.seed} {alpha} {idle}"
            arrivals = Poisson(rate, settings.seconds, seed)
            for mode in modes:
                yield self._timed(mode, alpha, idle, arrivals)

    # nodes

    def _few(self) -> tuple[list[str], list[Prompt]]:
        """Few nodes, stored, and the orders in which they are asked for."""
        settings = self._settings
        requests, nodes, asked, tokens, _ = settings.few
        texts = random_texts(f"few {settings.seed}", nodes, tokens)
        self._engine.precompute(texts)
        rng = random.Random(settings.seed)
        return texts, [tuple(rng.sample(range(nodes), asked)) for _ in range(requests)]

    def _bring_few(self, mode: Mode, texts: Sequence[str]) -> None:
        """Empty the pool, then have all of few nodes brought into it."""
        self._engine.start_anew(mode)
        halves = [tuple(range(len(texts))[first::2]) for first in range(2)]
        send(self._engine, self._asks(texts, halves, 1, "few"), AtOnce(2))

    def _prepare(self) -> None:
        self._engine.precompute(self._texts, progress=self._timer.progress("encoding"))
        self._timer.lap("nodes encoded and stored")

    def _fill_host(self) -> None:
        if not self._host_filled:
            self._prepare()
            self._engine.fill_host(self._texts)
            self._host_filled = True
            self._timer.lap("nodes brought into host memory")

    # runs

    def _cold(self, alpha: float) -> Row:
        """Over nodes that the store does not have; it has not afterwards, either."""
        settings, engine = self._settings, self._engine
        many = settings.many
        texts = random_texts(f"cold {settings.seed}", many.documents, many.tokens)
        nodes = [NodeText(text, reference=Reference("trace", "cold")) for text in texts]
        engine.register(nodes)
        try:
            return self._zipf(Mode.LAZY, alpha, Start.COLD, texts, keep_host=False)
        finally:
            engine.release([Reference("trace", "cold")])
            engine.flush()  # what was being written just then is deleted now

    def _from_disk(self, alpha: float) -> Row:
        self._engine.forget_file_cache()
        return self._zipf(Mode.LAZY, alpha, Start.DISK, keep_host=False)

    def _zipf(
        self,
        mode: Mode,
        alpha: float,
        start: Start,
        texts: Sequence[str] | None = None,
        *,
        keep_host: bool = True,
    ) -> Row:
        settings = self._settings
        self._host_filled &= keep_host
        self._engine.start_anew(mode, device_bytes=settings.zipf_bytes, keep_host=keep_host)
        requests = settings.full_requests if mode is Mode.FULL else settings.many.requests
        trace = self._zipf_asks(mode, alpha, texts or self._texts)[:requests]
        return self._row(trace, AtOnce(len(trace)), Part.ZIPF, mode, alpha, start)

    def _timed(self, mode: Mode, alpha: float, idle_gb: float, load: Load) -> Row:
        self._engine.start_anew(mode, idle_bytes=int(idle_gb * 1e9))
        trace = self._zipf_asks(mode, alpha, self._texts)
        return self._row(trace, load, Part.COMPARE, mode, alpha, Start.HOST)

    def _warm_up(self, mode: Mode, alpha: float) -> None:
        """Have the usual passes of a mode captured, once."""
        if mode in self._warm:
            return
        self._warm.add(mode)
        self._engine.start_anew(mode)
        trace = self._zipf_asks(mode, alpha, self._texts)[: 2 * self._settings.clients]
        send(self._engine, trace, AtOnce(len(trace)))
        self._timer.lap(f"{mode} warmed up")

    def _row(
        self, trace: Sequence[Ask], load: Load, part: Part, mode: Mode, alpha: float, start: Start
    ) -> Row:
        engine = self._engine
        device_bytes, idle_bytes = engine.budgets
        copied = engine.copied_tokens
        answered = send(engine, trace, load)
        return row_of(
            answered,
            load,
            part=part,
            mode=mode,
            alpha=alpha,
            device_bytes=device_bytes,
            idle_bytes=idle_bytes,
            start=start,
            copied=engine.copied_tokens - copied,
            seed=self._settings.seed,
        )

    # requests

    def _zipf_asks(self, mode: Mode, alpha: float, texts: Sequence[str]) -> list[Ask]:
        settings = self._settings
        prompts = settings.many.prompts(alpha, settings.seed)
        if mode is Mode.PREFIX:
            prompts = [by_rank(prompt) for prompt in prompts]
        return self._asks(texts, prompts, settings.new_tokens, f"zipf {alpha}")

    def _asks(
        self, texts: Sequence[str], prompts: Sequence[Prompt], new_tokens: int, seed: str
    ) -> list[Ask]:
        return asks(
            texts,
            prompts,
            seed=f"{seed} {self._settings.seed}",
            question_tokens=self._settings.question_tokens,
            new_tokens=new_tokens,
            vocabulary=self._engine.vocabulary,
        )


def by_rank(prompt: Prompt) -> Prompt:
    """The most popular nodes first: as many prompts as possible begin alike."""
    return tuple(sorted(prompt))


def _reuses_nodes(mode: Mode) -> bool:
    return mode in (Mode.LAZY, Mode.BLOCK_ATTENTION)
