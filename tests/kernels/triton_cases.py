"""The Triton kernels against the reference; `test_triton` runs this file in its own process.

On the CPU every launch goes through Triton's interpreter. On a GPU the same cases and the sweep
below run natively:

    LAZYRAG_TEST_DEVICE=cuda python -m pytest tests/kernels/triton_cases.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from lazyrag_kernels.attention import (
    AttentionLayer,
    Batch,
    LiveSpan,
    NodeSpan,
    RequestRows,
    reference_attention,
)
from lazyrag_kernels.attention.plan import Heads, Plan, PlanError, Planner, TileClass
from lazyrag_kernels.attention.step import TritonStep
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.kv_write.triton import write_layers, write_step
from lazyrag_kernels.linear import triton as narrow
from lazyrag_kernels.rope import AngleTable, Rotary, cos_sin, rotate
from torch import Tensor

from tests.support.close import assert_close, assert_far, rms_ratio

DEVICE = torch.device(os.environ.get("LAZYRAG_TEST_DEVICE", "cpu"))
NATIVE = DEVICE.type == "cuda"
on_gpu = pytest.mark.skipif(not NATIVE, reason="needs a GPU")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LIMIT = 4096


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory from `torch.empty` is NaN: what nothing wrote shows in every result."""
    empty = torch.empty

    def poison(*size, **settings):
        made = empty(*size, **settings)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-(2**31))

    monkeypatch.setattr(torch, "empty", poison)


@dataclass(frozen=True)
class Shape:
    """A model and a pool."""

    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    rotary_dim: int | None = None
    interleaved: bool = False
    page_major: bool = False
    fp8: bool = False


