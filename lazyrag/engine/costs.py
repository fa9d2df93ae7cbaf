"""What it takes to have a node's KV on the device: measured, so that machines speak for themselves.

Reading from the store goes against computing anew. On a slow disk under a fast GPU computing wins,
on a CPU it hardly ever does; nothing but this machine's own figures decides.
"""

from __future__ import annotations

import threading

from lazyrag.engine.metrics import Metrics
from lazyrag.engine.report import Tier

_WEIGHT = 0.2
"""Of the newest sample in the mean of seconds a unit."""
_CLEARLY, _WORTH_S = 0.8, 0.02
"""Computing takes the device away from others, so it must be faster by a fifth, and by so much."""
_HOPE = 0.9
"""What a speed that keeps losing is taken for each time, so that it is tried again."""


class Speed:
    """Seconds a unit (a byte, a token), the mean of what was measured lately. Thread-safe.

    Args:
        guess: units a second until the first measurement; used to weigh nodes against each other.
    """

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Back to the guess."""
        self._seconds_per_unit = 1 / self._guess
        self.measured = False

    def record(self, units: int, seconds: float) -> None:
        """``units`` took ``seconds``; none at all says nothing."""
        if units <= 0 or seconds <= 0:
            return
        with self._lock:
            weight = _WEIGHT if self.measured else 1.0
            self._seconds_per_unit += weight * (seconds / units - self._seconds_per_unit)
            self.measured = True

    def seconds(self, units: float) -> float:
        """Expected for ``units``."""
        return units * self._seconds_per_unit

    def hope(self) -> None:
        """Expect a little more of a speed that nobody measures any more."""
        with self._lock:
            self._seconds_per_unit *= _HOPE

    @property
    def per_second(self) -> float | None:
        """Units a second; None while it is a guess."""
        return 1 / self._seconds_per_unit if self.measured else None


class Costs:
    """The three ways to bring a node: read it from the store, send it from host memory, compute it.

    Args:
        metrics: counts what is measured here.

    Attributes:
        read: bytes from the store into host memory, checked.
        send: bytes from host memory into pages.
        encode: tokens through the model.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self.read = Speed(1e9)
        self.send = Speed(1e10)
        self.encode = Speed(1e3)

    def reset(self) -> None:
        """Forget what was measured."""
        for speed in (self.read, self.send, self.encode):
            speed.reset()

    def was_read(self, nbytes: int, seconds: float) -> None:
        """A node came from the store into host memory."""
        self.read.record(nbytes, seconds)
        self._metrics.moved(Tier.DISK, Tier.HOST, nbytes, seconds)

    def was_sent(self, nbytes: int, seconds: float) -> None:
        """A node came from host memory into pages."""
        self.send.record(nbytes, seconds)
        self._metrics.moved(Tier.HOST, Tier.DEVICE, nbytes, seconds)

    def was_encoded(self, tokens: int, seconds: float) -> None:
        """Nodes were computed."""
        self.encode.record(tokens, seconds)
        self._metrics.encoded(tokens, seconds)

    def encoding_is_faster(self, tokens: int, tokens_before: int, read_s: float) -> bool:
        """Whether to compute a node that the store has.

        Args:
            tokens: of the node.
            tokens_before: that are in line to be computed.
            read_s: expected until the node is read.

        Returns:
            False as long as one of the two was never measured.
        """
        if not (self.read.measured and self.encode.measured):
            return False
        encode_s = self.encode.seconds(tokens + tokens_before)
        return encode_s < min(_CLEARLY * read_s, read_s - _WORTH_S)

    def bring_s(self, tokens: int, nbytes: int, in_host_memory: bool) -> float:
        """Seconds to bring back a node that is not on the device."""
        if in_host_memory:
            return self.send.seconds(nbytes)
        return min(self.read.seconds(nbytes), self.encode.seconds(tokens)) + self.send.seconds(
            nbytes
        )
