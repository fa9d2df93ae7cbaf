"""One packed pass: the next tokens of several requests in, logits and the tokens after them out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from lazyrag_kernels.attention import RequestRows
from torch import Tensor

from lazyrag.engine.attention import PagedAttention, TritonAttention
from lazyrag.engine.materialized import MaterializedSequence
from lazyrag.engine.sampling import Sampler
from lazyrag.engine.sequence import PagedSequence
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel

PROBE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest RMS(error) / RMS(hidden) between joined layers and the model's own."""

logger = logging.getLogger("lazyrag")


RunningSequence = PagedSequence | MaterializedSequence


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The next tokens of one request.

    Attributes:
        sequence: where its KV lies.
        ids: the tokens; None = one, that which was chosen after the last row of this request in
            the pass before, which need not have been fetched from the device.
        positions: of the tokens.
        wanted: of how many last tokens the logits are wanted, 0 or more.
        sampler: chooses what follows the last token; None = the logits themselves are wanted.
    """

    sequence: RunningSequence
    ids: Sequence[int] | None
    positions: Sequence[int]
    wanted: int = 1
    sampler: Sampler | None = None


class Launched(Protocol):
    """A pass on its way. What it has chosen may be fetched once another one has been launched."""

    logits: Tensor
    """fp32 [sum of wanted, vocab] on the device; those of a captured pass until the next one."""

    @property
    def done(self) -> bool:
        """Whether fetching waits for nothing."""
        ...

    def choose(self, rows: Sequence[int], ids: Tensor) -> None:
        """Let other ids than the likeliest follow some rows; before another pass is launched.

        Args:
            rows: of the logits.
            ids: integers [rows], on the device.
        """
        ...

    def fetch(self) -> tuple[list[int], list[float]]:
        """Of each row of the logits the id that was chosen, and the largest logit.

        The likeliest id, of equals the lowest, where `choose` has said nothing else.
        """
        ...


class Forward(Protocol):
    """Runs packed passes over one pool."""

    @property
    def asynchronous(self) -> bool:
        """Whether passes are only begun when `launch` returns."""
        ...

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens of a pass for which answers that are being written may be let wait."""
        ...

    def launch(self, batch: Sequence[NextTokens]) -> Launched:
        """Start one pass; a request stands in it once, and none of `Quality.MATERIALIZED`."""
        ...

    def warm_up(self) -> None:
        """Do what makes later passes faster, where there is something; may take a minute."""
        ...


class EagerLaunched:
    """See `Launched`; it is done."""

    done = True

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._top, self._ids = logits.max(dim=-1)

    def choose(self, rows: Sequence[int], ids: Tensor) -> None:
        """See `Launched`."""
        self._ids[list(rows)] = ids

    def fetch(self) -> tuple[list[int], list[float]]:
        """See `Launched`."""
        return self._ids.tolist(), self._top.tolist()


class EagerForward:
    """transformers, layer by layer; on any device.

    Args:
        model: a loaded checkpoint.
        attention: over the pool.
    """

    asynchronous = False
    shared_tokens = 256

    def __init__(self, model: LoadedModel, attention: PagedAttention) -> None:
        self._model = model
        self._attention = attention
        self._before: dict[RunningSequence, int] = {}
        self._launched: Launched | None = None

    def launch(self, batch: Sequence[NextTokens]) -> Launched:
        """See `Forward`."""
        ids = [id for one in batch for id in self._ids(one)]
        step = self._attention.step(packed_rows(batch))
        launched = EagerLaunched(run(self._model, ids, step, wanted_rows(batch)))
        self._before, self._launched = last_rows(batch), launched
        return launched

    def warm_up(self) -> None:
        """See `Forward`: nothing to do."""

    def _ids(self, one: NextTokens) -> Sequence[int]:
        if one.ids is not None:
            return one.ids
        assert self._launched is not None, "there was a pass before"
        return [self._launched.fetch()[0][self._before[one.sequence]]]


def run(
    model: LoadedModel, ids: Sequence[int], step: seam.AttentionStep, wanted: Sequence[int]
) -> Tensor:
    """Logits fp32 [len(wanted), vocab] of some rows of a pass."""
    tokens = torch.tensor([ids], dtype=torch.int64, device=model.device)
    hidden = seam.hidden_states(model.model, tokens, step)[0]
    index = torch.tensor(wanted, dtype=torch.int64, device=hidden.device)
    return seam.logits(model.model, hidden[index])


def packed_forward(model: LoadedModel, attention: PagedAttention) -> Forward:
    """The fastest there is for this device and model."""
    alone = model.ranks is None  # the twin of the layers knows of no other ranks
    if not (alone and model.device.type == "cuda" and isinstance(attention, TritonAttention)):
        return EagerForward(model, attention)
    try:
        from lazyrag.engine.graphs import GraphForward

        forward = GraphForward(model, attention)
        forward.probe(PROBE_TOLERANCE[model.dtype])
        return forward
    except Exception as error:  # an unusual layer, too little memory, ...
        logger.warning("passes run as transformers does on this GPU: %s", error)
        return EagerForward(model, attention)


def packed_rows(batch: Sequence[NextTokens]) -> list[tuple[RequestRows, Tensor]]:
    """Query rows and slots of a pass over the pool, counted as tokens of their requests."""
    rows = []
    for one in batch:
        assert isinstance(one.sequence, PagedSequence), "it lies in the pool"
        rows.append(one.sequence.rows(one.positions))
    return rows


def wanted_rows(batch: Sequence[NextTokens]) -> list[int]:
    """Rows of the pass whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for one in batch:
        end += len(one.positions)
        rows += range(end - one.wanted, end)
    return rows


def last_rows(batch: Sequence[NextTokens]) -> dict[RunningSequence, int]:
    """Of each request whose logits are wanted the last row among them."""
    rows: dict[RunningSequence, int] = {}
    end = 0
    for one in batch:
        end += one.wanted
        if one.wanted:
            rows[one.sequence] = end - 1
    return rows
