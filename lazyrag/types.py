"""Identities and small values that cross the borders between rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

TextId = NewType("TextId", int)
"""Row of a registered text in the store's index."""


@dataclass(frozen=True, slots=True, order=True)
class NodeKey:
    """Identity of one node's KV: 256-bit digest of its token ids and all that shaped its K and V.

    Equal text encoded by other weights, behind another sink or in another dtype has another key.
    """

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise ValueError(f"a NodeKey has 32 bytes, got {len(self.digest)}")

    def __str__(self) -> str:
        return self.digest.hex()

    @classmethod
    def parse(cls, text: str) -> NodeKey:
        """Read the 64 hex digits that ``str(key)`` writes.

        Raises:
            ValueError: ``text`` is not 64 hex digits.
        """
        return cls(bytes.fromhex(text))


class KVDType(StrEnum):
    """How K and V are kept on disk. ``model`` means the dtype the model computes in."""

    MODEL = "model"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Quality(StrEnum):
    """How much of a prompt is computed anew.

    ``fast``: every known node is reused as stored, in its place. ``balanced`` and ``best``: the
    nodes the question needs most are computed anew, last of their group, within a quarter and 40%
    of full attention's work (see `lazyrag.quality.ladder`). ``full``: nothing is reused, plain
    attention.
    ``materialized``: as ``fast``, but every node is copied and its raw keys are rotated to their
    place; the oracle the lazy path is tested against, not a mode for users.
    """

    FAST = "fast"
    BALANCED = "balanced"
    BEST = "best"
    FULL = "full"
    MATERIALIZED = "materialized"


DEFAULT_QUALITY = Quality.BALANCED
"""Of prompts whose nodes are found in them; see `GenerationOptions`."""
DEFAULT_SINK = "passages"
"""What nodes are encoded behind unless told otherwise; the names are in `lazyrag.engine.sink`."""


@dataclass(frozen=True, slots=True, order=True)
class Reference:
    """Who needs a node: document ``name`` of collection ``owner``; neither may be empty."""

    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class NodeText:
    """A text to ingest, in the exact form in which it will reach the model.

    Attributes:
        text: the string whose KV is computed and which is looked for in prompts.
        aliases: other forms of the same node; they are registered now and encoded at their
            first use in a prompt.
        label: what to call the node in messages to the user (a file name, say).
        reference: who needs the node, until `Engine.release`; None = it is kept for good.
        behind: text that the node is encoded behind, besides the sink, such as the passage before
            it in its document. What it means is known to the node then, but it is no part of it
            and need not stand in a prompt. Its last 128 tokens count. A text that is known already
            stays as it was encoded.
    """

    text: str
    aliases: tuple[str, ...] = ()
    label: str | None = None
    reference: Reference | None = None
    behind: str = ""

    @property
    def forms(self) -> tuple[str, ...]:
        """The text and its aliases."""
        return (self.text, *self.aliases)


@dataclass(frozen=True, slots=True)
class Live:
    """A segment computed with the request: give ``text`` or ``ids``, not both.

    Attributes:
        text: plain text; special tokens written in it stay text unless ``control`` is true.
        ids: token ids, taken as they are.
        control: read special tokens written in ``text`` (for text you wrote yourself).
        offset: position of the first token; None = right behind what stands before. All that
            follows continues from here.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    control: bool = False
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A segment whose KV comes from the store: give ``key`` or ``text``.

    Attributes:
        key: what `Engine.precompute` returned.
        text: the text of the node; encoded now if the store does not hold it.
        offset: position of the node's first token (S_d); None = right behind what stands before.
            It moves this node alone; with explicit offsets nodes may share positions. What a token
            sees is decided by the order of segments, never by positions.
    """

    key: NodeKey | None = None
    text: str | None = None
    offset: int | None = None


Segment = Live | Node
Prompt = str | Sequence[Segment]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to decode.

    Attributes:
        max_new_tokens: at most this many tokens; None = 256 or what the context window leaves.
        shorten: whether ``max_new_tokens`` gives way to a context window that leaves less; else
            such a request is refused.
        temperature: 0 = greedy.
        top_k, top_p, min_p: the usual truncations, applied in this order; None = off.
        repetition_penalty: above 1 discourages tokens already in prompt or answer; 1 = off.
        seed: of the random stream; None = a fresh one. The stream depends on seed and step only.
        stop: strings that end the answer; never part of it, in any form of delivery.
        json_schema: a JSON Schema as JSON text; None = off. The answer is one JSON value of this
            schema without white space between its parts, whatever the other options say, unless it
            is cut: by ``max_new_tokens`` (the finish reason is ``length``) or by a stop string,
            also one inside a JSON string. Needs the extra ``structured``.
        quality: see `Quality`. None = ``balanced``, but ``fast`` for a prompt of `Live` and `Node`
            segments: whoever lists the nodes has said where they stand, and naming a quality agrees
            to another order.
        strict: raise instead of answering when a known node had to be computed anew.
        timeout_s: seconds from the call after which the request is stopped with an error; looked at
            between forward passes. None = no limit.
        priority: of requests that wait for room the highest is served first.
    """

    max_new_tokens: int | None = None
    shorten: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    json_schema: str | None = None
    quality: Quality | None = None
    strict: bool = False
    timeout_s: float | None = None
    priority: int = 0
