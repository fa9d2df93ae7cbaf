"""The oracles: tiny random models in fp32, each test with a twin that must fail.

1. lazy == materialised (copies re-rotated, from raw, to their place)
2. lazy == one plain forward under the block mask, each node behind a private copy of its sink
3. encoded alone, one node at offset 0 == plain causal attention
4. encoded behind sink ids s, the prompt s + node + question == plain causal attention
5. nothing reused == full causal attention
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lazyrag.engine import scheduler as scheduler_module
from lazyrag.engine.engine import Engine
from lazyrag.model import oracle, seam
from lazyrag.model.oracle import eager_logits
from lazyrag.prompt.segments import PlacedPrompt, Run, end_live, place
from lazyrag.types import Live, Node, Quality, Segment
from tests.support.close import assert_close, assert_far
from tests.support.tiny import CONFIGS

TOLERANCE = 1e-5
DEVICE = os.environ.get("LAZYRAG_TEST_DEVICE", "cpu")
LENGTHS = (1, 15, 16, 17, 63, 300)
SINKS = ("none", "template", "documents")

EngineFor = Callable[[str, str], Engine]


@pytest.fixture(scope="module")
def engine_for(checkpoint, tmp_path_factory) -> EngineFor:
    made: dict[tuple[str, str], Engine] = {}

    def get(name: str, sink: str) -> Engine:
        if (name, sink) not in made:
            store = tmp_path_factory.mktemp("store")
            engine = Engine.from_pretrained(
                checkpoint(name),
                store=store,
                sink=sink,
                device=DEVICE,
                dtype="float32",
                reuse_live=False,  # every live row is looked at, every time
            )
            engine._pool.k.fill_(float("nan"))
            engine._pool.v.fill_(float("nan"))
            made[name, sink] = engine
        return made[name, sink]

    return get


def text(length: int, seed: int) -> str:
    """A text of exactly ``length`` tokens of the tiny tokenizer."""
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghij klmno.,\n") for _ in range(length - 1)) + "z"


def live(length: int, seed: int) -> Live:
    return Live(ids=tuple(random.Random(-seed - 1).choices(range(256), k=length)))


def read(engine: Engine, segments: list[Segment]) -> PlacedPrompt:
    runs: list[Run] = end_live(engine._reader.read_segments(segments).runs)
    return place(runs)


def lazy_logits(engine: Engine, segments: list[Segment], quality: Quality = Quality.FAST) -> Tensor:
    """Scores behind every live token, through the engine's own path."""
    captured: list[Tensor] = []
    original = seam.logits

    def capture_states(model, ids, step):
        hidden = hidden_states(model, ids, step)
        captured.append(original(model, hidden[0]))
        return hidden

    hidden_states = seam.hidden_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "hidden_states", capture_states)
        engine.precompute([s.text for s in segments if isinstance(s, Node)])
        captured.clear()
        engine.generate(segments, max_new_tokens=1, quality=quality)
    return torch.cat(captured).cpu()


def prompts(count: int) -> list[list[Segment]]:
    """1 to 8 nodes of all lengths in many orders, live text before, between and after."""
    chooser = random.Random(3)
    made: list[list[Segment]] = []
    for number in range(count):
        lengths = [chooser.choice(LENGTHS) for _ in range(1 + number % 8)]
        segments: list[Segment] = []
        for place_, length in enumerate(lengths):
            if chooser.random() < 0.6:
                segments.append(live(chooser.choice((1, 2, 7)), 100 * number + place_))
            segments.append(Node(text=text(length, chooser.randrange(6))))
        segments.append(live(chooser.choice((1, 3, 20)), number))
        made.append(segments)
    return made


