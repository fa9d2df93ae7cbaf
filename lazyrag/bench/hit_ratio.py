"""How much of the nodes in its prompts a cache of a given size reuses, simulated.

    lazyrag bench hit-ratio

A trace is a list of prompts, each of a few distinct documents drawn one after another from a Zipf
law. All nodes have the same length, so a budget is a number of nodes and the token hit ratio is
that of nodes. As in the engine a prompt's nodes are looked up together, and the budget is for idle
nodes: what stays is decided when the request ends, among what was there and what it brought.

Every trace is twice as long as asked for. `State.COLD` is its first half from an empty cache,
`State.WARM` the second half behind the first.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lazyrag.engine.eviction import EvictionPolicy

Prompt = tuple[int, ...]
"""Documents in the order of the prompt; 0 is the most popular one."""

KV_BYTES_PER_TOKEN = 131_072
"""Llama-3.1-8B in bfloat16: 2 × 32 layers × 8 heads × 128 × 2 bytes."""


class State(StrEnum):
    """What a cache holds when counting begins."""

    COLD = "cold"
    WARM = "warm"


class Order(StrEnum):
    """Where a document stands in its prompt.

    ``drawn``: as drawn, so popular ones tend to stand in front, which helps caches that depend on
    position. ``shuffled``: anywhere.
    """

    DRAWN = "drawn"
    SHUFFLED = "shuffled"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        documents: in the collection.
        tokens: of a document.
        per_prompt: distinct documents in a prompt.
        requests: prompts that count, for each `State`.
        order: see `Order`.

    Raises:
        ValueError: there are fewer documents than a prompt takes.
    """

    documents: int = 100
    tokens: int = 2048
    per_prompt: int = 5
    requests: int = 200
    order: Order = Order.DRAWN

    def __post_init__(self) -> None:
        if self.per_prompt > self.documents:
            raise ValueError(
                f"{self.per_prompt} distinct documents a prompt need as many in the collection, "
                f"which has {self.documents}"
            )

    @property
    def node_bytes(self) -> int:
        """Bytes of a node's KV."""
        return self.tokens * KV_BYTES_PER_TOKEN

    def capacity(self, budget_gb: float) -> int:
        """Nodes that fit into a budget.

        Raises:
            ValueError: not even one fits.
        """
        capacity = int(budget_gb * 1e9) // self.node_bytes
        if not capacity:
            raise ValueError(
                f"a budget of {budget_gb:g} GB holds no node of {self.node_bytes / 1e9:.3g} GB"
            )
        return capacity

    def prompts(self, alpha: float, seed: int) -> list[Prompt]:
        """The trace of a seed: 2 × ``requests`` prompts, document i of weight (i+1)^−alpha."""
        rng = random.Random(seed)
        weights = [(document + 1) ** -alpha for document in range(self.documents)]
        prompts = []
        for _ in range(2 * self.requests):
            left, left_weights, drawn = list(range(self.documents)), weights.copy(), []
            for _ in range(self.per_prompt):
                index = rng.choices(range(len(left)), weights=left_weights)[0]
                drawn.append(left.pop(index))
                del left_weights[index]
            if self.order is Order.SHUFFLED:
                rng.shuffle(drawn)
            prompts.append(tuple(drawn))
        return prompts


class Cache(Protocol):
    """A cache of so many nodes."""

    def serve(self, prompt: Prompt) -> int:
        """Answer a prompt and decide what stays; how many of its nodes were reused."""


def _nodes(prompt: Prompt) -> Sequence[Hashable]:
    return prompt


def _placed_nodes(prompt: Prompt) -> Sequence[Hashable]:
    """A node and the position it was cached for, without which it cannot be reused."""
    return tuple(enumerate(prompt))


class Ours:
    """`EvictionPolicy`."""

    def __init__(
        self, capacity: int, keys: Callable[[Prompt], Sequence[Hashable]] = _nodes
    ) -> None:
        self._policy: EvictionPolicy[Hashable] = EvictionPolicy(capacity)
        self._keys = keys

    def serve(self, prompt: Prompt) -> int:
        keys = self._keys(prompt)
        misses = [key for key in keys if key not in self._policy]
        for key in keys:
            self._policy.touch(key)
        for key in misses:
            self._policy.add(key, size_bytes=1, cost_s=1.0)
        return len(keys) - len(misses)


class Lru:
    """Keeps what was used last."""

    def __init__(
        self, capacity: int, keys: Callable[[Prompt], Sequence[Hashable]] = _nodes
    ) -> None:
        self._capacity = capacity
        self._keys = keys
        self._kept: OrderedDict[Hashable, None] = OrderedDict()

    def serve(self, prompt: Prompt) -> int:
        keys = self._keys(prompt)
        hits = sum(key in self._kept for key in keys)
        for key in keys:
            self._kept[key] = None
            self._kept.move_to_end(key)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return hits


class Prefix:
    """A radix tree of whole nodes: only the longest prefix seen before is reused; the leaf that was
    used longest ago goes first.

    The tree is kept as its paths. A prompt uses its paths longest first, so a path is always older
    than what it continues, and the oldest one is a leaf.
    """

    def __init__(self, capacity: int, *, by_frequency: bool = False) -> None:
        self._by_frequency = by_frequency
        self._tree = Lru(capacity, self._paths)

    def serve(self, prompt: Prompt) -> int:
        return self._tree.serve(prompt)

    def _paths(self, prompt: Prompt) -> Sequence[Hashable]:
        if self._by_frequency:  # the numbers are the true ranks: the best order there is
            prompt = tuple(sorted(prompt))
        return [prompt[:length] for length in range(len(prompt), 0, -1)]


