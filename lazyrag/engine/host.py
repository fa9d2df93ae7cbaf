"""Nodes in host memory, between the device and the store: raw KV, pinned where a GPU reads it."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lazyrag.engine.eviction import EvictionPolicy
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey

logger = logging.getLogger("lazyrag")


class HostTier:
    """Raw KV of nodes that were read or computed, at most ``budget_bytes``. Thread-safe.

    A node stays here while it is on the device, too: nothing is written back when its pages are
    needed. `EvictionPolicy` decides which nodes stay.

    Args:
        budget_bytes: of all nodes together; 0 = keep none.
        device: a GPU that reads this memory, None = none does.
        evicted: called with the bytes of every node that goes for want of room.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        device: torch.device | None = None,
        evicted: Callable[[int], None] | None = None,
    ) -> None:
        self._policy: EvictionPolicy[NodeKey] = EvictionPolicy(budget_bytes)
        self._kept: dict[NodeKey, StoredKV] = {}
        self._device = device
        self._lock = threading.Lock()
        self._tell_evicted = evicted or (lambda nbytes: None)

    @property
    def budget_bytes(self) -> int:
        return self._policy.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._policy.used_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._kept

    def get(self, key: NodeKey) -> StoredKV | None:
        """A node that is here."""
        return self._kept.get(key)

    def touch(self, key: NodeKey) -> None:
        """A request uses the node, wherever it is."""
        if self.budget_bytes:
            with self._lock:
                self._policy.touch(key)

    def keep(self, key: NodeKey, kv: StoredKV, bring_s: float) -> StoredKV:
        """Keep a node if it is worth more than what would have to go.

        Args:
            key: the node.
            kv: as read or computed.
            bring_s: seconds to bring it back into host memory.

        Returns:
            The same KV, a copy in memory of this tier if it stays here. In any case a GPU can read
            it without the help of a processor, as far as there is memory for that.
        """
        try:
            if (copy := self._admit(key, kv, bring_s)) is not None:
                return copy
            return replace(kv, k=kv.k.pin_memory(), v=kv.v.pin_memory()) if self._device else kv
        except (OSError, MemoryError, RuntimeError) as error:
            logger.warning("node %s is not kept in host memory: %r", key, error)
            return kv

    def _admit(self, key: NodeKey, kv: StoredKV, bring_s: float) -> StoredKV | None:
        if not 0 < kv.nbytes <= self.budget_bytes:
            return None
        given_up: list[StoredKV] = []  # freed outside the lock
        with self._lock:
            if key in self._policy:
                return self._kept.get(key, kv)
            admission = self._policy.add(key, kv.nbytes, bring_s)
            for gone in admission.evicted:
                if (node := self._kept.pop(gone, None)) is not None:
                    given_up.append(node)
                    self._tell_evicted(node.nbytes)
        given_up.clear()
        if not admission.admitted:
            return None
        try:
            copy = replace(kv, k=_copied(kv.k, self._device), v=_copied(kv.v, self._device))
        except BaseException:
            self.forget(key)
            raise
        with self._lock:
            if key in self._policy:  # not evicted or forgotten meanwhile
                self._kept[key] = copy
        return copy

    def clear(self) -> None:
        """Give up all nodes and forget how often they were used."""
        with self._lock:
            gone, self._kept = self._kept, {}
            self._policy = EvictionPolicy(self.budget_bytes)
        gone.clear()  # freed outside the lock

    def forget(self, key: NodeKey) -> None:
        """The node will not come back."""
        with self._lock:
            gone = self._kept.pop(key, None)
            self._policy.forget(key)
        del gone  # freed outside the lock


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The same values in memory of their own: what was read maps its file.

    Whole memory pages, so that pinning them touches nobody else's; torch's own pinned allocator
    rounds up to powers of two. Memory that cannot be pinned serves as well, more slowly.
    """
    copy = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    if device is not None:
        storage, runtime = copy.untyped_storage(), torch.cuda.cudart()
        address = storage.data_ptr()
        with torch.cuda.device(device):
            error = runtime.cudaHostRegister(address, storage.nbytes(), 0)
        if error == runtime.cudaError.success:
            weakref.finalize(storage, runtime.cudaHostUnregister, address)
        else:
            logger.warning("host memory of %d bytes is not pinned: %s", storage.nbytes(), error)
    return copy
