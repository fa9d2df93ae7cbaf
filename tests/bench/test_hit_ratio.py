"""The simulated caches against brute force, the bounds, and the command."""

from __future__ import annotations

import csv
import itertools
import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.bench.hit_ratio import (
    ONLINE,
    POLICIES,
    Ideal,
    Lru,
    Optimum,
    Order,
    Prefix,
    Prompt,
    Row,
    State,
    Workload,
    measure,
)
from lazyrag.bench.hit_ratio_report import verdicts
from tests.cli.support import run, run_json

traces = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True).map(tuple), max_size=14
)
tiny_traces = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple), max_size=7
)
capacities = st.integers(1, 5)
TINY = ("--seeds", "2", "--requests", "20", "--documents", "12", "--alpha", "1.1")


def served(cache, prompts: list[Prompt]) -> list[int]:
    return [cache.serve(prompt) for prompt in prompts]


def most_recent(keys: list, capacity: int) -> set:
    """The last ``capacity`` distinct keys of a history."""
    return set(list(dict.fromkeys(reversed(keys)))[:capacity])


@given(traces, capacities)
def test_lru_is_lru(prompts, capacity):
    history: list[int] = []
    expected = []
    for prompt in prompts:
        kept = most_recent(history, capacity)
        expected.append(sum(node in kept for node in prompt))
        history += prompt
    assert served(Lru(capacity), prompts) == expected


@given(traces, capacities)
def test_position_aware_reuses_a_node_at_its_position_only(prompts, capacity):
    history: list[tuple[int, int]] = []
    expected = []
    for prompt in prompts:
        kept = most_recent(history, capacity)
        expected.append(sum((place, prompt[place]) in kept for place in range(len(prompt))))
        history += [(place, prompt[place]) for place in range(len(prompt))]
    assert served(ONLINE["position-aware"](capacity), prompts) == expected


@given(traces, capacities, st.booleans())
def test_prefix_is_a_tree_that_loses_its_oldest_leaf(prompts, capacity, by_frequency):
    tree: dict[Prompt, int] = {}  # path -> last use
    expected = []
    for time, prompt in enumerate(prompts):
        path = tuple(sorted(prompt)) if by_frequency else prompt
        paths = [path[: length + 1] for length in range(len(path))]
        expected.append(len(list(itertools.takewhile(tree.__contains__, paths))))
        tree.update(dict.fromkeys(paths, time))
        while len(tree) > capacity:
            leaves = [path for path in tree if not any(other[:-1] == path for other in tree)]
            del tree[min(leaves, key=tree.__getitem__)]
    assert served(Prefix(capacity, by_frequency=by_frequency), prompts) == expected


def best_of_all(prompts: list[Prompt], capacity: int, *, warm: bool) -> int:
    """Most hits of any sequence of decisions what to keep."""
    everything = set(itertools.chain(*prompts))
    found = {frozenset(): 0}
    if warm:
        found = {
            frozenset(kept): 0
            for size in range(capacity + 1)
            for kept in itertools.combinations(everything, size)
        }
    for prompt in prompts:
        following: dict[frozenset[int], int] = {}
        for kept, hits in found.items():
            hits += len(kept.intersection(prompt))
            choice = kept.union(prompt)
            for size in range(min(capacity, len(choice)) + 1):
                for stays in map(frozenset, itertools.combinations(choice, size)):
                    following[stays] = max(hits, following.get(stays, 0))
        found = following
    return max(found.values())


@given(tiny_traces, st.integers(1, 3), st.booleans())
def test_optimum_is_the_best_of_all_decisions(prompts, capacity, warm):
    optimum = Optimum(capacity, prompts, warm=warm)
    assert sum(served(optimum, prompts)) == best_of_all(prompts, capacity, warm=warm)


@given(traces, capacities)
def test_no_policy_beats_the_optimum_from_cold(prompts, capacity):
    optimum = sum(served(Optimum(capacity, prompts, warm=False), prompts))
    for name, make in ONLINE.items():
        assert sum(served(make(capacity), prompts)) <= optimum, name
    assert sum(served(Ideal(capacity), prompts)) <= optimum


@given(traces, capacities, st.integers(0, 14))
def test_no_warm_policy_beats_the_warm_optimum(prompts, capacity, split):
    before, counted = prompts[:split], prompts[split:]
    optimum = sum(served(Optimum(capacity, counted, warm=True), counted))
    for name in ("ours", "lru", "prefix"):
        cache = ONLINE[name](capacity)
        served(cache, before)
        assert sum(served(cache, counted)) <= optimum, name
    assert sum(served(Ideal(capacity, range(7)), counted)) <= optimum


def test_ideal_keeps_the_most_popular_nodes_it_has_seen():
    prompts = [(3, 5), (4, 3), (5, 0), (5, 3), (0, 3)]
    assert served(Ideal(2), prompts) == [0, 1, 0, 1, 2]
    assert served(Ideal(2, range(6)), prompts) == [0, 0, 1, 0, 1]


def test_prompts_are_distinct_documents_and_the_same_for_a_seed():
    workload = Workload(documents=10, requests=50)
    prompts = workload.prompts(1.1, 3)
    assert len(prompts) == 100
    assert all(len(set(prompt)) == 5 for prompt in prompts)
    assert prompts == workload.prompts(1.1, 3) != workload.prompts(1.1, 4)
    everything = Workload(documents=5, requests=3, order=Order.SHUFFLED).prompts(10.0, 0)
    assert all(sorted(prompt) == [0, 1, 2, 3, 4] for prompt in everything)


