"""The one place where our attention enters transformers (measured on 5.12 to 5.24).

The model runs with ``position_ids = 0``, so its own rotary step is the identity and the registered
attention function gets raw q and k. Unknown keyword arguments of the model's forward travel
untouched to that function: ``lazy`` carries the step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from lazyrag.errors import ModelError

IMPLEMENTATION = "lazyrag"


class AttentionStep(Protocol):
    """What one forward pass attends to."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the decoder layer.
            q: [sequences, q_heads, tokens, head_dim], raw.
            k, v: [sequences, kv_heads, tokens, head_dim], raw.

        Returns:
            [sequences, tokens, q_heads, head_dim].
        """
        ...


def register() -> None:
    """Make our attention known to transformers under its own name; changes nothing else."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lazy: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if lazy is None:
        raise ModelError(
            "this model was loaded for lazyrag and cannot be called directly; "
            "use Engine.generate() or load a second copy with transformers"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return lazy.attend(layer, query, key, value), None


def hidden_states(model: PreTrainedModel, ids: Tensor, step: AttentionStep) -> Tensor:
    """Run the decoder layers.

    Args:
        ids: int64 [sequences, tokens].
        step: what attention sees.

    Returns:
        [sequences, tokens, hidden_size], after the final norm.
    """
    output = model.base_model(
        input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, lazy=step
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Scores over the vocabulary in fp32.

    Args:
        hidden: [..., hidden_size] from `hidden_states`.

    Returns:
        fp32 [..., vocab].
    """
    head = model.get_output_embeddings()
    scores: Tensor = head(hidden)
    return scores.float()
