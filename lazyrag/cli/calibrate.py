"""``lazyrag calibrate``: once per model, so that ``--quality balanced`` chooses well."""

from __future__ import annotations

from dataclasses import asdict

import typer

from lazyrag.cli.index import Index, check_weights
from lazyrag.cli.options import DeviceOption, IndexOption, JsonOption
from lazyrag.cli.output import command_errors, quiet_libraries, say, to_json


@command_errors
def calibrate(
    index: IndexOption, device: DeviceOption = "auto", as_json: JsonOption = False
) -> None:
    """Find out, from the indexed passages, how the model shows which passages a question needs.

    Takes a minute or so and needs no labels. The result is kept for these weights on this machine
    and serves every index. The qualities `balanced` and `best` use it.
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

        found = engine.calibrate(progress=progress)
    if as_json:
        to_json({**asdict(found), "heads": [list(head) for head in found.heads]})
        return
    for head, share in zip(found.heads, found.shares, strict=True):
        typer.echo(
            f"layer {head.layer}, head {head.head}: {share:.0%} of its attention to passages goes "
            "to the right one"
        )
    typer.echo("Kept. `--quality balanced` and `--quality best` choose passages by these heads.")
