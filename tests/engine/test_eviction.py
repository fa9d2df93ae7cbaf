"""Eviction with admission: budget, pins, what goes and what may come in."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag.engine import eviction, popularity
from lazyrag.engine.eviction import Admission, EvictionPolicy
from lazyrag.engine.popularity import Popularity
from lazyrag.types import NodeKey


def use(policy: EvictionPolicy, key, size: int = 1, cost: float = 1.0) -> bool:
    """A request uses a node and leaves it; whether it was there."""
    here = key in policy
    policy.touch(key)
    if not here:
        policy.add(key, size, cost)
    return here


def drawn(rng: random.Random, count: int, keys: int = 100, alpha: float = 1.1) -> list[int]:
    """Uses of Zipf-distributed keys, 0 the most popular."""
    return rng.choices(range(keys), [(key + 1) ** -alpha for key in range(keys)], k=count)


BUDGET, HISTORY = 100, 8
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.integers(0, 19)),
        st.tuples(
            st.just("use"), st.integers(0, 5), st.integers(1, 60), st.sampled_from([0.1, 1, 7])
        ),
        st.tuples(
            st.just("add"), st.integers(0, 19), st.integers(1, 130), st.sampled_from([0, 0.1, 1, 7])
        ),
        st.tuples(st.just("evict"), st.integers(0, 150)),
        st.tuples(st.sampled_from(["remove", "forget", "pin", "unpin"]), st.integers(0, 19)),
    ),
    max_size=120,
)


class Checked:
    """A policy beside plain books of what it must hold."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.policy: EvictionPolicy[NodeKey] = EvictionPolicy(budget, history=HISTORY)
        self.held: dict[NodeKey, tuple[int, float]] = {}
        self.pins: dict[NodeKey, int] = {}

    def value(self, key: NodeKey, cost: float) -> float:
        count = self.policy._popularity.log_count(key)
        return 2 ** (count - self.policy._popularity._now.long) * cost

    def go(self, victims: tuple[NodeKey, ...]) -> None:
        """The victims are the least valuable per byte of those that may go, in this order."""
        density = {
            key: self.value(key, cost) / size
            for key, (size, cost) in self.held.items()
            if not self.pins.get(key)
        }
        for victim in victims:
            assert density[victim] <= min(density.values()) * (1 + 1e-9)
            del density[victim], self.held[victim]

    def step(self, name: str, *arguments) -> None:
        key = NodeKey(arguments[0].to_bytes(32, "big")) if name != "evict" else None
        if name == "touch":
            self.policy.touch(key)
        elif name == "use":
            self.policy.touch(key)
            self.add(key, *arguments[1:])
        elif name in ("remove", "forget"):
            getattr(self.policy, name)(key)
            self.held.pop(key, None)
        elif name == "pin":
            self.policy.pin(key)
            self.pins[key] = self.pins.get(key, 0) + 1
        elif name == "unpin":
            if self.pins.get(key):
                self.policy.unpin(key)
                self.pins[key] -= 1
            else:
                with pytest.raises(ValueError, match="not pinned"):
                    self.policy.unpin(key)
        elif name == "evict":
            free = {k: size for k, (size, _) in self.held.items() if not self.pins.get(k)}
            victims = self.policy.evict(arguments[0])
            freed = sum(free[victim] for victim in victims)
            assert freed >= arguments[0] or set(victims) == set(free)
            assert not victims or freed - free[victims[-1]] < arguments[0], "no more than needed"
            self.go(victims)
        else:
            self.add(key, *arguments[1:])
        self.check()

    def add(self, key: NodeKey, size: int, cost: float) -> None:
        self.held.pop(key, None)
        worth = self.value(key, cost)
        admission = self.policy.add(key, size, cost)
        if not admission.admitted:
            assert admission.evicted == ()
            assert size > self.policy.budget_bytes - sum(s for s, _ in self.held.values())
            return
        price = sum(self.value(victim, self.held[victim][1]) for victim in admission.evicted)
        if admission.evicted and not self.pins.get(key):
            assert worth > price
        self.go(admission.evicted)
        self.held[key] = (size, cost)

    def check(self) -> None:
        policy = self.policy
        assert {key for key in self.held if key in policy} == set(self.held)
        assert len(policy) == len(self.held)
        assert policy.used_bytes == sum(size for size, _ in self.held.values())
        assert policy.used_bytes <= policy.budget_bytes
        assert len(policy._popularity) <= len(self.held) + HISTORY
        assert len(policy._heap) <= 2 * len(self.held) + 17


def _plain(actions):
    """Steps with every use written as its two calls."""
    for name, *arguments in actions:
        if name == "use":
            yield "touch", arguments[0]
        yield ("add" if name == "use" else name), *arguments


