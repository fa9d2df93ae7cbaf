"""Several ranks answer what one process answers: gloo on the CPU, NCCL where there are GPUs.

On two GPUs: ``LAZYRAG_TEST_DEVICE=cuda python -m pytest tests/engine/test_parallel.py``.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lazyrag import (
    AsyncEngine,
    Engine,
    LazyRagError,
    Live,
    ModelError,
    Node,
    NodeText,
    RequestError,
)
from lazyrag.engine.attention import TritonAttention
from lazyrag.engine.calibrate import calibrate
from lazyrag.engine.request import Request
from lazyrag.model import ranks as ranks_module
from lazyrag.model.geometry import AllHeads, Geometry
from lazyrag.prompt.read import ReadPrompt
from lazyrag.prompt.segments import place
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 1, reason="needs two GPUs, or none")
on_cpu = pytest.mark.skipif(GPUS > 0, reason="over NCCL it is torchrun that ends the program")

FAMILIES = ("llama3-scaled", "qwen2-window", "qwen3", "mistral-window")
TEXTS = [
    " ".join(
        f"Row {row} of the log {n} names {row * n + 7} grey gulls and {n} crates of {n + row}."
        for row in range(3 + n % 4)
    )
    for n in range(9)
]
NODES = [
    NodeText(text, behind=TEXTS[number - 1] if number % 2 else "")
    for number, text in enumerate(TEXTS)
]
ORDERS = ((0, 1), (1, 0), (5, 8), (3, 3))
SCORES = 1e-3 if GPUS else 1e-5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints whose vocabulary two and three ranks share, with heads for the kernels."""
    made: dict[str, Path] = {}

    def get(name: str, **changes: Any) -> Path:
        key = f"{name}-{'-'.join(changes)}"
        if key not in made:
            settings = {"head_dim": 64, "vocab_size": 264, **changes}
            made[key] = save_tiny(tmp_path_factory.mktemp("shared") / key, name, **settings)
        return made[key]

    return get


def prompt(first: int, second: int) -> list[Live | Node]:
    return [
        Live(text="Read this.\n\n"),
        Node(text=TEXTS[first]),
        Live(text="\n\n"),
        Node(text=TEXTS[second]),
        Live(text="\n\nHow many gulls are there, and who counts them?"),
    ]


def opened(folder: Path, store: Path, tensor_parallel: bool) -> Engine:
    return Engine.from_pretrained(
        folder, store=store, dtype="float32", sink="template", tensor_parallel=tensor_parallel
    )


def answers(folder: Path, store: Path, tensor_parallel: bool) -> dict[str, Any]:
    """What an engine says; the same in one process and, on rank 0, in several."""
    with opened(folder, store, tensor_parallel) as engine:
        assert (engine._model.ranks is not None) is tensor_parallel
        assert isinstance(engine._runner._paged, TritonAttention) is bool(GPUS)
        keys = engine.precompute(NODES)
        asked = [prompt(*order) for order in ORDERS]
        alone = [engine.generate(one, max_new_tokens=12) for one in asked]
        with ThreadPoolExecutor(len(asked)) as threads:
            together = list(threads.map(lambda one: engine.generate(one, max_new_tokens=12), asked))
        chosen = [
            engine.generate(prompt(4, 6), max_new_tokens=12, quality=quality)
            for quality in ("balanced", "full")
        ]
        drawn = engine.sample(asked[0], 2, max_new_tokens=12, temperature=0.8, seed=3)
        every = (*alone, *together, *chosen, *drawn)
        return {
            "keys": [str(key) for key in keys],
            "bytes": engine.kv_bytes_per_token,
            "encoded": engine.stats().encoded_tokens,
            "tiers": [[node.tier for node in one.report.nodes] for one in alone],
            "ids": [one.token_ids for one in every],
            "work": [(one.report.nodes_reused, one.report.work) for one in every],
            "scores": [engine.score(one, "Nobody counts them.") for one in asked],
        }


def compare(alone: dict[str, Any], parallel: dict[str, Any]) -> None:
    scores, expected = torch.tensor(parallel.pop("scores")), torch.tensor(alone["scores"])
    assert (scores - expected).abs().max() < SCORES
    for name, value in parallel.items():
        assert value == alone[name], name


