"""What reuse costs with real weights on a few real questions: the order of things, no figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyrag.bench.quality import QualityBench
from lazyrag.bench.quality_data import read_examples
from lazyrag.bench.quality_settings import BALANCED, FAST, FULL, NO_DOCUMENTS
from lazyrag.model.load import load_model
from lazyrag.quality.choice import Head

DATA = Path(__file__).parents[1] / "data" / "nq_open_20.jsonl"
HEADS = (Head(18, 7), Head(18, 6), Head(17, 4), Head(17, 3))
"""What `lazyrag calibrate` finds for these weights, see docs/quality.md."""
SETTINGS = (NO_DOCUMENTS, FULL, FAST, BALANCED)


@pytest.fixture(scope="module")
def mean() -> dict[str, dict[str, float]]:
    """Of each setting the means over some questions."""
    model = load_model("smollm2", device="cpu", dtype="float32")
    examples = read_examples(DATA, 4)
    bench = QualityBench(model, heads=HEADS, pool_tokens=30_000, greedy_tokens=0)
    rows = [row for one in examples for row in bench.run([one], SETTINGS)]
    found: dict[str, dict[str, float]] = {}
    for setting in SETTINGS:
        own = [row for row in rows if row.setting == setting.name]
        assert len(own) == len(examples)
        found[setting.name] = {
            key: sum(getattr(row, key) for row in own) / len(own)
            for key in ("nll", "kl", "top1", "work")
        }
    return found


def test_reuse_lies_between_no_documents_and_full_attention(mean):
    """By nats of the gold answers and by nearness."""
    none, full, fast = (mean[one.name] for one in (NO_DOCUMENTS, FULL, FAST))
    assert full["kl"] == 0 < fast["kl"] < none["kl"]
    assert full["top1"] == 1 > fast["top1"] > none["top1"]
    assert full["nll"] < fast["nll"] < none["nll"]


def test_balanced_keeps_the_gain_within_a_quarter_of_the_work(mean):
    """98% of what the documents bring; of so few questions no more is said than that."""
    none, full, balanced = (mean[one.name] for one in (NO_DOCUMENTS, FULL, BALANCED))
    assert mean[FAST.name]["work"] < balanced["work"] <= 0.25
    assert none["nll"] - balanced["nll"] >= 0.98 * (none["nll"] - full["nll"])
