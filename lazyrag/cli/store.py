"""``lazyrag store``: what the KV store of an index holds, and whether it is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from lazyrag.cli.documents import printable
from lazyrag.cli.index import Index
from lazyrag.cli.options import IndexOption, JsonOption
from lazyrag.cli.output import bytes_text, command_errors, plural, to_json

if TYPE_CHECKING:
    from lazyrag.store import KVStore

app = typer.Typer(
    help="Look into the KV store of an index.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("stats")
@command_errors
def stats(index: IndexOption, as_json: JsonOption = False) -> None:
    """Say how many passages are stored and how large they are."""
    store = _open(index)
    found = store.stats()
    store.close()
    if as_json:
        to_json({**asdict(found), "path": str(found.path)})
        return
    typer.echo(printable(str(found.path)))
    typer.echo(
        f"{plural(found.nodes, 'node')}, {plural(found.tokens, 'token')}, "
        f"{bytes_text(found.bytes)}; {plural(found.texts, 'text')} registered, "
        f"{plural(found.quarantined, 'damaged file')} put aside."
    )


@app.command("verify")
@command_errors
def verify(index: IndexOption, as_json: JsonOption = False) -> None:
    """Read and check every stored node; exit code 1 if something is damaged. Changes nothing."""
    store = _open(index)
    problems = store.verify()
    nodes = store.stats().nodes
    store.close()
    if as_json:
        to_json(
            {
                "nodes": nodes,
                "problems": [
                    {
                        "key": None if problem.key is None else str(problem.key),
                        "file": str(problem.file),
                        "reason": problem.reason,
                    }
                    for problem in problems
                ],
            }
        )
    else:
        for problem in problems:
            typer.echo(printable(f"{problem.file}: {problem.reason}"))
        typer.echo(f"{plural(nodes, 'node')} checked, {plural(len(problems), 'problem')} found.")
        if problems:
            typer.echo("A damaged node is never served; it is computed anew when it is next used.")
    if problems:
        raise typer.Exit(1)


def _open(index: IndexOption) -> KVStore:
    place = Index(index)
    place.settings()

    from lazyrag.store import KVStore

    return KVStore.open(place.kv_path, create=False)
