"""Load a checkpoint as a guest: weights, tokenizer, geometry, digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from lazyrag.errors import ModelError
from lazyrag.model import seam
from lazyrag.model.fingerprint import weights_digest
from lazyrag.model.geometry import Geometry, check_shared, check_supported, read_geometry
from lazyrag.model.ranks import Ranks
from lazyrag.model.source import ModelSource, find_model, quiet
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
        ranks: the processes that share the model; None = this one has all of it.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PromptTokenizer
    geometry: Geometry
    weights_digest: str
    eos_ids: frozenset[int]
    note: str | None
    ranks: Ranks | None = None

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


def load_model(
    name: str, *, device: str = "auto", dtype: str = "auto", tensor_parallel: bool = False
) -> LoadedModel:
    """Load a hub id, a local folder, a ``.gguf`` file or ``smollm2``.

    Args:
        name: which.
        device: ``auto``, ``cpu``, ``cuda``, ...
        dtype: to compute in.
        tensor_parallel: share it among the processes of this ``torchrun``; all of them call this.

    Raises:
        ModelError: not found, not supported (named), damaged, or without a fast tokenizer; with
            ``tensor_parallel`` also what `Ranks.join` and `check_shared` refuse.
    """
    where = parse_device(device)
    compute = parse_dtype(dtype, where)
    ranks = Ranks.join(where) if tensor_parallel else None
    try:
        loaded = _load(name, where, compute, ranks)
    except Exception:
        if ranks is not None:
            ranks.close()
        raise
    if ranks is not None:
        ranks.ready(loaded.model)
    return loaded


def _load(name: str, where: torch.device, compute: torch.dtype, ranks: Ranks | None) -> LoadedModel:
    source = _found(name, compute, ranks)
    seam.register()
    try:
        with quiet():
            config = AutoConfig.from_pretrained(source.folder)
            check_supported(config, name)
            if ranks is not None:
                check_shared(config, name, ranks.count)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=compute,
                attn_implementation=seam.IMPLEMENTATION,
                use_safetensors=True,
                **_sharing(ranks),
            )
            tokenizer = AutoTokenizer.from_pretrained(source.folder)
    except ModelError:
        raise
    except Exception as error:  # a damaged checkpoint fails in many ways, all below this line
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"cannot load {name!r} from {source.folder}: {reason}") from error
    model = model.eval().requires_grad_(False)
    if ranks is None:
        model = model.to(where)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.eos_token_id is not None:
        eos_ids.add(int(tokenizer.eos_token_id))
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=PromptTokenizer(tokenizer),
        geometry=read_geometry(model, name, 1 if ranks is None else ranks.count),
        weights_digest=_digest(source, config, ranks),
        eos_ids=frozenset(eos_ids),
        note=source.note,
        ranks=ranks,
    )


def _found(name: str, dtype: torch.dtype, ranks: Ranks | None) -> ModelSource:
    """Rank 0 fetches or converts the weights, the others find them there."""
    if ranks is None:
        return find_model(name, dtype)
    if ranks.leads:
        try:
            source = find_model(name, dtype)
        except ModelError as error:
            ranks.share({"refused": str(error)})
            raise
        ranks.share({"refused": None})
        return source
    if (refused := ranks.share(None)["refused"]) is not None:
        raise ModelError(refused)
    return find_model(name, dtype)


def _sharing(ranks: Ranks | None) -> dict[str, Any]:
    """Arguments by which transformers shards a model by its own plan while it is read."""
    if ranks is None:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        config: Any = DistributedConfig
        return {"distributed_config": config(tp_size=ranks.count, tp_plan="auto")}
    except TypeError as error:
        raise ModelError("tensor_parallel=True needs transformers 5.17 or newer.") from error


def _digest(source: ModelSource, config: PretrainedConfig, ranks: Ranks | None) -> str:
    """Read by one process, the same in all."""
    if ranks is None:
        return weights_digest(source.weight_files, config)
    found = {"digest": weights_digest(source.weight_files, config)} if ranks.leads else None
    return str(ranks.share(found)["digest"])
