"""From a framework's keyword arguments to the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lazyrag.engine.sampling import make_options
from lazyrag.errors import RequestError
from lazyrag.types import GenerationOptions

RENAMED = {"max_tokens": "max_new_tokens", "timeout": "timeout_s"}
NEW_TOKENS = frozenset({"max_tokens", "max_new_tokens"})

_NAMES = tuple(field.name for field in fields(GenerationOptions))
_NEVER_NONE = frozenset({"temperature", "repetition_penalty", "quality", "strict"})


def with_arguments(
    options: GenerationOptions, arguments: Mapping[str, Any], *, caller: str
) -> GenerationOptions:
    """``options`` with one call's keyword arguments on top.

    None switches an option off that may be None, and leaves any other as it is.

    Args:
        options: to begin with.
        arguments: by the names of the options, or ``max_tokens``.
        caller: class the user called, for the error.

    Raises:
        RequestError: an argument no option is named after, or a value it cannot have.
    """
    changes: dict[str, Any] = {}
    for given, value in arguments.items():
        name = RENAMED.get(given, given)
        if name not in _NAMES:
            known = ", ".join(sorted((*_NAMES, *RENAMED)))
            raise RequestError(f"{caller} knows no argument {given!r}; it takes {known}.")
        if name in changes:
            raise RequestError(f"{given} is given twice, once as {name}; give one of them.")
        if value is None and name in _NEVER_NONE:
            continue
        changes[name] = value
    return make_options(options, changes)