class Ideal:
    """Admission by frequency that knows the true popularity: of all nodes seen, and those in
    ``seen``, it keeps the most popular ones.
    """

    def __init__(self, capacity: int, seen: Iterable[int] = ()) -> None:
        self._capacity = capacity
        self._kept = set(sorted(seen)[:capacity])

    def serve(self, prompt: Prompt) -> int:
        hits = sum(node in self._kept for node in prompt)
        self._kept = set(sorted(self._kept.union(prompt))[: self._capacity])
        return hits


class Optimum:
    """Belady: knows the prompts to come and keeps the nodes that are needed soonest.

    No policy reuses more nodes of equal size: two uses of a node without a use between them are an
    interval, reusing the node holds one place for that long, and taking the interval that ends
    first packs the most intervals into so many places. With ``warm`` it begins with the best nodes,
    so it bounds whatever a warm cache may hold.
    """

    def __init__(self, capacity: int, prompts: Sequence[Prompt], *, warm: bool) -> None:
        self._capacity = capacity
        self._uses: dict[int, list[int]] = {}  # of a node, the next one last
        for time in reversed(range(len(prompts))):
            for node in prompts[time]:
                self._uses.setdefault(node, []).append(time)
        self._kept: set[int] = set()
        if warm:
            self._keep(self._uses)

    def serve(self, prompt: Prompt) -> int:
        hits = sum(node in self._kept for node in prompt)
        for node in prompt:
            self._uses[node].pop()
        self._keep(self._kept.union(prompt))
        return hits

    def _keep(self, nodes: Iterable[int]) -> None:
        needed = [(self._uses[node][-1], node) for node in nodes if self._uses[node]]
        self._kept = {node for _, node in sorted(needed)[: self._capacity]}


ONLINE: dict[str, Callable[[int], Cache]] = {
    "ours": Ours,
    "lru": Lru,
    "position-aware": lambda capacity: Lru(capacity, _placed_nodes),
    "position-aware, our policy": lambda capacity: Ours(capacity, _placed_nodes),
    "prefix": Prefix,
    "prefix, frequency order": lambda capacity: Prefix(capacity, by_frequency=True),
}
"""Policies that know the past only."""

POLICIES = (*ONLINE, "ideal", "optimum")
"""All that are simulated."""


def simulate(
    workload: Workload, prompts: Sequence[Prompt], capacity: int
) -> dict[tuple[str, State], float]:
    """Hit ratio of every policy, by name and state, on one trace (see `Workload.prompts`)."""
    halves = {
        State.COLD: prompts[: workload.requests],
        State.WARM: prompts[workload.requests :],
    }
    hits: dict[tuple[str, State], int] = {}
    for name, make in ONLINE.items():
        cache = make(capacity)
        for state, half in halves.items():
            hits[name, state] = sum(map(cache.serve, half))
    for state, half in halves.items():
        warm = state is State.WARM
        ideal = Ideal(capacity, range(workload.documents) if warm else ())
        hits["ideal", state] = sum(map(ideal.serve, half))
        hits["optimum", state] = sum(map(Optimum(capacity, half, warm=warm).serve, half))
    nodes = workload.requests * workload.per_prompt
    return {name: count / nodes for name, count in hits.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one workload, over all seeds.

    Attributes:
        alpha: of the Zipf law; 0 = all documents alike.
        budget_gb: 10^9 bytes of KV.
        capacity: nodes that fit.
        state: see `State`.
        order: see `Order`.
        policy: its name.
        hit_ratio: tokens reused / tokens of nodes, the mean over seeds.
        deviation: standard deviation over seeds; None for one seed, as below.
        lowest, highest: over seeds.
        ours_over_this: our mean / this mean; None where this is 0.
        ours_over_this_error: its standard error (seeds are paired).
        seeds: how many.
    """

    alpha: float
    budget_gb: float
    capacity: int
    state: State
    order: Order
    policy: str
    hit_ratio: float
    deviation: float | None
    lowest: float
    highest: float
    ours_over_this: float | None
    ours_over_this_error: float | None
    seeds: int


def measure(
    workload: Workload, alphas: Sequence[float], budgets_gb: Sequence[float], seeds: int
) -> Iterator[Row]:
    """Simulate every skew with every budget."""
    capacities = {budget: workload.capacity(budget) for budget in budgets_gb}
    for alpha in dict.fromkeys(alphas):
        traces = [workload.prompts(alpha, seed) for seed in range(seeds)]
        for budget, capacity in capacities.items():
            runs = [simulate(workload, trace, capacity) for trace in traces]
            for state, policy in itertools.product(State, POLICIES):
                ratios = [run[policy, state] for run in runs]
                ratio, error = _ratio([run["ours", state] for run in runs], ratios)
                yield Row(
                    alpha=alpha,
                    budget_gb=budget,
                    capacity=capacity,
                    state=state,
                    order=workload.order,
                    policy=policy,
                    hit_ratio=statistics.fmean(ratios),
                    deviation=statistics.stdev(ratios) if seeds > 1 else None,
                    lowest=min(ratios),
                    highest=max(ratios),
                    ours_over_this=ratio,
                    ours_over_this_error=error,
                    seeds=seeds,
                )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, float | None]:
    """Ratio of the means of paired samples, and its standard error (delta method)."""
    base = statistics.fmean(theirs)
    if not base:
        return None, None
    ratio = statistics.fmean(ours) / base
    if len(ours) < 2:
        return ratio, None
    residuals = [our - ratio * their for our, their in zip(ours, theirs, strict=True)]
    return ratio, statistics.stdev(residuals) / math.sqrt(len(ours)) / base
