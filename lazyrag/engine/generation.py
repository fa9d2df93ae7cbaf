"""What a request returns: an answer at once, or a stream of its text."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from lazyrag.engine.report import ReuseReport
from lazyrag.errors import RequestError

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


class GenerationStream(Iterator[str]):
    """The answer piece by piece; the work is done as the caller asks for it.

    Every delta is non-empty and whole in UTF-8; all deltas together are ``result.text``. Closing
    (or leaving the ``with`` block) stops the work and gives everything back.
    """

    def __init__(self, work: Generator[str, None, Generation]) -> None:
        self._work = work
        self._result: Generation | None = None
        self._reading = threading.Lock()
        self._closed = False

    def __next__(self) -> str:
        with self._reading:
            while not self._closed:
                try:
                    delta = next(self._work)
                except StopIteration as stop:
                    self._closed = True
                    self._result = stop.value
                    break
                if delta and not self._closed:
                    return delta
            self._work.close()
        raise StopIteration

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

        A step that is just being computed is finished first, by the thread that reads.
        """
        self._closed = True
        if self._reading.acquire(blocking=False):
            try:
                self._work.close()
            finally:
                self._reading.release()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
