"""From what a caller hands over (text, messages, segments) to runs of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lazyrag.errors import RequestError, StoreError
from lazyrag.prompt.near import NearKind
from lazyrag.prompt.segments import LiveRun, NodeIdentity, NodeRun, NodeSource, Run
from lazyrag.prompt.template import Content, render_chat
from lazyrag.prompt.tokenise import PromptTokenizer
from lazyrag.types import Live, Node, NodeKey, Segment

QUOTED_WARNING = (
    "The prompt holds ingested texts inside quotes, as a program writes a list of strings or "
    "JSON: their line ends are spelled out, so they cannot be reused. Put the plain text into the "
    "prompt; in LangChain: retriever | format_docs."
)


@dataclass(frozen=True, slots=True)
class FoundNode:
    """``content[start:stop]`` is, letter by letter, the text of a node."""

    start: int
    stop: int
    node: NodeIdentity
    source: NodeSource


@dataclass(frozen=True, slots=True)
class FoundNear:
    """``content[start:stop]`` is the longest piece of the text of a node of ``tokens`` tokens."""

    start: int
    stop: int
    kind: NearKind
    key: NodeKey
    tokens: int


@dataclass(frozen=True, slots=True)
class FoundTexts:
    """What was found in a content: nodes in order without overlap, and near misses."""

    nodes: list[FoundNode]
    near: list[FoundNear]


class TextFinder(Protocol):
    """Who knows the ingested texts."""

    def find(self, content: str) -> FoundTexts:
        """Every ingested text in ``content``."""
        ...

    def identify(self, text: str) -> NodeIdentity:
        """A text as a node, whether or not it was ingested."""
        ...

    def source_of(self, text: str) -> NodeSource:
        """Whether a text was ingested, is an alias, or is not known."""
        ...

    def text_of(self, key: NodeKey) -> str | None:
        """The text of an ingested node."""
        ...


@dataclass(frozen=True, slots=True)
class NearNode:
    """A node the prompt almost holds; ``before`` tokens of the prompt stand before the piece."""

    key: NodeKey
    tokens: int
    kind: NearKind
    before: int


@dataclass(slots=True)
class ReadPrompt:
    """A prompt as runs of ids; ``near`` only explains misses, nothing of it is reused."""

    runs: list[Run] = field(default_factory=list)
    near: list[NearNode] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(run.used if isinstance(run, NodeRun) else len(run.ids) for run in self.runs)

    def add_live(self, ids: Sequence[int], offset: int | None = None) -> None:
        """Append live tokens; neighbours without an offset of their own become one run."""
        last = self.runs[-1] if self.runs else None
        if offset is None and isinstance(last, LiveRun):
            self.runs[-1] = LiveRun((*last.ids, *ids), last.offset)
        elif ids:
            self.runs.append(LiveRun(tuple(ids), offset))


class PromptReader:
    """Reads prompts of one engine.

    Args:
        tokenizer: of the model.
        finder: finds ingested texts.
        vocabulary: number of token ids of the model.
        longest_node: most tokens a node may have.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        finder: TextFinder,
        *,
        vocabulary: int,
        longest_node: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._finder = finder
        self._vocabulary = vocabulary
        self._longest_node = longest_node

    def read_text(self, text: str) -> ReadPrompt:
        """A raw prompt: the tokenizer's own opening (BOS, if any), then the text.

        Raises:
            RequestError: the text is empty.
        """
        if not text.strip():
            raise RequestError("the prompt is empty.")
        prompt = ReadPrompt()
        prompt.add_live(self._tokenizer.bos_ids)
        self._add_content(prompt, text)
        return prompt

    def read_chat(self, messages: Sequence[Mapping[str, str]]) -> ReadPrompt:
        """Messages through the chat template; nodes are looked for inside each message.

        Raises:
            RequestError: no messages, no template, or the template refuses them.
        """
        if not any(str(message.get("content") or "").strip() for message in messages):
            raise RequestError("the messages are empty.")
        prompt = ReadPrompt()
        for piece in render_chat(self._tokenizer.tokenizer, messages):
            if isinstance(piece, Content):
                self._add_content(prompt, piece.text)
            else:
                prompt.add_live(self._tokenizer.encode_control(piece.text))
        return prompt

    def read_segments(self, segments: Iterable[Segment]) -> ReadPrompt:
        """Segments exactly as given: nothing is added, live text is not searched for nodes.

        Raises:
            RequestError: a segment has both or none of its alternatives, or an unknown key.
        """
        prompt = ReadPrompt()
        for number, segment in enumerate(segments):
            if isinstance(segment, Live):
                prompt.add_live(self._live_ids(segment, number), segment.offset)
            else:
                prompt.runs.append(self._node(segment, number))
        if not prompt.tokens:
            raise RequestError("the prompt is empty.")
        return prompt

    def _live_ids(self, segment: Live, number: int) -> Sequence[int]:
        if (segment.text is None) == (segment.ids is None):
            raise RequestError(f"segment {number}: a Live segment takes text or ids, one of them.")
        if segment.text is None:
            ids = segment.ids or ()
            for id in ids:
                if not isinstance(id, int) or not 0 <= id < self._vocabulary:
                    raise RequestError(
                        f"segment {number}: {id!r} is no token id of this model "
                        f"(0 to {self._vocabulary - 1:,})."
                    )
            return ids
        if segment.control:
            return self._tokenizer.encode_control(segment.text)
        return self._tokenizer.encode_text(segment.text)

    def _node(self, segment: Node, number: int) -> NodeRun:
        if (segment.text is None) == (segment.key is None):
            raise RequestError(f"segment {number}: a Node segment takes key or text, one of them.")
        text = segment.text
        if text is None:
            assert segment.key is not None
            text = self._finder.text_of(segment.key)
            if text is None:
                raise RequestError(
                    f"segment {number}: node {segment.key} is not in this store for this model. "
                    "Ingest its text first (Engine.precompute returns the key)."
                )
        check_unicode(f"segment {number}: the node's text", text)
        node = self._finder.identify(text)
        if not node.ids:
            raise RequestError(f"segment {number}: the node's text is empty.")
        if len(node.ids) > self._longest_node:
            raise RequestError(
                f"segment {number}: the node has {len(node.ids):,} tokens, the context window "
                f"leaves {self._longest_node:,} for one node."
            )
        return _run(node, text, self._finder.source_of(text), segment.offset)

    def _add_content(self, prompt: ReadPrompt, content: str) -> None:
        try:
            found = self._finder.find(content)
        except StoreError as error:
            prompt.warnings.append(f"nothing is reused: {error}")
            found = FoundTexts([], [])
        self._add_near(prompt, content, found.near)
        cursor = 0
        for one in found.nodes:
            prompt.add_live(self._tokenizer.encode_text(content[cursor : one.start]))
            prompt.runs.append(_run(one.node, content[one.start : one.stop], one.source))
            cursor = one.stop
        prompt.add_live(self._tokenizer.encode_text(content[cursor:]))

    def _add_near(self, prompt: ReadPrompt, content: str, near: Sequence[FoundNear]) -> None:
        if any(miss.kind == "quoted" for miss in near) and QUOTED_WARNING not in prompt.warnings:
            prompt.warnings.append(QUOTED_WARNING)
        before, cursor = prompt.tokens, 0
        for miss in sorted(near, key=lambda miss: miss.start):
            before += len(self._tokenizer.encode_text(content[cursor : miss.start]))
            cursor = miss.start
            prompt.near.append(NearNode(miss.key, miss.tokens, miss.kind, before))


def _run(node: NodeIdentity, text: str, source: NodeSource, offset: int | None = None) -> NodeRun:
    return NodeRun(node.key, node.ids, len(node.ids), offset, text, source, node.behind)


def check_unicode(name: str, text: str) -> None:
    """Refuse what no tokenizer can read.

    Raises:
        RequestError: ``text`` holds a lone surrogate; ``name`` begins the sentence.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode (a lone surrogate at character {error.start}); "
            "remove it or read the source again with the right encoding."
        ) from None