def shifted(segments: list[Segment], engine: Engine) -> list[Segment]:
    """The last node of some length one position off; everything else where it was."""
    placed = read(engine, segments)
    indices = [i for i, segment in enumerate(segments) if isinstance(segment, Node)]
    nodes = list(zip(indices, placed.nodes, strict=False))
    index, node = [one for one in nodes if len(one[1].run.ids) > 1 or len(nodes) == 1][-1]
    moved = replace(segments[index], offset=node.offset + 1)
    return [*segments[:index], moved, *segments[index + 1 :]]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_lazy_equals_materialised(engine_for: EngineFor, name: str, sink: str):
    engine = engine_for(name, sink)
    for number, segments in enumerate(prompts(8)):
        expected = lazy_logits(engine, segments, Quality.MATERIALIZED)
        actual = lazy_logits(engine, segments)
        assert_close(f"{name} {number}", expected, actual, TOLERANCE)
        wrong = lazy_logits(engine, shifted(segments, engine))
        assert_far(f"{name} {number} twin", expected, wrong, TOLERANCE)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_lazy_equals_the_block_mask(engine_for: EngineFor, name: str, sink: str):
    engine = engine_for(name, sink)
    for number, segments in enumerate(prompts(8)):
        layout = oracle.block_layout(read(engine, segments), engine.encoding.sink)
        expected = eager_logits(engine._model.model, layout)
        actual = lazy_logits(engine, segments)
        assert_close(f"{name} {number}", expected, actual, TOLERANCE)
        wrong = lazy_logits(engine, shifted(segments, engine))
        assert_far(f"{name} {number} twin", expected, wrong, TOLERANCE)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_order_of_three_nodes(engine_for: EngineFor, name: str, order: tuple[int, ...]):
    """One stored copy serves every order: logits and greedy text equal the re-rotated copies."""
    engine = engine_for(name, "template")
    nodes = [Node(text=text(length, 50 + length)) for length in (17, 63, 300)]
    segments: list[Segment] = [live(4, 1)]
    for index in order:
        segments += [nodes[index], live(2, index)]
    engine.precompute([node.text for node in nodes])
    expected = engine.generate(segments, max_new_tokens=24, quality="materialized")
    before = engine.store.stats()
    actual = engine.generate(segments, max_new_tokens=24)
    assert actual.token_ids == expected.token_ids
    assert engine.store.stats() == before
    wrong = lazy_logits(engine, shifted(segments, engine))
    assert_far("twin", lazy_logits(engine, segments)[-1], wrong[-1], TOLERANCE)


