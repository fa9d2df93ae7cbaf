"""Reports of the LLM calls that a query engine makes out of sight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lazyrag import ReuseReport

_collecting: ContextVar[tuple[list[ReuseReport], ...]] = ContextVar("lazyrag_reports", default=())


@contextmanager
def collect_reports() -> Iterator[list[ReuseReport]]:
    """The reports of all calls begun inside the block, in the order in which they finish.

    Query and chat engines return a response of their own and drop what the LLM said beside the
    text; this is how to see it::

        with collect_reports() as reports:
            answer = query_engine.query("...")
        print(reports[-1].summary())

    A streamed answer adds its report when its stream ends, also after the block. Threads and tasks
    see the block they were started from if they copy the context, as asyncio does.
    """
    reports: list[ReuseReport] = []
    token = _collecting.set((*_collecting.get(), reports))
    try:
        yield reports
    finally:
        _collecting.reset(token)


def collectors() -> tuple[list[ReuseReport], ...]:
    """The lists that want the report of a call begun now."""
    return _collecting.get()
