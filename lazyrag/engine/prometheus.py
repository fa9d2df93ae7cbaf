"""An engine's statistics for Prometheus: the only module that knows prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from lazyrag.engine.metrics import BOUNDS_S, EngineStats, Gauges, HistogramStats
from lazyrag.errors import LazyRagError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


def prometheus_registry(stats: Callable[[], EngineStats]) -> CollectorRegistry:
    """A registry that shows one engine; every scrape reads one snapshot.

    Args:
        stats: gives a snapshot, `Engine.stats` for example; called in the server's thread.

    Raises:
        LazyRagError: the extra ``metrics`` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise LazyRagError(
            "metrics for Prometheus need prometheus-client: pip install 'lazyrag[metrics]'."
        ) from error
    registry = CollectorRegistry()
    registry.register(_EngineCollector(stats))
    return registry


Samples = Mapping[tuple[str, ...], float]
"""Values by the values of their labels."""


class _EngineCollector:
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        stats = self._stats()
        for name, text, labels, samples in _counters(stats):
            counter = CounterMetricFamily(f"lazyrag_{name}", text, labels=labels)
            for values, value in samples.items():
                counter.add_metric(values, value)
            yield counter
        for name, text, value in _gauges(stats.now):
            yield GaugeMetricFamily(f"lazyrag_{name}", text, value=value)
        for name, text, histogram in _histograms(stats):
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            yield HistogramMetricFamily(
                f"lazyrag_{name}", text, buckets=buckets, sum_value=histogram.total_s
            )


def _counters(stats: EngineStats) -> Iterator[tuple[str, str, tuple[str, ...], Samples]]:
    """Names without prefix and suffix, help texts, labels, samples."""
    ways = {(one.source, one.target): one for one in stats.movements}
    way, tier = ("source", "target"), ("tier",)
    yield "requests_admitted", "Requests that were admitted", (), {(): stats.requests}
    text = "Requests that ended, refused ones among them"
    yield "requests_finished", text, ("outcome",), _labelled(stats.finished_by_outcome)
    text = "Nodes of prompts, by where their KV was; none = computed"
    yield "nodes", text, tier, _labelled(stats.nodes_by_tier)
    yield (
        "node_tokens",
        "Tokens of the nodes of prompts, by where their KV was",
        tier,
        _labelled(stats.node_tokens_by_tier),
    )
    text = "Nodes of prompts that were computed, by why"
    yield "nodes_computed", text, ("reason",), _labelled(stats.computed_by_reason)
    yield "tokens_reused", "Tokens of nodes that were reused", (), {(): stats.tokens_reused}
    text = "Live tokens whose KV another request had left"
    yield "live_tokens_reused", text, (), {(): stats.live_tokens_reused}
    text = "Tokens computed before the first tokens of answers"
    yield "tokens_computed", text, (), {(): stats.tokens_computed}
    text = "Tokens of nodes computed, by requests and by ingestion"
    yield "encoded_tokens", text, (), {(): stats.encoded_tokens}
    yield "encode_seconds", "Time in which nodes were computed", (), {(): stats.encode_s}
    text = "Nodes computed by requests and not stored: too much waited, or the store failed"
    yield "nodes_unstored", text, (), {(): stats.unstored_nodes}
    text = "Times that KV was brought from one tier to another"
    yield "moves", text, way, {key: one.moves for key, one in ways.items()}
    yield (
        "moved_bytes",
        "Bytes of KV brought from one tier to another",
        way,
        {key: one.nbytes for key, one in ways.items()},
    )
    text = "Time in which KV was brought from one tier to another"
    yield "move_seconds", text, way, {key: one.seconds for key, one in ways.items()}
    text = "Nodes dropped from a tier to make room"
    yield "evicted_nodes", text, tier, _labelled(stats.evicted_nodes_by_tier)
    yield (
        "evicted_bytes",
        "Bytes of nodes dropped from a tier to make room",
        tier,
        _labelled(stats.evicted_bytes_by_tier),
    )


def _gauges(now: Gauges) -> Iterator[tuple[str, str, int]]:
    yield "requests_waiting", "Requests not admitted yet", now.waiting
    yield "requests_loading", "Admitted requests that wait for their nodes", now.loading
    yield "requests_running", "Requests that take part in forward passes", now.running
    yield "pool_pages", "Pages of the pool on the device", now.pool_pages
    yield "pool_free_pages", "Free pages of the pool on the device", now.pool_free_pages
    yield "idle_bytes", "KV on the device that no running request uses", now.idle_bytes
    yield "idle_budget_bytes", "Most KV on the device that may be idle", now.idle_budget_bytes
    yield "pinned_bytes", "KV that is never evicted", now.pinned_bytes
    yield "resident_nodes", "Nodes on the device, used or idle", now.resident_nodes
    yield "host_nodes", "Nodes in the host's memory", now.host_nodes
    yield "host_bytes", "Bytes of nodes in the host's memory", now.host_bytes
    yield "host_budget_bytes", "Most bytes of nodes in the host's memory", now.host_budget_bytes
    yield "storing_bytes", "KV that was computed and is not stored yet", now.storing_bytes


def _histograms(stats: EngineStats) -> Iterator[tuple[str, str, HistogramStats]]:
    yield "queue_seconds", "From a request's arrival to its admission", stats.queue
    text = "From the call to the first token of an answer"
    yield "first_token_seconds", text, stats.first_token
    text = "From one token of an answer to the next"
    yield "next_token_seconds", text, stats.next_token


def _labelled(counts: Mapping[str, int]) -> Samples:
    return {(name,): count for name, count in counts.items()}
