"""One node, one self-describing safetensors file.

    k, v  [layers, tokens, kv_heads, head_dim]   k is raw: not rotated, the portable form
    ids   int32 [tokens]
    behind   int32 [tokens it is encoded behind]; absent if there are none
    metadata: format, version, key, encoding (digest), text, and a checksum (xxh3-128) over dtype,
              shape and bytes of k, v, ids and behind

Loading checks size, header, shapes, checksum and ids; whatever is in doubt is not served.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lazyrag.store.key import FORMAT_VERSION
from lazyrag.types import NodeKey

FORMAT = "lazyrag-kv"
SUFFIX = ".safetensors"
TEMPORARY_PREFIX = ".partial-"
_TENSORS = ("k", "v", "ids", "behind")
"""In the order of the checksum; every file has the first three."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredKV:
    """A node's KV as it lies on disk.

    Attributes:
        ids: token ids.
        k: raw keys [layers, tokens, kv_heads, head_dim].
        v: values, the same shape and dtype.
        behind: ids between the sink and the node when it was encoded.
    """

    ids: tuple[int, ...]
    k: Tensor
    v: Tensor
    behind: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class DamagedFileError(Exception):
    """A node's file is not what it should be; the text says in which way."""


def write_node(path: Path, key: NodeKey, encoding: bytes, kv: StoredKV, text: str | None) -> int:
    """Write a node so that ``path`` is either absent or complete.

    Temporary name in the same folder, fsync, rename, fsync of the folder.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: no space, no permission; nothing is left behind.
    """
    tensors = {
        "k": kv.k.contiguous(),
        "v": kv.v.contiguous(),
        "ids": torch.tensor(kv.ids, dtype=torch.int32),
    }
    if kv.behind:
        tensors["behind"] = torch.tensor(kv.behind, dtype=torch.int32)
    metadata = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "key": str(key),
        "encoding": encoding.hex(),
        "checksum": _checksum(*tensors.values()),
        "text": text or "",
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
    os.close(handle)
    temporary = Path(name)
    try:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # wraps the operating system's own error
            raise OSError(str(error)) from error
        temporary.chmod(0o600)
        fsync(temporary)
        size = temporary.stat().st_size
        os.replace(temporary, path)
        fsync(path.parent)
        return size
    finally:
        temporary.unlink(missing_ok=True)


def read_node(path: Path, key: NodeKey, size: int | None = None) -> StoredKV:
    """Read and check a node.

    Args:
        path: the file.
        key: the node it should hold.
        size: bytes it should have; None = unknown.

    Raises:
        FileNotFoundError: no such file.
        DamagedFileError: it does not hold what it should.
    """
    actual = path.stat().st_size
    if size is not None and actual != size:
        raise DamagedFileError(f"{actual} bytes instead of {size}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DamagedFileError("not a file of this store")
            if metadata.get("version") != str(FORMAT_VERSION):
                raise DamagedFileError(f"format version {metadata.get('version')!r}")
            if metadata.get("key") != str(key):
                raise DamagedFileError("it holds another node")
            present = file.keys()
            tensors = {name: file.get_tensor(name) for name in _TENSORS if name in present}
    except (SafetensorError, ValueError) as error:
        raise DamagedFileError(f"unreadable: {error}") from error
    try:
        k, v, ids = (tensors[name] for name in _TENSORS[:3])
    except KeyError as error:
        raise DamagedFileError(f"no tensor {error}") from None
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or ids.shape != k.shape[1:2]:
        raise DamagedFileError("tensor shapes disagree")
    if metadata.get("checksum") != _checksum(*tensors.values()):
        raise DamagedFileError("checksum differs")
    behind = tensors["behind"].flatten().tolist() if "behind" in tensors else ()
    return StoredKV(tuple(ids.tolist()), k, v, tuple(behind))


def read_encoding(path: Path) -> bytes:
    """The digest of the encoding a node file says it was made with.

    Raises:
        DamagedFileError: not a node file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return bytes.fromhex((file.metadata() or {}).get("encoding", ""))
    except (SafetensorError, ValueError) as error:
        raise DamagedFileError(f"unreadable: {error}") from error


def fsync(path: Path) -> None:
    """Make the content of a file, or a rename inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(*tensors: Tensor) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