@pytest.mark.parametrize("alpha", [0.0, 0.8, 2.1])
def test_draws_follow_the_zipf_law_of_what_is_left(alpha):
    workload = Workload(documents=4, per_prompt=2, requests=5_000)
    weights = [(document + 1) ** -alpha for document in range(4)]
    prompts = workload.prompts(alpha, 1)
    first = Counter(prompt[0] for prompt in prompts)
    for document, weight in enumerate(weights):
        assert first[document] / 10_000 == pytest.approx(weight / sum(weights), abs=0.02)
    second = Counter(prompt[1] for prompt in prompts if prompt[0] == 0)
    for document, weight in enumerate(weights[1:], 1):
        expected = weight / sum(weights[1:])
        assert second[document] / second.total() == pytest.approx(expected, abs=0.03)


def test_popular_documents_stand_in_front_unless_shuffled():
    def first_is_most_popular(order: Order) -> float:
        prompts = Workload(order=order).prompts(1.5, 1)
        return sum(prompt[0] == min(prompt) for prompt in prompts) / len(prompts)

    assert first_is_most_popular(Order.DRAWN) > 0.35
    assert first_is_most_popular(Order.SHUFFLED) < 0.25


def test_budgets_are_decimal_gigabytes_of_an_8b_model():
    assert [Workload().capacity(budget) for budget in (1, 10, 50)] == [3, 37, 186]
    with pytest.raises(ValueError, match=r"holds no node of 0\.268 GB"):
        Workload().capacity(0.25)


def rows_of(alphas: list[float], budgets: list[float], seeds: int = 6) -> list[Row]:
    return list(measure(Workload(), alphas, budgets, seeds))


def test_rows_say_mean_spread_and_ratio():
    rows = rows_of([1.1], [1])
    assert [(row.state, row.policy) for row in rows] == [*itertools.product(State, POLICIES)]
    for row in rows:
        assert 0 <= row.lowest <= row.hit_ratio <= row.highest <= 1
        ours = next(r for r in rows if (r.policy, r.state) == ("ours", row.state))
        assert row.ours_over_this == pytest.approx(ours.hit_ratio / row.hit_ratio)
        if row.policy == "ours":
            assert row.ours_over_this_error == pytest.approx(0, abs=1e-12)
    assert all(row.deviation is row.ours_over_this_error is None for row in rows_of([1.1], [1], 1))


def test_ours_reaches_what_is_judged_where_an_online_policy_can():
    for verdict in verdicts(rows_of([1.1, 1.5, 2.1], [1, 10])):
        if verdict.state is State.WARM:
            assert verdict.met == verdict.cases, verdict


def test_command_prints_json_and_writes_csv(tmp_path: Path):
    file = tmp_path / "rows.csv"
    result = run_json("bench", "hit-ratio", *TINY, "--budget", "1", "--budget", "2", "--csv", file)
    assert set(result) == {"workload", "rows", "verdicts", "paper"}
    assert result["workload"]["node_bytes"] == 2048 * 131_072
    assert len(result["rows"]) == 2 * len(State) * len(POLICIES)
    with file.open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == len(result["rows"])
    for line, row in zip(table, result["rows"], strict=True):
        assert list(line) == list(row)
        assert (line["policy"], line["state"]) == (row["policy"], row["state"])
        assert float(line["hit_ratio"]) == pytest.approx(row["hit_ratio"], rel=1e-5)


def test_plot_draws_every_policy_once_a_panel(tmp_path: Path):
    file = tmp_path / "plot.svg"
    budgets = ("--budget", "1", "--budget", "2")
    result = run("bench", "hit-ratio", *TINY, "--alpha", "0", *budgets, "--plot", file)
    assert result.exit_code == 0, result.output
    root = ET.parse(file).getroot()
    tag = "{http://www.w3.org/2000/svg}"
    words = [text.text for text in root.iter(f"{tag}text")]
    assert {"1 GB", "2 GB", *POLICIES} <= set(words)
    lines = [line.get("points").split() for line in root.iter(f"{tag}polyline")]
    assert len(lines) == 3 * len(POLICIES), "two panels and the legend"
    assert all(len(points) == 2 for points in lines)


def test_command_prints_tables_verdicts_and_the_papers_figures():
    result = run("bench", "hit-ratio", *TINY, "--budget", "1")
    assert result.exit_code == 0, result.output
    for words in ("warm", "cold", "pre+", "ours at least 0.90", "13.57", "2606.04302", "not known"):
        assert words in result.stdout
    again = run("bench", "hit-ratio", *TINY, "--budget", "1")
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--alpha", "-1"), "alpha"),
        (("--alpha", "nan"), "alpha"),
        (("--budget", "inf"), "finite"),
        (("--budget", "0.1"), "holds no node"),
        (("--seeds", "0"), "seeds"),
        (("--requests", "many"), "requests"),
        (("--per-prompt", "101"), "101 distinct documents"),
        (("--order", "sorted"), "order"),
        (("--csv", "no/such/folder/rows.csv"), "there is no directory"),
        (("--plot", "no/such/folder/plot.svg"), "there is no directory"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, words):
    result = run("bench", "hit-ratio", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert words in " ".join(result.stderr.split())


def test_files_that_cannot_be_written_are_one_sentence(tmp_path: Path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "gone" / "rows.csv")
    result = run("bench", "hit-ratio", *TINY, "--json", "--csv", tmp_path / "link.csv")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows"], "what was simulated is not lost"
    assert "cannot be written" in result.stderr
