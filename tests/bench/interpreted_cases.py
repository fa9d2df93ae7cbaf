"""Moving nodes with the Triton kernel in the interpreter; run by `test_trace.py` only."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lazyrag_kernels.rope import AngleTable, Rotary

from lazyrag.bench.positioned import Mover
from lazyrag.bench.relocate import relocate


def test_the_kernel_moves_as_plain_torch_does() -> None:
    rotary = Rotary(1e4 ** -(torch.arange(8) / 8))
    k, v = torch.randn(2, 3, 64, 2, 16)
    turns = [5, -5, 0, 3000, -4000, 256, -256, 1, -1, 77]
    moves = torch.stack((torch.arange(10), torch.arange(30, 40), torch.tensor(turns)))
    pool = SimpleNamespace(k=k.clone(), v=v.clone())
    layers = [SimpleNamespace(rotary=rotary)] * 3
    Mover(pool, SimpleNamespace(layers=layers)).move(moves)  # type: ignore[arg-type]
    relocate(k, v, moves, rotary, AngleTable.build(rotary, 4096, torch.device("cpu")))
    torch.testing.assert_close(k, pool.k, rtol=0, atol=1e-5)
    torch.testing.assert_close(v, pool.v, rtol=0, atol=0)
