"""What attention needs to know of a checkpoint, per layer; what is unknown is refused by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from lazyrag_kernels.attention import AttentionLayer
from lazyrag_kernels.rope import Rotary
from transformers import PretrainedConfig, PreTrainedModel

from lazyrag.errors import ModelError

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``config.model_type`` whose attention this version computes exactly (tested)."""

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary types with one frequency table whatever the length of a request."""


@dataclass(frozen=True, slots=True)
class AllHeads:
    """The heads of a checkpoint, however many processes share them: what a store holds.

    Attributes:
        layers: how many.
        q_heads, kv_heads, head_dim: as in the checkpoint's configuration.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """2 (K and V) x layers x kv_heads x head_dim x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Shapes and per-layer attention of one loaded checkpoint, as this process computes it.

    Attributes:
        layers: one entry per decoder layer.
        q_heads, kv_heads, head_dim: the same in every layer; the heads of this process alone.
        max_positions: the checkpoint's context window in tokens.
        rotary_digest: 32 bytes over frequencies, windows and scales; part of every `NodeKey`.
        ranks: processes that share the heads, each the same number of neighbours.
    """

    layers: tuple[AttentionLayer, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rotary_digest: bytes
    ranks: int = 1

    @property
    def all_heads(self) -> AllHeads:
        """Those of all processes together."""
        q_heads, kv_heads = self.q_heads * self.ranks, self.kv_heads * self.ranks
        return AllHeads(len(self.layers), q_heads, kv_heads, self.head_dim)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """In this process: 2 (K and V) x layers x kv_heads x head_dim x bytes."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * dtype.itemsize


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Refuse what this version would compute wrongly, before any weight is read.

    Raises:
        ModelError: family or rotary type is not supported; the message names it.
    """
    if config.model_type not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"{name} is of the family {config.model_type!r}, which lazyrag does not support. "
            f"Supported families: {', '.join(SUPPORTED_FAMILIES)}."
        )
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        raise ModelError(
            f"{name} uses the rotary type {kind!r}, whose frequencies depend on the length of a "
            f"request or are unknown here; stored keys would be wrong. "
            f"Supported: {', '.join(SUPPORTED_ROPE)}."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{name} rotates only a part of each head, which is not supported yet.")


def check_shared(config: PretrainedConfig, name: str, ranks: int) -> None:
    """Refuse a checkpoint that so many processes cannot share, before any weight is read.

    Raises:
        ModelError: transformers has no plan for the family, or the heads do not divide.
    """
    if not config.base_model_tp_plan:
        raise ModelError(
            f"{name} is of the family {config.model_type!r}, for which transformers has no plan of "
            "tensor parallelism. Leave tensor_parallel out."
        )
    heads = {
        "KV heads": int(config.num_key_value_heads),
        "query heads": int(config.num_attention_heads),
    }
    for kind, count in heads.items():
        if count % ranks:
            usable = [n for n in range(2, count + 1) if not any(h % n for h in heads.values())]
            raise ModelError(
                f"{name} has {count} {kind}, which {ranks} ranks cannot share equally. Numbers of "
                f"ranks that can: {', '.join(map(str, usable)) or 'none'}."
            )


def read_geometry(model: PreTrainedModel, name: str, ranks: int = 1) -> Geometry:
    """Read the geometry off a loaded model.

    Args:
        model: the model.
        name: of it, for messages.
        ranks: processes that share its heads; see `check_shared`.

    Raises:
        ModelError: the model's rotary frequencies are not float32 (cast after loading, say).
    """
    config = model.config
    check_supported(config, name)
    decoder: Any = model.base_model
    inv_freq = decoder.rotary_emb.inv_freq
    if inv_freq.dtype != torch.float32:
        raise ModelError(
            f"{name}: rotary frequencies are {inv_freq.dtype}, not float32. "
            "Load with dtype=..., do not cast the model afterwards."
        )
    rotary = Rotary(inv_freq.detach().clone())
    attentions = [layer.self_attn for layer in decoder.layers]
    head_dim = int(attentions[0].head_dim)
    if rotary.dim != head_dim:
        raise ModelError(
            f"{name}: {rotary.dim} of {head_dim} head dimensions rotate: not supported."
        )
    layers = tuple(
        AttentionLayer(float(attention.scaling), rotary, _window(config, index))
        for index, attention in enumerate(attentions)
    )
    described = {
        "inv_freq": inv_freq.tolist(),
        "attention_scaling": float(decoder.rotary_emb.attention_scaling),
        "layers": [(layer.scale, layer.window) for layer in layers],
    }
    return Geometry(
        layers=layers,
        q_heads=int(config.num_attention_heads) // ranks,
        kv_heads=int(config.num_key_value_heads) // ranks,
        head_dim=head_dim,
        max_positions=int(config.max_position_embeddings),
        rotary_digest=hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest(),
        ranks=ranks,
    )


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    return dict(config.rope_parameters or {})


def _window(config: PretrainedConfig, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return None
    return int(window)
