"""Digest of a checkpoint's weights and configuration: replaced weights never match old KV."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import PretrainedConfig

from lazyrag.model.cache_dir import JsonCache

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Configuration entries that do not change what a forward pass computes from given weights."""


def weights_digest(files: list[Path], config: PretrainedConfig) -> str:
    """Hex SHA-256 over the content of every weight file and the configuration.

    Files are hashed once and remembered by path, size and times (mtime and ctime in ns).
    """
    cache = JsonCache("weight-digests.json")
    known = cache.read()
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        name = str(file.resolve())
        entry = known.get(name)
        if not isinstance(entry, dict) or entry.get("stamp") != stamp:
            with file.open("rb") as stream:
                hexadecimal = hashlib.file_digest(stream, "sha256").hexdigest()
            entry = {"stamp": stamp, "sha256": hexadecimal}
            cache.put(name, entry)
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(entry["sha256"]))
    settings = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
