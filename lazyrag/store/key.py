"""Which KV is which: everything that shapes a node's K and V goes into its key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from lazyrag.types import KVDType, NodeKey

FORMAT_VERSION = 1
"""Of the files on disk; part of every key, so another format is another key."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How nodes are turned into KV.

    Attributes:
        weights: hex digest of weights and configuration.
        adapter: hex digest of an adapter's weights; empty = none.
        tokenizer: hex digest of everything that turns text into ids.
        rotary: hex digest of frequencies, windows and scales per layer.
        sink: ids every node is encoded behind; their KV is dropped.
        dtype: how K and V are kept; never ``model``.
        compute_dtype: dtype of the forward pass that made them.
        tenant: nodes of one tenant are never served to another.
        format_version: of the files.
    """

    weights: str
    tokenizer: str
    rotary: str
    sink: tuple[int, ...]
    dtype: KVDType
    compute_dtype: str
    adapter: str = ""
    tenant: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """32 bytes over all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def node_key(encoding_digest: bytes, ids: Sequence[int], behind: Sequence[int] = ()) -> NodeKey:
    """The key of a node: digest of the encoding, the token ids, and those it is encoded behind."""
    digest = hashlib.sha256(encoding_digest + np.asarray(ids, "<i8").tobytes())
    if behind:  # no id is negative
        digest.update(np.asarray((-1, *behind), "<i8").tobytes())
    return NodeKey(digest.digest())
