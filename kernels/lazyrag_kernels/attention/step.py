"""Launches of the attention kernel: plans on the device, the workspace, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lazyrag_kernels.attention.batch import AttentionLayer
from lazyrag_kernels.attention.plan import WORKSPACE_BYTES, Planner
from lazyrag_kernels.attention.table import Heads, Plan, TileClass
from lazyrag_kernels.attention.triton import attention_kernel, merge_kernel
from lazyrag_kernels.rope import AngleTable, Rotary
from lazyrag_kernels.staging import send

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn

_LOG2E = math.log2(math.e)


def tile_classes(heads: Heads, dtype: torch.dtype, processors: int) -> tuple[TileClass, ...]:
    """The tile classes this package was tuned with (docs/benchmarks/kernels.md).

    Args:
        heads: of the model.
        dtype: of the queries.
        processors: multiprocessors of the GPU.
    """

    def workers(resident: int) -> int:
        return max(1, processors * resident // heads.kv_heads)

    if dtype == torch.float32 or heads.dim > 128:
        # Twice the bytes a key: half the keys a step keep the pipeline in shared memory.
        return (
            TileClass(64, 32, workers(1), warps=4, stages=2),
            TileClass(128, 32, workers(1), warps=8, stages=2, whole=8),
        )
    return (
        TileClass(16, 64, workers(2), warps=4, stages=3),
        TileClass(64, 64, workers(2), warps=4, stages=3),
        TileClass(128, 64, workers(1), warps=8, stages=3, whole=8, overhead=4),
    )


@dataclass(slots=True)
class _Loaded:
    """A plan on the device."""

    plan: Plan
    table: Tensor  # int32, the packed plan and what a decode step changes
    steps: int  # decode steps left

    @property
    def growing(self) -> tuple[Tensor, Tensor]:
        """int32: entries of the table that a decode step changes, and by how much."""
        first, count = self.plan.table.size, self.plan.growing.shape[1]
        places, change = self.table[first : first + 2 * count].view(2, count)
        return places, change


class TritonStep:
    """Attention on one GPU: plans on the device and the workspace, both allocated once.

    A launch reads the plan from device memory, so a CUDA graph that captured `attend` serves every
    plan of as many rows that needs the same launches (`Plan.launches`) and is loaded ``fixed``.

    Args:
        heads: of the model.
        page_size: of the pool, in tokens.
        rows: query rows of a launch, at most; plans for captured launches are padded to it.
        dtype: of queries and results.
        device: a GPU, or the CPU under Triton's interpreter.
        classes: tile classes, `tile_classes` by default.
        workspace_bytes: for partial results.
        table_ints: room for each plan that captured launches read, one a window.
        limit: angle tables reach to this distance.
        temperature, lse_scale: whether plans may carry them.

    Raises:
        ValueError: a shape or dtype that no launch can do, by name.
    """

    def __init__(
        self,
        heads: Heads,
        page_size: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        classes: tuple[TileClass, ...] | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        table_ints: int = 2**20,
        limit: int = 2**20,
        temperature: bool = False,
        lse_scale: bool = False,
    ) -> None:
        if heads.dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {heads.dim} is not supported, only {HEAD_DIMS}")
        if dtype not in DTYPES:
            raise ValueError(f"queries in {dtype} are not supported, only {DTYPES}")
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 16 on, got {page_size}")
        self.heads, self.page_size, self.rows, self.dtype = heads, page_size, rows, dtype
        self.device, self.limit = device, limit
        self.temperature, self.lse_scale = temperature, lse_scale
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 2
        )
        self.classes = classes or tile_classes(heads, dtype, self.processors)
        # Programmatic dependent launch: a grid is set up while the one before it still runs.
        self._overlap = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
        self._table_ints = table_ints
        self._workspace_bytes = workspace_bytes
        self._loaded: dict[int | None, _Loaded] = {}
        self._fixed: dict[int | None, Tensor] = {}  # tables of captured launches, by window
        self._loose: dict[int | None, Tensor] = {}  # tables of others, which may move
        self._angles: dict[Rotary, AngleTable] = {}
        slots = workspace_bytes // heads.partial_bytes
        self._partial = torch.empty(slots, heads.q_heads, heads.dim, device=device)
        self._partial_lse = torch.empty(slots, heads.q_heads, device=device)

    def planner(self, *, join: bool = True) -> Planner:
        """A planner whose plans this step takes; captured ones with ``padded_rows=step.rows``."""
        return Planner(
            self.heads,
            self.page_size,
            self.classes,
            element_bytes=self.dtype.itemsize,
            limit=self.limit,
            workspace_bytes=self._workspace_bytes,
            join=join,
        )

    def fits(self, plan: Plan) -> bool:
        """Whether a plan can be loaded ``fixed``."""
        return plan.table.size + plan.growing.size <= self._table_ints

    def load(self, plan: Plan, *, fixed: bool = False) -> None:
        """Bring a plan to the device, in place of the last one for the same window.

        Args:
            plan: made by `planner`.
            fixed: into the table that captured launches read, or will read.

        Raises:
            ValueError: it was made for another step, or is larger than this step's tables.
        """
        if plan.classes != self.classes or plan.page_size != self.page_size:
            raise ValueError("a plan for other tile classes or pages; make it with `planner`")
        if plan.rows > self.rows:
            raise ValueError(f"a plan of {plan.rows} rows, launches of at most {self.rows}")
        if plan.partials > self._partial.shape[0]:
            raise ValueError(
                f"{plan.partials} partial results exceed the workspace of {self._partial.shape[0]}"
            )
        for name in ("temperature", "lse_scale"):
            if getattr(plan, name) and not getattr(self, name):
                raise ValueError(f"a plan with {name} needs TritonStep({name}=True)")
        size = plan.table.size + plan.growing.size
        tables = self._fixed if fixed else self._loose
        table = tables.get(plan.window)
        if table is None or table.numel() < size:
            room = self._table_ints
            if size > room:
                if fixed:
                    raise ValueError(
                        f"a plan of {size} numbers exceeds table_ints={room}, and the table of "
                        "captured launches cannot move"
                    )
                room = triton.next_power_of_2(size)
            table = tables[plan.window] = torch.empty(room, dtype=torch.int32, device=self.device)
        send((plan.table, plan.growing), table)
        self._loaded[plan.window] = _Loaded(plan, table, plan.steps)

    def advance(self) -> bool:
        """Bring the loaded plans to the next decode step: one more live token in every request.

        Returns:
            False, and nothing changes, when a plan does not reach that far: make new ones.
        """
        if not all(loaded.steps for loaded in self._loaded.values()):
            return False
        for loaded in self._loaded.values():
            places, change = loaded.growing
            loaded.table[: loaded.plan.table.size].index_add_(0, places, change)
            loaded.steps -= 1
        return True

    def attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        layer: AttentionLayer,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
        rotate: bool = True,
    ) -> Tensor:
        """Attention of all rows over one layer's pool.

        Args:
            q: fp32 [rows, q_heads, head_dim], turned to each row's position by the launch that
                wrote this step's live K and V (`kv_write.write_step`).
            k_pool, v_pool: [slots, kv_heads, head_dim] or [pages, kv_heads, page_size, head_dim].
            layer: what the layer needs; a plan for its window must be loaded.
            k_scale, v_scale: fp32 [pages, kv_heads], with pages in fp8 (e4m3): K = page * scale.
            out: [rows, q_heads, head_dim], contiguous; a new tensor by default.
            rotate: False leaves queries where they are, to measure what turning them costs.

        Returns:
            ``out``; rows beyond the batch are zeros.

        Raises:
            ValueError: names what a launch cannot do.
        """
        loaded = self._loaded.get(layer.window)
        if loaded is None:
            raise ValueError(f"no plan is loaded for layers of window {layer.window}")
        page_stride, slot_stride, head_stride = self._check(q, k_pool, v_pool, layer, loaded.plan)
        fp8 = k_pool.dtype == FP8
        if fp8 and (k_scale is None or v_scale is None):
            raise ValueError("pages in fp8 need k_scale and v_scale")
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        heads, angles = self.heads, self.angles(layer.rotary)
        nothing = self._partial_lse
        launch: dict[str, Any] = {
            "score_scale": layer.scale * _LOG2E,
            "softcap": (layer.softcap or 1.0) * _LOG2E,
            "page_stride": page_stride,
            "slot_stride": slot_stride,
            "kv_head_stride": head_stride,
            "kv_heads": heads.kv_heads,
            "WINDOW": layer.window or 0,
            "DIM": heads.dim,
            "DIM_PAD": triton.next_power_of_2(heads.dim),
            "HALF": layer.rotary.dim // 2,
            "HALF_PAD": triton.next_power_of_2(heads.dim // 2),
            "GROUP": heads.group,
            "PAGE": self.page_size,
            "ROTATE": rotate and layer.rotary.dim > 0,
            "INTERLEAVED": layer.rotary.interleaved,
            "SOFTCAP": layer.softcap is not None,
            "SINKS": layer.sinks is not None,
            "ALIBI": layer.alibi is not None,
            "FP8_PAGES": fp8,
            "TEMPERATURE": self.temperature,
        }
        sinks = nothing if layer.sinks is None else layer.sinks
        slopes = nothing if layer.alibi is None else layer.alibi
        first_worker = 0
        joinable = max(1, len(self.classes) - 1)  # classes that joined items may be of
        for number, (spec, items) in enumerate(zip(self.classes, loaded.plan.items, strict=True)):
            if items:
                attention_kernel[(spec.workers * heads.kv_heads,)](
                    q,
                    k_pool,
                    v_pool,
                    nothing if k_scale is None else k_scale,
                    nothing if v_scale is None else v_scale,
                    out,
                    self._partial,
                    self._partial_lse,
                    loaded.table,
                    angles.rows,
                    sinks,
                    slopes,
                    first_worker=first_worker,
                    M=spec.rows,
                    BLOCK=spec.block,
                    JOINED=number < joinable,
                    OVERLAP=self._overlap,
                    STAGES=spec.stages,
                    num_warps=spec.warps,
                    num_stages=spec.stages,
                    launch_pdl=self._overlap,
                    **launch,
                )
            first_worker += spec.workers + 1
        if loaded.plan.merged_rows:
            merge_kernel[(min(self.rows * heads.q_heads, 16 * self.processors),)](
                self._partial,
                self._partial_lse,
                out,
                loaded.table,
                sinks,
                heads.q_heads,
                DIM=heads.dim,
                DIM_PAD=launch["DIM_PAD"],
                SINKS=launch["SINKS"],
                SCALED=self.lse_scale,
                OVERLAP=self._overlap,
                PARTS=16,
                num_warps=2,
                launch_pdl=self._overlap,
            )
        return out

    def angles(self, rotary: Rotary) -> AngleTable:
        """The table of a layer's angles, made at its first use."""
        if rotary not in self._angles:
            self._angles[rotary] = AngleTable.build(rotary, self.limit, self.device)
        return self._angles[rotary]

    def _check(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: AttentionLayer, plan: Plan
    ) -> tuple[int, int, int]:
        """Refuse what a launch cannot do; strides of a page, a slot and a head of the pool."""
        heads = self.heads
        expected = (plan.rows, heads.q_heads, heads.dim)
        if tuple(q.shape) != expected or not q.is_contiguous() or q.dtype != torch.float32:
            raise ValueError(
                f"queries must be float32 {list(expected)}, contiguous and turned to their "
                f"positions, got {q.dtype} {list(q.shape)}"
            )
        if k_pool.dtype not in (self.dtype, FP8) or v_pool.dtype != k_pool.dtype:
            raise ValueError(
                f"pools in {k_pool.dtype} and {v_pool.dtype}; {self.dtype} or {FP8} is supported"
            )
        if k_pool.dtype == FP8 and self.dtype == torch.float32:
            raise ValueError("pages in fp8 need queries in float16 or bfloat16")
        if k_pool.stride() != v_pool.stride() or k_pool.shape != v_pool.shape:
            raise ValueError("the pools of K and V must have one shape and the same strides")
        if k_pool.stride(-1) != 1:
            raise ValueError("the head dimension of the pools must be dense")
        if layer.rotary.dim > heads.dim:
            raise ValueError(f"rotary_dim {layer.rotary.dim} exceeds head_dim {heads.dim}")
        if layer.rotary.dim % 16 and layer.rotary.dim != heads.dim:
            raise ValueError(f"a partial rotary_dim must be a multiple of 16: {layer.rotary.dim}")
        if not layer.scale > 0 or (layer.softcap is not None and not layer.softcap > 0):
            raise ValueError("scale and softcap must be positive")
        for name, vector in (("sinks", layer.sinks), ("alibi", layer.alibi)):
            if vector is not None and (
                tuple(vector.shape) != (heads.q_heads,) or vector.dtype != torch.float32
            ):
                raise ValueError(f"{name} must be float32 [{heads.q_heads}]")
        if layer.alibi is not None and not plan.positions:
            raise ValueError("a layer with ALiBi needs a plan made with positions=True")
        if k_pool.dim() == 3 and k_pool.shape[1:] == (heads.kv_heads, heads.dim):
            slot, head, _ = k_pool.stride()
            return self.page_size * slot, slot, head
        if k_pool.dim() == 4 and k_pool.shape[1:] == (heads.kv_heads, self.page_size, heads.dim):
            page, head, slot, _ = k_pool.stride()
            return page, slot, head
        raise ValueError(
            f"pools must be [slots, {heads.kv_heads}, {heads.dim}] or "
            f"[pages, {heads.kv_heads}, {self.page_size}, {heads.dim}], got {tuple(k_pool.shape)}"
        )
