"""What was reused and what was not: the one object every answer carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lazyrag.types import NodeKey, Quality

REPORT_VERSION = 1


class NodeStatus(StrEnum):
    REUSED = "reused"
    RECOMPUTED = "recomputed"


class Tier(StrEnum):
    """Where a node's KV was when the request came."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    NONE = "none"


class Reason(StrEnum):
    """Why a node was computed anew."""

    FIRST_USE = "first use"
    """Registered (another form of an ingested node, say), encoded by this request, then stored."""
    CHANGED = "changed"
    """The prompt holds a text close to, but not equal to, the ingested one."""
    CUT = "cut"
    """The prompt holds only one part of the ingested text."""
    QUOTED = "quoted"
    """The prompt holds the text inside quotes, with its line ends spelled out (a list, JSON)."""
    DAMAGED = "damaged"
    """The stored file failed its check and was put aside."""
    MISSING = "missing"
    """The node was ingested, its file is gone."""
    UNREADABLE = "unreadable"
    """The store could not be read just now."""
    FASTER = "faster"
    """By this machine's measured speeds, computing it took less time than reading it."""
    NOT_STORED = "not stored"
    """The text was given as a node and had never been ingested."""
    LAST_TOKEN = "last token"
    """The node is one token, the last of the prompt, behind which the answer is predicted."""
    CHOSEN = "chosen"
    """The question needs it most, says the quality that was asked for."""
    QUALITY_FULL = "quality full"
    """The caller asked for full attention."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node's KV came from, bytes read; ``reason``: why it was computed now."""

    tier: Tier
    nbytes: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One known node of the prompt.

    Attributes:
        key: identity of the ingested node.
        tokens: tokens of the node as ingested.
        offset: position of its first token in this prompt (S_d); for a `changed` or `cut` node that
            of the piece found.
        tier: where its KV came from; ``none`` when recomputed.
        status, reason: ``reason`` is None when reused.
        given: number of the node in the prompt as given, when ``quality`` may change the order of
            nodes; `nodes` of the report are in the order in which they were read.
    """

    key: NodeKey
    tokens: int
    offset: int
    tier: Tier
    status: NodeStatus
    reason: Reason | None = None
    given: int | None = None


@dataclass(slots=True)
class ReuseReport:
    """Counts are tokens, sizes bytes, times seconds; ``version`` changes with a field's meaning.

    ``tokens_reused`` counts tokens of nodes, ``live_tokens_reused`` those of live text that an
    earlier request had computed behind exactly the same. ``tokens_computed`` counts what went
    through the model before the first token; a node that stands twice in a prompt is reused twice,
    but computed once. ``tokens_looked`` counts, with the share of layers that were run, what went
    through it before only to choose nodes, ``look_s`` is the time from the request until they were
    chosen; it is part of ``ttft_s``.

    ``node_temperature`` and ``node_lse_scale`` are those of attention to reused nodes (1 = as the
    model has it), as the checkpoint was calibrated.

    Times are those spent in the engine: what a reader of a stream does between pieces is not in
    them. ``warnings`` are sentences on what could not be used (the store's index, say).
    """

    quality: Quality
    nodes: list[NodeReport] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens_reused: int = 0
    live_tokens_reused: int = 0
    tokens_computed: int = 0
    tokens_looked: float = 0.0
    look_s: float = 0.0
    node_temperature: float = 1.0
    node_lse_scale: float = 1.0
    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    recognise_s: float = 0.0
    ttft_s: float | None = None
    decode_tokens_per_s: float | None = None
    warnings: list[str] = field(default_factory=list)
    version: int = REPORT_VERSION

    @property
    def work(self) -> float:
        """All tokens that went through the model for the prompt, over its length."""
        return (self.tokens_computed + self.tokens_looked) / max(1, self.prompt_tokens)

    @property
    def nodes_reused(self) -> int:
        return sum(node.status is NodeStatus.REUSED for node in self.nodes)

    @property
    def nodes_recomputed(self) -> int:
        return len(self.nodes) - self.nodes_reused

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, the same in ``--json``, both adapters and metrics."""
        data: dict[str, Any] = _plain(asdict(self))
        for node, given in zip(data["nodes"], self.nodes, strict=True):
            node["key"] = str(given.key)
        data["nodes_reused"] = self.nodes_reused
        data["nodes_recomputed"] = self.nodes_recomputed
        data["work"] = self.work
        return data

    def summary(self) -> str:
        """One line for people."""
        first = "-" if self.ttft_s is None else f"{self.ttft_s:.2f} s"
        line = (
            f"{self.quality}: {self.nodes_reused} of {len(self.nodes)} nodes reused, "
            f"{self.tokens_reused:,} tokens reused, {self.tokens_computed:,} computed, "
            f"work {self.work:.0%} of full attention's, first token after {first}"
        )
        reasons = sorted({str(node.reason) for node in self.nodes if node.reason is not None})
        return f"{line} (recomputed: {', '.join(reasons)})" if reasons else line


def _plain(value: Any) -> Any:
    """Enumerations as their values, in lists and dicts, too."""
    if isinstance(value, dict):
        return {_plain(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.value if isinstance(value, StrEnum) else value
