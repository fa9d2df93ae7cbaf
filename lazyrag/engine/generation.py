"""What a request returns: an answer at once, or a stream of its text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, Protocol

from torch import Tensor

from lazyrag.engine.report import Origin, ReuseReport
from lazyrag.errors import RequestError
from lazyrag.types import NodeKey

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens, stop strings and what would follow them.
        token_ids: every generated id, the end-of-text id included.
        finish_reason: ``stop`` (end of text, a stop string or a complete JSON value) or ``length``.
        report: what was reused and what was not.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely a given answer is.

    Attributes:
        log_probabilities: natural, of each token of the answer, given all before it.
        report: what was reused and what was not.
        distributions: fp32 [tokens, vocab], log-probabilities of every token there; None unless
            asked for.
    """

    log_probabilities: list[float]
    report: ReuseReport
    distributions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """Nodes are in the pool and stay there.

    Attributes:
        report: where they came from.
    """

    report: ReuseReport


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """What a question attends to.

    Attributes:
        masses: by layer fp32 [q_heads, rows, nodes], see `lazyrag.engine.mass.MassStep`; None = the
            pool had no room.
        origins: where the nodes came from.
    """

    masses: dict[int, Tensor] | None
    origins: Mapping[NodeKey, Origin]


Outcome = Generation | Scores | Pinned | Looked
"""What comes of a request."""
Delivery = str | Outcome | BaseException
Deliver = Callable[[Delivery], None]
"""Takes the pieces of an answer, then its outcome or what went wrong; must not block."""


class Cancellable(Protocol):
    """A request in line or running; set ``cancelled`` and it ends before its next forward pass."""

    cancelled: bool


class GenerationStream(Iterator[str]):
    """The answer piece by piece; the work begins when the first piece is asked for.

    Every delta is non-empty and whole in UTF-8; all deltas together are ``result.text``. Closing
    (or leaving the ``with`` block) stops the work and gives everything back.
    """

    def __init__(self, submit: Callable[[Deliver], Cancellable]) -> None:
        self._submit = submit
        self._task: Cancellable | None = None
        self._peeked: Delivery | None = None
        self._pieces: SimpleQueue[Delivery] = SimpleQueue()
        self._result: Generation | None = None
        self._closed = False
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Begin the work now; asking for the first piece does so, too."""
        with self._beginning:
            if self._task is None and not self._closed:
                self._task = self._submit(self._pieces.put)

    def wait_for_piece(self) -> None:
        """Begin, and return when there is something to read.

        Raises:
            BaseException: it went wrong before there was.
        """
        self.begin()
        if not self._closed and self._peeked is None:
            self._peeked = self._pieces.get()
            if isinstance(self._peeked, BaseException):
                raise self._peeked

    def __next__(self) -> str:
        self.begin()
        while not self._closed:
            piece, self._peeked = self._peeked, None
            if piece is None:
                piece = self._pieces.get()
            if isinstance(piece, str):
                return piece
            self._closed = True
            self._pieces.put(piece)  # for another thread that reads
            if isinstance(piece, Generation):
                self._result = piece
            elif isinstance(piece, BaseException) and not isinstance(piece, CancelledError):
                raise piece
        raise StopIteration

    def hand_over(self, deliver: Deliver) -> Cancellable:
        """Begin the work for another reader, which gets every piece and may cancel it.

        The stream itself is over with that: it gives nothing, and closing it stops nothing.

        Raises:
            RequestError: the stream has begun or was closed; or the engine was.
        """
        with self._beginning:
            if self._closed or self._task is not None:
                raise RequestError("a stream that has begun or was closed cannot be handed over.")
            self._closed = True
            return self._submit(deliver)

    def read(self) -> Generation:
        """Read to the end; the whole answer."""
        for _ in self:
            pass
        return self.result

    @property
    def result(self) -> Generation:
        """The whole answer and its report.

        Raises:
            RequestError: the stream was not read to its end.
        """
        if self._result is None:
            raise RequestError("the stream has no result yet: read it to its end first.")
        return self._result

    def close(self) -> None:
        """Stop; safe to call more than once, and while another thread reads.

        A forward pass that is just being computed is finished first.
        """
        with self._beginning:
            self._closed = True
            if self._task is not None:
                self._task.cancelled = True
        self._pieces.put(CancelledError())  # wakes a thread that reads

    def __del__(self) -> None:
        if not self._closed:
            self.close()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
