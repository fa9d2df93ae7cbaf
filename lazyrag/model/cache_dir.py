"""Where lazyrag keeps what it can make again: dequantised weights, digests of weight files."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

ENVIRONMENT_VARIABLE = "LAZYRAG_CACHE"


def cache_dir() -> Path:
    """The cache folder, made private if it does not exist yet."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    path = Path(given).expanduser() if given else user_cache_path("lazyrag")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
