"""Reports of the calls that a framework makes out of sight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lazyrag.engine.report import ReuseReport

Collectors = tuple[list[ReuseReport], ...]

_collecting: ContextVar[Collectors] = ContextVar("lazyrag_reports", default=())


@contextmanager
def collect_reports() -> Iterator[list[ReuseReport]]:
    """The reports of all calls begun inside the block, in the order in which they finish.

    Chains, query engines and chat engines return something of their own and drop what the model
    said beside the text; this is how to see it::

        with collect_reports() as reports:
            answer = chain.invoke("...")
        print(reports[-1].summary())

    A streamed answer adds its report when its stream ends, also after the block. Threads and tasks
    see the block they were started from if they copy the context, as asyncio and LangChain's
    ``batch`` do.
    """
    reports: list[ReuseReport] = []
    token = _collecting.set((*_collecting.get(), reports))
    try:
        yield reports
    finally:
        _collecting.reset(token)


def collectors() -> Collectors:
    """The lists that want the report of a call begun now."""
    return _collecting.get()
