"""The engine for programs on asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lazyrag.engine.async_stream import AsyncGenerationStream, OpenStream
from lazyrag.engine.engine import Engine
from lazyrag.engine.generation import Generation
from lazyrag.engine.metrics import EngineStats
from lazyrag.engine.progress import token_bar
from lazyrag.errors import RequestError
from lazyrag.types import GenerationOptions, NodeKey, NodeText, Prompt, Quality, Reference

READERS = 4
"""Threads that read prompts. What they do is mostly Python, so more of them do not read faster."""

Progress = Callable[[int, int], None]


class AsyncEngine:
    """One `Engine` with its methods as coroutines; the event loop never waits for it.

    Same model, same worker, same answers. It may be used from several event loops at once, beside
    the engine itself. Cancelling an await of `generate` or `chat`, or a task that reads a stream,
    stops the request before its next forward pass. Every other call runs in a thread of the event
    loop's default executor, and cancelling stops it as its method says.

    Args:
        engine: to be used; `close` closes it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="lazyrag-read")
        self._closed = False

    @classmethod
    async def from_pretrained(cls, model: str | os.PathLike[str], **settings: Any) -> AsyncEngine:
        """As `Engine.from_pretrained`, loading in a thread.

        Raises:
            ModelError: the model cannot be loaded, is not supported or fails the self-check.
            StoreError: the store cannot be opened.
        """
        return cls(await asyncio.to_thread(Engine.from_pretrained, model, **settings))

    @classmethod
    async def shared(cls, model: str | os.PathLike[str], **settings: Any) -> AsyncEngine:
        """As `Engine.shared`, loading in a thread; the engine may have other users.

        Raises:
            ModelError: the model cannot be loaded, is not supported or fails the self-check.
            StoreError: the store cannot be opened.
        """
        return cls(await asyncio.to_thread(Engine.shared, model, **settings))

    @property
    def engine(self) -> Engine:
        """The engine underneath: what it is, and what needs no waiting for."""
        return self._engine

    # generation

    async def generate(
        self, prompt: Prompt, options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """As `Engine.generate`.

        Raises:
            RequestError: the request cannot be served, its time is up, too many others wait, or the
                engine was closed.
            LazyRagError: the engine's worker failed.
        """
        async with self.stream(prompt, options, **overrides) as stream:
            return await stream.read()

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: GenerationOptions | None = None,
        **overrides: Any,
    ) -> Generation:
        """As `Engine.chat`.

        Raises:
            RequestError, LazyRagError: as `generate`; also when the template refuses the messages.
        """
        async with self.stream_chat(messages, options, **overrides) as stream:
            return await stream.read()

    def stream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **overrides: Any
    ) -> AsyncGenerationStream:
        """As `generate`, piece by piece. Errors of the request are raised by the first piece."""
        return self._stream(lambda: self._engine.stream(prompt, options, **overrides))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: GenerationOptions | None = None,
        **overrides: Any,
    ) -> AsyncGenerationStream:
        """As `chat`, piece by piece. Errors of the request are raised by the first piece."""
        return self._stream(lambda: self._engine.stream_chat(messages, options, **overrides))

    async def sample(
        self, prompt: Prompt, n: int, options: GenerationOptions | None = None, **overrides: Any
    ) -> list[Generation]:
        """As `Engine.sample`. Cancelled, it is computed to its end and dropped.

        Raises:
            RequestError, LazyRagError: as `generate`.
        """
        return await asyncio.to_thread(self._engine.sample, prompt, n, options, **overrides)

    async def score(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        answer: str,
        *,
        quality: Quality | str | None = None,
    ) -> list[float]:
        """As `Engine.score`. Cancelled, it is computed to its end and dropped.

        Raises:
            RequestError: the answer is empty, or prompt and answer do not fit.
        """
        return await asyncio.to_thread(self._engine.score, prompt, answer, quality=quality)

    # ingestion

    async def precompute(
        self, texts: Iterable[str | NodeText], *, progress: Progress | bool = False
    ) -> list[NodeKey]:
        """As `Engine.precompute`. Cancelled, it stops after the batch of nodes it is at.

        Args:
            texts: read in another thread.
            progress: called in that thread.

        Raises:
            RequestError: a text is empty or too long, or its reference is not valid; names which.
            StoreError: the disk cannot hold it.
        """
        left = threading.Event()
        try:
            return await asyncio.to_thread(self._precompute, texts, progress, left)
        finally:
            left.set()

    async def register(self, texts: Iterable[str | NodeText]) -> int:
        """As `Engine.register`. Cancelled, it is done all the same.

        Raises:
            RequestError: a reference has no owner or no name; names which.
            StoreError: the store's index cannot be read or written.
        """
        return await asyncio.to_thread(self._engine.register, texts)

    async def release(
        self, references: Iterable[Reference], keep: Iterable[str | NodeText] = ()
    ) -> int:
        """As `Engine.release`. Cancelled, it is done all the same.

        Raises:
            RequestError: a reference has no owner or no name.
            StoreError: the store's index cannot be written; nothing was dropped.
        """
        return await asyncio.to_thread(self._engine.release, references, keep)

    async def pin(self, nodes: Iterable[str | NodeKey]) -> None:
        """As `Engine.pin`. Cancelled, it is done all the same.

        Raises:
            RequestError: a node is not known or too long, or there is no room for all.
        """
        await asyncio.to_thread(self._engine.pin, nodes)

    async def unpin(self, nodes: Iterable[str | NodeKey]) -> None:
        """As `Engine.unpin`. Cancelled, it is done all the same.

        Raises:
            RequestError: one is not pinned; nothing changed.
        """
        await asyncio.to_thread(self._engine.unpin, nodes)

    # life

    async def warm_up(self) -> None:
        """As `Engine.warm_up`. Cancelled, it is done all the same."""
        await asyncio.to_thread(self._engine.warm_up)

    def stats(self) -> EngineStats:
        """As `Engine.stats`: what was done so far and how things stand; takes microseconds."""
        return self._engine.stats()

    async def flush(self) -> None:
        """As `Engine.flush`. Cancelled, what was computed is stored all the same."""
        await asyncio.to_thread(self._engine.flush)

    async def close(self) -> None:
        """Close the engine. What runs and waits ends with a RequestError at its await."""
        self._closed = True
        await asyncio.to_thread(self._engine.close)
        self._readers.shutdown(wait=False)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stream(self, open_stream: OpenStream) -> AsyncGenerationStream:
        return AsyncGenerationStream(open_stream, self._read_in_thread)

    def _read_in_thread(self, read: Callable[[], None]) -> None:
        try:
            self._readers.submit(read)
        except RuntimeError:
            if not self._closed:
                raise
            raise RequestError("this engine is closed.") from None

    def _precompute(
        self, texts: Iterable[str | NodeText], progress: Progress | bool, left: threading.Event
    ) -> list[NodeKey]:
        def stop_or(report: Progress) -> Progress:
            def batch_done(done: int, total: int) -> None:
                if left.is_set():
                    raise asyncio.CancelledError
                report(done, total)

            return batch_done

        if callable(progress):
            return self._engine.precompute(texts, progress=stop_or(progress))
        if progress:
            with token_bar("encoding") as bar:
                return self._engine.precompute(texts, progress=stop_or(bar))
        if not isinstance(texts, str):  # a sequence would be measured for a total nobody sees
            texts = iter(texts)
        return self._engine.precompute(texts, progress=stop_or(lambda done, total: None))