class World:
    """A poisoned pool with the nodes and live text of some requests, pages scattered at random.

    Args:
        shape: of model and pool.
        requests: (node lengths, live tokens before each node and at the end, rows or None = all
            live tokens are rows); a node given as ("=", i) is node i of the first request again.
        limit: of the angle table.
    """

    def __init__(self, shape: Shape, requests, *, limit=LIMIT):
        self.shape, self.limit = shape, limit
        self.generator = torch.Generator(DEVICE).manual_seed(11)
        turning = shape.dim if shape.rotary_dim is None else shape.rotary_dim
        inv_freq = 1.0 / 10_000 ** (torch.arange(0, turning, 2).float() / max(1, turning))
        self.rotary = Rotary(inv_freq, shape.interleaved)
        self.angles = AngleTable.build(self.rotary, limit, DEVICE)
        need = sum(
            -(-tokens // shape.page) + 1
            for nodes, live, *_ in requests
            for tokens in (*(n for n in nodes if not isinstance(n, tuple)), sum(live))
        )
        pages = need + 3
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist()
        pool = (pages, shape.kv_heads, shape.page, shape.dim)
        if not shape.page_major:
            pool = (pages * shape.page, shape.kv_heads, shape.dim)
        store = torch.float8_e4m3fn if shape.fp8 else shape.dtype
        self.k_pool = torch.full(pool, float("nan"), device=DEVICE).to(store)
        self.v_pool = torch.full(pool, float("nan"), device=DEVICE).to(store)
        self.scales = (None, None)
        if shape.fp8:
            units = torch.rand(2, pages, shape.kv_heads, device=DEVICE, generator=self.generator)
            self.scales = tuple((units * 0.02 + 0.005).unbind())
        plain = (pages * shape.page, shape.kv_heads, shape.dim)
        self.k_exact = torch.zeros(plain, dtype=torch.float64, device=DEVICE)
        self.v_exact = torch.zeros_like(self.k_exact)
        self.known: list[NodeSpan] = []
        self.batch = Batch(tuple(self._request(*request) for request in requests), shape.page)
        rows = self.batch.rows
        self.q = self._randn(rows + 1, shape.q_heads, shape.dim)  # one row of padding
        self.q[rows:] = float("nan")

    def _randn(self, *size: int) -> Tensor:
        made = torch.randn(size, generator=self.generator, device=DEVICE)
        return made.to(self.shape.dtype)

    def _write(self, positions: Tensor) -> tuple[int, ...]:
        """Raw K and V into fresh pages through the kernel, exactly into the reference's pool."""
        length, page = positions.numel(), self.shape.page
        pages = tuple(self.free.pop() for _ in range(-(-length // page)))
        slots = torch.tensor([p * page + i for p in pages for i in range(page)])[:length]
        slots, positions = slots.long().to(DEVICE), positions.to(DEVICE)
        k, v = (self._randn(length, self.shape.kv_heads, self.shape.dim) for _ in range(2))
        write_step(
            self.k_pool, self.v_pool, k, v, slots, positions, self.rotary, self.angles, page,
            k_scale=self.scales[0], v_scale=self.scales[1],
        )  # fmt: skip
        if self.shape.fp8:  # judged on what the pages hold
            for exact, pool, unit in zip(
                (self.k_exact, self.v_exact), (self.k_pool, self.v_pool), self.scales, strict=True
            ):
                exact[slots] = pool[slots].double() * unit[slots // page][..., None]
        else:
            cos, sin = _exact_angles(self.rotary, positions)
            args = (cos[:, None], sin[:, None], self.rotary.interleaved)
            self.k_exact[slots] = rotate(k.double(), *args)
            self.v_exact[slots] = v.double()
        return pages

    def _request(self, node_lengths, live_lengths, rows=None, **settings) -> RequestRows:
        nodes, positions, offset, seen = [], [], 0, 0
        for live, node in zip(live_lengths, [*node_lengths, None], strict=True):
            positions.append(torch.arange(offset, offset + live))
            offset, seen = offset + live, seen + live
            if node is None:
                continue
            if isinstance(node, tuple):
                known = self.known[node[1]]
                nodes.append(replace(known, offset=offset, first_row=seen))
            else:
                nodes.append(NodeSpan(self._write(torch.arange(node)), node, offset, seen))
                self.known.append(nodes[-1])
            offset += nodes[-1].length
        where = torch.cat(positions)
        first = 0 if rows is None else where.numel() - rows
        nodes = [replace(node, first_row=max(0, node.first_row - first)) for node in nodes]
        return RequestRows(LiveSpan(self._write(where), where, first), tuple(nodes), **settings)

    def layer(self, **settings) -> AttentionLayer:
        return AttentionLayer(self.shape.dim**-0.5, self.rotary, **settings)

    def reference(self, batch: Batch, layer: AttentionLayer) -> Tensor:
        q = self.q[: batch.rows].double()
        return reference_attention(q, self.k_exact, self.v_exact, batch, layer)

    def plan(self, batch: Batch, layer: AttentionLayer, classes, **settings) -> Plan:
        heads = Heads(self.shape.q_heads, self.shape.kv_heads, self.shape.dim)
        planner = Planner(heads, self.shape.page, classes, 4, limit=self.limit, **settings)
        rows = self.q.shape[0]
        alibi = layer.alibi is not None
        return planner.plan(batch, layer.window, padded_rows=rows, positions=alibi)

    def kernel(self, batch: Batch, layer: AttentionLayer, classes=None, **settings) -> Tensor:
        """Rows of the batch; padding rows must be zeros."""
        step = self.step(classes)
        self.last_plan = self.plan(batch, layer, step.classes, **settings)
        step.load(self.last_plan)
        out = self.run(step, batch, layer)
        assert (out[batch.rows :] == 0).all(), "padding rows are not zeros"
        return out[: batch.rows]

    def step(self, classes=None) -> TritonStep:
        heads = Heads(self.shape.q_heads, self.shape.kv_heads, self.shape.dim)
        return TritonStep(
            heads, self.shape.page, self.q.shape[0], self.shape.dtype, DEVICE, limit=self.limit,
            classes=classes or (None if NATIVE else SMALL), workspace_bytes=2**24,
            temperature=True, lse_scale=True,
        )  # fmt: skip

    def run(self, step: TritonStep, batch: Batch, layer: AttentionLayer) -> Tensor:
        return step.attend(
            self.turned(batch), self.k_pool, self.v_pool, layer,
            k_scale=self.scales[0], v_scale=self.scales[1],
        )  # fmt: skip

    def turned(self, batch: Batch) -> Tensor:
        """The queries as the write launch leaves them."""
        rows = self.q.shape[0]
        positions = torch.zeros(rows, dtype=torch.int64)
        positions[: batch.rows] = torch.cat([request.positions for request in batch.requests])
        slots = torch.full((rows,), -1)  # this test wrote its live keys before
        nothing = self.q[:, : self.shape.kv_heads]
        spare = slots.clone()
        spare[: batch.rows] = self.k_exact.shape[0] - 1 - torch.arange(batch.rows)
        pool = torch.empty((self.k_exact.shape[0], *nothing.shape[1:]), device=DEVICE)
        pool = pool.to(self.shape.dtype)
        made = write_step(
            pool, pool.clone(), nothing, nothing, spare.to(DEVICE), positions.to(DEVICE),
            self.rotary, self.angles, self.shape.page, q=self.q,
        )  # fmt: skip
        assert made is not None
        return made


def _exact_angles(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.double()[:, None] * rotary.inv_freq.double().to(positions.device)
    return angles.cos(), angles.sin()


SMALL = (TileClass(16, 16, 3), TileClass(64, 32, 2), TileClass(128, 32, 2, whole=2))
MIXED = [([17, 5], [2, 1, 6]), ([("=", 0), 40], [0, 0, 9], 1), ([("=", 0), ("=", 1)], [1, 1, 3], 1)]
LONG = [([1, 15, 16, 17, 63], [1, 1, 2, 1, 3, 20])]

# name -> shape, requests, layer; pairwise over dims, groups, dtypes, layouts and features
CASES = {
    "dim-64": (Shape(), LONG, {}),
    "dim-80-7-to-1": (Shape(7, 1, 80), MIXED, {}),
    "dim-96-mqa": (Shape(5, 1, 96), MIXED, {}),
    "dim-112": (Shape(2, 2, 112), MIXED, {}),
    "dim-128-page-64": (Shape(4, 1, 128, page=64), MIXED, {}),
    "dim-256": (Shape(2, 1, 256), MIXED, {}),
    "page-major": (Shape(6, 2, page=32, page_major=True), MIXED, {}),
    "page-major-16": (Shape(4, 4, page_major=True), MIXED, {}),
    "float16": (Shape(dtype=torch.float16), MIXED, {}),
    "bfloat16": (Shape(dtype=torch.bfloat16, page=64), MIXED, {}),
    "bfloat16-dim-128": (Shape(8, 2, 128, dtype=torch.bfloat16), LONG, {}),
    "interleaved": (Shape(interleaved=True), MIXED, {}),
    "interleaved-dim-80": (Shape(4, 2, 80, interleaved=True), MIXED, {}),
    "partial-rotary": (Shape(rotary_dim=16), MIXED, {}),
    "partial-rotary-dim-96": (Shape(3, 1, 96, rotary_dim=48), MIXED, {}),
    "partial-interleaved": (Shape(rotary_dim=32, interleaved=True), MIXED, {}),
    "no-rotary": (Shape(rotary_dim=0), MIXED, {}),
    "window-8": (Shape(), LONG, {"window": 8}),
    "window-40": (Shape(page=32), LONG, {"window": 40}),
    "window-40-mixed": (Shape(7, 1, 80), MIXED, {"window": 40}),
    "softcap": (Shape(), MIXED, {"softcap": 3.0}),
    "softcap-window": (Shape(page=64), MIXED, {"softcap": 2.0, "window": 20}),
    "sinks": (Shape(), MIXED, {"sinks": "random"}),
    "sinks-window": (Shape(6, 2), LONG, {"sinks": "random", "window": 40}),
    "alibi": (Shape(rotary_dim=0), MIXED, {"alibi": "random"}),
    "alibi-softcap-rotary": (Shape(4, 1, 64, page=64), MIXED, {"alibi": "random", "softcap": 4.0}),
    "no-node": (Shape(), [([], [5])], {}),
    "empty-node": (Shape(), [([0, 8], [1, 1, 4])], {}),
    "one-row": (Shape(9, 3), [([100, 100], [0, 0, 1])], {}),
    "one-request-many-rows": (Shape(8, 1), [([50], [0, 70])], {}),
    "one-off-a-page": (Shape(page=32), [([31, 32, 33, 63, 64, 65], [0, 0, 0, 0, 0, 0, 2])], {}),
    "same-node-twice": (Shape(), [([20, ("=", 0)], [1, 2, 3])], {}),
}  # fmt: skip


def features(settings: dict, heads: int) -> dict:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(heads, generator=generator).to(DEVICE) if value == "random" else value
        for name, value in settings.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case):
    shape, requests, settings = CASES[case]
    if shape.dtype == torch.bfloat16 and not NATIVE:
        pytest.skip("the interpreter multiplies bfloat16 as integers")
    world = World(shape, requests)
    layer = world.layer(**features(settings, shape.q_heads))
    reference = world.reference(world.batch, layer)
    assert_close(case, reference, world.kernel(world.batch, layer).double(), TOLERANCE[shape.dtype])


@pytest.mark.parametrize("case", ["dim-64", "dim-80-7-to-1", "interleaved", "partial-rotary"])
def test_a_shifted_node_is_seen(case):
    """Twin: with one node one position off the kernel must differ from the right reference."""
    shape, requests, _ = CASES[case]
    world = World(shape, requests)
    reference = world.reference(world.batch, world.layer())
    first, *rest = world.batch.requests
    nodes = (*first.nodes[:-1], replace(first.nodes[-1], offset=first.nodes[-1].offset + 1))
    shifted = Batch((replace(first, nodes=nodes), *rest), shape.page)
    wrong = world.kernel(shifted, world.layer()).double()
    assert_far(case, reference, wrong, TOLERANCE[torch.float32])


@pytest.mark.parametrize("settings", [{}, {"sinks": "random"}, {"softcap": 3.0}], ids=str)
def test_temperature_and_log_sum_exp_scale(settings):
    world = World(Shape(), MIXED)
    first, second, third = world.batch.requests
    nodes = tuple(replace(node, temperature=0.8) for node in first.nodes)
    batch = Batch(
        (replace(first, nodes=nodes, lse_scale=0.7), replace(second, lse_scale=1.3), third), 16
    )
    layer = world.layer(**features(settings, 4))
    reference = world.reference(batch, layer)
    plain = world.reference(world.batch, layer)
    assert rms_ratio(plain, reference) > 1e-2
    assert_close("scaled", reference, world.kernel(batch, layer).double(), 2e-6)


def decode(requests: int, shared: int, length: int) -> list:
    """Decode requests that share ``shared`` nodes, each in its own order behind its own node."""
    made = [([length] * shared + [9], [1] * shared + [0, 3], 1)]
    for r in range(1, requests):
        order = [("=", (i + r) % shared) for i in range(shared)]
        made.append(([7 + r, *order], [2] * (shared + 1) + [1], 1))
    return made


def test_joined_items_serve_rows_of_many_requests():
    world = World(Shape(8, 2, page=32), decode(4, 2, 130))
    ours = world.kernel(world.batch, world.layer())
    assert world.last_plan.joined
    reference = world.reference(world.batch, world.layer())
    assert_close("joined", reference, ours.double(), 2e-6)
    apart = world.kernel(world.batch, world.layer(), join=False)
    assert not world.last_plan.joined
    assert_close("not joined", reference, apart.double(), 2e-6)


def test_uses_that_differ_are_not_joined():
    """A node cut short or at another temperature has the pages of the whole one."""
    world = World(Shape(8, 2, page=32), decode(4, 1, 130))
    first, second, third, fourth = world.batch.requests
    shorter = replace(second.nodes[-1], length=120)
    warmer = replace(third.nodes[-1], temperature=0.5)
    second = replace(second, nodes=(*second.nodes[:-1], shorter))
    third = replace(third, nodes=(*third.nodes[:-1], warmer))
    batch = Batch((first, second, third, fourth), 32)
    reference = world.reference(batch, world.layer())
    ours = world.kernel(batch, world.layer())
    assert world.last_plan.joined == 1
    assert_close("differing uses", reference, ours.double(), 2e-6)


def test_fp8_pages():
    shape = Shape(4, 2, 64, page=32, dtype=torch.float16, fp8=True)
    world = World(shape, MIXED)
    reference = world.reference(world.batch, world.layer())
    ours = world.kernel(world.batch, world.layer())
    assert_close("fp8", reference, ours.double(), 1e-2)


def test_one_plan_twice_gives_identical_bits():
    world = World(Shape(8, 2, page=32), decode(4, 2, 130))
    first = world.kernel(world.batch, world.layer())
    assert torch.equal(first, world.kernel(world.batch, world.layer()))
    assert world.last_plan.partials


WRITTEN = {
    "half": Shape(),
    "pairs": Shape(3, 3, 80, interleaved=True, page_major=True),
    "part": Shape(4, 2, 64, rotary_dim=32),
}


@pytest.mark.parametrize("shape", WRITTEN.values(), ids=WRITTEN)
def test_writing_equals_the_plain_path(shape):
    """Keys, values and queries as `write_kv` and `rotate` make them; padding writes nothing."""
    world = World(shape, [([], [1])])
    generator = torch.Generator(DEVICE).manual_seed(2)
    k, v = torch.randn(2, 9, shape.kv_heads, shape.dim, device=DEVICE, generator=generator)
    q = torch.randn(9, shape.q_heads, shape.dim, device=DEVICE, generator=generator)
    slots = torch.tensor([3, 40, 17, -1, 0, 31, -1, 8, 9], device=DEVICE)
    positions = torch.tensor([0, 1, 255, 9, 256, 257, 3, 4095, 2048], device=DEVICE)
    plain = torch.zeros(48, shape.kv_heads, shape.dim, device=DEVICE)
    pools = [plain.clone() for _ in range(4)]
    used = slots >= 0
    cos, sin = cos_sin(world.rotary, positions)
    turned_k = rotate(k, cos[:, None], sin[:, None], shape.interleaved)
    still = cos_sin(world.rotary, torch.zeros_like(slots[used]))
    write_kv(*pools[:2], turned_k[used], v[used], slots[used], *still)
    views = pools[2:]
    if shape.page_major:
        views = [pool.unflatten(0, (3, 16)).transpose(1, 2).contiguous() for pool in views]
    turned = write_step(*views, k, v, slots, positions, world.rotary, world.angles, 16, q=q)
    if shape.page_major:
        views = [pool.transpose(1, 2).flatten(0, 1) for pool in views]
    assert_close("k", pools[0], views[0], 2e-7)
    assert torch.equal(pools[1], views[1])
    expected = rotate(q, cos[:, None], sin[:, None], shape.interleaved)
    assert turned is not None
    assert_close("q", expected[used], turned[used], 2e-7)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", WRITTEN.values(), ids=WRITTEN)
def test_writing_layers_equals_writing_each(shape, stored):
    """A node of three layers in one launch; what it does not write stays as it was."""
    world = World(shape, [([], [1])])
    generator = torch.Generator(DEVICE).manual_seed(3)
    whole = torch.randn(2, 5, 9, shape.kv_heads, shape.dim, device=DEVICE, generator=generator)
    k, v = whole.to(stored)[:, 1:4]
    slots = torch.tensor([3, 40, 17, 5, 0, 31, 6, 8, 9], device=DEVICE, dtype=torch.int32)
    positions = torch.arange(250, 259, device=DEVICE, dtype=torch.int32)
    pools = [torch.full((3, 48, shape.kv_heads, shape.dim), 7.0, device=DEVICE) for _ in range(4)]
    angles = cos_sin(world.rotary, positions.long())
    for layer in range(3):
        kv = k[layer].float(), v[layer].float()
        plain = pools[0][layer], pools[1][layer]
        write_kv(*plain, *kv, slots.long(), *angles, shape.interleaved)
    views = pools[2:]
    if shape.page_major:
        views = [pool.unflatten(1, (3, 16)).transpose(2, 3).contiguous() for pool in views]
    write_layers(*views, k, v, slots, positions, world.rotary, world.angles, 16)
    if shape.page_major:
        views = [pool.transpose(2, 3).flatten(1, 2) for pool in views]
    assert_close("k", pools[0], views[0], 2e-7)
    assert torch.equal(pools[1], views[1])


def test_layers_in_fp8_are_refused():
    world = World(Shape(), [([], [1])])
    pool = torch.zeros(1, 16, world.shape.kv_heads, world.shape.dim, device=DEVICE)
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    pool, k = pool.to(torch.float8_e4m3fn), pool[:, :1]
    with pytest.raises(ValueError, match="fp8"):
        write_layers(pool, pool, k, k, where, where, world.rotary, world.angles, 16)


@pytest.mark.parametrize("position", [0, 257, 15_962, 131_071, -131_071])
def test_two_level_angles_are_exact_at_large_positions(position):
    """Angles formed in fp32 are wrong by up to position * 6e-8 rad (bug log 8)."""
    rotary = Rotary(1.0 / 500_000 ** (torch.arange(0, 64, 2).float() / 64))
    angles = AngleTable.build(rotary, 131_072, DEVICE)
    k = torch.randn(1, 1, 64, device=DEVICE)
    pool = torch.zeros(16, 1, 64, device=DEVICE)
    where = torch.tensor([position], device=DEVICE)
    write_step(pool, pool.clone(), k, k, torch.zeros_like(where), where, rotary, angles, 16)
    exact = rotate(k.double(), *(x[:, None] for x in _exact_angles(rotary, where)))
    assert_close("key", exact[0, 0], pool[0, 0].double(), 3e-7)


@pytest.mark.parametrize("tokens, dtype", [(1, torch.bfloat16), (3, torch.float16),
                                           (16, torch.bfloat16), (17, torch.float16),
                                           (64, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("outputs, inputs", [(64, 256), (192, 768)])
def test_linear_of_few_tokens(tokens, dtype, outputs, inputs):
    """Twice over one counter, which must be zero again; every output is written."""
    if dtype == torch.bfloat16 and not NATIVE:
        pytest.skip("the interpreter cannot multiply bfloat16")
    generator = torch.Generator(DEVICE).manual_seed(4)
    arrived = torch.zeros(outputs // narrow.OUTPUTS, dtype=torch.int32, device=DEVICE)
    weight = torch.randn(outputs, inputs, device=DEVICE, generator=generator).to(dtype)
    assert narrow.fits(weight)
    for _ in range(2):
        x = torch.randn(tokens, inputs, device=DEVICE, generator=generator).to(dtype)
        ours = narrow.linear(x, weight, arrived)
        again = narrow.linear(x, weight, arrived)
        assert_close("linear", x.double() @ weight.double().T, ours.double(), TOLERANCE[dtype])
        assert torch.equal(ours, again)
        assert not arrived.any()


REFUSED = {
    "head_dim 72": (lambda: TritonStep(Heads(2, 2, 72), 16, 1, torch.float32, DEVICE)),
    "float64": (lambda: TritonStep(Heads(2, 2, 64), 16, 1, torch.float64, DEVICE)),
    "page_size must be a power of two": (
        lambda: TritonStep(Heads(2, 2, 64), 24, 1, torch.float32, DEVICE)
    ),
    "exceed the tallest tile": lambda: Planner(Heads(129, 1, 64), 16, (TileClass(128, 32, 1),)),
    "no multiple": lambda: Planner(Heads(3, 2, 64), 16, (TileClass(128, 32, 1),)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_a_launch_cannot_do_is_refused_by_name(sentence):
    with pytest.raises(ValueError, match=sentence):
        REFUSED[sentence]()


def test_calls_are_refused_by_name():
    world = World(Shape(), MIXED)
    step = world.step()
    layer = world.layer()
    step.load(world.plan(world.batch, layer, step.classes))
    q = world.turned(world.batch)
    alibi = torch.ones(4, device=DEVICE)
    for layer_, q_, pools, sentence in [
        (replace(layer, window=9), q, (world.k_pool, world.v_pool), "no plan is loaded"),
        (layer, q.half(), (world.k_pool, world.v_pool), "queries must be float32"),
        (layer, q, (world.k_pool.half(), world.v_pool.half()), "pools in"),
        (layer, q, (world.k_pool, world.v_pool[:, :1]), "one shape"),
        (layer, q, (world.k_pool[:, :1], world.v_pool[:, :1]), "pools must be"),
        (replace(layer, alibi=alibi), q, (world.k_pool, world.v_pool), "positions=True"),
        (replace(layer, sinks=alibi[:2]), q, (world.k_pool, world.v_pool), "sinks must be"),
        (replace(layer, softcap=0.0), q, (world.k_pool, world.v_pool), "must be positive"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            step.attend(q_, *pools, layer_)


def test_plans_are_refused_by_name():
    world = World(Shape(), MIXED)
    classes, layer = world.step().classes, world.layer()
    first, *rest = world.batch.requests
    far = (replace(first.nodes[0], offset=-LIMIT), *first.nodes[1:])
    cold = (replace(first.nodes[0], temperature=0.0), *first.nodes[1:])
    long = (replace(first.nodes[0], length=33), *first.nodes[1:])
    for nodes, sentence in [
        (far, "the angle table ends"),
        (cold, "temperature must be positive"),
        (long, "33 tokens do not fit 2 pages of 16"),
    ]:
        with pytest.raises(PlanError, match=sentence):
            world.plan(Batch((replace(first, nodes=nodes), *rest), 16), layer, classes)
    scaled = Batch(tuple(replace(r, lse_scale=0.5) for r in world.batch.requests), 16)
    with pytest.raises(PlanError, match="prefill fewer rows"):
        world.plan(scaled, layer, classes, workspace_bytes=2_000)


@pytest.mark.parametrize("requests, slots", [(decode(4, 2, 130), (100, 6, 0)),
                                             ([([400], [0, 30])], (90, 30, 0))],
                         ids=["joining-stops", "shares-get-longer"])  # fmt: skip
def test_the_workspace_bound_holds(requests, slots):
    world = World(Shape(8, 2, page=32), requests)
    layer, classes = world.layer(), SMALL
    used = []
    for bound in slots:
        bytes_ = bound * Heads(8, 2, 64).partial_bytes
        plan = world.plan(world.batch, layer, classes, workspace_bytes=bytes_)
        assert plan.partials <= bound
        used.append(plan.partials)
    assert used[0] > used[-1] == 0
    ours = world.kernel(world.batch, layer, workspace_bytes=0)
    assert_close("no slots", world.reference(world.batch, layer), ours.double(), 2e-6)


def test_an_advanced_plan_is_the_plan_of_the_next_step():
    world = World(Shape(8, 2, page=32), decode(5, 2, 70))
    layer, step = world.layer(), world.step(SMALL)
    plan = world.plan(world.batch, layer, step.classes)
    assert plan.steps > 2
    later = []
    for request in world.batch.requests:
        live = request.live
        where = torch.cat((live.positions, live.positions[-1:] + 1))
        later.append(replace(request, live=replace(live, positions=where, first_slot=live.length)))
    expected = world.plan(Batch(tuple(later), 32), layer, step.classes)
    table = plan.table.copy()
    places, change = plan.growing
    table[places] += change.astype("int32")
    assert (table != expected.table).nonzero()[0].tolist() == []
    step.load(plan)
    advanced = [step.advance() for _ in range(plan.steps + 1)]
    assert advanced == [True] * plan.steps + [False]


def test_a_full_block_ends_what_a_plan_can_advance():
    """One request's last block is full, another's is not."""
    world = World(Shape(8, 2, page=32), [([40], [3, 29], 1), ([40], [2, 3], 1)])
    plan = world.plan(world.batch, world.layer(), SMALL)
    assert plan.steps == 0


def test_one_tile_class_joins_and_walks():
    world = World(Shape(8, 2, page=32), decode(4, 2, 130))
    ours = world.kernel(world.batch, world.layer(), (TileClass(64, 32, 2),))
    assert world.last_plan.joined
    assert_close("one class", world.reference(world.batch, world.layer()), ours.double(), 2e-6)


def test_a_node_placed_outside_the_angle_table_is_refused():
    """Its rows are near, but a query turns back by the node's own offset."""
    world = World(Shape(), [([20], [3, 2], 1)])
    (request,) = world.batch.requests
    (node,) = request.nodes
    far = replace(request, nodes=(replace(node, offset=world.limit + 5),))
    with pytest.raises(PlanError, match="angle table"):
        world.plan(Batch((far,), 16), world.layer(), SMALL)


def test_a_plan_larger_than_the_table_gets_a_larger_one():
    world = World(Shape(8, 2, page=32), decode(4, 2, 130))
    layer, step = world.layer(), world.step(SMALL)
    step._table_ints = 64
    step.load(world.plan(world.batch, layer, SMALL))
    ours = step.attend(world.turned(world.batch), world.k_pool, world.v_pool, layer)
    reference = world.reference(world.batch, layer)
    assert_close("grown", reference, ours[: world.batch.rows].double(), 2e-6)
    with pytest.raises(ValueError, match="cannot move"):
        step.load(world.plan(world.batch, layer, SMALL), fixed=True)


@pytest.mark.parametrize("window", [None, 9])
def test_a_step_without_requests_writes_zeros(window):
    world = World(Shape(), [([], [3])])
    step, layer = world.step(), world.layer(window=window)
    step.load(step.planner().plan(Batch((), 16), window, padded_rows=step.rows))
    assert (world.run(step, world.batch, layer) == 0).all()


def test_plans_of_another_step_are_refused_by_name():
    world = World(Shape(), MIXED)
    step = world.step()
    other = tuple(replace(spec, workers=spec.workers + 1) for spec in step.classes)
    with pytest.raises(ValueError, match="other tile classes"):
        step.load(world.plan(world.batch, world.layer(), other))
    with pytest.raises(ValueError, match="a plan of 20 rows"):
        step.load(step.planner().plan(world.batch, padded_rows=20))


@on_gpu
def test_one_captured_graph_serves_every_plan():
    world = World(Shape(8, 2, 128, page=64, dtype=torch.bfloat16), decode(6, 2, 300))
    layer = world.layer()
    step = world.step()
    requests = world.batch.requests
    batches = [Batch(requests[:2], 64), Batch(requests[3:5], 64), world.batch]
    q = world.turned(batches[0])
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=DEVICE)
    everything = world.q.clone()
    graphs = {}
    for batch, skipped in zip(batches, (0, 3, 0), strict=True):
        world.q[: batch.rows] = everything[skipped : skipped + batch.rows]
        q.copy_(world.turned(batch))
        plan = world.plan(batch, layer, step.classes)
        step.load(plan, fixed=True)
        if plan.launches not in graphs:
            step.attend(q, world.k_pool, world.v_pool, layer, out=out)
            graph = graphs[plan.launches] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.attend(q, world.k_pool, world.v_pool, layer, out=out)
        # For launches that are not captured: elsewhere, and it may move.
        step.load(world.plan(world.batch, layer, step.classes))
        out.fill_(float("nan"))
        graphs[plan.launches].replay()
        expected = world.reference(batch, layer)
        assert_close("replay", expected, out[: batch.rows].double(), 1e-2)
        assert (out[batch.rows :] == 0).all()
    assert len(graphs) < len(batches)


BF16 = Shape(8, 2, 128, page=64, dtype=torch.bfloat16)
SWEEP = {
    "one-off-a-page": (BF16, [([63, 64, 65, 127, 128, 129], [0] * 6 + [9])], {}),
    "zero-and-one-token": (BF16, [([0, 1, 0, 1], [1, 0, 1, 0, 3])], {}),
    "200-nodes": (BF16, [([33] * 200, [1] * 200 + [40], 40)], {}),
    "200-nodes-decode": (BF16, [([33] * 200, [1] * 200 + [1], 1)], {}),
    "same-node-twice": (BF16, [([300, ("=", 0)], [1, 2, 70])], {}),
    "100,000-tokens": (BF16, [([4_000] * 25, [0] * 25 + [3], 3)], {}),
    "live-between-nodes": (BF16, [([500] * 6, [100, 1, 30, 64, 65, 200, 128])], {}),
    "window-across": (BF16, [([500] * 6, [100, 1, 30, 64, 65, 200, 128])], {"window": 700}),
    "mixed": (BF16, [([512] * 3, [0, 0, 0, 64]), ([("=", 0), ("=", 1)], [0, 5, 20], 1),
                     ([("=", 1), ("=", 0)], [3, 0, 7], 1), ([], [200])], {}),
    "sinks-softcap-window": (BF16, [([300] * 4, [5] * 5)],
                             {"sinks": "random", "softcap": 20.0, "window": 600}),
    "mha": (replace(BF16, q_heads=4, kv_heads=4), [([300] * 3, [0, 0, 0, 150])], {}),
    "71-to-1": (replace(BF16, q_heads=71, kv_heads=1, dim=64), [([300] * 3, [0, 0, 0, 5])], {}),
    "16-to-1-dim-256": (replace(BF16, q_heads=16, kv_heads=1, dim=256), [([300], [0, 50])], {}),
    "float32": (replace(BF16, dtype=torch.float32), [([300] * 3, [1, 1, 1, 90])], {}),
    "page-major": (replace(BF16, page_major=True), [([300] * 3, [1, 1, 1, 90])], {}),
    "page-128": (replace(BF16, page=128), [([300] * 3, [1, 1, 1, 90])], {}),
    "fp8": (replace(BF16, fp8=True), [([300] * 3, [1, 1, 1, 90])], {}),
    "fp8-page-16": (replace(BF16, fp8=True, page=16), [([300] * 3, [1, 1, 1, 90])], {}),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("case", SWEEP)
def test_sweep(case):
    shape, requests, settings = SWEEP[case]
    world = World(shape, requests, limit=2**18)
    layer = world.layer(**features(settings, shape.q_heads))
    reference = world.reference(world.batch, layer)
    ours = world.kernel(world.batch, layer).double()
    assert_close(case, reference, ours, TOLERANCE[shape.dtype])


@on_gpu
@pytest.mark.parametrize("base", [0, 131_071 - 2_400])
@pytest.mark.parametrize("rows", [1, 64, 300], ids="rows-{}".format)
def test_error_stays_that_of_sdpa(rows, base):
    """At most 1.3 times SDPA's error, given q and k rotated in fp32 and rounded once.

    Free offsets move the whole prompt to ``base``: the last row asks from 131,071.
    """
    shape = Shape(32, 8, 128, page=64, dtype=torch.bfloat16)
    world = World(shape, [([512] * 4, [0] * 4 + [352], rows)], limit=2**18)
    (request,) = world.batch.requests
    moved = request.live.positions + base
    nodes = tuple(replace(node, offset=node.offset + base) for node in request.nodes)
    live = replace(request.live, positions=moved)
    batch = Batch((replace(request, nodes=nodes, live=live),), 64)
    turn = torch.full_like(moved, base).to(DEVICE)
    slots = torch.tensor([page * 64 + i for page in live.pages for i in range(64)])[:352].to(DEVICE)
    kept = world.k_exact[slots]
    cos, sin = _exact_angles(world.rotary, turn)
    world.k_exact[slots] = rotate(kept, cos[:, None], sin[:, None])
    world.k_pool[slots] = world.k_exact[slots].bfloat16()

    every = [
        (torch.tensor([page * 64 + i for page in span.pages for i in range(64)]), span.offset)
        for span in nodes
    ]
    k = []
    for where, offset in every:
        angles = _exact_angles(world.rotary, torch.full((512,), offset, device=DEVICE))
        k.append(rotate(world.k_exact[where.to(DEVICE)], *(x[:, None] for x in angles)))
    index = torch.cat([where.to(DEVICE) for where, _ in every] + [slots])
    k = torch.cat([*k, world.k_exact[slots]]).bfloat16()
    v = world.v_exact[index].bfloat16()
    cos, sin = _exact_angles(world.rotary, batch.requests[0].positions.to(DEVICE))
    q = rotate(world.q[:rows].double(), cos[:, None], sin[:, None]).bfloat16()
    mask = torch.ones(rows, k.shape[0], dtype=torch.bool, device=DEVICE).tril(k.shape[0] - rows)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    reference = world.reference(batch, world.layer())
    theirs = rms_ratio(reference, sdpa.double())
    ours = rms_ratio(reference, world.kernel(batch, world.layer()).double())
    print(f"rows {rows}, base {base}: ours {ours:.2e}, sdpa {theirs:.2e}, {ours / theirs:.3f}")
    assert ours <= 1.3 * theirs
