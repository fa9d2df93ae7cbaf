"""``lazyrag ingest``: documents into an index."""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lazyrag.cli.documents import scan
from lazyrag.cli.encode import Ingestion, Outcome, Recipe
from lazyrag.cli.index import (
    DEFAULT_CHUNK_OVERLAP,
    DEFAULT_CHUNK_SIZE,
    DEFAULT_EMBEDDING,
    DEFAULT_KV_DTYPE,
    DEFAULT_MODEL,
    Index,
    IndexSettings,
    check_same,
    resolve_name,
)
from lazyrag.cli.options import DeviceOption, IndexOption, JsonOption
from lazyrag.cli.output import (
    bytes_text,
    command_errors,
    duration_text,
    plural,
    quiet_libraries,
    say,
    to_json,
)
from lazyrag.cli.plan import Plan, make_plan
from lazyrag.errors import RequestError
from lazyrag.types import DEFAULT_SINK, KVDType

SMALLEST_CHUNK = 64


@command_errors
def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)
    ],
    index: IndexOption,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Hub id, local folder, .gguf file, or the alias smollm2.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="minilm, a folder with a sentence-transformers model, or a hub id.",
            show_default=DEFAULT_EMBEDDING,
        ),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            min=SMALLEST_CHUNK,
            metavar="N",
            help="Tokens of a passage, by the model's tokenizer.",
            show_default=str(DEFAULT_CHUNK_SIZE),
        ),
    ] = None,
    chunk_overlap: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Tokens that neighbouring passages share.",
            show_default=str(DEFAULT_CHUNK_OVERLAP),
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[
        KVDType | None,
        typer.Option(
            help="How keys and values lie on disk; model = as the model computes.",
            show_default=DEFAULT_KV_DTYPE,
        ),
    ] = None,
    sink: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What passages see before them: passages, documents, template, none, or a text.",
            show_default=DEFAULT_SINK,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before starting.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read documents, cut them into passages, compute their keys and values and store them.

    Reads txt, md, rst, pdf and html. Says first how many tokens and bytes that makes and how long
    it will take. The same command again writes nothing; a changed file replaces its passages, a
    deleted one loses them. The settings of an existing index are kept and cannot be changed.
    """
    begun = time.monotonic()
    given = {
        "model": None if model is None else resolve_name(model),
        "embedding": None if embedding is None else resolve_name(embedding),
        "chunk_size": chunk_size,
        "chunk_overlap": chunk_overlap,
        "sink": sink,
        "kv_dtype": None if dtype is None else dtype.value,
    }
    place = Index(index)
    settings = place.settings() if place.exists else None
    if settings is not None:
        check_same(place, settings, given)
    recipe = _recipe(given, settings)
    found = scan(paths, leave_out=place.path)
    with place.writing():
        quiet_libraries()
        rows = {}
        if settings is not None:
            from lazyrag.cli.vectors import Vectors

            rows = Vectors(place.chroma_path).files()
        plan = make_plan(found, rows, recipe.shape)
        outcome = Ingestion(place, settings, recipe, device).run(plan, confirm=not yes)
    _tell(plan, outcome, time.monotonic() - begun, as_json=as_json)
    if not (outcome.read or plan.unchanged or outcome.removed):
        raise RequestError("nothing was ingested: no file that was named or found could be read.")


def _recipe(given: dict[str, Any], settings: IndexSettings | None) -> Recipe:
    """What was given, else what the index has, else the defaults.

    Raises:
        RequestError: the overlap is more than half of a passage.
    """
    names = [field.name for field in fields(Recipe)]
    if settings is not None:
        return Recipe(**{name: getattr(settings, name) for name in names})
    default: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "embedding": DEFAULT_EMBEDDING,
        "chunk_size": DEFAULT_CHUNK_SIZE,
        "chunk_overlap": min(
            DEFAULT_CHUNK_OVERLAP, (given["chunk_size"] or SMALLEST_CHUNK * 4) // 4
        ),
        "sink": DEFAULT_SINK,
        "kv_dtype": DEFAULT_KV_DTYPE,
    }
    recipe = Recipe(**{n: default[n] if given[n] is None else given[n] for n in names})
    if recipe.chunk_overlap > recipe.chunk_size // 2:
        raise RequestError(
            f"--chunk-overlap {recipe.chunk_overlap} is more than half of --chunk-size "
            f"{recipe.chunk_size}; choose a smaller overlap."
        )
    return recipe


def _tell(plan: Plan, outcome: Outcome, seconds: float, *, as_json: bool) -> None:
    for skipped in plan.skipped:
        say(f"Skipped {skipped}")
    if plan.unsupported:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in plan.unsupported.most_common())
        say(f"Not read, other types: {kinds}")
    if as_json:
        to_json(
            {
                **asdict(outcome),
                "unchanged": len(plan.unchanged),
                "skipped": [{"file": s.file, "reason": s.reason} for s in plan.skipped],
                "unsupported": dict(plan.unsupported),
                "seconds": round(seconds, 1),
            }
        )
        return
    line = [
        f"{plural(outcome.read, 'file')} read",
        f"{len(plan.unchanged):,} unchanged",
        f"{len(plan.skipped):,} skipped",
    ]
    if outcome.removed:
        line.append(f"{outcome.removed:,} removed")
    typer.echo(", ".join(line) + ".")
    if outcome.read or outcome.repaired:
        done = outcome.chunks or outcome.repaired
        typer.echo(
            f"{plural(done, 'passage')}, {plural(outcome.tokens, 'token')} computed, "
            f"{bytes_text(outcome.bytes)} of KV written in {duration_text(seconds)}."
        )
    elif not outcome.removed:
        typer.echo("Nothing was written.")
