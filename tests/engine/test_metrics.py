"""What is counted is what happened, at one moment, and Prometheus is told the same."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from lazyrag import Engine, EngineStats, LazyRagError, Live, Node, Quality
from lazyrag.engine.metrics import BOUNDS_S, Gauges, HistogramStats, Metrics, Outcome
from lazyrag.engine.prometheus import prometheus_registry
from lazyrag.engine.report import NodeReport, NodeStatus, Reason, ReuseReport, Tier
from lazyrag.types import NodeKey

SERVING = Path(__file__).resolve().parents[2] / "docs/serving.md"
GAUGES = Gauges(**{field.name: number for number, field in enumerate(fields(Gauges), start=3)})
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def node(tier: Tier, tokens: int, reason: Reason | None = None) -> NodeReport:
    status = NodeStatus.REUSED if reason is None else NodeStatus.RECOMPUTED
    return NodeReport(NodeKey(bytes(32)), tokens, 0, tier, status, reason)


def report(*nodes: NodeReport, reused: int = 0, computed: int = 0) -> ReuseReport:
    return ReuseReport(Quality.FAST, list(nodes), tokens_reused=reused, tokens_computed=computed)


def busy() -> Metrics:
    """Something of everything."""
    metrics = Metrics()
    first = report(node(Tier.DEVICE, 100), node(Tier.DISK, 300), reused=400, computed=20)
    second = report(
        node(Tier.DEVICE, 100),
        node(Tier.NONE, 60, Reason.DAMAGED),
        node(Tier.NONE, 40, Reason.CHANGED),
        reused=100,
        computed=110,
    )
    metrics.started(first, 0.002)
    second.live_tokens_reused = 7
    metrics.started(second, 0.4)
    for seconds in (0.2, 0.6):
        metrics.first_token(seconds)
    for seconds in (0.01, 0.01, 0.012, 0.4):
        metrics.next_token(seconds)
    for outcome in ("stop", "length", Outcome.STOP, Outcome.REFUSED):
        metrics.finished(outcome)
    metrics.moved(Tier.DISK, Tier.DEVICE, 3_000, 0.5)
    metrics.moved(Tier.DISK, Tier.DEVICE, 1_000, 0.5)
    metrics.encoded(60, 0.25)
    metrics.not_stored()
    metrics.evicted(Tier.DEVICE, 2, 5_000)
    return metrics


def histogram(*seconds: float) -> HistogramStats:
    metrics = Metrics()
    for one in seconds:
        metrics.next_token(one)
    return metrics.snapshot(Gauges()).next_token


def exposition(metrics: Metrics) -> str:
    registry = prometheus_registry(lambda: metrics.snapshot(GAUGES))
    return prometheus_client.generate_latest(registry).decode()


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(of: Samples, name: str, **labels: str) -> float:
    return of[name, frozenset(labels.items())]


# counting


def test_everything_is_counted_once():
    stats = busy().snapshot(GAUGES)
    assert stats.requests == 2
    assert stats.nodes_by_tier == {"device": 2, "disk": 1, "none": 2} | unused_tiers()
    assert stats.node_tokens_by_tier == {"device": 200, "disk": 300, "none": 100} | unused_tiers()
    assert {k: n for k, n in stats.computed_by_reason.items() if n} == {"damaged": 1, "changed": 1}
    assert set(stats.computed_by_reason) == set(Reason)
    assert (stats.tokens_reused, stats.live_tokens_reused, stats.tokens_computed) == (500, 7, 130)
    assert (stats.encoded_tokens, stats.encode_s) == (60, 0.25)
    assert stats.unstored_nodes == 1
    (moved,) = stats.movements
    assert (moved.source, moved.target, moved.moves) == ("disk", "device", 2)
    assert (moved.nbytes, moved.seconds) == (4_000, 1.0)
    assert stats.evicted_nodes_by_tier["device"] == 2
    assert stats.evicted_bytes_by_tier["device"] == 5_000
    assert stats.finished_by_outcome == {
        "stop": 2, "length": 1, "cancelled": 0, "failed": 0, "timeout": 0, "refused": 1,
    }  # fmt: skip
    assert (stats.queue.count, stats.first_token.count, stats.next_token.count) == (2, 2, 4)
    assert stats.queue.total_s == pytest.approx(0.402)
    assert stats.now == GAUGES


def unused_tiers() -> dict[str, int]:
    return {tier.value: 0 for tier in Tier if tier not in (Tier.DEVICE, Tier.DISK, Tier.NONE)}


def test_hit_ratios():
    stats = busy().snapshot(Gauges())
    assert stats.node_share_by_tier == {"device": 0.4, "disk": 0.2, "none": 0.4} | unused_tiers()
    assert stats.node_hit_ratio == pytest.approx(0.6)
    assert stats.token_share_by_tier["disk"] == pytest.approx(0.5)
    assert stats.token_hit_ratio == pytest.approx(5 / 6)


def test_an_engine_that_did_nothing():
    stats = Metrics().snapshot(Gauges())
    assert stats.node_hit_ratio == stats.token_hit_ratio == 0
    assert set(stats.node_share_by_tier.values()) == {0}
    assert stats.queue.mean_s is None and stats.queue.quantile_s(0.5) is None
    assert "first token  -" in stats.summary()
    json.dumps(stats.to_dict(), allow_nan=False)


def test_an_outcome_nobody_knows_is_a_mistake():
    with pytest.raises(ValueError, match="gone"):
        Metrics().finished("gone")


def test_a_snapshot_stays_as_it_is():
    metrics = busy()
    before = metrics.snapshot(GAUGES)
    kept = before.to_dict()
    metrics.started(report(node(Tier.DISK, 9)), 0.1)
    metrics.moved(Tier.DISK, Tier.DEVICE, 1, 0.1)
    metrics.finished("stop")
    metrics.next_token(0.1)
    assert before.to_dict() == kept
    with pytest.raises(FrozenInstanceError):
        before.requests = 5


def test_plain_values():
    data = busy().snapshot(GAUGES).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert data["token_hit_ratio"] == pytest.approx(5 / 6)
    assert data["next_token"]["count"] == 4
    assert data["next_token"]["buckets"] == {"0.01": 2, "0.015": 1, "0.5": 1}
    assert data["movements"][0]["nbytes"] == 4_000
    assert data["now"]["waiting"] == 3
    assert all(type(key) is str for key in data["nodes_by_tier"])


def test_a_summary_for_people():
    text = busy().snapshot(GAUGES).summary()
    assert "60% hit, by tokens 83% (device 2, disk 1, none 2)" in text
    assert "500 reused, 7 live reused, 130 computed" in text
    assert "4 kB from disk to device, 4 kB a second" in text
    assert "evicted      5 kB (device 2)" in text
    assert "4 ended (stop 2, length 1, refused 1)" in text
    assert max(map(len, text.splitlines())) <= 100


# histograms


def test_bounds_rise_by_a_known_factor():
    factors = [above / below for below, above in pairwise(BOUNDS_S)]
    assert min(factors) > 1 and max(factors) < 1.67
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (1e-4, 100.0)


def test_a_bound_belongs_to_its_bucket():
    """As Prometheus has it: ``le`` is less or equal."""
    for at in (0, 7, len(BOUNDS_S) - 1):
        assert histogram(BOUNDS_S[at]).counts[at] == 1
        assert histogram(math.nextafter(BOUNDS_S[at], math.inf)).counts[at + 1] == 1
    assert histogram(0.0).counts[0] == histogram(1e9).counts[-1] == 1


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_off_by_one_bucket_at_most(share):
    choose = random.Random(1)
    seconds = sorted(choose.lognormvariate(-4, 1.5) for _ in range(5_000))
    true = seconds[math.ceil(share * len(seconds)) - 1]
    estimate = histogram(*seconds).quantile_s(share)
    assert 1 / 1.67 < estimate / true < 1.67


def test_quantiles_inside_a_bucket_and_beyond_the_last():
    assert histogram(*[0.018] * 4).quantile_s(0.5) == pytest.approx(0.0175), "half of 15 to 20 ms"
    assert histogram(0.00001, 0.00002).quantile_s(0.5) == pytest.approx(0.00005)
    assert histogram(1, 500).quantile_s(0.99) == 100
    assert histogram(1, 500).mean_s == 250.5


# one writes, others read


def test_a_snapshot_is_of_one_moment():
    """Sums agree in every snapshot, and nothing ever decreases, while the worker counts on."""
    metrics, wrong = Metrics(), []
    one = report(node(Tier.DEVICE, 10), node(Tier.NONE, 5, Reason.MISSING), reused=10, computed=5)
    done = threading.Event()

    def read() -> None:
        last = metrics.snapshot(Gauges())
        while not done.is_set():
            now = metrics.snapshot(Gauges())
            counts = (now.requests, now.nodes_by_tier["device"], now.computed_by_reason["missing"])
            if len({*counts, now.queue.count, now.tokens_computed // 5}) != 1:
                wrong.append(now)
            if now.queue.total_s != now.queue.count * 0.5:
                wrong.append(now)
            if sum(now.evicted_bytes_by_tier.values()) != 8 * now.evicted_nodes_by_tier["disk"]:
                wrong.append(now)
            if now.requests < last.requests or now.next_token.count < last.next_token.count:
                wrong.append(now)
            last = now

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for number in range(3_000):
            metrics.started(one, 0.5)
            metrics.next_token(0.01)
            metrics.evicted(Tier.DISK, 1, 8)
            metrics.moved(*list(Tier)[number % 2 : number % 2 + 2], 1, 0.1)
    finally:
        done.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert metrics.snapshot(Gauges()).requests == 3_000


# Prometheus


def test_prometheus_is_told_the_same():
    stats = busy().snapshot(GAUGES)
    told = samples(exposition(busy()))
    assert value(told, "lazyrag_requests_admitted_total") == 2
    for tier, count in stats.nodes_by_tier.items():
        assert value(told, "lazyrag_nodes_total", tier=tier) == count
        tokens = stats.node_tokens_by_tier[tier]
        assert value(told, "lazyrag_node_tokens_total", tier=tier) == tokens
    for reason, count in stats.computed_by_reason.items():
        assert value(told, "lazyrag_nodes_computed_total", reason=reason) == count
    for outcome, count in stats.finished_by_outcome.items():
        assert value(told, "lazyrag_requests_finished_total", outcome=outcome) == count
    way = {"source": "disk", "target": "device"}
    assert value(told, "lazyrag_moves_total", **way) == 2
    assert value(told, "lazyrag_moved_bytes_total", **way) == 4_000
    assert value(told, "lazyrag_move_seconds_total", **way) == 1.0
    assert value(told, "lazyrag_tokens_reused_total") == 500
    assert value(told, "lazyrag_live_tokens_reused_total") == 7
    assert value(told, "lazyrag_tokens_computed_total") == 130
    assert value(told, "lazyrag_encoded_tokens_total") == 60
    assert value(told, "lazyrag_encode_seconds_total") == 0.25
    assert value(told, "lazyrag_nodes_unstored_total") == 1
    assert value(told, "lazyrag_evicted_nodes_total", tier="device") == 2
    assert value(told, "lazyrag_evicted_bytes_total", tier="device") == 5_000


def test_every_gauge_is_told():
    told = samples(exposition(Metrics()))
    for field in fields(Gauges):
        name = field.name
        if name in ("waiting", "loading", "running"):
            name = f"requests_{name}"
        assert value(told, f"lazyrag_{name}") == getattr(GAUGES, field.name)


def test_histograms_add_up():
    told = samples(exposition(busy()))
    stats = busy().snapshot(GAUGES)
    for name, one in (
        ("queue", stats.queue),
        ("first_token", stats.first_token),
        ("next_token", stats.next_token),
    ):
        base = f"lazyrag_{name}_seconds"
        buckets = {
            float(dict(labels)["le"]): count
            for (found, labels), count in told.items()
            if found == f"{base}_bucket"
        }
        assert sorted(buckets) == [*BOUNDS_S, math.inf]
        counts = [buckets[bound] for bound in sorted(buckets)]
        assert counts == sorted(counts), "cumulative"
        assert counts[-1] == value(told, f"{base}_count") == one.count > 0
        assert value(told, f"{base}_sum") == pytest.approx(one.total_s)
        assert tuple(now - last for last, now in pairwise([0, *counts])) == one.counts


def test_counters_never_decrease():
    metrics, choose = Metrics(), random.Random(5)
    last: Samples = {}
    tiers = list(Tier)
    for _ in range(20):
        for _ in range(choose.randint(0, 5)):
            metrics.started(report(node(choose.choice(tiers), 5), computed=3), choose.random())
            metrics.first_token(choose.random())
            metrics.next_token(choose.random() / 50)
            metrics.moved(choose.choice(tiers), choose.choice(tiers), 100, 0.01)
            metrics.evicted(choose.choice([Tier.DEVICE, Tier.DISK]), 1, 100)
            metrics.finished(choose.choice(list(Outcome)))
        gauges = replace(Gauges(), running=choose.randint(0, 9))
        stats = metrics.snapshot(gauges)
        registry = prometheus_registry(lambda stats=stats: stats)
        now = samples(prometheus_client.generate_latest(registry).decode())
        for key, before in last.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert now[key] >= before, key
        last = now


def test_names_follow_the_conventions():
    text = exposition(busy())
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 25
    for family in families:
        assert re.fullmatch(r"lazyrag_[a-z_]+", family.name)
        assert family.documentation and not family.documentation.endswith(".")
        assert not re.search(r"_(ms|kb|mb|gb|percent|total)(_|$)", family.name), family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        labels = {name for sample in family.samples for name in sample.labels}
        assert labels <= {"tier", "reason", "outcome", "source", "target", "le"}
        series = [(sample.name, tuple(sample.labels.items())) for sample in family.samples]
        assert len(series) == len(set(series))


def test_it_is_valid_openmetrics_too():
    registry = prometheus_registry(lambda: busy().snapshot(GAUGES))
    text = prometheus_client.openmetrics.exposition.generate_latest(registry).decode()
    assert len(list(parse_openmetrics(text))) > 25


def test_a_scrape_reads_one_snapshot():
    taken: list[EngineStats] = []
    metrics = busy()

    def stats() -> EngineStats:
        taken.append(metrics.snapshot(GAUGES))
        return taken[-1]

    registry = prometheus_registry(stats)
    assert not taken, "nothing is read before it is asked for"
    prometheus_client.generate_latest(registry)
    assert len(taken) == 1


def test_no_text_and_no_key_is_told(checkpoint, tmp_path):
    """Reports of a real engine, of a prompt with secrets, in every state a node can have."""
    metrics = Metrics()
    secret = "The codename Zanzibar belongs to agent Quillfeather of the eastern office, he said. "
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "Xylophone") as engine:
        (key,) = engine.precompute([secret * 2])
        asked = [
            [Node(key=key), Live(text=" Who?")],
            [Node(text=secret), Live(text=" Who?")],
            "Read: " + secret * 2 + "Who?",
            "Read: " + (secret * 2).replace("eastern", "western") + "Who?",
        ]
        for prompt in asked:
            metrics.started(engine.generate(prompt, max_new_tokens=2).report, 0.1)
    assert metrics.snapshot(Gauges()).requests == 4
    stats = metrics.snapshot(Gauges())
    assert stats.nodes_by_tier["none"] and stats.node_hit_ratio
    told = exposition(metrics) + json.dumps(stats.to_dict()) + stats.summary()
    for word in ("Zanzibar", "Quillfeather", "codename", "Xylophone", str(key), str(key)[:8]):
        assert word.lower() not in told.lower()


def test_without_prometheus_client(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for name in ("lazyrag.engine.prometheus", "lazyrag.engine.metrics"):
        monkeypatch.delitem(sys.modules, name)
    from lazyrag.engine import metrics, prometheus

    stats = metrics.Metrics().snapshot(metrics.Gauges())
    assert stats.summary()
    with pytest.raises(LazyRagError, match=r"lazyrag\[metrics\]"):
        prometheus.prometheus_registry(lambda: stats)


# the documentation


def documented() -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, labels and meaning of every row of the table."""
    for line in SERVING.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| `(lazyrag_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|", line):
            yield match.group(1), match.group(2), match.group(3), match.group(4)


def test_the_table_in_the_documentation_is_true():
    metrics = busy()
    told = []
    for family in text_string_to_metric_families(exposition(metrics)):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        told.append((name, family.type, shown, family.documentation))
    assert list(documented()) == told


def test_the_example_in_the_documentation_runs(monkeypatch):
    code = re.search(r"```python\n([^`]*start_http_server[^`]*)```", SERVING.read_text())
    assert code is not None
    assert len(code[1].strip().splitlines()) <= 10
    started = []
    serve = prometheus_client.start_http_server

    def any_port(port, addr, registry):
        assert addr == "127.0.0.1"
        started.append(serve(0, addr=addr, registry=registry))
        return started[-1]

    metrics = busy()

    class Serving:
        """In place of an engine."""

        def stats(self) -> EngineStats:
            return metrics.snapshot(GAUGES)

    monkeypatch.setattr(prometheus_client, "start_http_server", any_port)
    exec(code[1], {"engine": Serving()})
    ((server, thread),) = started
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as answer:
            assert samples(answer.read().decode()) == samples(exposition(metrics))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
