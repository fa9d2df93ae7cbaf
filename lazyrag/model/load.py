"""Load a checkpoint as a guest: weights, tokenizer, geometry, digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lazyrag.errors import ModelError
from lazyrag.model import seam
from lazyrag.model.fingerprint import weights_digest
from lazyrag.model.geometry import Geometry, check_supported, read_geometry
from lazyrag.model.source import find_model, quiet
from lazyrag.prompt.tokenise import PromptTokenizer

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A checkpoint ready to run.

    Attributes:
        name: what the user gave.
        model: in eval mode, our attention set.
        tokenizer: text to ids and back.
        geometry: per-layer attention.
        weights_digest: hex; covers weights and configuration.
        eos_ids: every id that ends an answer.
        note: a sentence to repeat wherever quality is reported.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PromptTokenizer
    geometry: Geometry
    weights_digest: str
    eos_ids: frozenset[int]
    note: str | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype: ``auto`` is float32 on the CPU, bfloat16 on a GPU.

    Raises:
        ModelError: not a dtype lazyrag computes in.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {name!r}: use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def parse_device(name: str) -> torch.device:
    """``auto`` is the GPU when there is one.

    Raises:
        ModelError: not a device of this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} is not available on this machine.") from error
    return device


def load_model(name: str, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a hub id, a local folder, a ``.gguf`` file or ``smollm2``.

    Raises:
        ModelError: not found, not supported (named), damaged, or without a fast tokenizer.
    """
    where = parse_device(device)
    compute = parse_dtype(dtype, where)
    source = find_model(name, compute)
    seam.register()
    try:
        with quiet():
            config = AutoConfig.from_pretrained(source.folder)
            check_supported(config, name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=compute,
                attn_implementation=seam.IMPLEMENTATION,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(source.folder)
    except ModelError:
        raise
    except Exception as error:  # a damaged checkpoint fails in many ways, all below this line
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"cannot load {name!r} from {source.folder}: {reason}") from error
    model = model.to(where).eval().requires_grad_(False)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.eos_token_id is not None:
        eos_ids.add(int(tokenizer.eos_token_id))
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=PromptTokenizer(tokenizer),
        geometry=read_geometry(model, name),
        weights_digest=weights_digest(source.weight_files, config),
        eos_ids=frozenset(eos_ids),
        note=source.note,
    )
