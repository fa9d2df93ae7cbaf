"""Which threads are in a call of the engine, for the program's end to wait for them.

A thread that nobody joins and that comes back from native code (torch, the tokenizer, the file
format) when the interpreter has ended aborts the process. So they leave before.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.005


class Calls:
    """Counts the threads that are in a call. Thread-safe, also over a fork: no lock is held."""

    def __init__(self) -> None:
        self._depths: dict[threading.Thread, int] = {}  # each thread writes its own
        self._ending = False

    @property
    def ending(self) -> bool:
        """Whether the program ends."""
        return self._ending

    @contextmanager
    def inside(self) -> Iterator[None]:
        """In a call; calls may be nested.

        Raises:
            SystemExit: the program ends, and with it this thread.
        """
        thread = threading.current_thread()
        self._depths[thread] = self._depths.get(thread, 0) + 1  # `wait` sees it, or it `end`
        try:
            self._check()
            yield
        except BaseException as error:  # of the engine that was closed, for one
            if self._ends_here():
                _let_go(error)
                raise SystemExit from None
            raise
        finally:
            self._depths[thread] -= 1
            if not self._depths[thread]:
                del self._depths[thread]

    def asked_for(self, items: Iterable[T]) -> Iterator[T]:
        """The items of a caller, whose own code takes as long as it likes: that is not in a call.

        Raises:
            SystemExit: as `inside`.
        """
        thread = threading.current_thread()
        iterator = iter(items)
        while True:
            depth = self._depths.pop(thread, 0)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                if depth:
                    self._depths[thread] = depth
            self._check()
            yield item

    def end(self) -> None:
        """The program ends: other threads that are in a call, or enter one, get `SystemExit` as
        soon as they look; it ends a thread silently. The main thread goes on.
        """
        self._ending = True

    def wait(self, within_s: float) -> None:
        """Return when no other thread is in a call, or the time is up."""
        until = time.monotonic() + within_s
        while self._others() and time.monotonic() < until:
            time.sleep(POLL_S)

    def _check(self) -> None:
        if self._ends_here():
            raise SystemExit

    def _ends_here(self) -> bool:
        return self._ending and threading.current_thread() is not threading.main_thread()

    def _others(self) -> bool:
        here = set(threading.enumerate()) - {threading.current_thread()}  # a fork leaves others
        return any(thread in here for thread in list(self._depths))


def _let_go(error: BaseException | None) -> None:
    """Free now what the frames of an error hold: to free a tensor is native code as well."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class HasCalls(Protocol):
    """An object that counts its calls."""

    _calls: Calls


def in_call(method: Callable[P, T]) -> Callable[P, T]:
    """A method, of an object with `Calls`, that does work in its caller's thread."""

    @wraps(method)
    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        calls = cast(HasCalls, args[0])._calls
        with calls.inside():
            return method(*args, **kwargs)

    return counted
