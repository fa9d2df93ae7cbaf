"""Times the attention kernel against what torch offers: ``python -m lazyrag_kernels.bench``.

Every case is checked against `scaled_dot_product_attention` before it is timed; a wrong result
stops the run. Calls are captured in CUDA graphs over several layers' worth of KV, so that data does
not stay in the L2 cache between calls. The CSV has one row a case and provider.

    ours        pages scattered over the pool, positions applied in the kernel
    unrotated   the same launch without rotation (wrong results), for its cost, in paired runs
    write       the launch before attention: live K and V into pages, queries turned in fp32
    write k, v  the same without queries
    unjoined    ours without items shared by requests (only where nodes are shared)
    sdpa        the better of flash and cuDNN over contiguous KV that is already rotated
    copy        nodes copied and re-rotated, then sdpa: Block-Attention's way, once a request
    flex        FlexAttention, compiled, over the same contiguous KV
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lazyrag_kernels.attention.batch import AttentionLayer, Batch, LiveSpan, NodeSpan, RequestRows
from lazyrag_kernels.attention.step import TritonStep
from lazyrag_kernels.attention.table import Heads, Plan
from lazyrag_kernels.kv_write.triton import write_step
from lazyrag_kernels.rope import AngleTable, Rotary, cos_sin, rotate

PAGE = 64
Call = Callable[[], Any]
BYTES_APART = 256 * 2**20
"""KV of all copies of a case together: several times the L2 cache."""
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of work.

    Attributes:
        name: in the table.
        requests: in the step.
        nodes, node_tokens: of each request.
        rows: query tokens of each request.
        live: live tokens of each request after the step.
        hot: nodes the requests share; None = every request has its own.
        replays: of the graph.
    """

    name: str
    requests: int
    nodes: int
    node_tokens: int
    rows: int
    live: int
    hot: int | None = None
    replays: int = 60

    @property
    def keys(self) -> int:
        return self.nodes * self.node_tokens + self.live


CASES = (
    Case("decode, 1 request, 10 x 512", 1, 10, 512, 1, 64),
    Case("decode, 16 requests, 10 x 512", 16, 10, 512, 1, 64),
    Case("decode, 64 requests, 10 x 512", 64, 10, 512, 1, 64),
    Case("decode, 256 requests, 10 x 512", 256, 10, 512, 1, 64, replays=30),
    Case("decode, 64 requests over 12 hot nodes", 64, 10, 512, 1, 64, hot=12),
    Case("64-token question, 1 request, 10 x 512", 1, 10, 512, 64, 64),
    Case("64-token question, 1 request, 20 x 1,024", 1, 20, 1024, 64, 64),
    Case("64-token question, 8 requests, 10 x 512", 8, 10, 512, 64, 64),
    Case("8,192 new over 8,192 cached", 1, 16, 512, 8192, 8192, replays=15),
)


