"""Nodes in pages: every layer's keys at their local positions, whatever rotates how.

`interpreted_cases` runs `check` over the kernel in the interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from lazyrag_kernels.attention import AttentionLayer
from lazyrag_kernels.rope import Rotary, cos_sin, rotate

from lazyrag.engine.fill import PageFiller, TritonWrite
from lazyrag.engine.pool import PagePool, page_size_on
from lazyrag.model.geometry import Geometry

DEVICE = torch.device(os.environ.get("LAZYRAG_TEST_DEVICE", "cpu"))
DIM, HEADS = 16, 3
HALF = Rotary(1.0 / 10_000 ** (torch.arange(0, DIM, 2).float() / DIM))
PAIRS = Rotary(1.0 / 500 ** (torch.arange(0, DIM, 2).float() / DIM), interleaved=True)
PART = Rotary(1.0 / 500 ** (torch.arange(0, 8, 2).float() / 8))
STILL = Rotary(torch.empty(0))


ROTARIES = {
    "alike": (HALF,) * 3,
    "pairs": (PAIRS, PAIRS),
    "in turn": (HALF, HALF, PART, HALF),
    "one still": (STILL, HALF),
}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotaries", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("first", [0, 300])
def test_every_layer_as_its_rotary_has_it(rotaries, stored, first):
    check(rotaries, stored, first)


def check(rotaries, stored, first, *, kernel=False):
    """Two nodes over scattered pages; a page of somebody else's stays as it was."""
    layers = tuple(AttentionLayer(DIM**-0.5, rotary) for rotary in rotaries)
    geometry = Geometry(layers, HEADS, HEADS, DIM, 4096, b"")
    size = page_size_on(DEVICE)
    pool = PagePool(geometry, pages=9, page_size=size, dtype=torch.float32, device=DEVICE)
    filler = PageFiller(pool, geometry)
    if kernel:
        filler._write = TritonWrite(pool, geometry)
        filler._write.probe()
    assert isinstance(filler._write, TritonWrite) == (kernel or DEVICE.type == "cuda")
    pool.k.fill_(7)
    pool.v.fill_(7)
    places = [((4, 1, 7), 2 * size + 3), ((2,), size)]
    tokens = sum(length for _, length in places)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, len(layers), tokens, HEADS, DIM, generator=generator).to(stored)
    filler.fill_all(k, v, places, first)
    begin = 0
    for pages, length in places:
        slots = pool.host_slots(pages, 0, length)
        for layer, rotary in enumerate(rotaries):
            raw = k[layer, begin : begin + length].float()
            cos, sin = cos_sin(rotary, torch.arange(first, first + length))
            expected = rotate(raw, cos[:, None], sin[:, None], rotary.interleaved)
            torch.testing.assert_close(pool.k[layer].cpu()[slots], expected, rtol=0, atol=2e-6)
            assert torch.equal(pool.v[layer].cpu()[slots], v[layer, begin : begin + length].float())
        begin += length
    for page in (0, 3, 5, 6, 8):
        for half in (pool.k, pool.v):
            assert (half[:, page * size : (page + 1) * size] == 7).all()
