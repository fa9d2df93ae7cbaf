"""``lazyrag chat``: a conversation about the documents of an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from lazyrag.cli.documents import printable
from lazyrag.cli.options import (
    DEFAULT_NODES,
    DEFAULT_RUNG,
    DeviceOption,
    IndexOption,
    NodesOption,
    QualityOption,
    TokensOption,
)
from lazyrag.cli.output import command_errors, interactive, say
from lazyrag.errors import LazyRagError, RequestError

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.schema import NodeWithScore

    from lazyrag import ReuseReport
    from lazyrag.cli.session import Session

INSTRUCTION = "Answer from these documents. If they do not hold the answer, say so."
MESSAGE_TOKENS = 8
"""What a chat template writes around a message, roughly."""


@command_errors
def chat(
    index: IndexOption,
    k: NodesOption = DEFAULT_NODES,
    quality: QualityOption = DEFAULT_RUNG,
    max_new_tokens: TokensOption = 256,
    device: DeviceOption = "auto",
) -> None:
    """Talk about the documents of an index; earlier questions and answers are remembered.

    Reads one question a line, typed or piped. /new forgets the conversation, /quit or the end of
    input leaves. The line after each answer says what was reused.
    """
    from lazyrag.cli.session import open_session

    with open_session(
        index, device=device, quality=quality, max_new_tokens=max_new_tokens
    ) as session:
        conversation = Conversation(session, k)
        asked = answered = 0
        for question in _questions():
            if question == "/quit":
                break
            if question == "/new":
                conversation.history.clear()
                continue
            asked += 1
            try:
                conversation.answer(question)
                answered += 1
            except LazyRagError as error:
                say(f"Error: {error}")
    if asked and not answered:
        raise RequestError("no question could be answered.")


class Conversation:
    """Passages in the system message, behind them as many earlier turns as fit.

    LlamaIndex's `ContextChatEngine` does the same, but reads earlier turns as templates, so that
    braces in an answer about code break the next question.
    """

    def __init__(self, session: Session, k: int) -> None:
        self._session = session
        self._retriever = session.index.as_retriever(similarity_top_k=k)
        self.history: list[ChatMessage] = []

    def answer(self, question: str) -> None:
        """Print the answer as it comes, then where it is from and what was reused.

        Raises:
            RequestError: the question does not fit the context window.
        """
        from llama_index.core.base.llms.types import ChatMessage

        self._session.check_question(question)
        nodes = self._retriever.retrieve(question)
        system = ChatMessage(role="system", content=_context(nodes))
        asked = ChatMessage(role="user", content=question)
        self._forget(self._tokens(system) + self._tokens(asked))
        text, report = self._stream([system, *self.history, asked])
        self.history += [asked, ChatMessage(role="assistant", content=text)]
        files = dict.fromkeys(str(node.metadata.get("file_name", "")) for node in nodes)
        typer.echo(printable(f"[{', '.join(files)}; {report.summary()}]\n"))

    def _stream(self, messages: list[ChatMessage]) -> tuple[str, ReuseReport]:
        from llama_index.llms.lazyrag import collect_reports

        text = ""
        with collect_reports() as reports:
            for chunk in self._session.llm.stream_chat(messages):
                typer.echo(printable(chunk.delta or ""), nl=False)
                text = chunk.message.content or ""
        typer.echo()
        return text, reports[-1]

    def _forget(self, taken: int) -> None:
        """Drop the oldest turns until the rest fits beside ``taken`` tokens."""
        while self.history and taken + sum(map(self._tokens, self.history)) > self._session.room:
            del self.history[:2]

    def _tokens(self, message: ChatMessage) -> int:
        return self._session.engine.count_tokens(message.content or "") + MESSAGE_TOKENS


def _context(nodes: list[NodeWithScore]) -> str:
    from llama_index.llms.lazyrag import node_text

    return "\n\n".join([INSTRUCTION, *(node_text(node.node).text for node in nodes)])


def _questions() -> Iterator[str]:
    """Lines of stdin that are not empty; with a prompt when a person types them."""
    while True:
        if interactive():
            try:
                line = input("> ")
            except EOFError:
                say()
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        if line.strip():
            yield line.strip()
