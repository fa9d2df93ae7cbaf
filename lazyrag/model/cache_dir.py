"""Where lazyrag keeps what it can make again: dequantised weights, digests, self-check results."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from lazyrag.errors import ModelError

ENVIRONMENT_VARIABLE = "LAZYRAG_CACHE"


def cache_dir() -> Path:
    """The cache folder, made private if it does not exist yet.

    Raises:
        ModelError: it cannot be made.
    """
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    path = Path(given).expanduser() if given else user_cache_path("lazyrag")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache folder {path}: {error.strerror}. "
            f"Set {ENVIRONMENT_VARIABLE} to a folder that can be written."
        ) from error
    return path


class JsonCache:
    """A small JSON object in the cache folder; a missing or damaged file is an empty one."""

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / name

    def read(self) -> dict[str, Any]:
        """The whole object."""
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def put(self, key: str, value: Any) -> None:
        """Add one entry; a reader sees the old file or the new one.

        Raises:
            ModelError: it cannot be written.
        """
        text = json.dumps({**self.read(), key: value})
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".partial-")
            try:
                with os.fdopen(handle, "w") as stream:
                    stream.write(text)
                os.replace(name, self._path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(
                f"cannot write {self._path}: {error.strerror}. "
                f"Set {ENVIRONMENT_VARIABLE} to a folder that can be written."
            ) from error
