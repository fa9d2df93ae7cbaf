"""A program that ends while its engine works ends as it would have, whoever forgot to close."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest

from lazyrag.engine.calls import Calls
from lazyrag.errors import LazyRagError, RequestError

BEGIN = """
import asyncio, os, sys, threading, time
from lazyrag import AsyncEngine, Engine
engine = Engine.from_pretrained(sys.argv[1], store=sys.argv[2], device="cpu")
"""
PROGRAMS = {
    "in the middle of an answer": """
        stream = engine.stream("Once upon a time", max_new_tokens=4000)
        print(next(stream) != "")
    """,
    "with an error": """
        stream = engine.stream("Once upon a time", max_new_tokens=4000)
        next(stream)
        sys.exit(3)
    """,
    "while a thread ingests": """
        texts = [f"Crane {n} of the harbour is red. " * 20 for n in range(400)]
        threading.Thread(target=engine.precompute, args=(texts,), daemon=True).start()
        while not engine.store.stats().nodes:
            time.sleep(0.01)
    """,
    "while a thread is at native work in a call": """
        import torch
        began = threading.Event()
        def work(done, total):
            began.set()
            until = time.monotonic() + 3
            while time.monotonic() < until:
                torch.ones(1000).sum()
        texts = ["Crane one is red.", "Crane two is green."]
        threading.Thread(
            target=engine.precompute, args=(texts,), kwargs={"progress": work}, daemon=True
        ).start()
        began.wait()
    """,
    "while threads ask again and again": """
        asked = threading.Semaphore(0)
        def ask(what):
            while True:
                what()
                asked.release()
        for what in (
            lambda: engine.score("Crane one is", " red"),
            lambda: engine.count_tokens("Crane one is red. " * 200),
            lambda: engine.generate("Once upon a time", max_new_tokens=2),
            lambda: next(engine.stream("Once upon a time", max_new_tokens=2)),
        ):
            threading.Thread(target=ask, args=(what,), daemon=True).start()
            asked.acquire()
    """,
    "while a thread waits for texts of its own": """
        import queue
        from lazyrag.engine import worker
        worker.EXIT_S = 1e6  # nobody waits for code that is not the engine's
        texts = queue.Queue()
        for _ in range(3):
            texts.put("Crane one is red.")
        threading.Thread(
            target=engine.precompute, args=(iter(texts.get, None),), daemon=True
        ).start()
        while not texts.empty():
            time.sleep(0.01)
    """,
    "when its loop has ended": """
        async def main():
            async with asyncio.timeout(60):
                stream = AsyncEngine(engine).stream("Once upon a time", max_new_tokens=4000)
                await anext(stream)
        asyncio.run(main())
    """,
    "as a child that answers, too": """
        next(engine.stream("Once upon a time", max_new_tokens=4000))
        if child := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(next(engine.stream("Once more", max_new_tokens=4000)) != "")
    """,
}


BEFORE = """
import atexit, sys
def last():  # handlers run in the reverse order: after the engine's
    thread.join()
    try:
        engine.count_tokens("Crane one is red.")
        engine.generate("Once upon a time")
    except RequestError as error:
        print("it is refused:", error)
atexit.register(last)
from lazyrag import RequestError
"""
AFTER = """
began = threading.Event()
def ask():
    try:
        while True:
            next(engine.stream("Once upon a time", max_new_tokens=2000))
            began.set()
    finally:
        print("the thread has ended")
thread = threading.Thread(target=ask, daemon=True)
thread.start()
began.wait()
"""


def run(program: str, checkpoint: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(checkpoint), str(folder / "kv")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_program_ends_as_it_would_have(checkpoint, tmp_path: Path, how: str):
    done = run(BEGIN + textwrap.dedent(PROGRAMS[how]), checkpoint("llama"), tmp_path)
    assert done.returncode == (3 if how == "with an error" else 0), done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr


def test_a_thread_ends_and_its_program_goes_on(checkpoint, tmp_path: Path):
    done = run(BEFORE + BEGIN + AFTER, checkpoint("llama"), tmp_path)
    assert done.stdout == "the thread has ended\nit is refused: this engine is closed.\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_call_holds_is_freed_before_it_is_left():
    calls, freed = Calls(), []

    class Held:
        pass

    def fail() -> None:
        held = Held()
        weakref.finalize(held, freed.append, True)
        raise RequestError("this engine is closed.")

    def call() -> None:
        try:
            with calls.inside():
                calls.end()
                try:
                    fail()
                except RequestError as error:
                    raise LazyRagError("the answer failed.") from error
        except SystemExit:
            freed.append(len(freed))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert freed == [True, 1]
