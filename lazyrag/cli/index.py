"""The index directory: ``lazyrag.json`` (what it was made with), ``chroma/`` and ``kv/``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lazyrag.errors import LazyRagError, ModelError, RequestError, StoreError
from lazyrag.types import KVDType

FORMAT_VERSION = 1
SETTINGS_FILE = "lazyrag.json"
LOCK_FILE = "lazyrag.lock"
RECORDED = ("lazyrag", "torch", "transformers", "llama-index-core", "chromadb")

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDING = "minilm"
DEFAULT_CHUNK_SIZE = 384
DEFAULT_CHUNK_OVERLAP = 32
DEFAULT_KV_DTYPE = KVDType.FLOAT16.value
"""Half the bytes that a model computing in float32 would need."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What an index was made with; none of it may differ later.

    Attributes:
        model: as given, a local path made absolute.
        weights_digest: of the checkpoint's weights, hex.
        embedding: as given, a local path made absolute.
        embedding_dim: length of its vectors.
        chunk_size, chunk_overlap: tokens of the model's tokenizer.
        sink: what nodes see in front of them while they are encoded.
        kv_dtype: how K and V lie on disk.
        compute_dtype: what the model computed in; another one makes other KV.
        versions: packages at the time of making, for bug reports.
    """

    model: str
    weights_digest: str
    embedding: str
    embedding_dim: int
    chunk_size: int
    chunk_overlap: int
    sink: str
    kv_dtype: str
    compute_dtype: str
    versions: dict[str, str] = field(default_factory=dict)


class Index:
    """One index directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.kv_path = self.path / "kv"
        self.chroma_path = self.path / "chroma"

    @property
    def exists(self) -> bool:
        return (self.path / SETTINGS_FILE).exists()

    def settings(self) -> IndexSettings:
        """Read ``lazyrag.json``.

        Raises:
            StoreError: there is no index here, or its file is damaged, foreign or newer.
        """
        file = self.path / SETTINGS_FILE
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise StoreError(
                f"there is no index at {self.path} ({SETTINGS_FILE} is missing); make one with "
                f"`lazyrag ingest PATH --index {self.path}`."
            ) from None
        except OSError as error:
            raise StoreError(f"{file} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise _damaged(file, "it is not JSON") from error
        return _parse(file, data)

    def write_settings(self, settings: IndexSettings) -> None:
        """Publish ``lazyrag.json`` whole or not at all, readable by its owner only."""
        data = {"format_version": FORMAT_VERSION, **asdict(settings)}
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".lazyrag-", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path / SETTINGS_FILE)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the directory for one writer; made here and left without an index, it is removed.

        Raises:
            StoreError: it cannot be made, holds something else, or another process writes to it.
        """
        made = self._prepare()
        before = os.umask(0o077)
        lock = None
        try:
            lock = self._lock()
            yield
        finally:
            os.umask(before)
            if lock is not None:
                if not self.exists:
                    self._remove(whole=made)
                os.close(lock)

    def _prepare(self) -> bool:
        if self.exists:
            return False
        try:
            made = not self.path.exists()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = {entry.name for entry in os.scandir(self.path)}
        except OSError as error:
            raise StoreError(
                f"the index directory {self.path} cannot be made: {error.strerror}."
            ) from error
        if LOCK_FILE in others:  # an ingestion that was killed before it wrote its settings
            others -= {LOCK_FILE, self.kv_path.name, self.chroma_path.name}
        if others:
            raise StoreError(
                f"{self.path} is not an index ({SETTINGS_FILE} is missing) and is not empty (it "
                f"holds {min(others)}); give --index a new or empty directory."
            )
        return made

    def _lock(self) -> int:
        handle = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            import fcntl
        except ImportError:
            return handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise StoreError(
                f"another lazyrag process is writing to {self.path}; wait until it is done."
            ) from None
        return handle

    def _remove(self, *, whole: bool) -> None:
        for part in (self.kv_path, self.chroma_path):
            shutil.rmtree(part, ignore_errors=True)
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        if whole:
            self.path.rmdir()


def resolve_name(name: str) -> str:
    """An alias or hub id as it is; a local path made absolute, to mean the same anywhere."""
    is_path = name not in (DEFAULT_MODEL, DEFAULT_EMBEDDING) and os.path.exists(name)
    return os.path.realpath(name) if is_path else name


def check_same(index: Index, settings: IndexSettings, given: dict[str, Any]) -> None:
    """Refuse what was given for an index made with something else; None = not given.

    Raises:
        ModelError: another model, named together with the index's.
        RequestError: another embedding, chunking, sink or dtype.
    """
    words = {
        "model": "model",
        "embedding": "embedding",
        "chunk_size": "chunk size",
        "chunk_overlap": "chunk overlap",
        "sink": "sink",
        "kv_dtype": "KV dtype",
    }
    for name, value in given.items():
        had = getattr(settings, name)
        if value is None or value == had:
            continue
        kind = ModelError if name == "model" else RequestError
        raise kind(
            f"{index.path} was made with the {words[name]} {had}, not {value}; leave the option "
            "out, or make another index."
        )


def check_weights(index: Index, settings: IndexSettings, digest: str) -> None:
    """Refuse a checkpoint whose weights are not those the index was made with.

    Raises:
        ModelError: same name, other weights.
    """
    if digest != settings.weights_digest:
        raise ModelError(
            f"{index.path} was made with the model {settings.model} of weights "
            f"{settings.weights_digest[:12]}, but {settings.model} now has the weights "
            f"{digest[:12]}; put the old weights back, or make another index."
        )


def recorded_versions() -> dict[str, str]:
    """Versions of the packages that shape an index; those not installed are left out."""
    found = {}
    for package in RECORDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _parse(file: Path, data: object) -> IndexSettings:
    if not isinstance(data, dict) or "format_version" not in data:
        raise _damaged(file, "it has no format_version")
    found = data.pop("format_version")
    if found != FORMAT_VERSION:
        raise StoreError(
            f"{file} has format {found!r}, this lazyrag reads format {FORMAT_VERSION}; install the "
            "version that made it, or make another index."
        )
    for name, annotation in IndexSettings.__annotations__.items():
        if name not in data:
            raise _damaged(file, f"{name} is missing")
        expected = {"str": str, "int": int}.get(annotation, dict)
        if not isinstance(data[name], expected):
            raise _damaged(file, f"{name} is {data[name]!r}")
    return IndexSettings(**{name: data[name] for name in IndexSettings.__annotations__})


def _damaged(file: Path, what: str) -> LazyRagError:
    return StoreError(
        f"{file} is damaged or not lazyrag's ({what}); restore it, or make another index with "
        "`lazyrag ingest`."
    )
