"""Requests sent to an engine as a load has it, and what came of them as one row."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from lazyrag.bench.trace_engine import TraceEngine
from lazyrag.engine.generation import Delivery, Generation
from lazyrag.engine.report import NodeStatus, ReuseReport, Tier
from lazyrag.types import Live, Node, Segment


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a trace.

    Attributes:
        texts: of its nodes, in order.
        question: ids of the live tokens behind them, of no other request.
        new_tokens: of the answer.
    """

    texts: tuple[str, ...]
    question: tuple[int, ...]
    new_tokens: int

    @property
    def prompt(self) -> list[Segment]:
        """As the engine takes it."""
        return [*(Node(text=text) for text in self.texts), Live(ids=self.question)]


def random_texts(seed: str, count: int, tokens: int) -> list[str]:
    """Texts of so many bytes, one token each for a tokenizer of bytes."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return ["n" + "".join(rng.choices(letters, k=tokens - 1)) for _ in range(count)]


def asks(
    texts: Sequence[str],
    prompts: Iterable[Sequence[int]],
    *,
    seed: str,
    question_tokens: int,
    new_tokens: int,
    vocabulary: int,
) -> list[Ask]:
    """Requests over numbered texts, each with a question of its own."""
    rng = random.Random(seed)
    return [
        Ask(
            tuple(texts[number] for number in prompt),
            tuple(rng.choices(range(vocabulary), k=question_tokens)),
            new_tokens,
        )
        for prompt in prompts
    ]


class Load(Protocol):
    """When requests are sent."""

    name: str
    seconds: float
    """Length of the window in which finished requests count; infinite = until all have."""

    def due(self, sent: int, finished: int, now: float) -> float:
        """When the next one is to be sent, in seconds from the start; infinite = not now."""
        ...


class AtOnce:
    """So many requests at the start."""

    def __init__(self, count: int) -> None:
        self.name, self.seconds, self._count = "at once", math.inf, count

    def due(self, sent: int, finished: int, now: float) -> float:
        """See `Load`."""
        return 0.0 if sent < self._count else math.inf


class InTurn:
    """So many requests, each when the one before it is answered."""

    def __init__(self, count: int) -> None:
        self.name, self.seconds, self._count = "one by one", math.inf, count

    def due(self, sent: int, finished: int, now: float) -> float:
        """See `Load`."""
        return now if sent == finished < self._count else math.inf


class Closed:
    """So many clients, each of which asks again when it is answered, for so long."""

    def __init__(self, clients: int, seconds: float) -> None:
        self.name, self.seconds, self._clients = f"closed {clients}", seconds, clients

    def due(self, sent: int, finished: int, now: float) -> float:
        """See `Load`."""
        return now if now < self.seconds and sent - finished < self._clients else math.inf


class Poisson:
    """Arrivals at random, at a rate (1/s), for so long."""

    def __init__(self, rate: float, seconds: float, seed: str) -> None:
        self.name, self.seconds = f"Poisson {rate:.3g}/s", seconds
        rng = random.Random(seed)
        self._arrivals: list[float] = []
        arrival = rng.expovariate(rate)
        while arrival <= seconds:
            self._arrivals.append(arrival)
            arrival += rng.expovariate(rate)

    def due(self, sent: int, finished: int, now: float) -> float:
        """See `Load`."""
        return self._arrivals[sent] if sent < len(self._arrivals) else math.inf


@dataclass(frozen=True, slots=True)
class Answered:
    """One request's end.

    Attributes:
        first_s: from when it was to be sent to its first token.
        ended_s: from the start of the run to its last token.
        answer: with the report.
    """

    first_s: float
    ended_s: float
    answer: Generation


def send(engine: TraceEngine, trace: Sequence[Ask], load: Load) -> list[Answered]:
    """Send requests as the load has it, from one thread, and wait for all answers.

    Args:
        engine: nothing else uses it.
        trace: taken from its start; begins anew when it is over.
        load: when.

    Returns:
        One a request, in the order in which they were sent.

    Raises:
        BaseException: what went wrong with a request.
    """
    ends: SimpleQueue[tuple[int, float, Delivery]] = SimpleQueue()
    answered: dict[int, Answered] = {}
    late: list[float] = []  # of each request, how much later than due it was sent
    begin = time.perf_counter()

    def submit(ask: Ask) -> None:
        number = len(late) - 1

        def deliver(delivery: Delivery) -> None:
            if not isinstance(delivery, str):
                ends.put((number, time.perf_counter() - begin, delivery))

        engine.stream(ask.prompt, max_new_tokens=ask.new_tokens).hand_over(deliver)

    while True:
        now = time.perf_counter() - begin
        due = load.due(len(late), len(answered), now)
        if due <= now:
            late.append(now - due)
            submit(trace[(len(late) - 1) % len(trace)])
            continue
        if due == math.inf and len(answered) == len(late):
            return [answered[number] for number in range(len(late))]
        try:
            number, ended, outcome = ends.get(timeout=None if due == math.inf else due - now)
        except Empty:
            continue
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Generation), "only answers were asked for"
        first = late[number] + (outcome.report.ttft_s or 0.0)
        answered[number] = Answered(first, ended, outcome)


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        part: of the benchmark.
        mode: see `lazyrag.bench.trace_engine.Mode`.
        alpha: exponent of the nodes' popularity, 0 = all alike.
        device_gb: most KV on the device, 10^9 bytes.
        idle_gb: of it, most that no running request uses.
        load: when requests were sent.
        start: where nodes were: device, host, disk, or cold (nothing is stored).
        requests: that were finished within ``seconds``.
        seconds: length of the run: until the last answer for requests at once, else as told.
        requests_per_s: of those.
        ttft_p50_ms, ttft_p99_ms: to the first token of all requests that were sent, from when they
            were due.
        token_ms: a further token of an answer, the median of the requests' means.
        prompt_tokens: of all requests that were sent, as what follows: where their KV came from.
        device, host, disk: tokens of reused nodes by the tier in which they were.
        live: tokens reused as pages of text (prefix).
        computed: tokens that went through the model.
        copied: tokens of nodes that were copied on the device (block_attention).
        seed: of the trace.
    """

    part: str
    mode: str
    alpha: float
    device_gb: float
    idle_gb: float
    load: str
    start: str
    requests: int
    seconds: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    token_ms: float
    prompt_tokens: int
    device: int
    host: int
    disk: int
    live: int
    computed: int
    copied: int
    seed: int

    @property
    def label(self) -> str:
        """What was run, for tables and plots."""
        nodes = f"alpha {self.alpha:g}, idle {self.idle_gb:.3g} GB"
        return ", ".join((self.part, nodes, self.load, f"from {self.start}", self.mode))

    def __str__(self) -> str:
        where = ("device", "host", "disk", "live", "computed", "copied")
        share = (f"{name} {100 * getattr(self, name) / self.prompt_tokens:.1f}%" for name in where)
        return (
            f"{self.label}: {self.requests} in {self.seconds:.2f} s, "
            f"{self.requests_per_s:.2f} requests/s, first token {self.ttft_p50_ms:.0f} ms "
            f"(p99 {self.ttft_p99_ms:.0f}), a token {self.token_ms:.2f} ms; {', '.join(share)}"
        )