@pytest.mark.parametrize("length", [2, *LENGTHS[1:]])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_node_alone_equals_causal_attention(engine_for: EngineFor, name: str, length: int):
    engine = engine_for(name, "none")
    segments: list[Segment] = [Node(text=text(length, 8)), live(5, 9)]
    placed = read(engine, segments)
    ids = [*placed.nodes[0].run.ids, *placed.live_ids]
    expected = eager_logits(engine._model.model, oracle.causal_layout(ids))[length:]
    assert_close(name, expected, lazy_logits(engine, segments), TOLERANCE)
    wrong = lazy_logits(engine, shifted(segments, engine))
    assert_far(f"{name} twin", expected, wrong, TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_node_behind_its_sink_equals_causal_attention(
    engine_for: EngineFor, name: str, length: int
):
    engine = engine_for(name, "template")
    sink = engine.encoding.sink
    assert len(sink) > 20
    segments: list[Segment] = [Live(ids=sink), Node(text=text(length, 8)), live(5, 9)]
    placed = read(engine, segments)
    ids = [*sink, *placed.nodes[0].run.ids, *placed.live_ids[len(sink) :]]
    expected = eager_logits(engine._model.model, oracle.causal_layout(ids))
    actual = lazy_logits(engine, segments)
    keep = torch.tensor([*range(len(sink)), *range(len(sink) + length, len(ids))])
    assert_close(name, expected[keep], actual, TOLERANCE)
    wrong = lazy_logits(engine, shifted(segments, engine))
    assert_far(f"{name} twin", expected[-5:], wrong[-5:], TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_reused_equals_full_attention(engine_for: EngineFor, name: str):
    """Both ``quality="full"`` over known nodes and a prompt with no known node."""
    engine = engine_for(name, "template")
    segments = prompts(6)[5]
    placed = read(engine, segments)
    full = lazy_logits(engine, segments, Quality.FULL)
    ids = [id for run in engine._reader.read_segments(segments).runs for id in run.ids]
    expected = eager_logits(engine._model.model, oracle.causal_layout(ids))
    assert placed.tokens == len(ids)
    assert_close(f"{name} full", expected, full, TOLERANCE)
    unknown: list[Segment] = [live(70, 5)]
    assert isinstance(unknown[0], Live) and unknown[0].ids
    expected = eager_logits(engine._model.model, oracle.causal_layout(list(unknown[0].ids)))
    assert_close(f"{name} unknown", expected, lazy_logits(engine, unknown), TOLERANCE)
    wrong = lazy_logits(
        engine, [Live(ids=unknown[0].ids[:35]), Live(ids=unknown[0].ids[35:], offset=36)]
    )
    assert_far(f"{name} twin", expected[-1], wrong[-1], TOLERANCE)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_chunked_prefill_equals_one_pass(engine_for: EngineFor, monkeypatch, rows: int):
    engine = engine_for("qwen2-window", "template")
    segments = prompts(8)[7]
    whole = lazy_logits(engine, segments)
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", rows)
    assert_close("chunked", whole, lazy_logits(engine, segments), TOLERANCE)
    wrong = lazy_logits(engine, shifted(segments, engine))
    assert_far("twin", whole, wrong, TOLERANCE)


def test_a_prompt_that_ends_with_a_node(engine_for: EngineFor):
    """Its last token is computed, the rest of the node is reused as a causal prefix."""
    engine = engine_for("llama", "none")
    node = Node(text=text(33, 4))
    placed = read(engine, [node])
    assert [n.run.used for n in placed.nodes] == [32]
    expected = eager_logits(
        engine._model.model, oracle.causal_layout(list(placed.nodes[0].run.ids))
    )
    assert_close("ends with a node", expected[-1:], lazy_logits(engine, [node]), TOLERANCE)
    report = engine.generate([node], max_new_tokens=1).report
    assert (report.nodes_reused, report.tokens_reused, report.tokens_computed) == (1, 32, 1)


def test_the_same_node_twice(engine_for: EngineFor):
    engine = engine_for("qwen3", "template")
    node = Node(text=text(40, 4))
    segments: list[Segment] = [live(3, 1), node, live(2, 2), node, live(4, 3)]
    expected = lazy_logits(engine, segments, Quality.MATERIALIZED)
    assert_close("twice", expected, lazy_logits(engine, segments), TOLERANCE)
    assert_far("twin", expected, lazy_logits(engine, shifted(segments, engine)), TOLERANCE)
    report = engine.generate(segments, max_new_tokens=1).report
    assert (report.nodes_reused, report.tokens_reused) == (2, 80)


@pytest.mark.parametrize("offset", [0, 37, 4_000])
def test_free_offsets(engine_for: EngineFor, offset: int):
    """Nodes share positions or lie far away; what is visible does not change (bug log 2)."""
    engine = engine_for("llama3-scaled", "template")
    segments: list[Segment] = [
        live(3, 1),
        Node(text=text(20, 4), offset=offset),
        Node(text=text(17, 5), offset=offset),
        Live(ids=live(4, 3).ids, offset=offset + 20),
    ]
    layout = oracle.block_layout(read(engine, segments), engine.encoding.sink)
    expected = eager_logits(engine._model.model, layout)
    assert_close("free offsets", expected, lazy_logits(engine, segments), TOLERANCE)
    assert_far("twin", expected, lazy_logits(engine, shifted(segments, engine)), TOLERANCE)