def both(shared: Callable[..., Path], store: Path, name: str, **changes: Any) -> None:
    """One process and two ranks, each with a store of its own."""
    folder = shared(name, **changes)
    alone = answers(folder, store / "alone", False)
    leader, follower = run_ranks(answers, folder, store / "two", True)
    assert (leader.code, follower.code, follower.result) == (0, 0, None), leader.result
    assert alone["encoded"] > 0
    compare(alone, leader.result)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_answer_as_one(shared, tmp_path: Path, name: str) -> None:
    both(shared, tmp_path, name)


def test_stores_do_not_tell_how_many_ranks_there_were(shared, tmp_path: Path) -> None:
    """Each reads what the other has written, opened again."""
    both(shared, tmp_path, "qwen3", tie_word_embeddings=True)
    folder = shared("qwen3", tie_word_embeddings=True)
    alone = answers(folder, tmp_path / "two", False)
    leader, _ = run_ranks(answers, folder, tmp_path / "alone", True)
    assert leader.code == 0, leader.result
    assert leader.result["encoded"] == 0
    assert leader.result["tiers"][0] == ["disk", "disk"]
    compare(alone, leader.result)


def found_heads(folder: Path, store: Path, tensor_parallel: bool) -> dict[str, Any]:
    fewer = mock.patch.dict(calibrate.__kwdefaults__, questions=6)  # on every rank
    with fewer, opened(folder, store, tensor_parallel) as engine:
        engine.precompute(TEXTS)
        found = engine.calibrate(TEXTS)
        between = [part for text in TEXTS for part in (Node(text=text), Live(text="\n\n"))]
        asked = [Live(text="Read.\n\n"), *between, Live(text="Who counts?")]
        answer = engine.generate(asked, max_new_tokens=12, quality="best")
        assert answer.report.tokens_looked > 0
        assert 0 < answer.report.nodes_recomputed < len(TEXTS)

        placed = place(engine._read(asked).runs)
        nodes = Request.of_nodes(ReadPrompt([node.run for node in placed.nodes]))
        looked = engine._wait(partial(engine._worker.look, nodes, placed, [0, 2]))
        return {
            "heads": [list(head) for head in found.heads],
            "shares": found.shares,
            "ids": answer.token_ids,
            "masses": [looked.masses[layer].tolist() for layer in (0, 2)],
        }


