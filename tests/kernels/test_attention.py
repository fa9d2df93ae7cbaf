"""The fast CPU attention against the reference, over a pool poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lazyrag_kernels.attention import (
    AttentionLayer,
    Batch,
    CpuStep,
    LiveSpan,
    NodeSpan,
    RequestRows,
    attend_behind_prefix,
    reference_attention,
)
from lazyrag_kernels.attention import cpu as cpu_module
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import Rotary, cos_sin, rotate
from torch import Tensor

from tests.support.close import assert_close, assert_far

PAGE = 16
TOLERANCE = 2e-6

# name, q heads, kv heads, head dim, requests of (node lengths, live before each node..., rows)
CASES = {
    "no-node": (4, 4, 64, [([], [5])]),
    "one-node": (4, 2, 64, [([17], [2, 3])]),
    "ragged-lengths": (6, 2, 64, [([1, 15, 16, 17, 63, 300], [1, 1, 2, 1, 3, 1, 20])]),
    "mqa": (8, 1, 80, [([33, 16], [3, 0, 9])]),
    "7-to-1": (7, 1, 96, [([31], [1, 40])]),
    "empty-node": (4, 2, 64, [([0, 8], [1, 1, 4])]),
    "two-requests": (4, 2, 128, [([20, 5], [2, 1, 6]), ([], [11]), ([64], [1, 1])]),
    "one-live-row": (9, 3, 64, [([100, 100], [0, 0, 1])]),
}


class World:
    """A poisoned pool with the nodes and live text of some requests, pages scattered at random."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, requests, *, contiguous=False):
        self.generator = torch.Generator().manual_seed(7)
        self.kv_heads, self.dim = kv_heads, dim
        self.rotary = Rotary(1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim))
        pages = 200
        self.free = list(range(pages))
        if not contiguous:
            order = torch.randperm(pages, generator=self.generator)
            self.free = [self.free[i] for i in order.tolist()]
        shape = (pages * PAGE, kv_heads, dim)
        self.k_pool = torch.full(shape, float("nan"))
        self.v_pool = torch.full(shape, float("nan"))
        self.batch = Batch(tuple(self._request(*request) for request in requests), PAGE)
        self.q = self._randn(self.batch.rows, q_heads, dim)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _write(self, positions: Tensor) -> tuple[int, ...]:
        length = positions.numel()
        pages = tuple(self.free.pop() for _ in range(-(-length // PAGE)))
        slots = torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])[:length]
        cos, sin = cos_sin(self.rotary, positions)
        write_kv(
            self.k_pool,
            self.v_pool,
            self._randn(length, self.kv_heads, self.dim),
            self._randn(length, self.kv_heads, self.dim),
            slots.long(),
            cos,
            sin,
        )
        return pages

    def _request(self, node_lengths, live_lengths) -> RequestRows:
        nodes, positions, offset, rows = [], [], 0, 0
        for live, node in zip(live_lengths, [*node_lengths, None], strict=True):
            positions.append(torch.arange(offset, offset + live))
            offset, rows = offset + live, rows + live
            if node is not None:
                nodes.append(NodeSpan(self._write(torch.arange(node)), node, offset, rows))
                offset += node
        where = torch.cat(positions)
        return RequestRows(LiveSpan(self._write(where), where, 0), tuple(nodes))

    def layer(self, window: int | None = None) -> AttentionLayer:
        return AttentionLayer(self.dim**-0.5, self.rotary, window)

    def both(self, batch: Batch, window: int | None = None) -> tuple[Tensor, Tensor]:
        layer = self.layer(window)
        reference = reference_attention(self.q, self.k_pool, self.v_pool, batch, layer)
        step = CpuStep(batch, *self.q.shape[1:])
        return reference, step.attend(self.q, self.k_pool, self.v_pool, layer)


@pytest.mark.parametrize("tile_rows", [256, 3], ids=["one-tile", "tiles-of-3"])
@pytest.mark.parametrize("window", [None, 8, 40], ids=["full", "window-8", "window-40"])
@pytest.mark.parametrize("case", CASES)
def test_cpu_equals_reference(case, window, tile_rows, monkeypatch):
    monkeypatch.setattr(cpu_module, "MAX_TILE_ROWS", tile_rows)
    world = World(*CASES[case])
    assert_close(case, *world.both(world.batch, window), TOLERANCE)


def scaled(batch: Batch, lse_scale: float, temperature: float) -> Batch:
    """The same batch with a group scale and temperatures; every other one is squared."""
    return Batch(
        tuple(
            replace(
                request,
                nodes=tuple(
                    replace(node, temperature=temperature ** (1 + number % 2))
                    for number, node in enumerate(request.nodes)
                ),
                lse_scale=lse_scale,
            )
            for request in batch.requests
        ),
        batch.page_size,
    )


@pytest.mark.parametrize("tile_rows", [256, 3], ids=["one-tile", "tiles-of-3"])
@pytest.mark.parametrize("window", [None, 8], ids=["full", "window-8"])
@pytest.mark.parametrize(("lse_scale", "temperature"), [(0.8, 1.0), (1.0, 0.7), (1.2, 0.9)])
@pytest.mark.parametrize("case", CASES)
def test_temperature_and_group_scale(case, lse_scale, temperature, window, tile_rows, monkeypatch):
    """As the reference has them; the twin without them differs wherever a row sees a node."""
    monkeypatch.setattr(cpu_module, "MAX_TILE_ROWS", tile_rows)
    world = World(*CASES[case])
    batch = scaled(world.batch, lse_scale, temperature)
    reference, actual = world.both(batch, window)
    assert_close(case, reference, actual, TOLERANCE)
    if case != "no-node":
        _, plain = world.both(world.batch, window)
        assert_far(case, reference, plain, TOLERANCE)


@pytest.mark.parametrize("case", ["one-node", "ragged-lengths", "7-to-1"])
def test_a_shifted_node_is_seen(case):
    """Twin: with one node one position off, the fast path must differ from the right reference."""
    world = World(*CASES[case])
    request = world.batch.requests[0]
    nodes = (*request.nodes[:-1], replace(request.nodes[-1], offset=request.nodes[-1].offset + 1))
    shifted = Batch((replace(request, nodes=nodes),), PAGE)
    reference, _ = world.both(world.batch)
    _, wrong = world.both(shifted)
    assert_far(case, reference, wrong, TOLERANCE)


def test_contiguous_pages_become_one_range():
    """A node whose pages are neighbours is one product, not one per page."""
    world = World(*CASES["ragged-lengths"], contiguous=True)
    request = world.batch.requests[0]
    descending = request.nodes[-1].pages
    assert len(descending) > 10
    ascending = tuple(sorted(descending))
    assert cpu_module.slot_ranges(ascending, 300, PAGE) == [
        (ascending[0] * PAGE, ascending[0] * PAGE + 300)
    ]


def test_a_node_is_read_in_place():
    """No tensor as large as a node is made while a decode step attends to it."""
    length = 4_000
    layer = AttentionLayer(0.125, Rotary(torch.rand(32)))
    live = LiveSpan((length // PAGE,), torch.tensor([length]), 0)
    batch = Batch((RequestRows(live, (NodeSpan(tuple(range(length // PAGE)), length, 0),)),), PAGE)
    pool = torch.randn(length + PAGE, 2, 64)
    step = CpuStep(batch, 4, 64)
    q = torch.randn(1, 4, 64)
    step.attend(q, pool, pool, layer)
    with torch.profiler.profile(profile_memory=True) as profile:
        step.attend(q, pool, pool, layer)
    allocated = [event.self_cpu_memory_usage for event in profile.key_averages()]
    largest = max(allocated)
    assert 0 < largest < pool.numel() * 4 / 4, f"{largest} bytes were allocated at once"


def test_slot_ranges_refuse_too_few_pages():
    with pytest.raises(ValueError, match="17 tokens do not fit 1 pages of 16"):
        cpu_module.slot_ranges((3,), 17, 16)


@pytest.mark.parametrize("position", [0, 257, 15_962, 131_071])
def test_angles_are_exact_at_large_positions(position):
    """Angles in fp32 are wrong by up to position * 6e-8 rad (bug log 8)."""
    rotary = Rotary(1.0 / 500_000 ** (torch.arange(0, 128, 2).float() / 128))
    cos, sin = cos_sin(rotary, torch.tensor(position))
    exact = position * rotary.inv_freq.double()
    assert (cos.double() - exact.cos()).abs().max() < 6e-8
    assert (sin.double() - exact.sin()).abs().max() < 6e-8


def test_rotation_is_relative_and_rounds_once():
    rotary = Rotary(1.0 / 10_000 ** (torch.arange(0, 64, 2).float() / 64))
    q, k = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)

    def at(x: Tensor, position: int) -> Tensor:
        angles = position * rotary.inv_freq.double()
        first, second = x[:32], x[32:]
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            )
        )

    assert torch.allclose(at(q, 41) @ at(k, 30), at(q, 11) @ k)
    low = q.bfloat16()
    ours = rotate(low, *cos_sin(rotary, torch.tensor(41)))
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - at(low.double(), 41)).abs().max() <= 2**-8 * q.abs().max() * 1.5


def test_partial_rotary_leaves_the_rest():
    rotary = Rotary(torch.rand(8))
    x = torch.randn(3, 64)
    out = rotate(x, *cos_sin(rotary, torch.arange(3)))
    assert torch.equal(out[:, 16:], x[:, 16:])
    assert not torch.equal(out[1:, :16], x[1:, :16])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("before", [0, 5])
def test_encoding_equals_the_reference(before, window):
    """Dense attention behind a prefix equals paged causal attention over prefix + node."""
    length, q_heads, kv_heads, dim = 12, 4, 2, 64
    rotary = Rotary(1.0 / 10_000 ** (torch.arange(0, dim, 2).float() / dim))
    layer = AttentionLayer(dim**-0.5, rotary, window)
    total = before + length
    q = torch.randn(total, q_heads, dim)
    k, v = torch.randn(total, kv_heads, dim), torch.randn(total, kv_heads, dim)
    prefix = (k[:before].transpose(0, 1), v[:before].transpose(0, 1)) if before else None
    padded = [
        torch.cat((x[before:], torch.randn(3, *x.shape[1:]))).transpose(0, 1)[None]
        for x in (q, k, v)
    ]
    ours = attend_behind_prefix(*padded, prefix, layer)[0, :, :length].transpose(0, 1)
    positions = torch.arange(total)
    cos, sin = cos_sin(rotary, positions)
    pool = rotate(k, cos[:, None], sin[:, None])
    pages = tuple(range(-(-total // PAGE)))
    batch = Batch((RequestRows(LiveSpan(pages, positions, 0)),), PAGE)
    reference = reference_attention(q, pool, v, batch, layer)[before:]
    assert_close("encode", reference, ours, TOLERANCE)


@pytest.mark.parametrize("nodes", [1, 20])
def test_bfloat16_is_rounded_once_however_many_ranges(nodes: int):
    """Output accumulated in bfloat16 would drift with the number of nodes and scattered pages."""
    world = World(4, 2, 64, [([80 // nodes * 8] * nodes, [1] * nodes + [4])])
    q, k, v = (x.nan_to_num().bfloat16() for x in (world.q, world.k_pool, world.v_pool))
    layer = world.layer()
    reference = reference_attention(q.double(), k.double(), v.double(), world.batch, layer)
    ours = CpuStep(world.batch, *q.shape[1:]).attend(q, k, v, layer)
    assert_close(f"bfloat16, {nodes} nodes", reference, ours.double(), 6e-3)


def test_many_short_nodes_do_not_blow_up_the_rotated_queries(monkeypatch):
    """A tile's queries are rotated once per segment: the bound counts them."""
    monkeypatch.setattr(cpu_module, "TILE_BYTES", 2**18)
    world = World(4, 2, 64, [([2] * 60, [0] * 60 + [50])])
    step = CpuStep(world.batch, 4, 64)
    rows = max(tile.positions.numel() for tile in step._tiles)
    assert 1 <= rows * 61 * 4 * 64 * 4 <= 2**18
    assert_close("many nodes", *world.both(world.batch), TOLERANCE)
