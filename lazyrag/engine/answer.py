"""One answer on its way: which tokens come next, and what their logits make of it."""

from __future__ import annotations

import logging
import time

from torch import Tensor

from lazyrag.engine.generation import Deliver, FinishReason, Generation
from lazyrag.engine.report import NodeStatus, Reason, ReuseReport
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Rows, Started
from lazyrag.engine.sampling import Sampler
from lazyrag.engine.text_stream import TextStream
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.types import Quality

logger = logging.getLogger("lazyrag")


class Answer:
    """The state of one running request; the worker's thread alone changes it.

    Args:
        request: placed and checked.
        model: for its tokenizer and its end-of-text ids.
        deliver: where the pieces go.

    Attributes:
        cancelled: set by the reader, from any thread; looked at between forward passes.
        started: its KV, once it runs.
    """

    def __init__(self, request: Request, model: LoadedModel, deliver: Deliver) -> None:
        self.request = request
        self.cancelled = False
        self.started: Started | None = None
        self._model = model
        self._deliver = deliver
        self._prefilled = 0
        self._token_ids: list[int] = []
        self._submitted = self._last = time.perf_counter()
        self._first: float | None = None

    def begin(self, started: Started) -> None:
        """Its nodes and pages are in place.

        Raises:
            RequestError: ``strict``, and a known node had to be computed.
        """
        self.started = started
        self._report = self.request.report(started.origins)
        _check_strict(self.request, self._report)
        options = self.request.options
        self._sampler = Sampler(options, self.request.ids, self.request.constraint)
        self._text = TextStream(self._model.tokenizer.decode, options.stop)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self._prefilled == len(self.request.prompt.live_ids)

    def take(self, most: int) -> Rows:
        """At most ``most`` tokens for the next forward pass, and their positions."""
        assert self.started is not None, "it runs"
        sequence, prompt = self.started.sequence, self.request.prompt
        if self.decoding:
            position = prompt.next_position + len(self._token_ids) - 1
            return sequence, self._token_ids[-1:], [position]
        chunk = slice(self._prefilled, self._prefilled + most)
        self._prefilled = min(chunk.stop, len(prompt.live_ids))
        return sequence, prompt.live_ids[chunk], prompt.live_positions[chunk]

    def advance(self, logits: Tensor) -> Generation | None:
        """Choose the next token and deliver what can be shown of it.

        Args:
            logits: [vocab], behind the last token of the prompt or of the answer.

        Returns:
            The whole answer when it is complete, not delivered yet.
        """
        token = self._sampler.next(logits)
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
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

    def conclude(self, outcome: Generation | BaseException) -> None:
        """Tell the reader that it is over; one that cannot be told is nobody else's trouble."""
        try:
            self._deliver(outcome)
        except BaseException:
            logger.exception("the outcome of a request could not be delivered")

    def _say(self, piece: str) -> None:
        if piece:
            self._deliver(piece)

    def _generation(self, finish: FinishReason) -> Generation:
        report, first = self._report, self._first or self._last
        report.ttft_s = self.request.recognise_s + first - self._submitted
        if self._last > first:
            report.decode_tokens_per_s = (len(self._token_ids) - 1) / (self._last - first)
        return Generation(self._text.text, self._token_ids, finish, report)


def _check_strict(request: Request, report: ReuseReport) -> None:
    if not request.options.strict or request.options.quality is Quality.FULL:
        return
    for node in report.nodes:
        if node.status is NodeStatus.RECOMPUTED and node.reason is not Reason.LAST_TOKEN:
            raise RequestError(
                f"strict: node {node.key} ({node.tokens:,} tokens) had to be computed anew: "
                f"{node.reason}."
            )