@given(steps)
def test_books_hold_whatever_happens(actions):
    checked = Checked()
    for action in actions:
        checked.step(*action)


@given(steps)
def test_equal_calls_give_equal_answers_whatever_the_hashes(actions):
    """Keys of two kinds, which hash differently, see the same decisions."""
    number = EvictionPolicy[int](BUDGET, history=HISTORY)
    text = EvictionPolicy[str](BUDGET, history=HISTORY)
    for name, *arguments in _plain(actions):
        if name == "unpin" and not number._pins[arguments[0]]:
            continue
        first = getattr(number, name)(*arguments)
        if name == "evict":
            assert text.evict(*arguments) == tuple(map(str, first))
            continue
        second = getattr(text, name)(str(arguments[0]), *arguments[1:])
        if name == "add":
            assert second == Admission(first.admitted, tuple(map(str, first.evicted)))


def test_memory_is_bounded_by_the_tier_and_the_history():
    policy = EvictionPolicy[int](50, history=30)
    for number in range(5_000):
        use(policy, number)
        use(policy, number % 7)
    assert len(policy) == 50
    assert len(policy._popularity) <= 80
    assert len(policy._popularity._loose) <= 30
    assert len(policy._heap) <= 2 * 50 + 17


def test_uses_of_a_node_in_the_tier_outlive_the_history():
    policy = EvictionPolicy[int](1, history=4)
    for _ in range(5):
        use(policy, 1)
    for key in range(10, 30):
        policy.touch(key)
    policy.touch(50)
    policy.touch(50)
    assert not policy.add(50, 1, 1.0).admitted, "used twice, against five times"


def test_hot_nodes_survive_a_scan():
    policy = EvictionPolicy[int](10)
    for _ in range(3):
        for hot in range(8):
            use(policy, hot)
    for number in range(100, 1_100):
        use(policy, number)
    assert all(hot in policy for hot in range(8))
    assert len(policy) == 10, "the scan has the rest"


def test_a_loop_over_more_than_fits_is_hit_in_part():
    policy = EvictionPolicy[int](10)
    hits = [sum(use(policy, number) for number in range(20)) for _ in range(10)]
    assert hits[-3:] == [10, 10, 10]


def test_the_dearer_of_two_nodes_stays():
    for dear, cheap in ((1, 2), (2, 1)):
        policy = EvictionPolicy[int](2)
        use(policy, dear, cost=2.0)
        use(policy, cheap, cost=1.0)
        policy.touch(3)
        policy.touch(3)
        assert policy.add(3, 1, 1.0) == Admission(True, (cheap,))


def test_a_newcomer_must_outweigh_all_that_go_for_it():
    policy = EvictionPolicy[int](4)
    for key in range(4):
        use(policy, key)
    for _ in range(3):
        policy.touch(9)
    assert not policy.add(9, 4, 1.0).admitted, "worth 3, in the place of 4"
    assert len(policy) == 4
    assert policy.add(9, 4, 2.0).evicted == (0, 1, 2, 3)


@pytest.mark.parametrize("sizes", [{1: 7, 2: 3}, {2: 3, 1: 7}], ids=["first", "last"])
def test_the_larger_of_two_equal_nodes_goes_and_no_more_than_needed(sizes):
    policy = EvictionPolicy[int](10)
    for key, size in sizes.items():
        use(policy, key, size=size)
    policy.touch(3)
    policy.touch(3)
    assert policy.add(3, 2, 1.0) == Admission(True, (1,))


def test_of_nodes_used_alike_the_one_used_longest_ago_goes():
    policy = EvictionPolicy[int](3)
    for key in (1, 2, 3, 1, 2, 3):
        use(policy, key)
    assert policy.evict(2) == (1, 2)


def test_nodes_never_used_get_free_room_only():
    policy = EvictionPolicy[int](2)
    assert policy.add(1, 1, 1.0).admitted
    assert policy.add(2, 1, 1.0).admitted
    assert not policy.add(3, 1, 1.0).admitted
    assert use(policy, 2)
    policy.touch(3)
    assert policy.add(3, 1, 1.0) == Admission(True, (1,))


def test_pinned_nodes_stay_and_need_room_only():
    policy = EvictionPolicy[int](3)
    for key in (1, 2, 3):
        use(policy, key)
    policy.pin(1)
    policy.pin(1)
    policy.pin(7)
    assert policy.add(7, 2, 0.0) == Admission(True, (2, 3)), "never used, but pinned"
    assert policy.evict(3) == ()
    policy.pin(8)
    assert not policy.add(8, 1, 1.0).admitted, "no room among pinned nodes"
    policy.unpin(1)
    assert policy.evict(3) == ()
    policy.unpin(1)
    assert policy.evict(3) == (1,)


