"""Packed passes as CUDA graphs: one a bucket of tokens and set of launches serves every plan.

A pass is three things in line on the device: small arrays from pinned memory (ids, slots, positions
and the plan of attention), the decoder over a bucket of tokens, the head over a bucket of wanted
rows. Only `GraphLaunched.fetch` waits for the device, for its own pass, so that one may be planned
and launched while the one before it still runs. (Whoever reads logits waits for all in line.)

    inputs   int32 [5, bucket]     ids, rows of the choice before, slots, positions, wanted rows
    hidden   [most, hidden_size]   the wanted rows, from the decoder to the head
    choice   int32 [2, rows]       chosen id, and the bits of the largest logit
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lazyrag_kernels.attention import LiveSpan, NodeSpan, RequestRows
from lazyrag_kernels.staging import send
from numpy.typing import NDArray
from torch import Tensor

from lazyrag.engine.attention import TritonAttention
from lazyrag.engine.forward import (
    NextTokens,
    RunningSequence,
    last_rows,
    packed_rows,
    wanted_rows,
)
from lazyrag.engine.sequence import PagedSequence
from lazyrag.model import seam
from lazyrag.model.fused import FusedDecoder
from lazyrag.model.load import LoadedModel

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of captured passes; a longer pass runs as it is."""

CAPTURED_AT = 2
"""How often a kind of pass must have come to be captured, which takes as long as some passes."""

CHOICE_PARTS = 64
"""Parts of the vocabulary in which the likeliest id is looked for."""

WARM_TOKENS = 4096
"""Keys that every request sees in the passes that are captured ahead."""

logger = logging.getLogger("lazyrag")


class GraphLaunched:
    """See `lazyrag.engine.forward.Launched`.

    Args:
        logits: of the wanted rows.
        choice: int32 [2, rows], on the device.
    """

    def __init__(self, logits: Tensor, choice: Tensor) -> None:
        self.logits = logits
        self._choice = choice
        self._copy = torch.empty(choice.shape, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()
        self._begin_copy()

    def _begin_copy(self) -> None:
        self._copy.copy_(self._choice, non_blocking=True)
        self._copied.record()

    @property
    def done(self) -> bool:
        """See `lazyrag.engine.forward.Launched`."""
        return bool(self._copied.query())

    def choose(self, rows: Sequence[int], ids: Tensor) -> None:
        """See `lazyrag.engine.forward.Launched`."""
        with torch.cuda.device(ids.device):
            where = torch.tensor(rows).pin_memory().to(ids.device, non_blocking=True)
            self._choice[0].index_copy_(0, where, ids.int())
            self._begin_copy()

    def fetch(self) -> tuple[list[int], list[float]]:
        """Waits for this pass, not for later ones."""
        self._copied.synchronize()
        ids, top = self._copy
        return ids.tolist(), top.view(torch.float32).tolist()


class GraphForward:
    """Packed passes on one GPU. Not thread-safe: one worker owns it.

    Args:
        model: a loaded checkpoint on a GPU; see `FusedDecoder` for what becomes of it.
        attention: over the pool.
    """

    asynchronous = True
    shared_tokens = 2048

    def __init__(self, model: LoadedModel, attention: TritonAttention) -> None:
        self._model, self._attention, self._device = model, attention, model.device
        self._decoder = FusedDecoder(model.model)
        most, device = BUCKETS[-1], self._device
        self._inputs = torch.zeros(5 * most, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(1, most, dtype=torch.int64, device=device)
        width = model.model.config.hidden_size
        self._hidden = torch.zeros(most, width, dtype=model.dtype, device=device)
        self._head_choice = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: dict[Hashable, int] = {}
        self._captures = True
        self._memory = _new_memory()
        # Of the pass before:
        self._choice = self._head_choice
        self._before: dict[RunningSequence, int] = {}  # rows of the choice
        self._steady: list[tuple[RunningSequence, int]] = []  # requests that decode, and positions
        self._key: Hashable = None
        self._loaded = 0  # number of the plans in the attention
        self._packed: list[tuple[RequestRows, Tensor]] = []  # rows of this pass, and their slots

    def launch(self, batch: Sequence[NextTokens]) -> GraphLaunched:
        """See `lazyrag.engine.forward.Forward`."""
        rows = sum(len(one.positions) for one in batch)
        wanted = sum(one.wanted for one in batch)
        with self._on_device():
            if self._advance(batch, rows) or self._load(batch, rows):
                self._perform(self._key, partial(self._run_decoder, bucket_of(rows)))
                most = bucket_of(wanted)
                logits = self._perform(most, partial(self._run_head, most))[:wanted]
                self._choice = self._head_choice
            else:
                logits = self._run_long(batch, rows, wanted)
            self._before = last_rows(batch)
            return GraphLaunched(logits, self._choice[:, :wanted])

    def warm_up(self) -> None:
        """Compile the layers and capture the usual passes: 15 s, 5 where it was done before.

        Without it passes run as transformers' code does and are captured as they come.
        """
        with self._on_device():
            self._graphs.clear()
            self._memory = _new_memory()  # the other ends with its last graph
            self._decoder.compile()
            try:
                self._capture_ahead(BUCKETS[:2])
            except Exception as error:  # the compiler needs tools that may be missing
                logger.warning("the model's layers are not compiled: %s", error)
                self._decoder.undo_compile()
            self._capture_ahead(BUCKETS)
            self._steady = []

    def probe(self, tolerance: float) -> None:
        """Compare one pass with the model's own layers, over the first page of an empty pool.

        Args:
            tolerance: RMS(error) / RMS(hidden), at most.

        Raises:
            Exception: they differ, or whatever this model or machine cannot do.
        """
        count = 5
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._model.model.config.vocab_size, (1, count), generator=generator)
        ids = ids.to(self._device)
        rows = [(RequestRows(LiveSpan((0,), torch.arange(count), 0)), torch.arange(count))]
        with self._on_device():
            step = self._attention.step(rows)
            expected = seam.hidden_states(self._model.model, ids, step).double()
            actual = self._decoder(ids, self._zeros[:, :count], step).double()
            error = float((actual - expected).square().mean() / expected.square().mean()) ** 0.5
        if not error <= tolerance:
            raise ValueError(f"joined layers differ from the model's own by {error:.1e}")

    # what a pass consists of

    def _advance(self, batch: Sequence[NextTokens], count: int) -> bool:
        """Bring inputs and plans of the pass before to the next token of the same requests."""
        if (
            count != len(self._steady)
            or [(one.sequence, *one.positions) for one in batch]
            != [(sequence, position + 1) for sequence, position in self._steady]
            or not self._attention.advance(self._loaded)
        ):
            return False
        self._steady = [(one.sequence, one.positions[0]) for one in batch]
        bucket = bucket_of(count)
        inputs = self._inputs[: 5 * bucket].view(5, bucket)
        inputs[2:4, :count] += 1
        for one in batch:
            assert isinstance(one.sequence, PagedSequence), "it lies in the pool"
            one.sequence.extend(one.positions[0])
        if all(one.ids is None for one in batch):
            inputs[0, :count] = self._choice[0, :count]
        else:
            send((_pack_ids(batch, self._before, bucket),), self._inputs)
            self._take_chosen(batch, inputs)
        return True

    def _load(self, batch: Sequence[NextTokens], count: int) -> bool:
        """Plan a pass and bring it to the device; False: it is none that is captured."""
        self._packed = packed_rows(batch)
        self._steady = []
        if count > BUCKETS[-1]:
            return False
        bucket = bucket_of(count)
        if not self._place([request for request, _ in self._packed], bucket):
            return False
        slots = [slots for _, slots in self._packed]
        send((_pack(batch, self._before, slots, bucket),), self._inputs)
        self._take_chosen(batch, self._inputs[: 5 * bucket].view(5, bucket))
        if all(len(one.positions) == one.wanted == 1 for one in batch):
            self._steady = [(one.sequence, one.positions[0]) for one in batch]
        return True

    def _place(self, requests: Sequence[RequestRows], bucket: int) -> bool:
        """Load the plan of a captured pass; False: it is larger than captured passes can read."""
        plans = self._attention.plan(requests, bucket)
        if not self._attention.fits(plans):
            return False
        inputs = self._inputs[: 5 * bucket].view(5, bucket)
        self._loaded = self._attention.load(plans, inputs[2], inputs[3], fixed=True)
        self._key = (bucket, *(plan.launches for plan in plans))
        return True

    def _take_chosen(self, batch: Sequence[NextTokens], inputs: Tensor) -> None:
        """Fill in the ids that are known on the device only."""
        if any(one.ids is None for one in batch):
            known = self._choice[0].index_select(0, inputs[1].clamp(min=0))
            inputs[0] = torch.where(inputs[1] >= 0, known, inputs[0])

    def _run_decoder(self, bucket: int) -> Tensor:
        inputs = self._inputs[: 5 * bucket].view(5, bucket)
        hidden = self._decoder(inputs[:1], self._zeros[:, :bucket], self._attention)[0]
        return torch.index_select(hidden, 0, inputs[4], out=self._hidden[:bucket])

    def _run_head(self, rows: int) -> Tensor:
        logits = seam.logits(self._model.model, self._hidden[:rows])
        self._head_choice[:, :rows] = _choose(logits)
        return logits

    def _run_long(self, batch: Sequence[NextTokens], rows: int, wanted: int) -> Tensor:
        """As it is; of the rows that `_load` has made."""
        packed = self._packed
        inputs = torch.empty(5, rows, dtype=torch.int32, device=self._device)
        send((_pack(batch, self._before, [slots for _, slots in packed], rows),), inputs.view(-1))
        self._take_chosen(batch, inputs)
        plans = self._attention.plan([request for request, _ in packed])
        self._attention.load(plans, inputs[2], inputs[3])
        zeros = torch.zeros(1, rows, dtype=torch.int64, device=inputs.device)
        hidden = self._decoder(inputs[:1], zeros, self._attention)[0]
        logits = seam.logits(self._model.model, hidden.index_select(0, inputs[4, :wanted]))
        self._choice = _choose(logits)
        return logits

    # graphs

    def _perform(self, key: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """Replay what was captured as ``key``, or do the work."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        result = work()
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] >= CAPTURED_AT:
            self._capture(key, work)
        return result

    def _capture(self, key: Hashable, work: Callable[[], Tensor]) -> None:
        if not self._captures or key in self._graphs:
            return
        graph: Any = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the GPU.
            capturing: Any = torch.cuda.graph(
                graph, self._memory, capture_error_mode="thread_local"
            )
            with capturing:
                result = work()
        except Exception as error:
            logger.warning("passes are not captured on this GPU: %s", error)
            self._captures = False
        else:
            self._graphs[key] = graph, result

    def _capture_ahead(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            inputs = self._inputs[: 5 * bucket].view(5, bucket)
            inputs.zero_()
            inputs[2] = -1  # nothing is written
            for requests in _usual_requests(bucket, self._attention.page_size):
                self._place(requests, bucket)
                for key, work in (
                    (self._key, partial(self._run_decoder, bucket)),
                    (bucket, partial(self._run_head, bucket)),
                ):
                    if key not in self._graphs:
                        work()
                        self._capture(key, work)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.inference_mode():
            yield


def _new_memory() -> Any:
    """A pool of memory that graphs share: they never run at the same time."""
    make: Any = torch.cuda.graph_pool_handle
    return make()


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds ``rows``."""
    return BUCKETS[bisect_left(BUCKETS, rows)]


def _choose(logits: Tensor) -> Tensor:
    """int32 [2, rows]: the likeliest ids, of equals the lowest, and the bits of their logits."""
    rows, vocab = logits.shape
    parts = CHOICE_PARTS if vocab % CHOICE_PARTS == 0 else 1  # one row alone is one program's work
    tops, inside = logits.view(rows, parts, vocab // parts).max(dim=-1)
    top, part = tops.max(dim=-1, keepdim=True)
    ids = (part * (vocab // parts) + inside.gather(1, part))[:, 0]
    top = top[:, 0].contiguous()
    return torch.stack((ids.int(), top.view(torch.int32)))


def _pack_ids(
    batch: Sequence[NextTokens], before: dict[RunningSequence, int], width: int
) -> NDArray[np.int32]:
    """int32 [2, width]: ids, and rows of the choice before (-1 = none) where they are not known."""
    packed = np.zeros((2, width), np.int32)
    packed[1] = -1
    first = 0
    for one in batch:
        stop = first + len(one.positions)
        if one.ids is None:
            packed[1, first] = before[one.sequence]
        else:
            packed[0, first:stop] = one.ids
        first = stop
    return packed


def _pack(
    batch: Sequence[NextTokens],
    before: dict[RunningSequence, int],
    slots: Sequence[Tensor],
    width: int,
) -> NDArray[np.int32]:
    """int32 [5, width], see the module."""
    packed = np.zeros((5, width), np.int32)
    packed[:2] = _pack_ids(batch, before, width)
    packed[2] = -1
    where, wanted = torch.cat(list(slots)).numpy(), wanted_rows(batch)
    packed[2, : where.size] = where
    packed[3, : where.size] = np.concatenate([one.positions for one in batch])
    packed[4, : len(wanted)] = wanted
    return packed


def _usual_requests(rows: int, page_size: int) -> tuple[list[RequestRows], list[RequestRows]]:
    """A step of ``rows`` answers, and a question of ``rows`` tokens; over the first page."""
    lengths = range(WARM_TOKENS, WARM_TOKENS - rows, -1)  # nodes of one length would be one node
    pages = (0,) * (WARM_TOKENS // page_size)
    one, all_rows = torch.zeros(1, dtype=torch.int64), torch.arange(rows)
    decoding = [
        RequestRows(LiveSpan((0,), one, 0), (NodeSpan(pages, length, 0),)) for length in lengths
    ]
    live = LiveSpan((0,) * -(-rows // page_size), all_rows, 0)
    return decoding, [RequestRows(live, (NodeSpan(pages, WARM_TOKENS, 0),))]
