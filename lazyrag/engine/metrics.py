"""What an engine has done since it was made, counted by its worker and read from any thread."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeVar

from lazyrag.engine.report import Reason, ReuseReport, Tier

K = TypeVar("K", bound=StrEnum)

_STEPS = ("1", "1.5", "2", "3", "5", "7")
BOUNDS_S = (*(float(f"{step}e{power}") for power in range(-4, 2) for step in _STEPS), 100.0)
"""Upper bounds of the buckets of every histogram, seconds: 0.1 ms to 100 s. Neighbours differ by a
factor of at most 1.67, and between them so does an estimated quantile from the true one."""
QUANTILES = (0.5, 0.9, 0.99)


class Outcome(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMEOUT = "timeout"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Gauges:
    """How things stand at one moment: requests, pages, nodes and bytes.

    Attributes:
        waiting: requests that were not admitted yet.
        loading: admitted ones that wait for their nodes.
        running: those that take part in forward passes.
        pool_pages, pool_free_pages: of the pool on the device.
        idle_bytes, idle_budget_bytes: KV on the device that no running request uses; most of it.
        pinned_bytes: KV that is never evicted.
        resident_nodes: on the device, used or idle.
        host_nodes, host_bytes, host_budget_bytes: in the host's memory.
        storing_bytes: KV that was computed and is not stored yet.
    """

    waiting: int = 0
    loading: int = 0
    running: int = 0
    pool_pages: int = 0
    pool_free_pages: int = 0
    idle_bytes: int = 0
    idle_budget_bytes: int = 0
    pinned_bytes: int = 0
    resident_nodes: int = 0
    host_nodes: int = 0
    host_bytes: int = 0
    host_budget_bytes: int = 0
    storing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """How often something took how long.

    Attributes:
        counts: one for each of `BOUNDS_S`, and of what took longer; not cumulative.
        total_s: all of it together, seconds.
    """

    counts: tuple[int, ...]
    total_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        """Seconds; None when nothing was observed."""
        return self.total_s / self.count if self.count else None

    def quantile_s(self, share: float) -> float | None:
        """Seconds that ``share`` (above 0, at most 1) of what was observed stays within.

        Estimated as Prometheus does: a bucket's observations lie evenly between its bounds.
        What took longer than the last bound counts as that bound; None when nothing was observed.
        """
        rank = share * self.count
        if not self.count:
            return None
        at = bisect_left(list(accumulate(self.counts)), rank)
        if at >= len(BOUNDS_S):
            return BOUNDS_S[-1]
        lower = BOUNDS_S[at - 1] if at else 0.0
        inside = (rank - sum(self.counts[:at])) / self.counts[at]
        return lower + (BOUNDS_S[at] - lower) * inside

    def to_dict(self) -> dict[str, Any]:
        """Count, mean, p50, p90, p99, and the buckets that hold something by their upper bound."""
        bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["inf"]
        return {
            "count": self.count,
            "total_s": self.total_s,
            "mean_s": self.mean_s,
            **{f"p{share * 100:.0f}_s": self.quantile_s(share) for share in QUANTILES},
            "buckets": {
                bound: count for bound, count in zip(bounds, self.counts, strict=True) if count
            },
        }


@dataclass(frozen=True, slots=True)
class Movement:
    """KV that was brought from one tier to another: nodes' bytes, seconds, and how many moves."""

    source: str
    target: str
    moves: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine; counts are since it was made, of requests that were admitted.

    A node counts as often as it stands in a prompt, in the tier its KV was in when the request
    came; the tier ``none`` means that it was computed. Tiers, reasons and outcomes that did not
    occur are there as 0. A move through several tiers is a `Movement` for each of its legs.

    Attributes:
        requests: that were admitted.
        nodes_by_tier, node_tokens_by_tier: nodes of the prompts, and their tokens.
        computed_by_reason: nodes of the tier ``none``, by the reason in their reports.
        tokens_reused: tokens of nodes that were reused.
        live_tokens_reused: live tokens whose KV another request had left.
        tokens_computed: tokens that went through the model before first tokens.
        encoded_tokens, encode_s: nodes computed, by requests and by ingestion.
        unstored_nodes: computed by requests and not stored, since too much was waiting to be, or
            since the store failed; they are when they are computed again.
        movements: KV brought from tier to tier.
        evicted_nodes_by_tier, evicted_bytes_by_tier: from where they were dropped.
        finished_by_outcome: requests, refused ones among them.
        queue: from a request's arrival to its admission.
        first_token: from the call to the first token of an answer.
        next_token: from one token of an answer to the next.
        now: how things stand.
    """

    requests: int
    nodes_by_tier: dict[str, int]
    node_tokens_by_tier: dict[str, int]
    computed_by_reason: dict[str, int]
    tokens_reused: int
    live_tokens_reused: int
    tokens_computed: int
    encoded_tokens: int
    encode_s: float
    unstored_nodes: int
    movements: tuple[Movement, ...]
    evicted_nodes_by_tier: dict[str, int]
    evicted_bytes_by_tier: dict[str, int]
    finished_by_outcome: dict[str, int]
    queue: HistogramStats
    first_token: HistogramStats
    next_token: HistogramStats
    now: Gauges

    @property
    def node_share_by_tier(self) -> dict[str, float]:
        """The hit ratio of each tier, ``none`` = misses; 0 everywhere when there were no nodes."""
        return _shares(self.nodes_by_tier)

    @property
    def token_share_by_tier(self) -> dict[str, float]:
        """As `node_share_by_tier`, each node with the weight of its tokens."""
        return _shares(self.node_tokens_by_tier)

    @property
    def node_hit_ratio(self) -> float:
        """Nodes that were not computed, of all nodes; 0 when there were none."""
        return _hits(self.nodes_by_tier)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens of nodes that were not computed, of the tokens of all nodes."""
        return _hits(self.node_tokens_by_tier)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the ratios and quantiles among them; counts are per name."""
        data = asdict(self)
        for name in ("queue", "first_token", "next_token"):
            data[name] = getattr(self, name).to_dict()
        data["movements"] = [asdict(movement) for movement in self.movements]
        for name in (
            "node_share_by_tier", "token_share_by_tier", "node_hit_ratio", "token_hit_ratio",
        ):  # fmt: skip
            data[name] = getattr(self, name)
        return data

    def summary(self) -> str:
        """A few lines for people."""
        now = self.now
        ended = sum(self.finished_by_outcome.values())
        lines = [
            f"requests     {now.running:,} running, {now.loading:,} loading, {now.waiting:,} "
            f"waiting; {ended:,} ended{_named(self.finished_by_outcome)}",
            f"nodes        {self.node_hit_ratio:.0%} hit, by tokens {self.token_hit_ratio:.0%}"
            f"{_named(self.nodes_by_tier)}",
            f"tokens       {self.tokens_reused:,} reused, {self.live_tokens_reused:,} live reused, "
            f"{self.tokens_computed:,} computed",
            f"queue        {_times(self.queue)}",
            f"first token  {_times(self.first_token)}",
            f"next token   {_times(self.next_token)}",
        ]
        lines += [
            f"moved        {_size(one.nbytes)} from {one.source} to {one.target}, "
            f"{_size(one.nbytes / one.seconds) if one.seconds else '-'} a second"
            for one in self.movements
        ]
        if self.unstored_nodes:
            lines.append(f"not stored   {self.unstored_nodes:,} computed nodes")
        if any(self.evicted_nodes_by_tier.values()):
            evicted = sum(self.evicted_bytes_by_tier.values())
            lines.append(f"evicted      {_size(evicted)}{_named(self.evicted_nodes_by_tier)}")
        lines.append(
            f"memory       {now.pool_free_pages:,} of {now.pool_pages:,} pages free, idle nodes "
            f"{_size(now.idle_bytes)} of {_size(now.idle_budget_bytes)}, host "
            f"{_size(now.host_bytes)} of {_size(now.host_budget_bytes)}, to be stored "
            f"{_size(now.storing_bytes)}"
        )
        return "\n".join(lines)


class Metrics:
    """The counters behind `EngineStats`.

    One thread records, any thread reads. A recording is a few additions under a lock (about a
    microsecond), so that a snapshot is of one moment: what belongs together agrees.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._nodes: Counter[Tier] = Counter()
        self._node_tokens: Counter[Tier] = Counter()
        self._reasons: Counter[Reason] = Counter()
        self._tokens_reused = self._live_tokens_reused = self._tokens_computed = 0
        self._encoded_tokens, self._encode_s = 0, 0.0
        self._unstored_nodes = 0
        self._moves: dict[tuple[Tier, Tier], tuple[int, int, float]] = {}
        self._evicted_nodes: Counter[Tier] = Counter()
        self._evicted_bytes: Counter[Tier] = Counter()
        self._outcomes: Counter[Outcome] = Counter()
        self._queue = _Histogram()
        self._first_token = _Histogram()
        self._next_token = _Histogram()

    def started(self, report: ReuseReport, queued_s: float) -> None:
        """A request was admitted ``queued_s`` seconds after it came; its nodes are in place."""
        with self._lock:
            self._requests += 1
            self._queue.add(queued_s)
            for node in report.nodes:
                self._nodes[node.tier] += 1
                self._node_tokens[node.tier] += node.tokens
                if node.reason is not None:
                    self._reasons[node.reason] += 1
            self._tokens_reused += report.tokens_reused
            self._live_tokens_reused += report.live_tokens_reused
            self._tokens_computed += report.tokens_computed

    def first_token(self, seconds: float) -> None:
        """An answer's first token was chosen, this long after the call."""
        with self._lock:
            self._first_token.add(seconds)

    def next_token(self, seconds: float) -> None:
        """Another token was chosen, this long after the one before it."""
        with self._lock:
            self._next_token.add(seconds)

    def finished(self, outcome: Outcome | str) -> None:
        """A request is over.

        Raises:
            ValueError: there is no such outcome.
        """
        known = Outcome(outcome)
        with self._lock:
            self._outcomes[known] += 1

    def moved(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> None:
        """KV was brought from one tier to another; ``seconds`` that it took, not that it waited."""
        with self._lock:
            moves, all_bytes, all_seconds = self._moves.get((source, target), (0, 0, 0.0))
            self._moves[source, target] = (moves + 1, all_bytes + nbytes, all_seconds + seconds)

    def encoded(self, tokens: int, seconds: float) -> None:
        """Nodes of so many tokens were computed."""
        with self._lock:
            self._encoded_tokens += tokens
            self._encode_s += seconds

    def not_stored(self) -> None:
        """A node was computed and is not stored this time."""
        with self._lock:
            self._unstored_nodes += 1

    def evicted(self, tier: Tier, nodes: int, nbytes: int) -> None:
        """Nodes were dropped from a tier to make room."""
        with self._lock:
            self._evicted_nodes[tier] += nodes
            self._evicted_bytes[tier] += nbytes

    def snapshot(self, gauges: Gauges) -> EngineStats:
        """What was counted so far, and how things stand. Thread-safe."""
        with self._lock:
            return EngineStats(
                requests=self._requests,
                nodes_by_tier=_by_name(Tier, self._nodes),
                node_tokens_by_tier=_by_name(Tier, self._node_tokens),
                computed_by_reason=_by_name(Reason, self._reasons),
                tokens_reused=self._tokens_reused,
                live_tokens_reused=self._live_tokens_reused,
                tokens_computed=self._tokens_computed,
                encoded_tokens=self._encoded_tokens,
                encode_s=self._encode_s,
                unstored_nodes=self._unstored_nodes,
                movements=tuple(
                    Movement(source.value, target.value, *sums)
                    for (source, target), sums in sorted(self._moves.items())
                ),
                evicted_nodes_by_tier=_by_name(Tier, self._evicted_nodes, but=Tier.NONE),
                evicted_bytes_by_tier=_by_name(Tier, self._evicted_bytes, but=Tier.NONE),
                finished_by_outcome=_by_name(Outcome, self._outcomes),
                queue=self._queue.stats(),
                first_token=self._first_token.stats(),
                next_token=self._next_token.stats(),
                now=gauges,
            )


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._total += seconds

    def stats(self) -> HistogramStats:
        return HistogramStats(tuple(self._counts), self._total)


def _by_name(names: Iterable[K], counts: Mapping[K, int], but: K | None = None) -> dict[str, int]:
    return {name.value: counts.get(name, 0) for name in names if name is not but}


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total if total else 0.0 for name, count in counts.items()}


def _hits(by_tier: Mapping[str, int]) -> float:
    total = sum(by_tier.values())
    return 1 - by_tier[Tier.NONE] / total if total else 0.0


def _named(counts: Mapping[str, int]) -> str:
    parts = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def _times(histogram: HistogramStats) -> str:
    if not histogram.count:
        return "-"
    parts = [f"p{share * 100:.0f} {histogram.quantile_s(share):.2g} s" for share in QUANTILES]
    return f"{', '.join(parts)} ({histogram.count:,})"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"
