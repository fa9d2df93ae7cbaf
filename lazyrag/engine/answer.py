"""One request on its way: which tokens come next, and what their logits make of it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import CancelledError

import torch
from torch import Tensor

from lazyrag.engine.forward import NextTokens
from lazyrag.engine.generation import Deliver, FinishReason, Generation, Outcome, Pinned, Scores
from lazyrag.engine.metrics import Metrics
from lazyrag.engine.metrics import Outcome as Ending
from lazyrag.engine.report import NodeStatus, Reason, ReuseReport
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner, Started
from lazyrag.engine.sampling import Sampler
from lazyrag.engine.text_stream import TextStream
from lazyrag.errors import EngineBusyError, RequestError, RequestTimeoutError
from lazyrag.model.load import LoadedModel
from lazyrag.types import Quality

MAX_WANTED = 128
"""Tokens of a given answer that one pass scores, at most."""

_CHOSEN = (Reason.LAST_TOKEN, Reason.FASTER, Reason.CHOSEN)
"""Reasons of nodes that are computed although their KV could be had."""

logger = logging.getLogger("lazyrag")


class Task:
    """A request in line or running; the worker's thread alone changes it.

    One that is no `PassTask` is complete as soon as its nodes are in place.

    Args:
        request: placed and checked.
        deliver: where what comes of it goes.
        metrics: counts what becomes of it.

    Attributes:
        cancelled: set by the reader, from any thread; looked at between forward passes.
        started: its pages, once it has them.
        begun: whether all its KV is in place, and forward passes with it go on.
        arrival: its place in line among those of its priority, once it is in line.
    """

    def __init__(self, request: Request, deliver: Deliver, metrics: Metrics) -> None:
        self.request = request
        self.cancelled = False
        self.started: Started | None = None
        self.begun = False
        self.arrival: int | None = None
        self._deliver = deliver
        self._metrics = metrics
        self._submitted = self._admitted = time.perf_counter()

    def admit(self, started: Started) -> None:
        """It has its pages."""
        self.started = started
        self._admitted = time.perf_counter()

    def begin(self) -> Outcome | None:
        """Its nodes are in place.

        Returns:
            The outcome if that is all it wanted.

        Raises:
            RequestError: ``strict``, and a known node had to be computed.
        """
        assert self.started is not None, "it has its pages"
        self.report = self.request.report(self.started.origins, self.started.reused)
        self._metrics.started(self.report, self._admitted - self._submitted)
        _check_strict(self.request, self.report)
        self.begun = True
        return None

    def conclude(self, outcome: Outcome | BaseException) -> None:
        """Tell the reader that it is over; one that cannot be told is nobody else's trouble."""
        self._metrics.finished(_name_of(outcome))
        try:
            self._deliver(outcome)
        except BaseException:
            logger.exception("the outcome of a request could not be delivered")


class PassTask(Task, ABC):
    """A request that takes part in forward passes once its nodes are in place."""

    _computed = 0

    def begin(self) -> Outcome | None:
        """See `Task`."""
        assert self.started is not None, "it has its pages"
        self._computed = self.started.reused
        return super().begin()

    @property
    @abstractmethod
    def decoding(self) -> bool:
        """Whether it needs one token a pass from here on."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Whether all its tokens were taken; what came of the last ones may still be on its way."""

    @abstractmethod
    def take(self, most: int) -> NextTokens:
        """At most ``most`` tokens for the next forward pass, and at least one."""

    @abstractmethod
    def advance(self, result: int | Tensor) -> Outcome | None:
        """Go on from a pass in which something of the rows taken last was wanted.

        Args:
            result: the token that their sampler has chosen, or fp32 [wanted, vocab].

        Returns:
            The outcome when it is complete, not delivered yet.
        """


class Answer(PassTask):
    """Writes an answer token by token.

    Args:
        request: placed and checked.
        model: for its tokenizer and its end-of-text ids.
        deliver: where the pieces go.
        metrics: counts what becomes of it.
    """

    def __init__(
        self, request: Request, model: LoadedModel, deliver: Deliver, metrics: Metrics
    ) -> None:
        super().__init__(request, deliver, metrics)
        self._model = model
        self._token_ids: list[int] = []
        self._asked = 0  # tokens of the answer that passes have chosen or are about to
        self._last = self._submitted
        self._first: float | None = None

    def begin(self) -> Outcome | None:
        """See `Task`."""
        options = self.request.options
        self._sampler = Sampler(options, self.request.ids, self.request.constraint)
        self._text = TextStream(self._model.tokenizer.decode, options.stop)
        return super().begin()

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self._computed == len(self.request.prompt.live_ids)

    @property
    def exhausted(self) -> bool:
        """See `PassTask`."""
        return self._asked == self.request.new_tokens

    def take(self, most: int) -> NextTokens:
        """See `Task`."""
        assert self.started is not None, "it runs"
        sequence, prompt = self.started.sequence, self.request.prompt
        if self.decoding:
            known = self._asked == len(self._token_ids)
            ids = self._token_ids[-1:] if known else None
            position = prompt.next_position + self._asked - 1
            self._asked += 1
            return NextTokens(sequence, ids, [position], 1, self._sampler)
        chunk = slice(self._computed, self._computed + most)
        self._computed = min(chunk.stop, len(prompt.live_ids))
        self._asked = wanted = int(self.decoding)
        read, positions = prompt.live_ids[chunk], prompt.live_positions[chunk]
        return NextTokens(sequence, read, positions, wanted, self._sampler)

    def advance(self, result: int | Tensor) -> Generation | None:
        """Take the next token and deliver what can be shown of it; see `Task`."""
        token = int(result)
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.first_token(self.request.spent_s + now - self._submitted)
        else:
            self._metrics.next_token(now - self._last)
        self._last = now
        self._token_ids.append(token)
        finish: FinishReason | None = None
        if token in self._model.eos_ids:
            finish = "stop"
        else:
            self._say(self._text.push(token))
            if self._text.stopped or self._sampler.finished:
                finish = "stop"
            elif len(self._token_ids) == self.request.new_tokens:
                finish = "length"
        if finish is None:
            return None
        if not self._text.stopped:
            self._say(self._text.finish())
        return self._generation(finish)

    def _say(self, piece: str) -> None:
        if piece:
            self._deliver(piece)

    def _generation(self, finish: FinishReason) -> Generation:
        report, first = self.report, self._first or self._last
        report.ttft_s = self.request.spent_s + first - self._submitted
        if self._last > first:
            report.decode_tokens_per_s = (len(self._token_ids) - 1) / (self._last - first)
        return Generation(self._text.text, self._token_ids, finish, report)