def tokens_by_tier(reports: Iterable[ReuseReport]) -> Counter[Tier]:
    """Tokens of reused nodes, by where their KV was."""
    tokens: Counter[Tier] = Counter()
    for report in reports:
        for node in report.nodes:
            if node.status is NodeStatus.REUSED:
                tokens[node.tier] += node.tokens
    return tokens


def row_of(
    answered: Sequence[Answered],
    load: Load,
    *,
    part: str,
    mode: str,
    alpha: float,
    device_bytes: int,
    idle_bytes: int,
    start: str,
    copied: int,
    seed: int,
) -> Row:
    """The figures of a run."""
    reports = [one.answer.report for one in answered]
    last = max(one.ended_s for one in answered)
    seconds = load.seconds if math.isfinite(load.seconds) else last
    finished = sum(one.ended_s <= seconds for one in answered)
    tiers = tokens_by_tier(reports)
    first = sorted(one.first_s * 1e3 for one in answered)
    speeds = [r.decode_tokens_per_s for r in reports if r.decode_tokens_per_s is not None]
    return Row(
        part=part,
        mode=mode,
        alpha=alpha,
        device_gb=device_bytes / 1e9,
        idle_gb=idle_bytes / 1e9,
        load=load.name,
        start=start,
        requests=finished,
        seconds=seconds,
        requests_per_s=finished / seconds,
        ttft_p50_ms=statistics.median(first),
        ttft_p99_ms=first[math.ceil(0.99 * len(first)) - 1],
        token_ms=statistics.median(1e3 / speed for speed in speeds) if speeds else 0.0,
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        device=tiers[Tier.DEVICE],
        host=tiers[Tier.HOST],
        disk=tiers[Tier.DISK],
        live=sum(report.live_tokens_reused for report in reports),
        computed=sum(report.tokens_computed for report in reports),
        copied=copied,
        seed=seed,
    )
