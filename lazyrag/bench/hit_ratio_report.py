"""Tables, files and verdicts of `lazyrag.bench.hit_ratio`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lazyrag.bench.hit_ratio import POLICIES, Row, State, Workload
from lazyrag.bench.hit_ratio_plot import svg

LABELS = {
    "ours": ("ours", "this project's eviction with admission, position-agnostic nodes"),
    "lru": ("LRU", "position-agnostic nodes, the least recently used goes"),
    "position-aware": ("pos", "a node is reusable at the position it was cached for; LRU"),
    "position-aware, our policy": ("pos+", "the same with our eviction and admission"),
    "prefix": ("pre", "the longest prefix seen before is reusable; LRU over leaves"),
    "prefix, frequency order": ("pre+", "the same, nodes sorted by their true popularity"),
    "ideal": ("ideal", "knows the true popularity, keeps the most popular nodes"),
    "optimum": ("opt", "knows the future (Belady); all nodes have one size"),
}
PAPER = {
    "the paper": "LazyAttention, arXiv 2606.04302; hit ratios position-agnostic / position-aware",
    "at 1 GB": "13.57 / 7.27%, 1.87 times",
    "another pair": "3.47 / 1.84%, 1.89 times",
    "at 10 GB": "23.89%",
    "in theory": "7.5 times prefix caching, 2.86 times position-aware caching",
    "not known": "skew and length of the traces behind these figures, the setting of the second "
    "pair, the order of the documents, the eviction policies, warm or cold, GB or GiB. So they "
    "stand beside ours, they are not reproduced.",
}
IDEAL, OPTIMUM, POSITION_AWARE = 0.90, 0.85, 1.87
"""What ours must reach, as a share or a multiple."""

_Case = dict[str, Row]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim, judged in one state.

    Attributes:
        claim: what must hold in every case.
        state: see `State`.
        met, cases: in how many of how many it does.
        lowest: the smallest ratio.
        missed: the cases in which it does not hold, with the ratio.
    """

    claim: str
    state: State
    met: int
    cases: int
    lowest: float
    missed: tuple[str, ...]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Judge every claim in both states."""
    found = []
    for state in (State.WARM, State.COLD):
        cases = list(_cases(rows, state))
        small = [case for case in cases if case["ours"].budget_gb == 1]
        for against, bar, judged in (
            ("ideal", IDEAL, cases),
            ("optimum", OPTIMUM, cases),
            ("position-aware", POSITION_AWARE, small),
            ("position-aware, our policy", POSITION_AWARE, small),
        ):
            ratios = [(case[against].ours_over_this, case) for case in judged]
            known = [(ratio, case) for ratio, case in ratios if ratio is not None]
            if not known:
                continue
            where = " at 1 GB" if judged is small else ""
            missed = tuple(_miss(ratio, case) for ratio, case in known if ratio < bar)
            found.append(
                Verdict(
                    claim=f"ours at least {bar:.2f} × {against}{where}",
                    state=state,
                    met=len(known) - len(missed),
                    cases=len(known),
                    lowest=min(ratio for ratio, _ in known),
                    missed=missed,
                )
            )
    return found


def text(workload: Workload, rows: Sequence[Row]) -> str:
    """All of it for people."""
    lines = [
        f"{workload.documents} documents of {workload.tokens:,} tokens, "
        f"{workload.node_bytes / 1e9:.3g} GB of KV each (Llama-3.1-8B, bfloat16); "
        f"{workload.per_prompt} a prompt, in the order {workload.order}; "
        f"{workload.requests} requests; seeds below {rows[0].seeds}.",
        "",
        "Tokens reused / tokens of nodes in %, mean ± standard deviation over seeds; fit = nodes "
        "that fit:",
    ]
    for state in (State.WARM, State.COLD):
        lines += ["", *_ratios_table(rows, state)]
    lines += ["", *(f"  {short:6} {meaning}" for short, meaning in LABELS.values())]
    lines += ["", "Ours / the others, ± standard error:"]
    for state in (State.WARM, State.COLD):
        lines += ["", *_comparison_table(rows, state)]
    lines.append("")
    for verdict in verdicts(rows):
        lines.append(
            f"{verdict.claim}, {verdict.state}: {verdict.met} of {verdict.cases} cases, "
            f"lowest {verdict.lowest:.2f}"
        )
        lines += [f"  missed: {missed}" for missed in verdict.missed]
    lines += ["", *(f"{name}: {value}" for name, value in PAPER.items())]
    return "\n".join(lines)


def as_json(workload: Workload, rows: Sequence[Row]) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "workload": {**asdict(workload), "node_bytes": workload.node_bytes},
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts(rows)],
        "paper": PAPER,
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a row; ratios with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    name: f"{value:.6g}" if isinstance(value, float) else value
                    for name, value in asdict(row).items()
                }
            )


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """See `svg`."""
    path.write_text(svg(rows), encoding="utf-8")


def _cases(rows: Sequence[Row], state: State) -> Iterator[_Case]:
    """The rows of one alpha and budget, by policy."""
    found: dict[tuple[float, float], _Case] = {}
    for row in rows:
        if row.state is state:
            found.setdefault((row.alpha, row.budget_gb), {})[row.policy] = row
    yield from found.values()


def _miss(ratio: float, case: _Case) -> str:
    ours, ideal, optimum = case["ours"], case["ideal"], case["optimum"]
    bound = f"{ideal.hit_ratio / optimum.hit_ratio:.3f}" if optimum.hit_ratio else "–"
    return (
        f"alpha {ours.alpha:g}, {ours.budget_gb:g} GB: {ratio:.3f} (the ideal has {bound} of the "
        "optimum)"
    )


def _ratios_table(rows: Sequence[Row], state: State) -> list[str]:
    header = "".join(f"{LABELS[policy][0]:>10}" for policy in POLICIES)
    lines = [f"{state:6}  GB fit   {header}"]
    for case in _cases(rows, state):
        ours = case["ours"]
        cells = (_percent(case[policy]) for policy in POLICIES)
        lines.append(
            f"{ours.alpha:6g}{ours.budget_gb:4g}{ours.capacity:6}"
            + "".join(f"{cell:>10}" for cell in cells)
        )
    return lines


def _comparison_table(rows: Sequence[Row], state: State) -> list[str]:
    others = [policy for policy in POLICIES if policy != "ours"]
    lines = [f"{state:6}  GB" + "".join(f"{LABELS[policy][0]:>12}" for policy in others)]
    for case in _cases(rows, state):
        cells = (_multiple(case[policy]) for policy in others)
        lines.append(
            f"{case['ours'].alpha:6g}{case['ours'].budget_gb:4g}"
            + "".join(f"{cell:>12}" for cell in cells)
        )
    return lines


def _percent(row: Row) -> str:
    spread = "" if row.deviation is None else f"±{100 * row.deviation:.1f}"
    return f"{100 * row.hit_ratio:.1f}{spread}"


def _multiple(row: Row) -> str:
    if row.ours_over_this is None:
        return "–"
    error = "" if row.ours_over_this_error is None else f"±{row.ours_over_this_error:.2f}"
    return f"{row.ours_over_this:.2f}{error}"
