"""`lazyrag bench quality`: data, metrics, statistics, and a run on a tiny model."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lazyrag.bench import quality_metrics as metrics
from lazyrag.bench import quality_report as report
from lazyrag.bench.quality import QualityBench
from lazyrag.bench.quality_data import Half, bm25_ranking, read_examples, split
from lazyrag.bench.quality_plot import svg
from lazyrag.bench.quality_rows import Row, RowWriter, read_rows
from lazyrag.bench.quality_settings import (
    BALANCED,
    BEST,
    EVERYTHING,
    FAST,
    FULL,
    NO_DOCUMENTS,
    OF_PARTS,
    SHORT,
    Chooser,
    Setting,
    Told,
    anew,
    controls,
)
from lazyrag.bench.quality_statistics import Table
from lazyrag.engine.engine import Engine
from lazyrag.engine.report import Reason
from lazyrag.errors import RequestError
from lazyrag.model.load import load_model
from lazyrag.quality.choice import Head
from lazyrag.quality.moves import Offsets
from lazyrag.types import NodeText

DATA = Path(__file__).parents[1] / "data" / "nq_open_20.jsonl"


# data


def test_examples_are_read():
    examples = read_examples(DATA)
    assert len(examples) == 20
    assert all(len(one.texts) == 10 and one.gold for one in examples)
    assert {one.half for one in examples} == {Half.A, Half.B}
    assert examples[0].texts[0].startswith("Baby (Justin Bieber song)\n")
    assert [one.id for one in read_examples(DATA, 3)] == [one.id for one in examples[:3]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no example"),
        ('{"id": 1}', "line 2 is no example"),
        ('{"id": 1, "question": "q", "answers": [], "documents": [{"text": "t"}]}', "empty"),
        (
            '{"id": 1, "question": "q", "answers": ["a"], "documents": [{"text": "t"}, '
            '{"text": "t"}]}',
            "occur twice",
        ),
        ('{"id": 0, "question": "q", "answers": ["a"], "documents": [{"text": "t"}]}', "id '0'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    good = {"id": 0, "question": "q", "answers": ["a"], "documents": [{"text": "t"}]}
    file = tmp_path / "own.jsonl"
    file.write_text(f"{json.dumps(good)}\n{line}\n", encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        read_examples(file)


def test_documents_are_cut_behind_sentences():
    whole = read_examples(DATA)
    for example, words in ((example, words) for example in whole for words in (20, 50)):
        parts = split(example, words)
        assert parts.id == example.id and parts.set != example.set
        for number, document in enumerate(example.texts):
            own = [n for n, one in enumerate(parts.documents) if one == number]
            texts = [parts.texts[n] for n in own]
            others = (text for n, text in enumerate(parts.texts) if n not in own)
            shared = any(text in document for text in others)
            assert shared or " ".join(texts).split() == document.split()
            for text in texts:
                assert len(text.split()) <= words or not re.search(r"[.!?]\s", text)
            assert {n in parts.gold for n in own} == {number in example.gold}
            for n, text in zip(own, texts, strict=True):
                later = n != own[0]
                assert parts.before(n, Told.NOTHING) == ""
                title = f"{example.titles[number]}\n" if later else ""
                assert parts.before(n, Told.TITLE) == title
                untitled = replace(parts, titles=("",) * len(parts.titles))
                assert untitled.before(n, Told.TITLE) == ""
                assert parts.before(n, Told.LEAD) == (f"{texts[0]}\n\n" if later else "")
                assert parts.before(n, Told.PREVIOUS) == (
                    f"{parts.texts[n - 1]}\n\n" if later else ""
                ), text


def test_a_sentence_that_occurs_twice_is_one_text():
    example = replace(read_examples(DATA, 1)[0], texts=("One two three. Four five.", "Four five."))
    parts = split(example, 3)
    assert parts.texts == ("One two three.", "Four five.") and parts.documents == (0, 0)


def test_bm25_ranks_the_matching_text_first():
    texts = ["the cat sat", "a dog ran to the park", "birds of the park and the dog in it today"]
    assert bm25_ranking("dog park", texts)[0] == 1
    assert bm25_ranking("nothing", texts) == [0, 1, 2]
    nq = read_examples(DATA)
    hits = sum(bm25_ranking(one.question, one.texts)[0] in one.gold for one in nq)
    assert hits >= 10


# metrics


def test_exact_means_whole_words():
    assert metrics.exact("It was the Beatles!", ["beatles"])
    assert metrics.exact("in New-York city", ["New York"])
    assert not metrics.exact("unfortunately", ["tuna"])
    assert not metrics.exact("the", ["The"])
    assert metrics.f1("a red car", ["red bicycle"]) == pytest.approx(0.5)
    assert metrics.f1("blue", ["red"]) == 0


def test_divergence_and_agreement():
    full = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).log()
    other = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.8, 0.1]]).log()
    by_hand = 0.5 * (0.7 * torch.log(torch.tensor(3.5)) + 0.2 * torch.log(torch.tensor(2 / 7)))
    assert metrics.divergence(full, other) == pytest.approx(float(by_hand), rel=1e-5)
    assert metrics.divergence(full, full) == 0
    assert metrics.agreement(full, other) == 0.5
    assert metrics.nll(full, [0, 1]) == pytest.approx(-math.log(0.7 * 0.8) / 2)


# statistics


def row(setting: str, number: int, nll: float, work: float = 1.0, name: str = "s") -> Row:
    half = "A" if number % 2 else "B"
    return Row(name, str(number), half, setting, nll, 0.1, 1.0, -1, -1, -1.0, 100 * work, work)


def rows() -> list[Row]:
    """Gains of 2; `fast` keeps 1, one setting 1.5 on half A only, another 1.2 everywhere."""
    made = []
    for number in range(40):
        wobble = 0.01 * (number % 5)
        uneven = 0.5 if number % 2 else 1.5
        made += [
            row(NO_DOCUMENTS.name, number, 4 + wobble, 0.05),
            row(FULL.name, number, 2 + wobble),
            row(FAST.name, number, 3 + wobble, 0.06),
            row("attention 1 last", number, 2 + uneven + wobble, 0.2),
            row("attention 2 last", number, 2.8 + wobble, 0.25),
        ]
    return made


def test_gain_kept_is_a_ratio_of_sums_with_an_interval():
    table = Table(rows())
    found = table.summary(FAST.name, table.examples_of())
    assert found.gain.value == pytest.approx(0.5)
    assert found.gain.low == pytest.approx(found.gain.high)  # the same everywhere
    uneven = table.summary("attention 1 last", table.examples_of())
    assert uneven.gain.value == pytest.approx(0.5)
    assert uneven.gain.low < 0.45 < 0.55 < uneven.gain.high
    assert table.difference("attention 2 last", FAST.name, table.examples_of()).value == (
        pytest.approx(-0.2)
    )
    assert Table(rows()).summary("attention 1 last", table.examples_of()) == uneven


def test_an_interval_that_is_not_known_says_so():
    """Where documents bring as much as they take, a resampling may have no gain to be kept."""
    seldom = [
        replace(one, nll=2.0 if int(one.id) < 4 else 4.2) if one.setting == FULL.name else one
        for one in rows()
    ]
    table = Table(seldom)
    found = table.summary(FAST.name, table.examples_of()).gain
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert "null" in json.dumps(report.as_json(seldom), allow_nan=False)
    assert "(-inf to inf)" in report.text(seldom)
    assert svg(seldom).count("<circle") == 4 + 4


def test_no_example_is_reported_by_what_was_tuned_on_it():
    """On A the first looks best and disappoints on B; on B the second is chosen."""
    table = Table(rows())
    names = ["attention 1 last", "attention 2 last"]
    chosen, best = table.tuned(names, table.examples_of())
    assert best == {Half.A: "attention 1 last", Half.B: "attention 2 last"}
    for (_, number), setting in chosen.items():
        assert setting == ("attention 2 last" if int(number) % 2 else "attention 1 last")
    assert table.mixed("rung", chosen).nll == pytest.approx((2.8 + 3.5) / 2 + 0.02)


def test_the_ladder_keeps_to_its_limits():
    rungs = {rung.name: rung for rung in report.ladder(Table(rows()))}
    assert rungs["fast"].chosen == {Half.A: FAST.name, Half.B: FAST.name}
    assert "attention 2 last" in rungs["balanced"].chosen.values()
    assert not rungs["best"].claimed
    dear = [replace(one, work=0.3) if one.setting == "attention 2 last" else one for one in rows()]
    rungs = {rung.name: rung for rung in report.ladder(Table(dear))}
    assert "attention 2 last" not in rungs["balanced"].chosen.values()
    perfect = [replace(one, nll=2.0) if one.setting == FAST.name else one for one in rows()]
    assert {rung.name: rung for rung in report.ladder(Table(perfect))}["fast"].claimed


def test_tables_hold_what_is_known(tmp_path: Path):
    written = [replace(one, em=int(one.setting == FULL.name), same_text=1) for one in rows()]
    text = report.text(written, "a note")
    assert text.startswith("a note\n")
    assert "| fast | 40 | 3.020 | 50.0 (50.0 to 50.0) |" in text
    assert "EM %" in text
    assert "EM %" not in report.text(rows())
    assert json.dumps(report.as_json(rows()))
    report.write_summary(rows(), tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0].startswith("set,setting,examples,nll,gain")
    assert len(lines) == 1 + 2 * 5
    assert svg(rows(), [FAST.name]).count("<circle") == 4 + 4


def test_rows_survive_their_file(tmp_path: Path):
    made = [row("x", 1, 1.25), replace(row("y", 2, 0.5), gold=0.5, ttft_s=0.25, em=1, f1=0.5)]
    writer = RowWriter(tmp_path / "rows.csv")
    writer.write(made[:1])
    assert read_rows(tmp_path / "rows.csv") == made[:1]  # before it is closed
    writer.write(made[1:])
    writer.close()
    assert read_rows(tmp_path / "rows.csv") == made
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="no table"):
        read_rows(tmp_path / "other.csv")


def test_settings_have_names_of_their_own_and_controls():
    names = [setting.name for setting in EVERYTHING]
    assert len(set(names)) == len(names)
    assert set(controls(BALANCED)) <= set(SHORT) <= set(EVERYTHING)


# a run


@pytest.fixture(scope="module")
def measured(checkpoint):
    """One real example, cut short, on a tiny model; the engine scores the same prompts."""
    model = load_model(str(checkpoint("llama")), device="cpu", dtype="float32")
    example = read_examples(DATA, 1)[0]
    short = replace(
        example, texts=tuple(text[:150] for text in example.texts[:4]), gold=frozenset((1,))
    )
    bench = QualityBench(
        model,
        heads=[Head(1, 0)],
        pool_tokens=60_000,
        greedy_tokens=4,
        written=[FULL.name, FAST.name],
    )
    found = {one.setting: one for one in bench.run([short], EVERYTHING, timed=True)}
    assert bench._pool.free_pages == bench._pool._allocator.total  # everything was given back
    return model, short, found


def test_a_run_measures_every_setting(measured):
    _, _, found = measured
    assert list(found) == [setting.name for setting in EVERYTHING]
    assert found[FULL.name].kl == 0
    assert found[FULL.name].work == 1
    assert all(one.kl > 1e-4 for name, one in found.items() if not name.startswith("full"))
    assert all(one.ttft_s > 0 for one in found.values())
    assert found[BALANCED.name].work == found[FAST.name].work  # no node fits a quarter
    assert found["attention 2 last"].work > found["attention 1 last"].work
    assert found["gold 1 last"].gold == 1
    assert found["only attention 1"].work < found["full, attention 1 last"].work
    assert found[FAST.name].same_text in (0, 1)
    assert found[BALANCED.name].same_text == -1


def test_the_bench_measures_what_the_engine_serves(measured, tmp_path: Path):
    """NLL of full, of reuse and of no documents: the same through `Engine.score`."""
    from lazyrag.bench.answers import SYSTEM, USER

    model, example, found = measured
    with Engine(model, store=tmp_path) as engine:
        engine.precompute(example.texts)

        def nll(texts: tuple[str, ...], quality: str) -> float:
            user = USER.format(context="\n\n".join(texts), query=example.question)
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
            scores = [engine.score(messages, one, quality=quality) for one in example.answers]
            return min(-sum(score) / len(score) for score in scores)

        assert found[FULL.name].nll == pytest.approx(nll(example.texts, "full"), abs=1e-4)
        assert found[FAST.name].nll == pytest.approx(nll(example.texts, "fast"), abs=1e-4)
        assert found[NO_DOCUMENTS.name].nll == pytest.approx(nll((), "fast"), abs=1e-4)


def test_the_rungs_are_those_of_the_engine(measured, tmp_path: Path):
    """What `balanced` and `best` choose, read and cost, of passages enough for some to fit."""
    from lazyrag.bench.answers import SYSTEM, USER
    from lazyrag.quality.calibration import Calibration

    model, example, _ = measured
    words = random.Random(4)
    texts = tuple(
        " ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(words.randint(14, 24)))
        for _ in range(36)
    )
    asked = replace(example, texts=texts, question=f"{texts[5][:22]}?", gold=frozenset())
    heads = [Head(1, 0)]
    bench = QualityBench(model, heads=heads, pool_tokens=60_000, greedy_tokens=0)
    settings = (NO_DOCUMENTS, FULL, BALANCED, BEST)
    found = {one.setting: one for one in bench.run([asked], settings)}
    user = USER.format(context="\n\n".join(texts), query=asked.question)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    with Engine(model, store=tmp_path) as engine:
        engine.precompute(texts)
        engine._ladder.calibration = Calibration(tuple(heads), (0.5,), 8)
        for setting, quality, limit in ((BALANCED, "balanced", 0.25), (BEST, "best", 0.4)):
            scores = [engine.score(messages, one, quality=quality) for one in asked.answers]
            nll = min(-sum(score) / len(score) for score in scores)
            report = engine.chat(messages, max_new_tokens=1, quality=quality).report
            assert found[setting.name].nll == pytest.approx(nll, abs=1e-4)
            assert any(one.reason is Reason.CHOSEN for one in report.nodes)
            tokens = report.tokens_computed + report.live_tokens_reused + report.tokens_looked
            assert tokens / report.prompt_tokens == pytest.approx(found[setting.name].work)
            assert found[setting.name].work <= limit


def test_nodes_behind_others_are_those_of_the_engine(measured, tmp_path: Path):
    """As `NodeText.behind` encodes them; of three parts of a document, one is read behind each."""
    from lazyrag.bench.answers import SYSTEM, USER

    model, example, _ = measured
    texts = ("A first part.", "The second.", "And a third.", "Elsewhere.")
    parts = replace(example, texts=texts, documents=(0, 0, 0, 1), titles=("T", "U"))
    bench = QualityBench(model, heads=[Head(1, 0)], pool_tokens=20_000, greedy_tokens=0)
    settings = (NO_DOCUMENTS, FULL, FAST, *OF_PARTS[:3])
    found = {one.setting: one.nll for one in bench.run([parts], settings)}
    assert len(set(found.values())) == len(settings)
    user = USER.format(context="\n\n".join(texts), query=parts.question)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    behind = {
        Told.NOTHING: ("", "", "", ""),
        Told.TITLE: ("", "T\n", "T\n", ""),
        Told.LEAD: ("", "A first part.\n\n", "A first part.\n\n", ""),
        Told.PREVIOUS: ("", "A first part.\n\n", "The second.\n\n", ""),
    }
    for told, before in behind.items():
        with Engine(model, store=tmp_path / told) as engine:
            pairs = zip(texts, before, strict=True)
            engine.precompute([NodeText(text, behind=one) for text, one in pairs])
            scores = [engine.score(messages, one, quality="fast") for one in parts.answers]
            nll = min(-sum(score) / len(score) for score in scores)
            name = FAST.name if told is Told.NOTHING else f"fast, behind {told}"
            assert found[name] == pytest.approx(nll, abs=1e-4), told


def test_everything_computed_anew_is_full_attention(checkpoint, measured):
    """A rung that computes all nodes anew, in place, is `full`: same NLL, no divergence."""
    model, example, _ = measured
    bench = QualityBench(model, heads=[Head(1, 0)], pool_tokens=20_000, greedy_tokens=0)
    whole = anew(Chooser.RETRIEVER, 4, last=False)
    heads_of_all = replace(whole, name="parts", offsets=Offsets.IN_LINE, count=3)
    found = {
        one.setting: one for one in bench.run([example], [NO_DOCUMENTS, FULL, whole, heads_of_all])
    }
    assert found[whole.name].nll == pytest.approx(found[FULL.name].nll, abs=1e-5)
    assert found[whole.name].kl == pytest.approx(0, abs=1e-6)
    assert found[whole.name].work == 1
    assert found["parts"].kl > 1e-4


SELECTIONS: dict[str, tuple[list[str], Sequence[Setting]]] = {
    "ladder": ([], SHORT),
    "all": (["--all"], EVERYTHING),
    "cut": (["--split", "13"], (*SHORT, *OF_PARTS)),
    "named": (
        ["--split", "13", "--setting", OF_PARTS[-1].name, "--setting", FAST.name],
        (NO_DOCUMENTS, FULL, FAST, OF_PARTS[-1]),
    ),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_command(checkpoint, tmp_path: Path, monkeypatch, selection: str):
    """A user's own file, a tiny model, calibrated on the way; every file it can write."""
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    options, settings = SELECTIONS[selection]
    from typer.testing import CliRunner

    from lazyrag.cli.main import app

    letters = random.Random(2)
    examples = []
    for number in range(3):
        texts = [
            ". ".join("".join(letters.choices("abcdefgh", k=5)) for _ in range(20))
            for _ in range(6)
        ]
        examples.append(
            {
                "id": number,
                "question": texts[number][:30],
                "answers": ["one", "it is two"],
                "documents": [
                    {"id": f"d{n}", "title": f"T{n}", "text": text} for n, text in enumerate(texts)
                ],
                "gold": [f"d{number}"],
            }
        )
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, examples)), encoding="utf-8")
    files = {name: tmp_path / name for name in ("rows.csv", "table.csv", "plot.svg")}
    result = CliRunner().invoke(
        app,
        [
            *("bench", "quality", "--data", str(data), "--model", str(checkpoint("llama"))),
            *("--device", "cpu", "--greedy", "3", "--timed", "1"),
            *("--rows", str(files["rows.csv"]), "--csv", str(files["table.csv"])),
            *("--plot", str(files["plot.svg"])),
            *options,
        ],
    )
    assert result.exit_code == 0, result.output
    name = "own by 13 words" if "--split" in options else "own"
    assert f"3 examples ({name} 3)" in result.stdout
    rows = read_rows(files["rows.csv"])
    assert len(rows) == 3 * len(settings)
    assert {one.setting for one in rows} == {one.name for one in settings}
    assert {one.same_text for one in rows if one.setting == FULL.name} == {1}
    assert sum(one.ttft_s >= 0 for one in rows) == len(settings)
    assert len(files["table.csv"].read_text().splitlines()) == 1 + 2 * len(settings)
    assert files["plot.svg"].read_text().startswith("<svg")


def test_a_setting_that_there_is_not_is_named(tmp_path: Path):
    from typer.testing import CliRunner

    from lazyrag.cli.main import app

    data = tmp_path / "own.jsonl"
    line = {"id": 1, "question": "q", "answers": ["a"], "documents": [{"text": "t"}]}
    data.write_text(json.dumps(line), encoding="utf-8")
    result = CliRunner().invoke(
        app, ["bench", "quality", "--data", str(data), "--setting", "fast", "--setting", "faster"]
    )
    assert result.exit_code == 1
    assert "no setting is called 'faster'" in result.stderr
