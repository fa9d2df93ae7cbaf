"""How much of the question's attention each node gets, measured while the question is read.

Attention weights say which nodes a question needs: the weight a row gives to all keys of a node is
summed, and averaged over the rows behind the last node (arXiv 2410.02642 ranks passages so;
ProphetKV and QCFuse choose tokens to recompute so).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import torch
from lazyrag_kernels.rope import cos_sin, rotate
from torch import Tensor

from lazyrag.engine.attention import PagedAttention
from lazyrag.engine.forward import run
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import LazyRagError
from lazyrag.model import seam
from lazyrag.model.geometry import Geometry
from lazyrag.model.load import LoadedModel
from lazyrag.model.ranks import Ranks

Rows = tuple[PagedSequence, Sequence[int], Sequence[int]]
"""The next tokens of a sequence and their positions."""
KEYS = 8192
"""Of nodes that are measured at once, their padding included, unless one node alone has more."""
QUESTION_ROWS = 256
"""Rows behind the last node that are looked at, at most; the last ones."""


class LayersDone(LazyRagError):
    """All wanted layers are measured, and the rest of the pass is not needed."""


class MassStep:
    """Wraps the attention of one pass over whole prompts, each in one piece.

    Args:
        inner: computes the attention itself.
        rows: of the pass; of each sequence the tokens from its first on, nodes seen by the last.
        pool, geometry: of the model.
        layers: which are measured.
        stop: leave the pass with `LayersDone` before the attention of the layer behind the last
            measured one is computed.
        ranks: the processes that share the heads; all of them measure.

    Attributes:
        masses: of each sequence, by layer, fp32 [q_heads of all ranks, rows, nodes] on the CPU:
            weight of a node in a row; the rows are those behind the last node.
    """

    def __init__(
        self,
        inner: seam.AttentionStep,
        rows: Sequence[Rows],
        pool: PagePool,
        geometry: Geometry,
        layers: Collection[int],
        *,
        stop: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._inner = inner
        self._ranks = ranks
        self._pool = pool
        self._geometry = geometry
        self._layers = layers
        self._last = max(layers) if stop else len(geometry.layers)
        self.masses: list[dict[int, Tensor]] = [{} for _ in rows]
        self._views: list[_View] = []
        first = 0
        for sequence, _, positions in rows:
            self._views.append(_View(sequence, positions, first, pool))
            first += len(positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `lazyrag.model.seam.AttentionStep`; one packed sequence."""
        if layer in self._layers:
            for view, masses in zip(self._views, self.masses, strict=True):
                if view.parts:
                    mass = self._mass(layer, view, q[0], k[0])
                    whole = mass if self._ranks is None else self._ranks.all_heads(mass)
                    masses[layer] = whole.cpu()
        if layer >= self._last:
            raise LayersDone
        return self._inner.attend(layer, q, k, v)

    def _mass(self, layer: int, view: _View, q: Tensor, k: Tensor) -> Tensor:
        """fp32 [q_heads, rows, nodes]."""
        spec = self._geometry.layers[layer]
        group = self._geometry.q_heads // self._geometry.kv_heads
        device = q.device
        rows = view.rows.to(device)
        raw = q[:, view.first + rows].float() * spec.scale  # [q_heads, rows, head_dim]
        positions = view.positions[view.rows].to(device)  # [rows]

        def scores(shift: Tensor, keys: Tensor) -> Tensor:
            """Query rows rotated by their distance to ``shift`` [parts], keys [parts, keys, ..]."""
            cos, sin = cos_sin(spec.rotary, positions[None] - shift[:, None])  # [parts, rows, half]
            turned = rotate(raw, cos[:, None], sin[:, None], spec.rotary.interleaved)
            turned = turned.unflatten(1, (self._geometry.kv_heads, group))
            return torch.einsum("phgrd,pkhd->phgrk", turned, keys.float()).flatten(1, 2)

        def lse(part: _Nodes) -> Tensor:
            """fp32 [nodes, q_heads, rows]: log-sum-exp of the scores of each node's keys."""
            keys = self._pool.k[layer][part.slots.to(device)]  # [nodes, longest, kv_heads, dim]
            keys = keys.masked_fill(part.padding.to(device)[:, :, None, None], 0.0)
            found = scores(part.offsets.to(device), keys)  # [nodes, q_heads, rows, longest]
            hidden = part.padding.to(device)[:, None, None, :]
            if spec.window is not None:
                where = part.offsets[:, None] + torch.arange(part.padding.shape[1])
                far = positions[None, :, None] - where.to(device)[:, None, :] >= spec.window
                hidden = hidden | far[:, None]
            return found.masked_fill(hidden, float("-inf")).logsumexp(dim=-1)

        nodes = torch.cat([lse(part) for part in view.parts])

        cos, sin = cos_sin(spec.rotary, view.positions.to(device))
        live = k[:, view.first : view.first + view.positions.numel()].transpose(0, 1)
        turned = rotate(live, cos[:, None], sin[:, None], spec.rotary.interleaved)
        own = scores(torch.zeros(1, dtype=torch.int64, device=device), turned[None])[0]
        unseen = torch.arange(own.shape[-1], device=device)[None] > rows[:, None]
        if spec.window is not None:
            unseen = unseen | (positions[:, None] - view.positions.to(device)[None] >= spec.window)
        own = own.masked_fill(unseen, float("-inf")).logsumexp(dim=-1)  # [q_heads, rows]
        together = torch.cat((nodes, own[None])).softmax(dim=0)[:-1]  # [nodes, q_heads, rows]
        return together.permute(1, 2, 0)


