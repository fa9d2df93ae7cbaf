"""A model of a given shape with random weights, made on the device: speed needs no checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lazyrag.model import seam
from lazyrag.model.geometry import read_geometry
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.tokenise import PromptTokenizer

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""Llama-3.1-8B, as its configuration gives it."""


def random_model(settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A checkpoint of this configuration that was never trained.

    Its tokenizer makes one token of each byte; ids that no text becomes are words of their own.
    """
    seam.register()
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=seam.IMPLEMENTATION
        )
    model = model.eval().requires_grad_(False)
    name = f"random {settings['model_type']}"
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=PromptTokenizer(_bytes_tokenizer(config.vocab_size)),
        geometry=read_geometry(model, name),
        weights_digest=hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(),
        eos_ids=frozenset(),
        note=None,
    )


def _bytes_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"\u0120word{number}" for number in range(len(tokens), vocabulary)]
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
