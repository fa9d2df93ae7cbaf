"""``lazyrag calibrate``: once per model, so that ``--quality balanced`` chooses well."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lazyrag.cli.index import Index, check_weights
from lazyrag.cli.options import DeviceOption, IndexOption, JsonOption
from lazyrag.cli.output import command_errors, quiet_libraries, say, to_json


@command_errors
def calibrate(
    index: IndexOption,
    scales: Annotated[
        bool,
        typer.Option(
            "--scales",
            help="Also how strongly reused passages should be attended to; read docs/quality.md.",
        ),
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find out, from the indexed passages, how the model is served best; needs no labels.

    How it shows which passages a question needs: seconds, kept for these weights on this machine;
    `lazyrag ingest` has done it already if it had passages enough. With --scales also how strongly
    reused passages should be attended to: some minutes on a CPU, kept and served for indexes made
    with the same settings.
    """
    place = Index(index)
    settings = place.settings()
    quiet_libraries()

    from lazyrag import Engine

    with Engine.from_pretrained(
        settings.model,
        store=place.kv_path,
        device=device,
        dtype=settings.compute_dtype,
        kv_dtype=settings.kv_dtype,
        sink=settings.sink,
    ) as engine:
        check_weights(place, settings, engine.weights_digest)

        def progress(done: int, whole: int) -> None:
            if done % 8 == 0 or done == whole:
                say(f"{done} of {whole} made-up questions")

        found = engine.calibrate(scales=scales, progress=progress)
        kept = dict(engine.scales)
    if as_json:
        heads = [list(head) for head in found.heads]
        by_quality = {quality.value: scale._asdict() for quality, scale in kept.items()}
        to_json({**asdict(found), "heads": heads, "scales": by_quality})
        return
    for head, share in zip(found.heads, found.shares, strict=True):
        typer.echo(
            f"layer {head.layer}, head {head.head}: {share:.0%} of its attention to passages goes "
            "to the right one"
        )
    for quality, scale in kept.items():
        typer.echo(
            f"{quality}: reused passages at temperature {scale.temperature:g}, group scale "
            f"{scale.lse_scale:g}"
        )
    if scales and not kept:
        typer.echo("No scale of attention to reused passages is certainly better than none.")
    typer.echo("Kept. `--quality balanced` and `--quality best` choose passages by these heads.")
