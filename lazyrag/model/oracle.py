"""The truth to compare with: transformers' own eager attention, with exact rotary tables.

transformers forms angles in fp32 and is off by up to n * 6e-8 rad at position n. Here its rotary
module is given the same fp64-made tables as ours, so that only the computation is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lazyrag_kernels.rope import Rotary, cos_sin
from torch import Tensor
from transformers import PreTrainedModel

from lazyrag.prompt.segments import PlacedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A plain sequence of tokens with an explicit mask.

    Attributes:
        ids, positions: int64 [tokens]; positions may repeat and may be negative.
        visible: bool [tokens, tokens]; row sees column.
        live: int64 [live tokens], where the live tokens stand.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    live: Tensor


def causal_layout(ids: list[int]) -> Layout:
    """Plain causal attention over ``ids``."""
    count = len(ids)
    everywhere = torch.arange(count)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    return Layout(torch.tensor(ids), everywhere, visible, everywhere)


def block_layout(prompt: PlacedPrompt, sink: tuple[int, ...]) -> Layout:
    """The block mask: a node sees itself and a private copy of what it was encoded behind.

    That is the sink and the node's own ids behind it, just before the node. Live tokens see the
    live tokens before them and every node before them, whole; nobody but its node sees a copy.
    """
    ids: list[int] = []
    positions: list[int] = []
    owner: list[int] = []  # -1 live, node number otherwise
    hidden: list[bool] = []  # the copies
    live: list[int] = []

    def add_live(first: int, stop: int) -> None:
        for row in range(first, stop):
            live.append(len(ids))
            ids.append(prompt.live_ids[row])
            positions.append(prompt.live_positions[row])
            owner.append(-1)
            hidden.append(False)

    row = 0
    for number, node in enumerate(prompt.nodes):
        add_live(row, node.first_row)
        row = node.first_row
        before = (*sink, *node.run.behind)
        tokens = (*before, *node.run.ids[: node.run.used])
        ids += tokens
        first = node.offset - len(before)
        positions += range(first, first + len(tokens))
        owner += [number] * len(tokens)
        hidden += [True] * len(before) + [False] * node.run.used
    add_live(row, len(prompt.live_ids))

    owners = torch.tensor(owner)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    same = owners[:, None] == owners[None, :]
    by_live = (owners == -1)[:, None] & ~torch.tensor(hidden)[None, :]
    return Layout(
        torch.tensor(ids), torch.tensor(positions), causal & (same | by_live), torch.tensor(live)
    )


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, layout: Layout) -> Tensor:
    """Scores behind every live token, fp32 [live tokens, vocab], on the CPU.

    The model is left as it was.
    """
    device = model.device
    with _eager(model, layout.positions.to(device)):
        output = model(
            input_ids=layout.ids[None].to(device),
            position_ids=layout.positions[None].to(device),
            attention_mask=_masks(model, layout),
            use_cache=False,
        )
    scores: Tensor = output.logits[0, layout.live.to(device)]
    return scores.float().cpu()


def _masks(model: PreTrainedModel, layout: Layout) -> Tensor | dict[str, Tensor]:
    config = model.config
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        return _additive(model, layout, window)
    return {
        kind: _additive(model, layout, window if kind == "sliding_attention" else None)
        for kind in set(kinds)
    }


def _additive(model: PreTrainedModel, layout: Layout, window: int | None) -> Tensor:
    visible = layout.visible
    if window is not None:
        distance = layout.positions[:, None] - layout.positions[None, :]
        visible = visible & (distance < window)
    mask = torch.zeros(visible.shape, dtype=model.dtype)
    mask.masked_fill_(~visible, torch.finfo(model.dtype).min)
    return mask[None, None].to(model.device)


@contextmanager
def _eager(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """Eager attention and exact tables for a while."""
    rotary: Any = model.base_model.rotary_emb
    implementation = model.config._attn_implementation
    cos, sin = cos_sin(Rotary(rotary.inv_freq), positions)
    scaling = float(rotary.attention_scaling)

    def exact(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        tables = [torch.cat((half, half), dim=-1)[None] * scaling for half in (cos, sin)]
        return tables[0].to(x.dtype), tables[1].to(x.dtype)

    model.config._attn_implementation = "eager"
    rotary.forward = exact
    try:
        yield
    finally:
        del rotary.forward
        model.config._attn_implementation = implementation
