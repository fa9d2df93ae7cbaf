"""A generation that runs in a thread of its own while the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from lazyrag.engine.generation import Generation, GenerationStream

OpenStream = Callable[[], GenerationStream]


async def iterate_in_thread(open_stream: OpenStream) -> AsyncGenerator[str | Generation, None]:
    """Every delta of the stream, then its `Generation`.

    The stream is opened and read in one worker thread. Leaving early (cancellation, ``aclose``)
    closes it: the request ends after the forward pass it is in, also before its first text.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[str | Generation | BaseException] = asyncio.Queue()
    left = threading.Event()
    opened: list[GenerationStream] = []

    def deliver(item: str | Generation | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, item)
        except RuntimeError:  # the loop was closed, nobody reads on
            left.set()

    def work() -> None:
        try:
            with open_stream() as stream:
                opened.append(stream)
                if left.is_set():
                    return
                for delta in stream:
                    if left.is_set():
                        return
                    deliver(delta)
                deliver(stream.result)
        except BaseException as error:
            deliver(error)

    threading.Thread(target=work, name="lazyrag-generate", daemon=True).start()
    try:
        while True:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if not isinstance(item, str):
                return
    finally:
        left.set()
        for stream in opened:
            stream.close()


async def run_in_thread(open_stream: OpenStream) -> Generation:
    """The whole answer; cancelling stops the work after the step it is in."""
    async with aclosing(iterate_in_thread(open_stream)) as items:
        async for item in items:
            if not isinstance(item, str):
                return item
    raise RuntimeError("a generation ended without a result")
