"""Measured attention to nodes equals what attention itself gives values that mark their node."""

from __future__ import annotations

import pytest
import torch

from lazyrag.engine import mass as mass_module
from lazyrag.engine.mass import LayersDone, MassStep
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedSequence, PagedStep, SeenNode
from lazyrag.model.load import load_model
from tests.support.close import assert_close, assert_far

LENGTHS = (5, 33, 16)


def made(checkpoint, name: str, shift: int = 0):
    """A pool whose values mark their node, a step over it, and one that measures around it."""
    model = load_model(str(checkpoint(name)), device="cpu", dtype="float32")
    geometry = model.geometry
    generator = torch.Generator().manual_seed(3)
    pool = PagePool(
        geometry, pages=40, page_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    pool.k.fill_(float("nan"))
    pool.v.fill_(float("nan"))
    nodes, offset = [], 4
    for number, length in enumerate(LENGTHS):
        pages = pool.allocate(length)
        assert pages is not None
        slots = pool.slots(pages, 0, length)
        shape = (len(geometry.layers), length, geometry.kv_heads, geometry.head_dim)
        pool.k[:, slots] = torch.randn(shape, generator=generator)
        marks = torch.zeros(shape)
        marks[..., number] = 1.0
        pool.v[:, slots] = marks
        nodes.append(SeenNode(pages, length, offset + shift, 4 + number))
        offset += length + 1
    positions = [0, 1, 2, 3, 9, 43, *range(60, 70)]
    live = pool.allocate(len(positions))
    assert live is not None
    sequence = PagedSequence(pool, nodes, live, len(positions))
    inner = PagedStep(pool, geometry, [sequence.rows(positions)])
    rows = (sequence, [0] * len(positions), positions)
    shape = (1, geometry.q_heads, len(positions), geometry.head_dim)
    q = torch.randn(shape, generator=generator)
    k = torch.randn(1, geometry.kv_heads, *shape[2:], generator=generator)
    return geometry, pool, inner, rows, q, k


@pytest.mark.parametrize(
    ("keys", "parts"),
    [(8192, [[0, 1, 2]]), (66, [[0, 1], [2]]), (65, [[0], [1], [2]]), (1, [[0], [1], [2]])],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral-window"])
def test_masses_are_the_weights_of_attention(checkpoint, monkeypatch, name: str, keys: int, parts):
    """Whether nodes are measured together or one by one."""
    monkeypatch.setattr(mass_module, "KEYS", keys)
    nodes = [SeenNode((), length, 0, 0) for length in LENGTHS]
    assert list(mass_module._parts(nodes)) == parts
    geometry, pool, inner, rows, q, k = made(checkpoint, name)
    step = MassStep(inner, [rows], pool, geometry, [0, 2])
    for layer in (0, 2):
        out = step.attend(layer, q, k, torch.zeros_like(k))[0]  # [rows, q_heads, head_dim]
        expected = out[6:, :, : len(LENGTHS)].permute(1, 0, 2)  # the rows behind the last node
        assert_close(f"{name} {layer}", expected, step.masses[0][layer], 1e-5)
    assert set(step.masses[0]) == {0, 2}


def test_a_shifted_node_has_another_mass(checkpoint):
    """Twin: measured with every node one position off."""
    geometry, pool, inner, rows, q, k = made(checkpoint, "llama")
    out = inner.attend(0, q, k, torch.zeros_like(k))[0]
    geometry, pool, inner, rows, q, k = made(checkpoint, "llama", shift=1)
    step = MassStep(inner, [rows], pool, geometry, [0])
    step.attend(0, q, k, torch.zeros_like(k))
    assert_far("shifted", out[6:, :, :3].permute(1, 0, 2), step.masses[0][0], 1e-5)


def test_the_pass_stops_behind_the_last_layer(checkpoint):
    geometry, pool, inner, rows, q, k = made(checkpoint, "llama")
    step = MassStep(inner, [rows], pool, geometry, [1], stop=True)
    step.attend(0, q, k, torch.zeros_like(k))
    with pytest.raises(LayersDone):
        step.attend(1, q, k, torch.zeros_like(k))
    assert step.masses[0][1].shape == (geometry.q_heads, 10, 3)


def test_a_prompt_in_pieces_is_refused(checkpoint):
    geometry, pool, inner, (sequence, _, _), _, _ = made(checkpoint, "llama")
    sequence.rewind(3)
    sequence.rows([3, 4])
    with pytest.raises(ValueError, match="one piece"):
        MassStep(inner, [(sequence, [0, 0], [3, 4])], pool, geometry, [0])