def test_a_removed_node_comes_back_with_its_uses_a_forgotten_one_without():
    for leave, admitted in (("remove", True), ("forget", False)):
        policy = EvictionPolicy[int](2)
        for key in (1, 1, 1, 2, 3, 2, 3):
            policy.touch(key)
        for key in (1, 2):
            policy.add(key, 1, 1.0)
        getattr(policy, leave)(1)
        policy.add(3, 1, 1.0)
        assert policy.add(1, 1, 1.0).admitted is admitted


def test_what_cannot_fit_is_refused_and_costs_nothing():
    policy = EvictionPolicy[int](5)
    use(policy, 1, size=5)
    for _ in range(9):
        policy.touch(2)
    assert policy.add(2, 6, 100.0) == Admission(False)
    assert 1 in policy
    assert not EvictionPolicy[int](0).add(1, 1, 1.0).admitted


@pytest.mark.parametrize(
    ("size", "cost"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, math.inf), (1, math.nan)]
)
def test_senseless_sizes_and_costs_are_refused(size, cost):
    policy = EvictionPolicy[int](5)
    use(policy, 1)
    with pytest.raises(ValueError, match=r"size_bytes|cost_s"):
        policy.add(1, size, cost)
    assert 1 in policy


@pytest.mark.parametrize("arguments", [(-1, 1), (1, 0)])
def test_senseless_settings_are_refused(arguments):
    with pytest.raises(ValueError, match="negative"):
        EvictionPolicy(arguments[0], history=arguments[1])


def _hits_after_a_change(seed: int) -> tuple[int, int]:
    """Hits of the first and the second thousand uses after popularity turned round."""
    rng = random.Random(seed)
    policy = EvictionPolicy[int](10)
    for key in drawn(rng, 2_000):
        use(policy, key)
    turned = [99 - key for key in drawn(rng, 2_000)]
    hits = [use(policy, key) for key in turned]
    return sum(hits[:1_000]), sum(hits[1_000:])


def test_a_change_of_popularity_is_followed(monkeypatch):
    """Within a thousand uses of a hundred nodes; it takes longer without the test for a change."""
    best = sum((key + 1) ** -1.1 for key in range(10)) / sum(
        (key + 1) ** -1.1 for key in range(100)
    )
    first, second = map(sum, zip(*map(_hits_after_a_change, range(8)), strict=True))
    assert first > 0.80 * 8_000 * best
    assert second > 0.95 * 8_000 * best
    monkeypatch.setattr(popularity, "_CHANGED", math.inf)
    slow, _ = map(sum, zip(*map(_hits_after_a_change, range(8)), strict=True))
    assert slow < 0.6 * 8_000 * best


@pytest.mark.parametrize("alpha", [0, 0.8, 1.5, 2.1])
def test_popularity_that_stands_still_is_not_taken_for_changed(alpha):
    for seed in range(5):
        counts = Popularity[int](1_000)
        assert not any(counts.use(key) for key in drawn(random.Random(seed), 5_000, alpha=alpha))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=80))
def test_counts_are_the_sums_of_faded_uses(uses):
    """Against the sum written out; the half-lives are read from the clock that they advance."""
    counts, times = Popularity[int](100), []
    changed = False
    for key in uses:
        changed |= counts.use(key)
        times.append(counts._now.long)
    if changed:
        return
    for key in set(uses):
        plain = sum(
            2 ** (t - times[-1]) for t, used in zip(times, uses, strict=True) if used == key
        )
        assert 2 ** (counts.log_count(key) - times[-1]) == pytest.approx(plain)


def test_absent_keys_long_unused_are_forgotten():
    counts = Popularity[int](1_000)
    for key in range(500):
        counts.use(key)
    for _ in range(20_000):
        counts.use(0)
    assert len(counts) < 250
    assert counts.log_count(499) == -math.inf
    assert counts.log_count(0) > counts.log_count(400)


def test_a_steady_mix_is_served_nearly_as_well_as_by_perfect_knowledge():
    rng = random.Random(5)
    policy = EvictionPolicy[int](20)
    uses = drawn(rng, 8_000)
    hits = [use(policy, key) for key in uses]
    known = sum(key < 20 for key in uses[4_000:])
    assert sum(hits[4_000:]) > 0.97 * known


def test_the_exchange_margin_is_what_keeps_a_loop(monkeypatch):
    monkeypatch.setattr(eviction, "_EXCHANGE", 0.0)
    policy = EvictionPolicy[int](10)
    assert not any(use(policy, number) for _ in range(10) for number in range(20))
