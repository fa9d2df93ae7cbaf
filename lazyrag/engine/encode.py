"""Ingestion: token ids of nodes to raw K and V, batched; a node sees only itself and the sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lazyrag_kernels.attention import attend_behind_prefix
from torch import Tensor

from lazyrag.errors import ModelError
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel
from lazyrag.store.format import StoredKV

BATCH_TOKENS = 2048
"""Padded tokens of one forward pass: bounds the memory of ingestion."""


class _EncodeStep:
    """Dense causal attention behind the sink; keeps every layer's raw K and V."""

    def __init__(
        self, model: LoadedModel, prefix: list[tuple[Tensor, Tensor]] | None, dtype: torch.dtype
    ) -> None:
        self._layers = model.geometry.layers
        self._prefix = prefix
        self._dtype = dtype
        self.captured: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.captured.append((k.to(self._dtype), v.to(self._dtype)))
        prefix = None if self._prefix is None else self._prefix[layer]
        return attend_behind_prefix(q, k, v, prefix, self._layers[layer]).transpose(1, 2)


class Encoder:
    """Computes the KV of nodes in a position-agnostic form.

    Args:
        model: a loaded checkpoint.
        sink: ids every node is encoded behind. They act through the hidden states only: their own
            KV is computed once and dropped (DESIGN, invariant 2).
        dtype: of the returned K and V.
    """

    def __init__(self, model: LoadedModel, sink: tuple[int, ...], dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._sink = sink
        self._prefix: list[tuple[Tensor, Tensor]] | None = None

    @torch.inference_mode()
    def encode(self, nodes: Sequence[Sequence[int]]) -> list[StoredKV]:
        """KV of each node, as if it stood alone behind the sink; one forward pass.

        Args:
            nodes: token ids, none empty; group many nodes with `length_batches` first.

        Returns:
            One `StoredKV` a node, on the CPU: raw k and v [layers, tokens, kv_heads, head_dim].

        Raises:
            ModelError: a value does not fit the KV dtype.
        """
        if self._sink and self._prefix is None:
            step = _EncodeStep(self._model, None, self._model.dtype)
            self._run([self._sink], step)
            self._prefix = [(k[0], v[0]) for k, v in step.captured]
        step = _EncodeStep(self._model, self._prefix, self._dtype)
        self._run(nodes, step)
        return [self._node(step, row, ids) for row, ids in enumerate(nodes)]

    def _node(self, step: _EncodeStep, row: int, ids: Sequence[int]) -> StoredKV:
        k, v = (
            torch.stack(
                [pair[which][row, :, : len(ids)].transpose(0, 1) for pair in step.captured]
            ).cpu()
            for which in (0, 1)
        )
        if not (k.isfinite().all() and v.isfinite().all()):
            raise ModelError(
                f"keys or values of {self._model.name!r} do not fit {self._dtype}; "
                "use --dtype bfloat16 or float32."
            )
        return StoredKV(tuple(ids), k, v)

    def _run(self, nodes: Sequence[Sequence[int]], step: _EncodeStep) -> None:
        longest = max(len(ids) for ids in nodes)
        padded = torch.zeros(len(nodes), longest, dtype=torch.int64)
        for row, ids in enumerate(nodes):
            padded[row, : len(ids)] = torch.as_tensor(ids)
        seam.hidden_states(self._model.model, padded.to(self._model.device), step)


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