class World:
    """Pool, batch and contiguous twin of a case.

    Args:
        case: the shape.
        heads: of the model.
        slot_major: pools of [slots, kv_heads, head_dim], else [pages, kv_heads, page, head_dim].
    """

    def __init__(self, case: Case, heads: Heads, slot_major: bool = True) -> None:
        self.case, self.heads, self.device = case, heads, torch.device("cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        inv_freq = 1.0 / 500_000 ** (torch.arange(0, heads.dim, 2).float() / heads.dim)
        self.layer = AttentionLayer(heads.dim**-0.5, Rotary(inv_freq))
        node_pages = case.node_tokens // PAGE
        live_pages = -(-case.live // PAGE)
        own_nodes = case.hot or case.requests * case.nodes
        total = own_nodes * node_pages + case.requests * live_pages
        kv_bytes = 4 * total * PAGE * heads.kv_heads * heads.dim
        contiguous_bytes = 4 * case.requests * case.keys * heads.kv_heads * heads.dim
        self.copies = max(1, min(16, -(-BYTES_APART // min(kv_bytes, contiguous_bytes))))
        self.kv_bytes = kv_bytes
        order = torch.randperm(total, generator=torch.Generator().manual_seed(2)).tolist()
        pages = [tuple(order[i * node_pages :][:node_pages]) for i in range(own_nodes)]
        rest = order[own_nodes * node_pages :]
        requests, chosen = [], []
        offsets = range(0, case.nodes * case.node_tokens, case.node_tokens)
        positions = case.nodes * case.node_tokens + torch.arange(case.live)
        for r in range(case.requests):
            if case.hot:
                mix = torch.randperm(case.hot, generator=torch.Generator().manual_seed(r))
                mine = mix[: case.nodes].tolist()
            else:
                mine = list(range(r * case.nodes, (r + 1) * case.nodes))
            chosen.append(mine)
            spans = tuple(
                NodeSpan(pages[node], case.node_tokens, offset)
                for node, offset in zip(mine, offsets, strict=True)
            )
            live = tuple(rest[r * live_pages : (r + 1) * live_pages])
            requests.append(RequestRows(LiveSpan(live, positions, case.live - case.rows), spans))
        self.batch = Batch(tuple(requests), PAGE)
        self.offsets = torch.arange(case.keys, device=self.device) // case.node_tokens
        self.offsets = self.offsets.clamp_max(case.nodes) * case.node_tokens
        self.offsets[case.nodes * case.node_tokens :] = 0

        self.k_pool, self.v_pool, self.k, self.v = [], [], [], []
        where = torch.arange(case.keys, device=self.device)
        inside = where[: case.node_tokens]
        for _ in range(self.copies):
            pool = (total, PAGE, heads.kv_heads, heads.dim)
            k_raw = torch.randn(pool, generator=generator, device=self.device).bfloat16()
            v_pool = torch.randn(pool, generator=generator, device=self.device).bfloat16()
            k_pool = torch.empty_like(k_raw)
            local = torch.empty(total, PAGE, dtype=torch.int64, device=self.device)
            for some in pages:
                local[list(some)] = inside.view(-1, PAGE)
            for request in requests:
                local[list(request.live.pages)] = positions.to(self.device).view(-1, PAGE)
            for low in range(0, total, 4096):
                part = slice(low, low + 4096)
                cos, sin = cos_sin(self.layer.rotary, local[part])
                k_pool[part] = rotate(k_raw[part], cos[:, :, None], sin[:, :, None])
            cos, sin = cos_sin(self.layer.rotary, where)
            shape = (case.requests, case.keys, heads.kv_heads, heads.dim)
            k = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            v = torch.empty_like(k)
            for r, request in enumerate(requests):
                mine = [page for span in request.nodes for page in span.pages]
                index = torch.tensor([*mine, *request.live.pages], device=self.device)
                k[r] = rotate(k_raw[index].flatten(0, 1), cos[:, None], sin[:, None])
                v[r] = v_pool[index].flatten(0, 1)
            self.k.append(k.transpose(1, 2).contiguous())
            self.v.append(v.transpose(1, 2).contiguous())
            del k, v, k_raw
            if slot_major:
                self.k_pool.append(k_pool.flatten(0, 1))
                self.v_pool.append(v_pool.flatten(0, 1))
            else:
                self.k_pool.append(k_pool.transpose(1, 2).contiguous())
                self.v_pool.append(v_pool.transpose(1, 2).contiguous())
            del k_pool, v_pool
        self.q = torch.randn(
            self.batch.rows, heads.q_heads, heads.dim, generator=generator, device=self.device
        ).bfloat16()
        cos, sin = cos_sin(self.layer.rotary, positions[case.live - case.rows :].to(self.device))
        rotated = rotate(
            self.q.unflatten(0, (case.requests, case.rows)), cos[:, None], sin[:, None]
        )
        self.q_rotated = rotated.transpose(1, 2).contiguous()
        turned = rotate(
            self.q.float().unflatten(0, (case.requests, case.rows)), cos[:, None], sin[:, None]
        )
        self.q_turned = turned.flatten(0, 1).contiguous()

    def step(self, join: bool = True, **settings: Any) -> tuple[TritonStep, Plan]:
        """A step with the plan of the case loaded."""
        step = TritonStep(
            self.heads, PAGE, self.batch.rows, torch.bfloat16, self.device, **settings
        )
        plan = step.planner(join=join).plan(self.batch)
        step.load(plan)
        return step, plan

    def ours(self, step: TritonStep, rotate: bool = True) -> list[Call]:
        out = torch.empty_like(self.q)
        return [
            partial(step.attend, self.q_turned, k, v, self.layer, out=out, rotate=rotate)
            for k, v in zip(self.k_pool, self.v_pool, strict=True)
        ]

    def sdpa(self, backend: str) -> list[Call]:
        rows, keys = self.case.rows, self.case.keys
        mask: Any = None
        if rows > 1:
            mask = causal_lower_right(rows, keys)
            if backend == "cudnn":
                mask = torch.ones(rows, keys, dtype=torch.bool, device=self.device)
                mask = mask.tril(keys - rows)

        def call(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return scaled_dot_product_attention(
                    self.q_rotated, k, v, attn_mask=mask, enable_gqa=True
                )

        return [partial(call, k, v) for k, v in zip(self.k, self.v, strict=True)]

    def copying(self, attend: list[Call]) -> list[Call]:
        """Each call copies the nodes of every request into place, turns their keys, attends."""
        heads, rotary = self.heads, self.layer.rotary
        angles = AngleTable.build(rotary, self.case.keys, self.device)
        tokens = self.case.requests * self.case.keys
        slots = torch.arange(tokens, device=self.device)
        where = self.offsets.repeat(self.case.requests)
        shape = (tokens, heads.kv_heads, heads.dim)
        source = torch.randn(shape, device=self.device).bfloat16()
        target, other = torch.empty_like(source), torch.empty_like(source)

        def call(then: Call) -> Any:
            write_step(target, other, source, source, slots, where, rotary, angles, PAGE)
            return then()

        return [partial(call, then) for then in attend]

    def writing(self, queries: bool) -> list[Call]:
        """The launch before attention: live K and V into pages, and queries turned."""
        heads, rotary = self.heads, self.layer.rotary
        angles = AngleTable.build(rotary, self.case.keys, self.device)
        rows = self.batch.rows
        k = torch.randn(rows, heads.kv_heads, heads.dim, device=self.device).bfloat16()
        pool = torch.empty(rows + PAGE, heads.kv_heads, heads.dim, device=self.device).bfloat16()
        slots = torch.arange(rows, device=self.device)
        where = torch.cat([request.positions for request in self.batch.requests]).to(self.device)
        q = self.q if queries else None
        call = partial(
            write_step, pool, pool.clone(), k, k, slots, where, rotary, angles, PAGE, q=q
        )
        return [call] * self.copies

    def flex(self) -> list[Call]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        shift = self.case.keys - self.case.rows

        def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return row + shift >= key

        mask = create_block_mask(visible, None, None, self.case.rows, self.case.keys, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return [
            partial(compiled, self.q_rotated, k, v, block_mask=mask, enable_gqa=True)
            for k, v in zip(self.k, self.v, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call: median, 20th and 80th percentile over replays."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        cuts = statistics.quantiles(samples, n=5)
        return cls(statistics.median(samples), cuts[0], cuts[3])


class Captured:
    """Calls one after the other in one CUDA graph; keeps what they use alive."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()

    def replay(self) -> None:
        self._graph.replay()


def timed(graphs: list[Captured], replays: int) -> list[list[float]]:
    """Microseconds a call of each graph, replayed in turns."""
    for graph in graphs:
        for _ in range(3):
            graph.replay()
    events = []
    for _ in range(replays):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        marks[0].record()
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record()
        events.append(marks)
    torch.cuda.synchronize()
    return [
        [marks[i].elapsed_time(marks[i + 1]) * 1000 / len(graph.calls) for marks in events]
        for i, graph in enumerate(graphs)
    ]


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    stop.record()
    torch.cuda.synchronize()
    return 10 * 2 * 4 * source.numel() / (float(start.elapsed_time(stop)) * 1e-3)


def check(world: World, step: TritonStep) -> float:
    """RMS error of ours against SDPA in fp32 over one copy, relative.

    Raises:
        SystemExit: it is more than rounding; nothing is timed then.
    """
    q, k, v = world.q_rotated[:4], world.k[0][:4], world.v[0][:4]
    rows, keys = world.case.rows, world.case.keys
    last = slice(max(0, rows - 64), rows)
    mask = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)[last]
    group = world.heads.group
    expected = torch.cat(
        [
            scaled_dot_product_attention(
                q[i : i + 1, :, last].float(),
                k[i : i + 1].float().repeat_interleave(group, 1),
                v[i : i + 1].float().repeat_interleave(group, 1),
                attn_mask=mask,
            )
            for i in range(q.shape[0])
        ]
    )
    ours = world.ours(step)[0]().unflatten(0, (world.case.requests, rows)).transpose(1, 2)
    ours = ours[:4, :, last].float()
    error = float((ours - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    if not error < 1e-2:
        raise SystemExit(f"{world.case.name}: wrong result, relative error {error:.1e}")
    return error


def plan_time(world: World, step: TritonStep) -> float:
    """Milliseconds to plan the step on the host, as in a running engine: nodes seen before."""
    planner = step.planner()
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        planner.plan(world.batch)
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def measure(
    case: Case, heads: Heads, bandwidth: float, flex: bool, slot_major: bool
) -> Iterator[dict[str, Any]]:
    """Rows of the CSV for one case."""
    world = World(case, heads, slot_major)
    step, plan = world.step()
    error = check(world, step)
    planned = plan_time(world, step)
    graphs = {
        "ours": Captured(world.ours(step)),
        "unrotated": Captured(world.ours(step, False)),
        "write": Captured(world.writing(True)),
        "write k, v": Captured(world.writing(False)),
    }
    if case.hot:
        other, _ = world.step(join=False)
        graphs["unjoined"] = Captured(world.ours(other))
    candidates = {}
    for backend in BACKENDS:
        try:
            candidates[backend] = Captured(world.sdpa(backend))
        except RuntimeError as reason:
            print(f"# {backend} cannot do {case.name}: {str(reason).splitlines()[0][:80]}")
    medians = {
        backend: statistics.median(timed([graph], 10)[0]) for backend, graph in candidates.items()
    }
    best = min(medians, key=lambda backend: medians[backend])
    graphs["sdpa"] = candidates[best]
    if case.rows > 1 and case.live == case.rows:
        graphs["copy"] = Captured(world.copying(world.sdpa(best)))
    if flex:
        try:
            graphs["flex"] = Captured(world.flex())
        except Exception as reason:  # whatever the compiler raises: the case is left out
            print(f"# flex cannot do {case.name}: {str(reason).splitlines()[0][:80]}")
    samples = timed(list(graphs.values()), case.replays)
    by_name = dict(zip(graphs, samples, strict=True))
    base = statistics.median(by_name["sdpa"])
    pairs = zip(by_name["ours"], by_name["unrotated"], strict=True)
    rotation = statistics.median(ours / without - 1 for ours, without in pairs)
    for name, values in by_name.items():
        timing = Timing.of(values)
        moved = world.kv_bytes / (timing.median * 1e-6)
        yield {
            "case": case.name,
            "q_heads": heads.q_heads,
            "kv_heads": heads.kv_heads,
            "head_dim": heads.dim,
            "layout": "slots" if slot_major else "pages",
            "provider": f"sdpa ({best})" if name == "sdpa" else name,
            "median_us": round(timing.median, 2),
            "p20_us": round(timing.low, 2),
            "p80_us": round(timing.high, 2),
            "against_sdpa": round(timing.median / base, 3),
            "of_copy_bandwidth": round(moved / bandwidth, 3) if name == "ours" else "",
            "rotation_cost": round(rotation, 4) if name == "ours" else "",
            "error": f"{error:.1e}" if name == "ours" else "",
            "partials": plan.partials if name == "ours" else "",
            "plan_ms": round(planned, 3) if name == "ours" else "",
        }


def main() -> None:
    """Run all cases, print a table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/8"], metavar="Q/KV")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--flex", action="store_true", help="compile FlexAttention too")
    parser.add_argument("--pages", action="store_true", help="pools of [pages, heads, page, dim]")
    arguments = parser.parse_args()
    stamp = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    bandwidth = copy_bandwidth()
    print(f"# {stamp}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for pair in arguments.heads:
        q_heads, kv_heads = map(int, pair.split("/"))
        for case in CASES:
            if arguments.only not in case.name:
                continue
            torch.cuda.empty_cache()
            for row in measure(
                case, Heads(q_heads, kv_heads, 128), bandwidth, arguments.flex, not arguments.pages
            ):
                rows.append({**row, **stamp})
                print(
                    f"{pair:>6} {row['case']:42} {row['provider']:13} {row['median_us']:9.1f} us "
                    f"({row['p20_us']:.1f} to {row['p80_us']:.1f})  {row['against_sdpa']:6.3f}  "
                    f"{row['of_copy_bandwidth']} {row['rotation_cost']} {row['error']}",
                    flush=True,
                )
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