class Scoring(PassTask):
    """Finds how likely an answer is that is given.

    Args:
        request: its ``new_tokens`` are those of the answer.
        answer: token ids, at least one.
        whole: whether the whole distributions are wanted.
        deliver: where the `Scores` go.
        metrics: counts what becomes of it.
    """

    def __init__(
        self,
        request: Request,
        answer: Sequence[int],
        whole: bool,
        deliver: Deliver,
        metrics: Metrics,
    ) -> None:
        super().__init__(request, deliver, metrics)
        prompt = request.prompt
        after = range(prompt.next_position, prompt.next_position + len(answer) - 1)
        self._answer = answer
        self._whole = whole
        self._ids = (*prompt.live_ids, *answer[:-1])
        self._positions = (*prompt.live_positions, *after)
        self._first_wanted = len(prompt.live_ids) - 1
        self._scores: list[float] = []
        self._distributions: list[Tensor] = []

    @property
    def decoding(self) -> bool:
        """Never: its tokens are known."""
        return False

    @property
    def exhausted(self) -> bool:
        """See `PassTask`."""
        return self._computed == len(self._ids)

    def take(self, most: int) -> NextTokens:
        """See `Task`."""
        assert self.started is not None, "it runs"
        first, stop = self._computed, min(self._computed + most, len(self._ids))
        if stop > self._first_wanted:  # logits of the whole vocabulary take room
            stop = min(stop, max(first, self._first_wanted) + MAX_WANTED)
        self._computed = stop
        wanted = max(0, stop - max(first, self._first_wanted))
        ids, positions = self._ids[first:stop], self._positions[first:stop]
        return NextTokens(self.started.sequence, ids, positions, wanted)

    def advance(self, result: int | Tensor) -> Scores | None:
        """Look the next tokens of the answer up; see `Task`."""
        assert isinstance(result, Tensor), "it has no sampler"
        distributions = result.log_softmax(dim=-1)
        done = len(self._scores)
        answer = self._answer[done : done + len(distributions)]
        chosen = torch.tensor(answer, device=distributions.device)[:, None]
        self._scores += distributions.gather(1, chosen)[:, 0].tolist()
        if self._whole:
            self._distributions.append(distributions.cpu())
        if len(self._scores) < len(self._answer):
            return None
        whole = torch.cat(self._distributions) if self._whole else None
        return Scores(self._scores, self.report, whole)


class Pinning(Task):
    """Brings nodes and keeps them in the pool.

    Args:
        request: of nodes alone.
        runner: holds them.
        deliver: where the `Pinned` goes.
        metrics: counts what becomes of it.
    """

    def __init__(
        self, request: Request, runner: Runner, deliver: Deliver, metrics: Metrics
    ) -> None:
        super().__init__(request, deliver, metrics)
        self._runner = runner

    def begin(self) -> Outcome | None:
        """See `Task`."""
        super().begin()
        assert self.started is not None, "it has its pages"
        self._runner.pin(self.started)
        return Pinned(self.report)


def _name_of(outcome: Outcome | BaseException) -> Ending:
    if isinstance(outcome, Generation):
        return Ending(outcome.finish_reason)
    if isinstance(outcome, Scores | Pinned):
        return Ending.STOP
    if isinstance(outcome, CancelledError):
        return Ending.CANCELLED
    if isinstance(outcome, RequestTimeoutError):
        return Ending.TIMEOUT
    return Ending.REFUSED if isinstance(outcome, EngineBusyError) else Ending.FAILED


def _check_strict(request: Request, report: ReuseReport) -> None:
    if not request.options.strict or request.options.quality is Quality.FULL:
        return
    for node in report.nodes:
        if node.status is NodeStatus.RECOMPUTED and node.reason not in _CHOSEN:
            raise RequestError(
                f"strict: node {node.key} ({node.tokens:,} tokens) had to be computed anew: "
                f"{node.reason}."
            )
