"""Page bookkeeping: exact page numbers, reference counts, eviction order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazyrag_kernels.attention import AttentionLayer
from lazyrag_kernels.rope import Rotary

from lazyrag.engine.pool import PageAllocator, PagePool
from lazyrag.model.geometry import Geometry
from lazyrag.types import NodeKey


def key(number: int) -> NodeKey:
    return NodeKey(number.to_bytes(32, "big"))


@pytest.fixture
def pool() -> PagePool:
    layer = AttentionLayer(1.0, Rotary(torch.ones(2)))
    geometry = Geometry((layer,), 2, 1, 4, 100, b"")
    return PagePool(geometry, pages=8, page_size=4, dtype=torch.float32, device=torch.device("cpu"))


def test_pages_are_contiguous_while_possible():
    allocator = PageAllocator(10)
    first, second, third = (allocator.allocate(count) for count in (3, 2, 4))
    assert (first, second, third) == ((0, 1, 2), (3, 4), (5, 6, 7, 8))
    assert allocator.free == 1
    allocator.release(second)
    assert allocator.allocate(1) == (9,)  # the smallest extent that fits
    allocator.release(first)
    assert allocator.allocate(5) == (0, 1, 2, 3, 4)  # neighbours have joined
    assert allocator.allocate(1) is None


def test_scattered_pages_are_used_when_no_run_is_long_enough():
    allocator = PageAllocator(6)
    held = [allocator.allocate(1) for _ in range(6)]
    for pages in (held[0], held[2], held[3], held[5]):
        allocator.release(pages)
    assert allocator.allocate(4) == (0, 2, 3, 5)


@pytest.mark.parametrize("pages", [(2,), (0,), (99,), (-1,)])
def test_a_free_or_foreign_page_is_not_released(pages):
    allocator = PageAllocator(4)
    allocator.allocate(2)
    allocator.release((0,))
    with pytest.raises(ValueError, match="not in use"):
        allocator.release(pages)


@given(st.lists(st.integers(1, 6), max_size=40), st.randoms(use_true_random=False))
def test_no_page_is_lost_or_handed_out_twice(counts, random):
    allocator = PageAllocator(20)
    held: list[tuple[int, ...]] = []
    for count in counts:
        if held and random.random() < 0.4:
            allocator.release(held.pop(random.randrange(len(held))))
        pages = allocator.allocate(count)
        used = {page for one in held for page in one}
        if pages is None:
            assert count > 20 - len(used)
        else:
            assert len(set(pages)) == count and not used & set(pages)
            assert pages == tuple(sorted(pages))
            held.append(pages)
        assert allocator.free == 20 - sum(map(len, held))
    for pages in held:
        allocator.release(pages)
    assert allocator.allocate(20) == tuple(range(20))


def test_the_least_recently_used_idle_node_goes_first(pool: PagePool):
    for number in range(3):
        pool.admit(key(number), pool.allocate(8), 8)
        pool.touch([key(number)])
    for number in range(3):
        pool.leave(key(number))
    pool.acquire(key(0))
    pool.touch([key(0)])
    pool.leave(key(0))  # 1 is now the oldest
    pages = pool.allocate(12)  # 2 free pages, 1 must go
    assert pages == (2, 3, 6)
    assert [key(n) in pool for n in range(3)] == [True, False, True]


def test_a_node_in_use_is_never_evicted(pool: PagePool):
    pool.admit(key(1), pool.allocate(16), 16)
    pool.admit(key(2), pool.allocate(16), 16)
    pool.leave(key(2))
    assert pool.allocate(20) is None
    assert key(2) in pool, "an allocation that cannot succeed evicts nothing"
    assert pool.allocate(16) == (4, 5, 6, 7)
    assert key(1) in pool and key(2) not in pool


def test_an_idle_node_is_dropped_and_one_in_use_is_not(pool: PagePool):
    for number in (1, 2):
        pool.admit(key(number), pool.allocate(8), 8)
    pool.leave(key(1))
    for number in (1, 2, 3):
        pool.drop(key(number))
    assert [key(n) in pool for n in range(4)] == [False, False, True, False]
    assert pool.free_pages == 6
    pool.leave(key(2))
    pool.drop(key(2))
    assert pool.free_pages == 8


def test_users_are_counted(pool: PagePool):
    pool.admit(key(1), pool.allocate(4), 4)
    assert pool.acquire(key(1)).users == 2
    pool.leave(key(1))
    pool.leave(key(1))
    with pytest.raises(ValueError, match="not in use"):
        pool.leave(key(1))


def test_slots_follow_the_pages(pool: PagePool):
    assert pool.slots((5, 2), 0, 6).tolist() == [20, 21, 22, 23, 8, 9]
    assert pool.slots((5, 2), 3, 2).tolist() == [23, 8]


def test_nodes_used_once_do_not_displace_one_used_often(pool: PagePool):
    """Of least recently used nodes the hot one would go first."""
    hot = key(0)
    pages = pool.allocate(16)
    assert pages is not None
    pool.admit(hot, pages, 16)
    pool.touch([hot])
    pool.leave(hot)
    for _ in range(5):
        assert pool.acquire(hot) is not None
        pool.touch([hot])
        pool.leave(hot)
    for number in range(1, 10):
        pages = pool.allocate(8)
        assert pages is not None
        pool.admit(key(number), pages, 8)
        pool.touch([key(number)])
        pool.leave(key(number))
    assert hot in pool and key(9) in pool
    assert key(1) not in pool and key(5) not in pool
    assert pool.free_pages + pool.evictable_pages == 8
    everything = pool.allocate(32)
    assert everything is not None and hot not in pool


def test_idle_entries_keep_within_their_budget():
    layer = AttentionLayer(1.0, Rotary(torch.ones(2)))
    geometry = Geometry((layer,), 2, 1, 4, 100, b"")
    gone: list[int] = []
    pool = PagePool(
        geometry,
        pages=8,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        idle_pages=3,
        evicted=lambda key, pages: gone.append(pages),
    )
    for number in range(4):
        pool.admit(key(number), pool.allocate(8), 8)
        pool.touch([key(number)])
    assert pool.free_pages == 0, "what is in use has no such limit"
    for number in range(4):
        pool.leave(key(number))
        assert pool.evictable_pages <= 3
    assert pool.evictable_pages == 2 and pool.free_pages == 6
    assert gone == [2, 2, 2]


def test_what_never_became_ready_is_given_up_with_its_last_user(pool: PagePool):
    pool.admit(key(1), pool.allocate(8), 8, ready=False)
    assert pool.acquire(key(1)) is not None
    pool.leave(key(1))
    assert key(1) in pool
    pool.leave(key(1))
    assert key(1) not in pool and pool.free_pages == 8


def test_pins_are_counted(pool: PagePool):
    for _ in range(2):
        if pool.acquire(key(1)) is None:
            pool.admit(key(1), pool.allocate(8), 8)
        pool.pin(key(1))
    assert pool.pinned_pages == 2
    for left in (2, 0):
        pool.unpin(key(1))
        pool.leave(key(1))
        assert pool.pinned_pages == left
    assert not pool.is_pinned(key(1)) and pool.evictable_pages == 2
    with pytest.raises(ValueError, match="not pinned"):
        pool.unpin(key(1))
