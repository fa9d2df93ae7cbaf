"""The engine over the Triton kernels, on a GPU: the oracle's answers, alone and together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lazyrag_kernels.attention import AttentionLayer, attend_behind_prefix
from lazyrag_kernels.rope import Rotary

from lazyrag import Engine, Live, Node
from lazyrag.engine.attention import TritonAttention
from lazyrag.quality.calibration import remember_scales
from lazyrag.quality.scale import Scale
from lazyrag.types import Quality
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FAMILIES = ("llama", "llama3-scaled", "qwen2", "qwen3", "mistral-window", "qwen2-window")
TEXTS = [
    " ".join(f"Line {row} of text {n} counts {row * n} ships." for row in range(9 + n))
    for n in range(6)
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny checkpoints with heads of a size the kernels take."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(tmp_path_factory.mktemp(name) / name, name, head_dim=64)
        return made[name]

    return get


def prompt(first: int, second: int) -> list[Live | Node]:
    return [
        Live(text="Read this.\n\n"),
        Node(text=TEXTS[first]),
        Live(text="\n\n"),
        Node(text=TEXTS[second]),
        Live(text="\n\nHow many ships are there, and who counts them?"),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_scores_are_the_oracles(wide, tmp_path: Path, name: str) -> None:
    with Engine.from_pretrained(
        wide(name), store=tmp_path / "kv", device="cuda", dtype="float32"
    ) as engine:
        assert isinstance(engine._runner._paged, TritonAttention)
        engine.precompute(TEXTS)
        engine._worker.call(lambda: engine._pool.k.fill_(float("nan")))
        engine._worker.call(lambda: engine._pool.v.fill_(float("nan")))
        for first, second in ((0, 1), (5, 2), (2, 5), (3, 3)):
            asked = prompt(first, second)
            lazy = engine.generate(asked, max_new_tokens=90)
            copied = engine.generate(asked, max_new_tokens=90, quality="materialized")
            assert lazy.token_ids == copied.token_ids
            assert lazy.report.nodes_reused == 2
            scores = torch.tensor(engine.score(asked, "Nobody counts them."))
            oracle = engine.score(asked, "Nobody counts them.", quality="materialized")
            assert (scores - torch.tensor(oracle)).abs().max() < 1e-3


def test_many_requests_at_once_get_their_single_answers(wide, tmp_path: Path) -> None:
    pairs = [(n % 6, (n * 5 + 1) % 6) for n in range(24)]
    with Engine.from_pretrained(
        wide("llama"), store=tmp_path / "kv", device="cuda", dtype="float32"
    ) as engine:
        engine.precompute(TEXTS)
        expected = [engine.generate(prompt(*pair), max_new_tokens=40).token_ids for pair in pairs]
        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            answer = engine.generate(prompt(*pairs[number]), max_new_tokens=40)
            answers[number] = answer.token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(pairs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[number] for number in range(len(pairs))] == expected


def test_bfloat16_answers(wide, tmp_path: Path) -> None:
    with Engine.from_pretrained(wide("llama"), store=tmp_path / "kv", device="cuda") as engine:
        assert isinstance(engine._runner._paged, TritonAttention)
        engine.precompute(TEXTS)
        scores = torch.tensor(engine.score(prompt(0, 1), "Nobody counts them."))
        oracle = engine.score(prompt(0, 1), "Nobody counts them.", quality="materialized")
        assert (scores - torch.tensor(oracle)).abs().mean() < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("before", [0, 21])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(8, 2, 128), (9, 3, 64)])
def test_dense_attention_of_ingestion(dtype, before, q_heads, kv_heads, head_dim) -> None:
    """Whatever torch chooses on a GPU: as near to fp64 as the dtype allows."""
    generator = torch.Generator().manual_seed(3)
    inverse = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    layer = AttentionLayer(head_dim**-0.5, Rotary(inverse))

    def attend(device: str, dtype: torch.dtype) -> torch.Tensor:
        q, k, v, *prefix = (one.to(device, dtype) for one in tensors)
        return attend_behind_prefix(q, k, v, (prefix[0], prefix[1]) if before else None, layer)

    shapes = [(2, heads, 300, head_dim) for heads in (q_heads, kv_heads, kv_heads)]
    shapes_before = [(kv_heads, before, head_dim)] * 2
    tensors = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in shapes + shapes_before
    ]
    expected = attend("cpu", torch.float64)
    error = (attend("cuda", dtype).cpu().double() - expected).square().mean().sqrt()
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    assert error < limit * expected.square().mean().sqrt()


def test_heads_that_no_launch_takes_run_in_plain_torch(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with Engine.from_pretrained(
        checkpoint("llama"), store=tmp_path / "kv", device="cuda", dtype="float32"
    ) as engine:
        assert not isinstance(engine._runner._paged, TritonAttention)
        assert engine.generate(prompt(0, 1), max_new_tokens=4).token_ids


def test_nodes_come_back_from_pinned_memory(wide, tmp_path: Path) -> None:
    """Evicted from the device, sent in a stream of their own while an answer is written."""
    with Engine.from_pretrained(
        wide("llama"), store=tmp_path / "kv", device="cuda", dtype="float32", host_bytes=2**28
    ) as engine:
        keys = engine.precompute(TEXTS)
        expected = [engine.generate(prompt(n, 5), max_new_tokens=20).token_ids for n in range(5)]
        assert all(engine._host._kept[key].k.is_pinned() for key in keys)
        with engine.stream(prompt(0, 1), max_new_tokens=3_000, temperature=3.0, seed=1) as running:
            next(running)
            for _ in range(3):
                engine._worker.call(lambda: [engine._pool.drop(key) for key in keys])
                for number in range(2, 5):
                    answer = engine.generate(prompt(number, 5), max_new_tokens=20)
                    assert answer.token_ids == expected[number]
                    assert answer.report.nodes[0].tier == "host"
                next(running, None)
        moved = {(one.source, one.target): one for one in engine.stats().movements}
        assert moved["host", "device"].moves >= 9


def test_live_text_is_reused_behind_the_same(wide, tmp_path: Path) -> None:
    with Engine.from_pretrained(
        wide("llama"), store=tmp_path / "kv", device="cuda", dtype="float32"
    ) as engine:
        engine.precompute(TEXTS)
        asked = [*prompt(0, 1), Live(text=" Say it in one sentence, please." * 8)]
        first = engine.generate(asked, max_new_tokens=30)
        again = engine.generate(asked, max_new_tokens=30)
        copied = engine.generate(asked, max_new_tokens=30, quality="materialized")
        live = sum(len(part.text) for part in asked if isinstance(part, Live))
        assert first.report.live_tokens_reused == 0
        assert again.report.live_tokens_reused == (live - 1) // 64 * 64 > 0
        assert first.token_ids == again.token_ids == copied.token_ids


def test_scales_are_served_as_on_the_cpu(wide, tmp_path: Path, monkeypatch) -> None:
    """Temperature and group scale that a calibration has left for the encoding, captured or not."""
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    scale = Scale(0.8, 0.7)
    scores: list[list[float]] = []
    texts = []
    for device in ("cpu", "cpu", "cuda"):  # the first engine finds no scale
        with Engine.from_pretrained(
            wide("llama"), store=tmp_path / device, device=device, dtype="float32"
        ) as engine:
            engine.precompute(TEXTS)
            asked = prompt(0, 1)
            scores.append(engine.score(asked, "Nine ships.", quality="fast"))
            answer = engine.generate(asked, max_new_tokens=40, quality="fast")
            texts.append(answer.text)
            known = (answer.report.node_temperature, answer.report.node_lse_scale)
            assert known == (scale if len(scores) > 1 else (1.0, 1.0))
            remember_scales(engine._model, engine.encoding.digest, {Quality.FAST: scale})
    assert scores[1] != pytest.approx(scores[0], abs=1e-2)
    assert scores[2] == pytest.approx(scores[1], abs=1e-4)
    assert texts[2] == texts[1]
