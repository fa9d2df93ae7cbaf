"""The engine over the Triton kernels in the interpreter; run by `test_interpreted.py` only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Live, Node
from lazyrag.engine.attention import TritonAttention, paged_attention
from lazyrag.engine.forward import EagerForward
from tests.engine import test_fill
from tests.support.tiny import save_tiny

TEXT = "The pier of Norrhamn was rebuilt in 1931."
OTHER = "A lamp burns on it from dusk until dawn."


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_greedy_text_is_that_of_plain_torch(tmp_path: Path, name: str) -> None:
    """One request alone, then two in one pass; behind a probe that has used the same pages."""
    folder = save_tiny(tmp_path / name, name, head_dim=64, num_hidden_layers=2)
    prompt = [Node(text=TEXT), Live(text="\n\n"), Node(text=OTHER), Live(text="\n\nWhen?")]
    turned = [Node(text=OTHER), Live(text="\n\n"), Node(text=TEXT), Live(text="\n\nWho?")]
    with Engine.from_pretrained(folder, store=tmp_path / "kv") as engine:
        engine.precompute([TEXT, OTHER])
        expected = [engine.generate(p, max_new_tokens=4).token_ids for p in (prompt, turned)]
        score = engine.score(prompt, "abc")
        runner, geometry = engine._runner, engine._model.geometry
        runner.drop([engine.key_of(TEXT), engine.key_of(OTHER)])
        attention = TritonAttention(engine._pool, geometry)
        attention.probe()
        runner._packed = EagerForward(runner.model, attention)
        streams = [engine.stream(p, max_new_tokens=4) for p in (prompt, turned)]
        assert [stream.read().token_ids for stream in streams] == expected
        assert engine.score(prompt, "abc") == pytest.approx(score, rel=1e-4)
        assert not isinstance(paged_attention(engine._pool, geometry), TritonAttention)


@pytest.mark.parametrize("rotaries", test_fill.ROTARIES.values(), ids=test_fill.ROTARIES)
def test_pages_are_filled_by_the_kernel(rotaries) -> None:
    test_fill.check(rotaries, torch.bfloat16, 300, kernel=True)
