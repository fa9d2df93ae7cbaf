"""Raw KV from host memory to the device, beside the forward passes where the device can do that."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag.engine.costs import Costs
from lazyrag.store import StoredKV


@dataclass(slots=True, eq=False)
class Sent:
    """KV on its way to the device.

    Attributes:
        kv: where it comes from; kept until it has arrived.
        k, v: [layers, tokens, kv_heads, head_dim] on the device.
        begun, arrived: events of the stream that copies; None where copying is immediate.
        started: of ``time.perf_counter``.
    """

    kv: StoredKV
    k: Tensor
    v: Tensor
    started: float
    begun: torch.cuda.Event | None = None
    arrived: torch.cuda.Event | None = None

    @property
    def here(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> None:
        """Return when it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def seconds(self) -> float:
        """What the copy took, once it has arrived."""
        if self.begun is None or self.arrived is None:
            return time.perf_counter() - self.started
        milliseconds: float = self.begun.elapsed_time(self.arrived)
        return milliseconds / 1000


class Sender:
    """Copies in a stream of its own, so that forward passes go on meanwhile.

    Args:
        device: where the pool is.
        costs: learns how long it takes.
    """

    def __init__(self, device: torch.device, costs: Costs) -> None:
        self._device = device
        self._costs = costs
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, kv: StoredKV) -> Sent:
        """Begin to copy."""
        started = time.perf_counter()
        if self._stream is None:
            return Sent(kv, kv.k.to(self._device), kv.v.to(self._device), started)
        begun, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            k = kv.k.to(self._device, non_blocking=True)
            v = kv.v.to(self._device, non_blocking=True)
            arrived.record()
        return Sent(kv, k, v, started, begun, arrived)

    def received(self, sent: Sent) -> None:
        """Note how long it took; the tensors may be used by the current stream from here on."""
        self._costs.was_sent(sent.kv.nbytes, sent.seconds())
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            for tensor in (sent.k, sent.v):
                tensor.record_stream(current)
