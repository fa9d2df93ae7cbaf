"""The way of small arrays from the host to a GPU without waiting for what runs there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(parts: Sequence[NDArray[np.integer]], target: Tensor) -> None:
    """Put a copy to a device in line behind what was asked of it before.

    A copy from ordinary memory would wait for all of that. Pinned memory comes from torch's cache,
    which hands it out again only after the copy was made.

    Args:
        parts: whole numbers, one after the other.
        target: int32, contiguous; its start is written.
    """
    size = sum(part.size for part in parts)
    pinned = target.device.type == "cuda"
    staged = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
    flat = [part.reshape(-1) for part in parts]
    np.concatenate(flat, out=staged.numpy(), casting="same_kind")
    target[:size].copy_(staged, non_blocking=pinned)
