"""Which nodes a question needs most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FUSION = 2.0
"""Damping of `together`: small, since ten or twenty nodes are ranked, not thousands."""


class Head(NamedTuple):
    """One attention head of a checkpoint."""

    layer: int
    head: int


def by_heads(masses: Mapping[int, Tensor], heads: Sequence[Head]) -> list[int]:
    """Node numbers, the most attended first; every head has the same say.

    Few heads look for what a question asks for (retrieval heads, arXiv 2404.15574); the mean over
    all of them is ruled by the first tokens of nodes and by the nearest node.

    Args:
        masses: by layer [q_heads, rows, nodes], see `lazyrag.engine.mass.MassStep`.
        heads: which of them, at least one.
    """
    weights = torch.stack([masses[layer][head].double().mean(dim=0) for layer, head in heads])
    shares = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    order = shares.sum(dim=0).argsort(descending=True, stable=True)
    return [int(number) for number in order]


def together(*rankings: Sequence[int]) -> list[int]:
    """Several rankings as one: reciprocal rank fusion (Cormack et al., SIGIR 2009).

    Of equals the first ranking decides.
    """
    places = [{node: place for place, node in enumerate(ranking)} for ranking in rankings]

    def worth(node: int) -> tuple[float, int]:
        return -sum(1 / (FUSION + place[node]) for place in places), places[0][node]

    return sorted(rankings[0], key=worth)


def within(ranking: Sequence[int], tokens: Sequence[int], room: float) -> list[int]:
    """The best nodes that fit into ``room`` tokens; one that does not is passed over.

    Args:
        ranking: node numbers, the most wanted first.
        tokens: of every node.
        room: in tokens.
    """
    chosen = []
    for node in ranking:
        if tokens[node] <= room:
            chosen.append(node)
            room -= tokens[node]
    return chosen
