"""The ``lazyrag`` command. Heavy packages are imported inside the commands: help is quick."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from lazyrag.cli import ask, bench, calibrate, chat, env, ingest, store

app = typer.Typer(
    name="lazyrag",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("chat")(chat.chat)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")
app.command("env")(env.env)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"lazyrag {version('lazyrag')}")
        except PackageNotFoundError:
            typer.echo("lazyrag (not installed, run from its source)")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Answers questions about your documents; each passage is computed once and reused anywhere.

    Begin with `lazyrag ingest FOLDER --index DIR`, then `lazyrag ask "..." --index DIR`.
    Set LAZYRAG_DEBUG=1 to see tracebacks and the messages of other packages.
    """


if __name__ == "__main__":
    app()
