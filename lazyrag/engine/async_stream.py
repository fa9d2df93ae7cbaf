"""An answer piece by piece for a reader in an event loop, without a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError

from lazyrag.engine.generation import Cancellable, Delivery, Generation, GenerationStream
from lazyrag.errors import RequestError

OpenStream = Callable[[], GenerationStream]
"""Reads and checks the prompt; raises what is wrong with the request."""
InThread = Callable[[Callable[[], None]], object]
"""Runs a function in some other thread, soon; returns at once."""


class AsyncGenerationStream(AsyncIterator[str]):
    """The answer piece by piece; the work begins when the first piece is asked for.

    Every delta is non-empty and whole in UTF-8; all deltas together are ``result.text``. Closing,
    leaving the ``async with`` block and cancelling a task that waits for a piece stop the work
    before its next forward pass and give everything back. It belongs to the event loop in which it
    is first read. Pieces that were not taken yet are kept, at most one for each token.

    Args:
        open_stream: called in another thread, since reading a prompt takes milliseconds.
        in_thread: runs it there.
    """

    def __init__(self, open_stream: OpenStream, in_thread: InThread) -> None:
        self._open_stream = open_stream
        self._in_thread = in_thread
        self._bridge: _Bridge | None = None
        self._result: Generation | None = None
        self._closed = False

    async def __anext__(self) -> str:
        """The next piece.

        Raises:
            RequestError: the request cannot be served, its time is up, or the engine was closed.
            LazyRagError: the engine's worker failed.
        """
        piece = await self._receive(whole=False)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def read(self) -> Generation:
        """Read to the end; the whole answer. The loop is woken once when no piece was read before.

        Raises:
            RequestError: as for a piece; also when the stream was closed before its end.
            LazyRagError: the engine's worker failed.
        """
        while await self._receive(whole=True) is not None:
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

    async def aclose(self) -> None:
        """Stop; waits for nothing, and is safe to call more than once."""
        self._leave()
        if self._bridge is not None:
            self._bridge.arrived.put_nowait(CancelledError())  # wakes another task that reads

    async def _receive(self, *, whole: bool) -> str | None:
        """The next piece, None at the end; ``whole``: pieces are not wanted if none was so far."""
        if self._closed:
            return None
        try:
            if self._bridge is None:
                self._bridge = _Bridge(whole)
                bridge, open_stream = self._bridge, self._open_stream
                self._in_thread(lambda: bridge.begin(open_stream))
            delivery = await self._bridge.arrived.get()
        except BaseException:
            self._leave()
            raise
        if isinstance(delivery, str):
            return delivery
        self._closed = True
        self._bridge.arrived.put_nowait(delivery)  # for another task that reads
        if isinstance(delivery, Generation):
            self._result = delivery
        elif isinstance(delivery, BaseException) and not isinstance(delivery, CancelledError):
            raise delivery
        return None

    def _leave(self) -> None:
        self._closed = True
        if self._bridge is not None:
            self._bridge.leave()

    def __del__(self) -> None:
        self._leave()

    async def __aenter__(self) -> AsyncGenerationStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Bridge:
    """Carries one answer from the worker's thread into the running event loop.

    The worker holds it, so it must not hold the stream: one that nobody holds is to be collected.

    Args:
        whole: leave the pieces behind, carry only what the request comes to.
    """

    def __init__(self, whole: bool) -> None:
        self.arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._whole = whole
        self._answer: Cancellable | None = None
        self._left = False

    def begin(self, open_stream: OpenStream) -> None:
        """Called in a thread: read the prompt and put the request in line."""
        if self._left:
            return
        try:
            self._answer = open_stream().hand_over(self.deliver)
        except BaseException as error:
            self.deliver(error)
            return
        if self._left:  # while the prompt was read, before there was anything to cancel
            self._answer.cancelled = True

    def deliver(self, delivery: Delivery) -> None:
        """Called in the worker's thread; never blocks and never fails."""
        if self._left:
            return
        try:
            if not self._whole or not isinstance(delivery, str):
                self._loop.call_soon_threadsafe(self.arrived.put_nowait, delivery)
            elif self._loop.is_closed():
                self.leave()
        except RuntimeError:  # the loop was closed, nobody reads on
            self.leave()

    def leave(self) -> None:
        """Nobody reads on: stop the work. Called in any thread."""
        self._left = True
        if self._answer is not None:
            self._answer.cancelled = True
