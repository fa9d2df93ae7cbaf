"""Programs of several ranks, as torchrun starts them: processes of this machine, over loopback."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

SECONDS = 240.0
"""A program that takes longer has hung."""

_PRELOADED = ["lazyrag.engine.engine", "tests.support.tiny"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: its exit code, negative for a signal.
        result: what the program returned, or the text of what it raised.
    """

    code: int
    result: Any


def run_ranks(program: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Ended]:
    """Run a function of a test module in ``count`` processes that find each other.

    They are forked from a process that has imported torch and transformers, which saves seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _free_port() as port:
        pass
    started = []
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_NVLS_ENABLE": "0",
            "LAZYRAG_CACHE": os.environ["LAZYRAG_CACHE"],
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        process = context.Process(target=_run, args=(there, environment, program, arguments))
        process.start()
        there.close()
        started.append((process, here))
    ended = []
    try:
        for process, here in started:
            result = None
            try:
                assert here.poll(SECONDS), "a rank hangs"
                result = here.recv()
            except EOFError:  # it was killed
                pass
            process.join(SECONDS)
            assert process.exitcode is not None, "a rank does not end"
            ended.append(Ended(process.exitcode, result))
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return ended


def _run(there: Any, environment: dict[str, str], program: Any, arguments: Any) -> None:
    import lazyrag.engine.costs

    os.environ.update(environment)
    lazyrag.engine.costs._CLEARLY = 0.0  # as in conftest.py: what is stored is read
    multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=1)  # as in a program
    try:
        there.send(program(*arguments))
    except SystemExit:
        there.send(None)
        raise
    except BaseException as error:
        traceback.print_exc()
        there.send(f"{type(error).__name__}: {error}")
        raise


class _free_port:
    """A port of loopback that nobody listens on, at the time."""

    def __enter__(self) -> int:
        try:
            self._socket = socket.create_server(("127.0.0.1", 0))
        except OSError as error:
            pytest.skip(f"needs sockets on loopback: {error}")
        port: int = self._socket.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._socket.close()
