"""Self-check of a checkpoint: lazily computed attention must equal transformers' eager attention.

No family is trusted by a list alone. At the first use of a checkpoint (per weights, dtype and
versions) a small probe runs both ways: nodes behind a sink, placed apart and out of the order they
were encoded in, at large positions (so that windows and ``original_max_position_embeddings`` are
crossed), two requests packed in one forward pass.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.pool import PagePool, page_size_on
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import ModelError
from lazyrag.model import oracle, seam
from lazyrag.model.cache_dir import JsonCache
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import LiveRun, NodeRun, PlacedPrompt, place
from lazyrag.types import NodeKey

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest RMS(error) / RMS(logits)."""


def examine(model: LoadedModel) -> float:
    """Run the probe.

    Returns:
        RMS(lazy - eager) / RMS(eager) over the logits of every live token.
    """
    prompts, sink = _probe(model)
    expected = torch.cat(
        [oracle.eager_logits(model.model, oracle.block_layout(prompt, sink)) for prompt in prompts]
    ).double()
    actual = _lazy_logits(model, prompts, sink).double()
    if not actual.isfinite().all():
        return float("inf")
    return float((actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def check(model: LoadedModel) -> None:
    """Examine a checkpoint once and remember that it passed.

    Raises:
        ModelError: the lazy path computes something else than the model.
    """
    cache = JsonCache("examined.json")
    name = "|".join(
        (
            model.weights_digest,
            str(model.dtype),
            model.device.type,
            *([] if model.ranks is None else [f"{model.ranks.count} ranks"]),
            *(f"{package} {version(package)}" for package in ("lazyrag", "torch", "transformers")),
        )
    )
    known = name in cache.read()
    if model.ranks is not None:  # all examine, or none
        known = model.ranks.share({"known": known} if model.ranks.leads else None)["known"]
    if known:
        return
    error = examine(model)
    if not error <= TOLERANCE[model.dtype]:
        raise ModelError(
            f"{model.name!r} fails the self-check: attention over placed nodes differs from the "
            f"model's own by {error:.1e} (at most {TOLERANCE[model.dtype]:.0e}). Its answers would "
            "be wrong, so it is refused. Please report the model and the output of 'lazyrag env'."
        )
    if model.ranks is None or model.ranks.leads:
        cache.put(name, error)


def _probe(model: LoadedModel) -> tuple[list[PlacedPrompt], tuple[int, ...]]:
    generator = torch.Generator().manual_seed(20260604)
    vocab = model.model.config.vocab_size
    far = max(64, min(model.geometry.max_positions - 64, 40_000))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab, (count,), generator=generator).tolist())

    def node(count: int, offset: int | None = None) -> NodeRun:
        tokens = ids(count)
        digest = bytes(32) if not tokens else (str(tokens).encode() + bytes(32))[:32]
        return NodeRun(NodeKey(digest), tokens, count, offset)

    first, second, third = node(17), node(5), node(9)
    prompts = [
        place([LiveRun(ids(3)), second, LiveRun(ids(2)), first, LiveRun(ids(5))]),
        place([LiveRun(ids(2)), third, LiveRun(ids(1), far), first, LiveRun(ids(4))]),
    ]
    return prompts, ids(4)


def _lazy_logits(model: LoadedModel, prompts: list[PlacedPrompt], sink: tuple[int, ...]) -> Tensor:
    encoder = Encoder(model, sink, model.dtype)
    pool = PagePool(
        model.geometry,
        pages=32,
        page_size=page_size_on(model.device),
        dtype=model.dtype,
        device=model.device,
    )
    attention = paged_attention(pool, model.geometry)
    filler = PageFiller(pool, model.geometry)
    pool.k.fill_(float("nan"))
    pool.v.fill_(float("nan"))
    rows = []
    for prompt in prompts:
        nodes = []
        for node in prompt.nodes:
            pages = pool.allocate(len(node.run.ids))
            assert pages is not None
            (kv,) = encoder.encode([node.run.ids])
            filler.fill(kv.k, kv.v, pages)
            nodes.append(SeenNode(pages, node.run.used, node.offset, node.first_row))
        live = len(prompt.live_ids)
        pages = pool.allocate(live)
        assert pages is not None
        sequence = PagedSequence(pool, nodes, pages, live)
        rows.append(sequence.rows(prompt.live_positions))
    ids = torch.tensor([[id for prompt in prompts for id in prompt.live_ids]])
    with torch.inference_mode():
        step = attention.step(rows)
        hidden = seam.hidden_states(model.model, ids.to(model.device), step)
        return seam.logits(model.model, hidden[0]).cpu()
