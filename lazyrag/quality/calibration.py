"""What was found out about a checkpoint, kept in the cache under the digest of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazyrag.model.cache_dir import JsonCache
from lazyrag.model.load import LoadedModel
from lazyrag.quality.choice import Head
from lazyrag.quality.scale import Scale
from lazyrag.types import Quality

CACHE = "calibrations.json"
VERSION = 2
"""Raised when the procedure finds something else; old results are then not used."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found out about a checkpoint.

    Attributes:
        heads: the best first.
        shares: of each, its attention to the right node over that to all nodes, mean; chance is
            one part in as many as there were nodes.
        questions: how many were asked.
    """

    heads: tuple[Head, ...]
    shares: tuple[float, ...]
    questions: int


def _name(model: LoadedModel) -> str:
    return f"{model.weights_digest}|{VERSION}"


def remember(model: LoadedModel, found: Calibration) -> None:
    """Keep a calibration for every later use of these weights on this machine."""
    heads = [list(head) for head in found.heads]
    kept = {"heads": heads, "shares": list(found.shares), "questions": found.questions}
    JsonCache(CACHE).put(_name(model), kept)


def recall(model: LoadedModel) -> Calibration | None:
    """The kept calibration of these weights, if there is one that can be read."""
    kept = JsonCache(CACHE).read().get(_name(model))
    if not isinstance(kept, dict):
        return None
    try:
        heads = tuple(Head(int(layer), int(head)) for layer, head in kept["heads"])
        found = Calibration(heads, tuple(map(float, kept["shares"])), int(kept["questions"]))
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    there = model.geometry.all_heads
    known = all(0 <= head.layer < there.layers and 0 <= head.head < there.q_heads for head in heads)
    return found if heads and known else None


def remember_scales(model: LoadedModel, encoding: bytes, scales: Mapping[Quality, Scale]) -> None:
    """Keep how nodes of an encoding are attended to best; none = as the model has it."""
    kept = {quality.value: list(scale) for quality, scale in scales.items()}
    JsonCache(CACHE).put(f"{_name(model)}|{encoding.hex()}", kept)


def recall_scales(model: LoadedModel, encoding: bytes) -> dict[Quality, Scale]:
    """The kept scales of an encoding; what cannot be read counts as none."""
    kept = JsonCache(CACHE).read().get(f"{_name(model)}|{encoding.hex()}")
    if not isinstance(kept, dict):
        return {}
    try:
        scales = {Quality(name): Scale(*map(float, pair)) for name, pair in kept.items()}
    except (TypeError, ValueError, OverflowError):
        return {}
    return scales if all(0.1 <= one <= 10 for pair in scales.values() for one in pair) else {}