def measure(
    model: LoadedModel,
    attention: PagedAttention,
    pool: PagePool,
    sequence: PagedSequence,
    ids: Sequence[int],
    positions: Sequence[int],
    layers: Collection[int],
) -> dict[int, Tensor]:
    """Read a prompt in one pass, up to the last of ``layers``, to see what it attends to.

    Args:
        model, attention, pool: of the engine.
        sequence: nothing of it was computed yet.
        ids, positions: of its live tokens.
        layers: whose attention is measured.

    Returns:
        By layer fp32 [q_heads of all ranks, rows, nodes], see `MassStep`.
    """
    step = MassStep(
        attention.step([sequence.rows(positions)]),
        [(sequence, ids, positions)],
        pool,
        model.geometry,
        layers,
        stop=True,
        ranks=model.ranks,
    )
    with suppress(LayersDone):
        run(model, ids, step, ())
    return step.masses[0]


class _View:
    """Which rows of a sequence are looked at, and where its nodes' keys lie."""

    def __init__(
        self, sequence: PagedSequence, positions: Sequence[int], first: int, pool: PagePool
    ) -> None:
        nodes = sequence.nodes
        live = len(positions)
        if sequence.length != live:
            raise ValueError("masses are measured over prompts read in one piece")
        behind = max((node.first_row for node in nodes), default=0)
        self.first = first
        self.rows = torch.arange(max(behind, live - QUESTION_ROWS), live)
        self.positions = torch.tensor(positions)
        self.parts = [_Nodes([nodes[n] for n in part], pool) for part in _parts(nodes)]


class _Nodes:
    """Some nodes side by side, padded to the longest of them."""

    def __init__(self, nodes: Sequence[SeenNode], pool: PagePool) -> None:
        self.offsets = torch.tensor([node.offset for node in nodes], dtype=torch.int64)
        lengths = torch.tensor([node.length for node in nodes])
        self.padding = torch.arange(int(lengths.max()))[None] >= lengths[:, None]
        self.slots = torch.zeros(self.padding.shape, dtype=torch.int64)
        for row, node in zip(self.slots, nodes, strict=True):
            row[: node.length] = pool.slots(node.pages, 0, node.length)


def _parts(nodes: Sequence[SeenNode]) -> Iterator[list[int]]:
    """Numbers in order, in parts of at most `KEYS` keys with their padding (or one node)."""
    part: list[int] = []
    longest = 0
    for number, node in enumerate(nodes):
        if part and max(longest, node.length) * (len(part) + 1) > KEYS:
            yield part
            part, longest = [], 0
        part.append(number)
        longest = max(longest, node.length)
    if part:
        yield part
