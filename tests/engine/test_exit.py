"""A program that ends while its engine works ends as it would have, whoever forgot to close."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_program_ends_as_it_would_have(checkpoint, tmp_path: Path, how: str):
    program = BEGIN + textwrap.dedent(PROGRAMS[how])
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint("llama")), str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (3 if how == "with an error" else 0), done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr
