"""``lazyrag bench``: measurements that anybody can repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lazyrag.bench.hit_ratio import Order, Workload, measure
from lazyrag.bench.hit_ratio_report import as_json, text, write_csv, write_plot
from lazyrag.bench.trace_settings import Mode, Part, Settings
from lazyrag.cli.options import DeviceOption, JsonOption
from lazyrag.cli.output import command_errors, say, to_json
from lazyrag.errors import RequestError

if TYPE_CHECKING:
    from lazyrag.bench.quality_rows import Row

app = typer.Typer(
    help="Measure, ours beside the alternatives.", no_args_is_help=True, rich_markup_mode=None
)

_DEFAULTS = Workload()


@app.callback()
def bench() -> None:
    """Measure, ours beside the alternatives."""


def _finite(values: list[float]) -> list[float]:
    if not all(map(math.isfinite, values)):
        raise typer.BadParameter("a finite number is needed.")
    return values


def _writable(path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}.")
    return path


_Repeats = Annotated[int, typer.Option(min=2, metavar="N", help="Runs of what is quick.")]
_Csv = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, callback=_writable, help="Write the rows."),
]
_Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, callback=_writable, help="Draw the bars (SVG)."),
]


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RequestError("this measurement needs an NVIDIA GPU, and there is none.")


@app.command("ttft")
@command_errors
def ttft(repeats: _Repeats = 15, csv: _Csv = None, plot: _Plot = None) -> None:
    """Time the first token over resident nodes, and further ones (needs a GPU).

    An 8B model's shape with random weights; ours beside position-aware copies, prefix caching and
    full prefill in the same engine. Takes about two minutes.
    """
    _need_gpu()
    from lazyrag.bench.ttft import measure

    rows = []
    for row in measure(repeats, say):
        rows.append(row)
        name = f"{row.what}, {row.nodes} x {row.node_tokens:,}, {row.mode}"
        typer.echo(
            f"{name:60}{row.ms:9.2f} ms ({row.low:.2f}..{row.high:.2f}), "
            f"{row.ms / row.floor_ms:.2f} x the floor of {row.floor_ms:.2f}"
        )
    _write(
        rows,
        [(f"{r.what}, {r.nodes} x {r.node_tokens:,}, {r.mode}", r.ms) for r in rows],
        "Milliseconds, one request",
        "ms",
        csv,
        plot,
    )


@app.command("throughput")
@command_errors
def throughput(repeats: _Repeats = 3, csv: _Csv = None, plot: _Plot = None) -> None:
    """Time 64 requests at once over 12 nodes, each in another order (needs a GPU).

    An 8B model's shape with random weights; ours beside position-aware copies, prefix caching and
    full prefill in the same engine. Takes about two minutes.
    """
    _need_gpu()
    from lazyrag.bench.at_once import measure

    rows = []
    for row in measure(repeats, say):
        rows.append(row)
        typer.echo(
            f"{row.mode:52}{row.seconds:8.3f} s, first tokens {row.first_s:.3f} s, "
            f"{row.step_ms:.2f} ms a step, {row.tokens_per_s:,.0f} tokens/s"
        )
    _write(
        rows,
        [(row.mode, row.seconds) for row in rows],
        "Seconds for 64 requests at once",
        "s",
        csv,
        plot,
    )


def _write(
    rows: Sequence[Any],
    drawn: Sequence[tuple[str, float]],
    title: str,
    unit: str,
    csv: Path | None,
    plot: Path | None,
) -> None:
    from lazyrag.bench.bars import bars
    from lazyrag.bench.table import write_csv as write_table

    try:
        if csv is not None:
            write_table(rows, csv)
            say(f"Wrote {csv}.")
        if plot is not None:
            plot.write_text(bars(title, drawn, unit))
            say(f"Wrote {plot}.")
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}.") from None


@app.command("trace")
@command_errors
def trace(
    part: Annotated[
        list[Part], typer.Option(help="What is measured; may be repeated.")
    ] = list(Part),  # noqa: B006
    mode: Annotated[
        list[Mode], typer.Option(help="What is reused; may be repeated.")
    ] = list(Mode),  # noqa: B006
    seconds: Annotated[
        float, typer.Option(min=0.1, max=20, metavar="S", help="Of runs that go on for a time.")
    ] = 4.0,
    clients: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="Of the closed loop of `compare`.")
    ] = 16,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.01, metavar="R", show_default=False,
            help="Poisson arrivals a second; default: 0.7 of block_attention's closed loop.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the traces.")] = 0,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", file_okay=False, show_default=False,
            help="Keep the nodes there (28 GB) for the next time; default: a temporary folder.",
        ),
    ] = None,
    csv: _Csv = None,
    plot: _Plot = None,
) -> None:  # fmt: skip
    """Send request traces through the whole engine (needs a GPU).

    An 8B model's shape with random weights; ours beside position-aware copies, prefix caching and
    full prefill in the same engine. All parts take about eight minutes.
    """
    _need_gpu()
    from lazyrag.bench.trace import measure

    settings = Settings(seed=seed, modes=tuple(mode), seconds=seconds, rate=rate, clients=clients)
    rows = []
    try:
        for row in measure(part, settings, store, say):
            rows.append(row)
            typer.echo(row)
    finally:
        if rows:
            drawn = [(row.label, row.requests_per_s) for row in rows if row.requests]
            _write(rows, drawn, "Requests a second", "", csv, plot)


@app.command("hit-ratio")
@command_errors
def hit_ratio(
    alpha: Annotated[
        list[float],
        typer.Option(
            min=0, max=10, metavar="A", callback=_finite,
            help="Zipf exponent of the documents' popularity, 0 = all alike; may be repeated.",
        ),
    ] = [0, 0.8, 1.1, 1.5, 2.1],  # noqa: B006
    budget: Annotated[
        list[float],
        typer.Option(
            min=0, metavar="GB", callback=_finite,
            help="10^9 bytes of KV of an 8B model; may be repeated.",
        ),
    ] = [1, 10, 50],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Traces for each alpha.")] = 100,
    documents: Annotated[
        int, typer.Option(min=1, metavar="N", help="Size of the collection.")
    ] = _DEFAULTS.documents,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a document.")
    ] = _DEFAULTS.tokens,
    per_prompt: Annotated[
        int, typer.Option(min=1, metavar="N", help="Distinct documents in a prompt.")
    ] = _DEFAULTS.per_prompt,
    requests: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Prompts counted from cold; as many follow, warm."
        ),
    ] = _DEFAULTS.requests,
    order: Annotated[
        Order, typer.Option(help="Documents of a prompt: popular ones rather in front, or anyhow.")
    ] = _DEFAULTS.order,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, callback=_writable, help="Write the rows."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, callback=_writable, help="Draw the warm ratios (SVG).",
        ),
    ] = None,
    as_json_: JsonOption = False,
) -> None:  # fmt: skip
    """Simulate how many of the retrieved tokens a cache of a given size reuses.

    Compared: this project's eviction, LRU, position-aware and prefix caching, and two bounds. No
    model is needed; the default takes about a minute on one core.
    """
    try:
        workload = Workload(documents, tokens, per_prompt, requests, order)
        for size in budget:
            workload.capacity(size)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
    rows = list(measure(workload, alpha, budget, seeds))
    if as_json_:
        to_json(as_json(workload, rows))
    else:
        typer.echo(text(workload, rows))
    for path, write in ((csv, write_csv), (plot, write_plot)):
        if path is not None:
            try:
                write(rows, path)
            except OSError as error:
                raise RequestError(f"{path} cannot be written: {error.strerror}.") from None
            say(f"Wrote {path}.")


@app.command("quality")
@command_errors
def quality(
    data: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, show_default=False,
            help="JSON lines with id, question, answers, documents; may be repeated.",
        ),
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="The model.")] = "smollm2",
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only so many examples of each file.")
    ] = None,
    words: Annotated[
        int | None,
        typer.Option(
            "--split", min=1, metavar="N",
            help="Cut documents into passages of about N words; compare what to encode them "
            "behind, too.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every setting, not only the ladder and its controls.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--setting", metavar="NAME", show_default=False,
            help="Only this one of them, beside 'full' and 'no documents'; may be repeated.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the computation.")] = "auto",
    greedy: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens of the greedy text, 0 = none.")
    ] = 32,
    timed: Annotated[
        int, typer.Option(min=0, metavar="N", help="So many examples are timed, too.")
    ] = 5,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, callback=_writable,
            help="Write a row for every example and setting, as they come.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, callback=_writable, help="Write the table."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, callback=_writable,
            help="Draw quality against work (SVG).",
        ),
    ] = None,
    as_json_: JsonOption = False,
) -> None:  # fmt: skip
    """Compare answers over reused passages with full attention, and what either costs.

    Gold answers are scored, texts are written greedily. The checkpoint is calibrated first, on the
    documents of the files, unless it is already.
    """
    from lazyrag.bench import quality as bench
    from lazyrag.bench import quality_report as report
    from lazyrag.bench.quality_data import read_examples, split
    from lazyrag.bench.quality_plot import svg
    from lazyrag.bench.quality_rows import RowWriter
    from lazyrag.bench.quality_settings import (
        BALANCED,
        BEST,
        EVERYTHING,
        FAST,
        FULL,
        NO_DOCUMENTS,
        OF_PARTS,
        SHORT,
        named,
        with_scales,
    )
    from lazyrag.engine.engine import CALIBRATION_TEXTS, Engine
    from lazyrag.model.load import load_model

    examples = [example for file in data for example in read_examples(file, count)]
    settings = EVERYTHING if everything else SHORT
    if words is not None:
        examples = [split(example, words) for example in examples]
        settings = (*settings, *OF_PARTS)
    if only is not None:
        try:
            settings = tuple(named(settings, [NO_DOCUMENTS.name, FULL.name, *only]))
        except ValueError as error:
            raise RequestError(f"{error}.") from None
    loaded = load_model(model, device=device, dtype=dtype)
    texts = [text for example in examples for text in example.texts]
    with Engine(loaded) as engine:
        texts = texts[:: max(1, len(texts) // CALIBRATION_TEXTS)]
        found = engine.calibration or engine.calibrate(texts)
        if only is None:
            settings = with_scales(settings, engine.scales)
    writer = None if rows is None else RowWriter(rows)

    def done(made: Sequence[Row], examples_done: int) -> None:
        if writer is not None:
            writer.write(made)
        say(f"{examples_done} of {len(examples)} examples")

    try:
        measured = bench.measure(
            loaded, examples, settings, found.heads,
            greedy_tokens=greedy, timed=timed, done=done,
        )  # fmt: skip
    finally:
        if writer is not None:
            writer.close()
    if as_json_:
        to_json(report.as_json(measured, loaded.note))
    else:
        typer.echo(report.text(measured, loaded.note))
    rungs = [setting.name for setting in (FAST, BALANCED, BEST)]
    for path, write in (
        (csv, lambda path: report.write_summary(measured, path)),
        (plot, lambda path: path.write_text(svg(measured, rungs), encoding="utf-8")),
    ):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise RequestError(f"{path} cannot be written: {error.strerror}.") from None
            say(f"Wrote {path}.")