def test_the_same_heads_are_found_and_choose_the_same_nodes(
    shared, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    folder = shared("llama")
    leader, _ = run_ranks(found_heads, folder, tmp_path / "kv", True)
    assert leader.code == 0, leader.result
    there, here = leader.result, found_heads(folder, tmp_path / "kv", False)
    assert (there["heads"], there["ids"]) == (here["heads"], here["ids"])
    assert there["shares"] == pytest.approx(here["shares"], abs=SCORES)
    masses, expected = torch.tensor(there["masses"]), torch.tensor(here["masses"])
    assert masses.shape == (2, 4, 13, len(TEXTS))  # layers, heads of all ranks, rows, nodes
    assert (masses - expected).abs().max() < SCORES


@pytest.mark.skipif(GPUS == 2, reason="needs three GPUs, or none")
def test_three_ranks_share_three_heads(shared, tmp_path: Path) -> None:
    """The heads of SmolLM2-135M."""
    folder = shared("llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    alone = answers(folder, tmp_path / "alone", False)
    leader, *others = run_ranks(answers, folder, tmp_path / "three", True, count=3)
    assert [one.code for one in (leader, *others)] == [0, 0, 0], leader.result
    compare(alone, leader.result)


def refused(folder: Path, store: Path) -> str:
    with pytest.raises(ModelError) as error:
        opened(folder, store, True)
    return str(error.value)


def test_uneven_heads_are_refused_on_every_rank(shared, tmp_path: Path) -> None:
    folder = shared("llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    for ended in run_ranks(refused, folder, tmp_path / "kv"):
        assert ended.code == 0
        assert "3 KV heads, which 2 ranks cannot share equally" in ended.result
        assert ended.result.endswith("Numbers of ranks that can: 3.")


def test_a_model_that_is_not_there_is_refused_on_every_rank(tmp_path: Path) -> None:
    for ended in run_ranks(refused, tmp_path, tmp_path / "kv"):
        assert ended.code == 0
        assert "no config.json" in ended.result


def test_without_torchrun(shared, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="start the program with 'torchrun --nproc-per-node N"):
        opened(shared("llama"), tmp_path / "kv", True)


def without_a_plan(folder: Path, store: Path) -> str:
    from transformers import LlamaConfig

    LlamaConfig.base_model_tp_plan = None
    return refused(folder, store)


def test_a_family_without_a_plan_is_refused(shared, tmp_path: Path) -> None:
    for ended in run_ranks(without_a_plan, shared("llama"), tmp_path / "kv"):
        assert "'llama', for which transformers has no plan" in ended.result


def one_rank(folder: Path, store: Path) -> list[int]:
    with opened(folder, store, True) as engine:
        assert engine._model.ranks is None
        return engine.generate(prompt(0, 1), max_new_tokens=8).token_ids


def test_one_rank_is_an_engine_like_others(shared, tmp_path: Path) -> None:
    (only,) = run_ranks(one_rank, shared("llama"), tmp_path / "kv", count=1)
    with opened(shared("llama"), tmp_path / "kv", False) as engine:
        assert only.result == engine.generate(prompt(0, 1), max_new_tokens=8).token_ids


def limits(folder: Path, store: Path) -> None:
    engine = opened(folder, store, True)
    with pytest.raises(RequestError, match="tensor_parallel"):
        engine.generate(prompt(0, 1), quality="materialized")
    with pytest.raises(LazyRagError, match="through its engine only"):
        engine._model.model.base_model(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(RequestError, match="too few"):
        engine.calibrate(TEXTS[:2])
    assert engine.generate(prompt(0, 1), max_new_tokens=4).token_ids
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.generate(prompt(0, 1))
    with pytest.raises(ModelError, match="opens one engine"):
        opened(folder, store, True)


def test_what_is_not_possible_is_said_and_the_ranks_go_on(shared, tmp_path: Path) -> None:
    leader, follower = run_ranks(limits, shared("llama"), tmp_path / "kv")
    assert (leader.code, follower.code) == (0, 0), leader.result


def on_asyncio(folder: Path, store: Path) -> list[list[int]]:
    async def main() -> list[list[int]]:
        settings = {"store": store, "dtype": "float32", "sink": "template"}
        opened = await AsyncEngine.shared(folder, **settings, tensor_parallel=True)
        async with opened as engine:
            assert Engine.shared(folder, **settings) is engine.engine  # as adapters find it
            await engine.precompute(TEXTS[:2])
            asked = (prompt(0, 1), prompt(1, 0))
            every = [engine.generate(one, max_new_tokens=8) for one in asked]
            return [one.token_ids for one in await asyncio.gather(*every)]

    return asyncio.run(main())


def test_asyncio_and_shared_engines(shared, tmp_path: Path) -> None:
    leader, follower = run_ranks(on_asyncio, shared("llama"), tmp_path / "kv")
    assert (leader.code, follower.code) == (0, 0), leader.result
    with opened(shared("llama"), tmp_path / "kv", False) as engine:
        for order, ids in zip(((0, 1), (1, 0)), leader.result, strict=True):
            assert engine.generate(prompt(*order), max_new_tokens=8).token_ids == ids


def left_open(folder: Path, store: Path) -> str:
    opened(folder, store, True).generate(prompt(0, 1), max_new_tokens=4)
    return "not closed"


def cannot_begin(folder: Path, store: Path) -> None:
    Engine.from_pretrained(folder, store=store, pool_bytes=1, tensor_parallel=True)


def test_a_leader_that_ends_lets_the_others_go(shared, tmp_path: Path) -> None:
    leader, follower = run_ranks(left_open, shared("llama"), tmp_path / "kv")
    assert (leader.code, follower.code) == (0, 0), leader.result
    leader, follower = run_ranks(cannot_begin, shared("llama"), tmp_path / "kv")
    assert (leader.code, follower.code) == (1, 0)
    assert "RequestError: pool_bytes=1 holds no page" in leader.result


def forked(folder: Path, store: Path) -> tuple[int, str, bool]:
    """A child of rank 0 asks, closes and exits as programs do; its code, and what it was told."""
    said = store.with_suffix(".said")
    with opened(folder, store, True) as engine:
        first = engine.generate(prompt(0, 1), max_new_tokens=4)
        child = os.fork()
        if not child:
            signal.alarm(30)  # it must not hang
            try:
                with engine:
                    engine.generate(prompt(0, 1), max_new_tokens=4, timeout_s=5)
            except LazyRagError as error:
                said.write_text(str(error))
            atexit._run_exitfuncs()
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        again = engine.generate(prompt(0, 1), max_new_tokens=4)
    return code, said.read_text(), again.token_ids == first.token_ids


@on_cpu
def test_a_forked_process_is_no_rank(shared, tmp_path: Path) -> None:
    """It is told so at once, and those that share the model go on."""
    leader, follower = run_ranks(forked, shared("llama"), tmp_path / "kv")
    assert (leader.code, follower.code) == (0, 0), leader.result
    code, said, equal = leader.result
    assert (code, equal) == (7, True)
    assert "was forked" in said


def trouble(folder: Path, store: Path, how: str) -> tuple[float, list[str]]:
    """Rank 1 ends in the middle of an answer; how long that took, and what rank 0 was told."""
    ranks_module.ANSWER_S = 1.0
    sign, process = store.with_suffix(".sign"), store.with_suffix(".pid")
    if os.environ["RANK"] == "1":
        process.write_text(str(os.getpid()))

        def wait() -> None:
            while not sign.exists():
                time.sleep(0.01)
            if how == "raises":
                from lazyrag.engine.parallel import follow

                follow._DO["launch"] = None  # type: ignore[assignment]
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

        threading.Thread(target=wait, daemon=True).start()
    told = []
    with opened(folder, store, True) as engine:
        with (
            pytest.raises(LazyRagError) as error,
            engine.stream(prompt(0, 1), max_new_tokens=5_000, temperature=3.0, seed=1) as stream,
        ):
            next(stream)
            started = time.monotonic()
            sign.touch()
            for _ in stream:
                pass
        told.append(str(error.value))
        with pytest.raises(LazyRagError) as error:
            engine.generate(prompt(0, 1))
        told.append(str(error.value))
    seconds = time.monotonic() - started
    if how == "stops":
        os.kill(int(process.read_text()), signal.SIGKILL)
    return seconds, told


@on_cpu
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("dies", -signal.SIGKILL, "Rank 1 of 2 has ended: see what it printed. Start"),
        ("raises", 1, "Rank 1 of 2 has ended: see what it printed. Start"),
        ("stops", -signal.SIGKILL, "Rank 1 did not answer within 1 s. Start"),
    ],
)
def test_a_rank_in_trouble_is_an_error_and_no_hang(
    shared, tmp_path: Path, how: str, code: int, message: str
) -> None:
    leader, follower = run_ranks(trouble, shared("llama"), tmp_path / "kv", how)
    assert leader.code == 0, leader.result
    seconds, told = leader.result
    assert follower.code == code
    assert all(message in one for one in told), told
    assert seconds < 30


def test_geometry_of_a_rank_and_of_all() -> None:
    """What is stored has all heads, what is computed those of the rank."""
    here = Geometry((), 4, 2, 16, 100, b"", ranks=3)
    assert here.all_heads == AllHeads(0, 12, 6, 16)
    assert AllHeads(3, 12, 6, 16).kv_bytes_per_token(torch.float16) == 2 * 3 * 6 * 16 * 2


DYING = """
import os, signal, sys, threading, time
from pathlib import Path
from lazyrag import Engine

folder, store = sys.argv[1:]
sign = Path(store + ".sign")

def die():
    while not sign.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1":
    threading.Thread(target=die, daemon=True).start()
with Engine.from_pretrained(folder, store=store, tensor_parallel=True) as engine:
    for piece in engine.stream("Once upon a time", max_new_tokens=5000, temperature=3.0):
        sign.touch()
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", *map(str, arguments)],
        env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(not GPUS, reason="the same over gloo is tested above, in less time")
def test_torchrun_ends_the_program_when_a_rank_dies(shared, tmp_path: Path) -> None:
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    done = torchrun(program, shared("qwen3"), tmp_path / "kv")
    assert done.returncode == 1, done.stderr[-4000:]
    assert (tmp_path / "kv.sign").exists(), done.stderr[-4000:]


PROGRAM = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"


def test_the_example_under_torchrun(shared, tmp_path: Path) -> None:
    done = torchrun(PROGRAM, shared("qwen3"), tmp_path / "kv")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("2 of 2 nodes reused") == 2
