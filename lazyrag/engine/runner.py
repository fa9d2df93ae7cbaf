"""Runs requests: nodes into the pool, prefill of the live text, the decode loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lazyrag.engine.generation import FinishReason, Generation
from lazyrag.engine.materialized import MaterializedSequence
from lazyrag.engine.nodes import NodeLoader, NodePlacer
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import Origin, Reason, ReuseReport, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.sampling import Sampler
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.engine.text_stream import TextStream
from lazyrag.errors import RequestError
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey, Quality

PREFILL_TOKENS = 2048
"""Live tokens of one forward pass: bounds the memory of a long prefill."""
RAW_NODES = 64
"""Nodes whose raw KV the oracle keeps in memory between requests."""
WAIT_S = 120.0
"""How long a request waits for pages that other running requests hold."""


class RunningSequence(Protocol):
    """A request whose KV is in place."""

    def step(self, positions: Sequence[int]) -> seam.AttentionStep:
        """The attention of the next forward pass."""
        ...


@dataclass(slots=True)
class _Started:
    sequence: RunningSequence
    origins: dict[NodeKey, Origin]
    release: Callable[[], None]


class Runner:
    """Takes requests from several threads; each forward pass has the model to itself."""

    def __init__(
        self,
        model: LoadedModel,
        pool: PagePool,
        placer: NodePlacer,
        loader: NodeLoader,
        lock: threading.RLock,
    ) -> None:
        self._model = model
        self._pool = pool
        self._placer = placer
        self._loader = loader
        self._lock = lock
        self._pages_came_back = threading.Condition(lock)
        self._raw: dict[NodeKey, StoredKV] = {}

    def check_fits(self, request: Request) -> None:
        """Refuse what the pool could not hold even when empty.

        Raises:
            RequestError: says what is needed and what there is.
        """
        if request.options.quality is Quality.MATERIALIZED:
            return
        nodes = {node.run.key: len(node.run.ids) for node in request.prompt.nodes}
        live = len(request.prompt.live_ids) + request.new_tokens
        pages = sum(self._pool.pages_for(tokens) for tokens in (live, *nodes.values()))
        if pages * self._pool.page_size > self._pool.capacity:
            raise RequestError(
                f"the request needs KV of {pages * self._pool.page_size:,} tokens, the pool holds "
                f"{self._pool.capacity:,}. Retrieve fewer nodes or give the engine more pool_bytes."
            )

    def drop(self, keys: Iterable[NodeKey]) -> None:
        """Forget nodes that are in memory and not in use."""
        with self._lock:
            for key in keys:
                self._pool.drop(key)
                self._raw.pop(key, None)

    @torch.inference_mode()
    def run(self, request: Request) -> Generator[str, None, Generation]:
        """Yield pieces of text as they are safe to show; return the generation."""
        begun = time.perf_counter()
        started = self._begin(request)
        try:
            report = request.report(started.origins)
            _check_strict(request, report)
            generation = yield from self._decode(request, started.sequence, report, begun)
            return generation
        finally:
            self._end(started)

    @torch.inference_mode()
    def score(self, request: Request, answer: Sequence[int]) -> list[float]:
        """Log-probability of each id of ``answer``, given the prompt and the ids before it."""
        started = self._begin(request)
        try:
            first = self._prefill(request, started.sequence)[None]
            start = request.prompt.next_position
            positions = range(start, start + len(answer) - 1)
            rest = self._forward(answer[:-1], positions, started.sequence, rows=len(answer) - 1)
            scores = torch.cat((first, rest)).log_softmax(dim=-1)
            chosen = torch.tensor(answer, device=scores.device)[:, None]
            result: list[float] = scores.gather(1, chosen)[:, 0].tolist()
            return result
        finally:
            self._end(started)

    def _end(self, started: _Started) -> None:
        with self._lock:
            started.release()
            self._pages_came_back.notify_all()

    def _begin(self, request: Request) -> _Started:
        if request.options.quality is Quality.MATERIALIZED:
            return self._begin_materialized(request)
        deadline = time.perf_counter() + WAIT_S
        if request.deadline is not None:
            deadline = min(deadline, request.deadline)
        origins: dict[NodeKey, Origin] = {}
        with self._lock:
            while (started := self._try_begin(request, origins)) is None:
                if not self._pages_came_back.wait(deadline - time.perf_counter()):
                    request.check_time()
                    raise RequestError(
                        "the KV pool is still full of other running requests after "
                        f"{WAIT_S:.0f} s. Close streams you no longer read, or give the engine "
                        "more pool_bytes."
                    )
            return started

    def _try_begin(self, request: Request, origins: dict[NodeKey, Origin]) -> _Started | None:
        prompt, pool = request.prompt, self._pool
        held = self._placer.acquire((node.run for node in prompt.nodes), origins)
        if held is None:
            return None
        capacity = len(prompt.live_ids) + request.new_tokens
        live_pages = pool.allocate(capacity)
        if live_pages is None:
            for key in held:
                pool.leave(key)
            return None
        nodes = [
            SeenNode(held[node.run.key].pages, node.run.used, node.offset, node.first_row)
            for node in prompt.nodes
        ]
        sequence = PagedSequence(pool, self._model.geometry, nodes, live_pages, capacity)

        def release() -> None:
            pool.release(live_pages)
            for key in held:
                pool.leave(key)

        return _Started(sequence, origins, release)

    def _begin_materialized(self, request: Request) -> _Started:
        origins: dict[NodeKey, Origin] = {}
        with self._lock:
            raw: dict[NodeKey, StoredKV] = {}
            for node in request.prompt.nodes:
                key = node.run.key
                if key in raw:
                    continue
                kept = self._raw.pop(key, None)
                if kept is None:
                    raw[key], origins[key] = self._loader.load(node.run)
                else:
                    raw[key], origins[key] = kept, Origin(Tier.DEVICE, kept.nbytes)
            self._raw = dict(list({**self._raw, **raw}.items())[-RAW_NODES:])
            sequence = MaterializedSequence(
                self._model.geometry,
                request.prompt,
                [raw[node.run.key] for node in request.prompt.nodes],
                request.new_tokens,
                self._model.dtype,
                self._model.device,
            )
        return _Started(sequence, origins, lambda: None)

    def _decode(
        self, request: Request, sequence: RunningSequence, report: ReuseReport, begun: float
    ) -> Generator[str, None, Generation]:
        sampler = Sampler(request.options, request.ids, request.constraint)
        stream = TextStream(self._model.tokenizer.decode, request.options.stop)
        logits = self._prefill(request, sequence)
        position = request.prompt.next_position
        token_ids: list[int] = []
        finish: FinishReason = "length"
        decoding = 0.0  # seconds, without what the reader does between pieces
        while True:
            token = sampler.next(logits)
            token_ids.append(token)
            if report.ttft_s is None:
                report.ttft_s = request.recognise_s + time.perf_counter() - begun
            else:
                decoding += time.perf_counter() - begun
            if token in self._model.eos_ids:
                finish = "stop"
                break
            yield stream.push(token)
            if stream.stopped or sampler.finished:
                finish = "stop"
                break
            if len(token_ids) == request.new_tokens:
                break
            begun = time.perf_counter()
            request.check_time()
            logits = self._forward([token], [position], sequence)[0]
            position += 1
        if decoding:
            report.decode_tokens_per_s = (len(token_ids) - 1) / decoding
        if not stream.stopped:
            yield stream.finish()
        return Generation(stream.text, token_ids, finish, report)

    def _prefill(self, request: Request, sequence: RunningSequence) -> torch.Tensor:
        ids, positions = request.prompt.live_ids, request.prompt.live_positions
        logits = torch.empty(0)
        for first in range(0, len(ids), PREFILL_TOKENS):
            request.check_time()
            chunk = slice(first, first + PREFILL_TOKENS)
            logits = self._forward(ids[chunk], positions[chunk], sequence)[0]
        return logits

    def _forward(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sequence: RunningSequence,
        rows: int = 1,
    ) -> torch.Tensor:
        """Scores [rows, vocab] behind the last ``rows`` of ``ids``."""
        if not ids:
            return torch.empty(0, self._model.model.config.vocab_size, device=self._model.device)
        with self._lock:
            tokens = torch.tensor([ids], dtype=torch.int64, device=self._model.device)
            hidden = seam.hidden_states(self._model.model, tokens, sequence.step(positions))
            return seam.logits(self._model.model, hidden[0, -rows:])


def _check_strict(request: Request, report: ReuseReport) -> None:
    anew = [node for node in report.nodes if node.reason not in (None, Reason.LAST_TOKEN)]
    if not request.options.strict or request.options.quality is Quality.FULL or not anew:
        return
    node = anew[0]
    raise RequestError(
        f"strict: node {node.key} ({node.tokens:,} tokens) had to be computed anew: {node.reason}."
    )
