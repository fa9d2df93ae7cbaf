"""The exceptions a user may see. Every message says what happened, to what, and what to do."""

from __future__ import annotations


class LazyRagError(Exception):
    """Base of every error raised on purpose by lazyrag; its text is meant for the user."""


class ModelError(LazyRagError):
    """A checkpoint cannot be loaded, is not supported, or is not the one an index was made with."""


class StoreError(LazyRagError):
    """The KV store cannot be opened, read or written (damaged, no space, another format)."""


class RequestError(LazyRagError):
    """A request cannot be served as asked: bad argument, prompt too long, empty input.

    Not a ValueError: frameworks catch those and go on with an empty answer.
    """


class RequestTimeoutError(RequestError):
    """A request took longer than its ``timeout_s`` and was stopped."""


class EngineBusyError(RequestError):
    """Too many requests wait already; the same request may be sent again later."""
