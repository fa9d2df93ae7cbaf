"""``lazyrag ask``: one question, its answer, the sources and what was reused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lazyrag.cli.documents import printable
from lazyrag.cli.options import (
    DEFAULT_NODES,
    DEFAULT_RUNG,
    DeviceOption,
    IndexOption,
    JsonOption,
    NodesOption,
    QualityOption,
    TokensOption,
)
from lazyrag.cli.output import command_errors, require_text, to_json
from lazyrag.errors import RequestError


@command_errors
def ask(
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The question.", show_default=False)
    ],
    index: IndexOption,
    k: NodesOption = DEFAULT_NODES,
    quality: QualityOption = DEFAULT_RUNG,
    max_new_tokens: TokensOption = 256,
    device: DeviceOption = "auto",
    stream: Annotated[bool, typer.Option("--stream", help="Show the answer as it comes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the documents of an index.

    Retrieves the passages nearest to the question, puts them into one prompt and reuses their
    stored keys and values. Everything else is read from the index directory.
    """
    question = require_text(question, "question")

    from lazyrag.cli.session import open_session, source_lines, source_of

    with open_session(
        index, device=device, quality=quality, max_new_tokens=max_new_tokens
    ) as session:
        session.check_question(question)

        from llama_index.llms.lazyrag import collect_reports

        show_now = stream and not as_json
        engine = session.index.as_query_engine(
            llm=session.llm, similarity_top_k=k, response_mode="compact", streaming=show_now
        )
        with collect_reports() as reports:
            response: Any = engine.query(question)
            if show_now:
                for delta in response.response_gen:
                    typer.echo(printable(delta), nl=False)
                typer.echo()
                answer = ""
            else:
                answer = str(response).strip()
    if not reports:
        raise RequestError("LlamaIndex did not ask the model; no passage was found.")
    if as_json:
        result = {
            "answer": answer,
            "sources": [source_of(node) for node in response.source_nodes],
            "report": reports[-1].to_dict(),
        }
        if len(reports) > 1:
            result["reports"] = [report.to_dict() for report in reports]
        to_json(result)
        return
    if answer:
        typer.echo(printable(answer))
    typer.echo("\nSources:")
    for line in source_lines(response.source_nodes):
        typer.echo(line)
    typer.echo()
    for report in reports:
        typer.echo(report.summary())
