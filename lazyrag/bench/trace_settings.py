"""What ``lazyrag bench trace`` measures, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from lazyrag.bench.hit_ratio import Workload
from lazyrag.types import Quality

GIB = 2**30


class Mode(StrEnum):
    """What is reused, and where it lies; requests, tiers and forward passes are the same.

    ``lazy``: a node's KV at any place, as it is. ``block_attention``: a copy of a node for every
    place it is asked at (`PositionedPlacer`). ``prefix``: pages of whole prompts under the names of
    all before them, as the engine reuses live text. ``full``: nothing.
    """

    LAZY = "lazy"
    BLOCK_ATTENTION = "block_attention"
    PREFIX = "prefix"
    FULL = "full"

    @property
    def quality(self) -> Quality:
        """What requests ask for."""
        return Quality.FULL if self in (Mode.PREFIX, Mode.FULL) else Quality.FAST


class Part(StrEnum):
    """What is measured, see `lazyrag.bench.trace`."""

    ALONE = "alone"
    AT_ONCE = "at-once"
    ZIPF = "zipf"
    COMPARE = "compare"


class Start(StrEnum):
    """Where nodes are when a run begins; ``again``: the same requests but for their questions were
    answered just before, and what they left is where it is.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    COLD = "cold"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of everything; the defaults are those of the published figures.

    Attributes:
        seed: of texts, traces, questions and arrivals.
        modes: that are run.
        seconds: of a run that goes on for a time.
        rate: of Poisson arrivals, 1/s; None = a share of what block_attention serves in a closed
            loop.
        alphas: of ``compare``; zipf_alphas: of ``zipf``.
        idle_gb: budgets of ``compare`` for KV that no running request uses, 10^9 bytes.
        clients: of the closed loop.
        question_tokens: of every request.
        few: requests of ``at-once``, nodes, nodes a prompt, tokens of a node, new tokens; also the
            nodes of ``alone``.
        repeats: of quick runs of ``at-once``.
        full_requests: of ``zipf`` without reuse, which takes the same time for each.
        many: the nodes of ``zipf`` and ``compare``, and the requests of ``zipf``.
        new_tokens: of their answers, and of ``alone``.
        pool_bytes: of KV on the device; zipf_bytes: of it, what ``zipf`` may use.
        host_bytes: of host memory for nodes; holds all of them.
    """

    seed: int = 0
    modes: tuple[Mode, ...] = tuple(Mode)
    seconds: float = 4.0
    rate: float | None = None
    alphas: tuple[float, ...] = (0.0, 1.1, 2.1)
    zipf_alphas: tuple[float, ...] = (1.1, 2.1)
    idle_gb: tuple[float, ...] = (1.0, 10.0)
    clients: int = 16
    question_tokens: int = 64
    few: tuple[int, int, int, int, int] = (64, 12, 10, 512, 128)
    repeats: int = 2
    full_requests: int = 25
    many: Workload = field(default_factory=partial(Workload, requests=100))
    new_tokens: int = 32
    pool_bytes: int = 48 * GIB
    zipf_bytes: int = 10 * GIB
    host_bytes: int = 32 * GIB
