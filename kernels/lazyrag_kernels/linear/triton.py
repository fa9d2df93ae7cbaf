"""A linear layer of few tokens and few outputs: time is that of reading its weights.

With 4,096 outputs a library's tiles leave half of the processors without work. Here tiles are
64 outputs high and the inputs are cut in two; of the two programs of a tile the later one adds up,
first part first, so that results do not depend on which it is.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 64
OUTPUTS = 64  # a tile
INPUTS = 128  # a step
SPLIT = 2


@triton.jit
def _linear_kernel(
    x,  # [tokens, inputs]
    weight,  # [outputs, inputs]
    out,  # [tokens, outputs]
    partial,  # fp32 [SPLIT, tokens, outputs]
    arrived,  # int32 [tiles], zeros before and after
    tokens,
    outputs,
    inputs,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    share = inputs // SPLIT
    o_n = tile * N + tl.arange(0, N)
    o_m = tl.arange(0, M)
    o_k = part * share + tl.arange(0, K)
    m_token = (o_m < tokens)[None, :]
    p_weight = weight + o_n.to(tl.int64)[:, None] * inputs + o_k[None, :]
    p_x = x + o_m[None, :] * inputs + o_k[:, None]
    b_acc = tl.zeros([N, M], tl.float32)
    for _ in tl.range(0, share, K, num_stages=STAGES):
        b_weight = tl.load(p_weight, eviction_policy="evict_first")  # [N, K]
        b_x = tl.load(p_x, mask=m_token, other=0.0)  # [K, M]
        b_acc = tl.dot(b_weight, b_x, b_acc, input_precision="ieee")
        p_weight += K
        p_x += K
    o_out = o_m[None, :] * outputs + o_n[:, None]
    size = tokens * outputs
    tl.store(partial + part * size + o_out, b_acc, mask=m_token)
    tl.debug_barrier()  # every thread has stored before one of them says so
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
        b_sum = tl.zeros([N, M], tl.float32)
        for other in tl.static_range(SPLIT):
            b_sum += tl.load(
                partial + other * size + o_out, mask=m_token, other=0.0, cache_modifier=".cg"
            )
        tl.store(out + o_out, b_sum.to(out.dtype.element_ty), mask=m_token)
        tl.store(arrived + tile, 0)


def pays(tokens: int, weight: Tensor, processors: int) -> bool:
    """Whether the launch is faster than the library's (docs/benchmarks/engine-gpu.md).

    Args:
        tokens: of the call.
        weight: [outputs, inputs].
        processors: multiprocessors of the GPU.
    """
    outputs, inputs = weight.shape
    most = MOST_TOKENS if inputs >= 2 * outputs else 16
    return tokens <= most and fits(weight) and SPLIT * outputs <= OUTPUTS * processors


def fits(weight: Tensor) -> bool:
    """Whether a launch can do this layer: [outputs, inputs] in whole tiles and steps, 16 bits."""
    outputs, inputs = weight.shape
    return (
        weight.dtype in (torch.float16, torch.bfloat16)
        and weight.is_contiguous()
        and outputs % OUTPUTS == 0
        and inputs % (SPLIT * INPUTS) == 0
    )


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """``x @ weight.T`` in fp32, rounded once.

    Args:
        x: [tokens, inputs], contiguous, at most `MOST_TOKENS`, in the dtype of ``weight``.
        weight: [outputs, inputs] that `fits`.
        arrived: int32 [outputs / OUTPUTS], zeros; of this layer alone, since calls on several
            streams at once must not share it. Zeros again afterwards.

    Returns:
        [tokens, outputs].
    """
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    partial = torch.empty(SPLIT, tokens, outputs, dtype=torch.float32, device=x.device)
    _linear_kernel[(outputs // OUTPUTS * SPLIT,)](
        x,
        weight,
        out,
        partial,
        arrived,
        tokens,
        outputs,
        inputs,
        M=max(16, triton.next_power_of_2(tokens)),
        N=OUTPUTS,
        K=INPUTS,
        SPLIT=SPLIT,
        STAGES=4,
        num_warps=4,
        num_stages=4,
    )
    return out
