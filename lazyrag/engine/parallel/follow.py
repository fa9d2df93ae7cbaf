"""The other ranks: do what rank 0 says until it closes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lazyrag.engine.attention import PagedAttention, paged_attention
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.forward import Forward, NextTokens, packed_forward
from lazyrag.engine.mass import measure
from lazyrag.engine.parallel.lead import fill_heads
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.model.load import LoadedModel
from lazyrag.model.ranks import Message


@torch.inference_mode()
def follow(model: LoadedModel) -> None:
    """Return when rank 0 has closed its engine.

    Args:
        model: shared by several ranks, this one not being rank 0.

    Raises:
        Exception: whatever failed here; or rank 0 has ended. The process should end as well.
    """
    ranks = model.ranks
    assert ranks is not None, "the model is shared"
    here: _Here | None = None
    while (message := ranks.hear())["do"] != "close":
        if message["do"] == "open":
            here = _open(model, message)
        else:
            assert here is not None, "rank 0 opens first"
            _DO[message["do"]](here, message)
    ranks.leave()


@dataclass(slots=True, eq=False)
class _Here:
    """What this rank has: a part of the model, and pages with its heads of all KV."""

    model: LoadedModel
    pool: PagePool
    filler: PageFiller
    encoder: Encoder
    attention: PagedAttention
    forward: Forward
    sequences: dict[int, PagedSequence] = field(default_factory=dict)


def _open(model: LoadedModel, message: Message) -> _Here:
    pool = PagePool(
        model.geometry,
        pages=message["pages"],
        page_size=message["page_size"],
        dtype=model.dtype,
        device=model.device,
    )
    filler = PageFiller(pool, model.geometry)
    encoder = Encoder(model, tuple(message["sink"]), getattr(torch, message["kv_dtype"]))
    attention = paged_attention(pool, model.geometry)
    return _Here(model, pool, filler, encoder, attention, packed_forward(model, attention))


def _launch(here: _Here, message: Message) -> None:
    for number in message["gone"]:
        here.sequences.pop(number, None)  # its message may never have come
    for new in message["new"]:
        here.sequences[new["number"]] = made(here.pool, new)
    batch = []
    for one in message["rows"]:
        sequence = here.sequences[one["number"]]
        assert sequence.length == one["first"], "every rank has computed the same tokens"
        batch.append(NextTokens(sequence, one["ids"], one["positions"], one["wanted"]))
    here.forward.launch(batch)


def _look(here: _Here, message: Message) -> None:
    sequence = made(here.pool, message["sequence"])
    measure(
        here.model,
        here.attention,
        here.pool,
        sequence,
        message["ids"],
        message["positions"],
        message["layers"],
    )


def _encode(here: _Here, message: Message) -> None:
    ranks = here.model.ranks
    assert ranks is not None, "the model is shared"
    for kv in here.encoder.compute(message["nodes"], message["behind"]):
        ranks.gather_heads(kv)


def _fill(here: _Here, message: Message) -> None:
    fill_heads(here.model, here.filler, None, message)


_DO: dict[str, Callable[[_Here, Message], None]] = {
    "launch": _launch,
    "look": _look,
    "encode": _encode,
    "fill": _fill,
}


def made(pool: PagePool, message: Message) -> PagedSequence:
    """A sequence over the same pages of this rank's pool; see `lead.describe`."""
    nodes = [
        SeenNode(tuple(pages), length, offset, first_row)
        for pages, length, offset, first_row in message["nodes"]
    ]
    pages, positions = tuple(message["pages"]), message["positions"]
    return PagedSequence(pool, nodes, pages, message["capacity"], positions=positions)
