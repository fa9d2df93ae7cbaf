"""Ingestion: token ids of nodes to raw K and V, batched.

A node sees itself, what it is encoded behind, and the sink.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from lazyrag_kernels.attention import attend_behind_prefix
from torch import Tensor

from lazyrag.engine.costs import Costs
from lazyrag.errors import ModelError
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel
from lazyrag.store.format import StoredKV

BATCH_TOKENS = 1024
"""Padded tokens of one forward pass: bounds the memory of ingestion."""


class _EncodeStep:
    """Dense causal attention behind the sink; keeps every layer's raw K and V of each sequence.

    Args:
        model: a loaded checkpoint.
        prefix: per layer raw K and V of the sink; None = no sink.
        parts: of each sequence of the batch which tokens are kept.
        dtype: in which K and V are kept.
    """

    def __init__(
        self,
        model: LoadedModel,
        prefix: list[tuple[Tensor, Tensor]] | None,
        parts: Sequence[range],
        dtype: torch.dtype,
    ) -> None:
        geometry = model.geometry
        self._layers = geometry.layers
        self._prefix = prefix
        self._parts = parts
        # written layer by layer into their final place: nothing is held twice
        self.kept = [
            torch.empty(
                (2, len(geometry.layers), len(part), geometry.kv_heads, geometry.head_dim),
                dtype=dtype,
                device=model.device,
            )
            for part in parts
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for row, (part, kept) in enumerate(zip(self._parts, self.kept, strict=True)):
            kept[0, layer].copy_(k[row, :, part.start : part.stop].transpose(0, 1))
            kept[1, layer].copy_(v[row, :, part.start : part.stop].transpose(0, 1))
        prefix = None if self._prefix is None else self._prefix[layer]
        return attend_behind_prefix(q, k, v, prefix, self._layers[layer]).transpose(1, 2)


class Encoder:
    """Computes the KV of nodes in a position-agnostic form.

    Args:
        model: a loaded checkpoint.
        sink: ids every node is encoded behind. They act through the hidden states only: their own
            KV is computed once and dropped (DESIGN, invariant 2).
        dtype: of the returned K and V.
        costs: learns how long it takes; None = nobody wants to know.
    """

    def __init__(
        self,
        model: LoadedModel,
        sink: tuple[int, ...],
        dtype: torch.dtype,
        costs: Costs | None = None,
    ) -> None:
        self._model = model
        self._costs = costs or Costs()
        self._dtype = dtype
        self._sink = sink
        self._prefix: list[tuple[Tensor, Tensor]] | None = None

    @torch.inference_mode()
    def encode(
        self, nodes: Sequence[Sequence[int]], behind: Sequence[Sequence[int]] = ()
    ) -> list[StoredKV]:
        """KV of each node, as if it stood behind the sink and its own ids; one forward pass.

        Args:
            nodes: token ids, none empty; group many nodes with `length_batches` first.
            behind: of each node the ids between sink and node, which act as the sink does; none
                = no node has any.

        Returns:
            One `StoredKV` a node, on the CPU: raw k and v [layers, tokens, kv_heads, head_dim].

        Raises:
            ModelError: a value does not fit the KV dtype.
        """
        if self._sink and self._prefix is None:
            self.compute(())  # once; no part of what a node costs
        started = time.perf_counter()
        kept = self.compute(nodes, behind)
        if not torch.stack([kv.isfinite().all() for kv in kept]).all():
            raise ModelError(
                f"keys or values of {self._model.name!r} do not fit {self._dtype}; "
                "use --dtype bfloat16 or float32."
            )
        on_cpu = [_on_cpu(kv) for kv in kept]
        tokens = sum(map(len, (*nodes, *behind)))
        self._costs.was_encoded(tokens, time.perf_counter() - started)
        return [
            StoredKV(tuple(ids), kv[0], kv[1], tuple(before))
            for ids, before, kv in zip(nodes, behind or [()] * len(nodes), on_cpu, strict=True)
        ]

    @torch.inference_mode()
    def compute(
        self, nodes: Sequence[Sequence[int]], behind: Sequence[Sequence[int]] = ()
    ) -> list[Tensor]:
        """As `encode`, but unchecked and left on the device; of no nodes, only what they all need.

        Returns:
            [2, layers, tokens, kv_heads, head_dim] of each node.
        """
        if self._sink and self._prefix is None:
            (sink,) = self._run([self._sink], (), None, self._model.dtype)
            self._prefix = [
                (k.transpose(0, 1), v.transpose(0, 1)) for k, v in zip(*sink, strict=True)
            ]
        return self._run(nodes, behind, self._prefix, self._dtype) if nodes else []

    def _run(
        self,
        nodes: Sequence[Sequence[int]],
        behind: Sequence[Sequence[int]],
        prefix: list[tuple[Tensor, Tensor]] | None,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """One forward pass; K and V [2, layers, tokens, kv_heads, head_dim] of each node."""
        whole = [
            (*before, *ids) for before, ids in zip(behind or [()] * len(nodes), nodes, strict=True)
        ]
        padded = torch.zeros(len(nodes), max(map(len, whole)), dtype=torch.int64)
        for row, ids in enumerate(whole):
            padded[row, : len(ids)] = torch.as_tensor(ids)
        parts = [
            range(len(all_ids) - len(ids), len(all_ids))
            for all_ids, ids in zip(whole, nodes, strict=True)
        ]
        step = _EncodeStep(self._model, prefix, parts, dtype)
        seam.hidden_states(self._model.model, padded.to(self._model.device), step)
        return step.kept


def _on_cpu(kv: Tensor) -> Tensor:
    """In pinned memory, which is read ten times as fast and may be sent back the same way."""
    if kv.device.type != "cuda":
        return kv.cpu()
    try:
        return torch.empty(kv.shape, dtype=kv.dtype, pin_memory=True).copy_(kv)
    except RuntimeError:  # the system gives no more of it
        return kv.cpu()


def length_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of similar length: one node, or at most `BATCH_TOKENS` padded tokens."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and lengths[index] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
