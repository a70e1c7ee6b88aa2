"""`Metrics`: what a server measures, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from deepinfer_core.requests import RequestOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_steps": ("deepinfer_engine_steps", "Rounds of the engine."),
    "num_failed_steps": ("deepinfer_engine_failed_steps", "Rounds that failed for a request."),
    "num_preemptions": ("deepinfer_preemptions", "Sequences that gave their pages up."),
    "num_computed_tokens": ("deepinfer_computed_tokens", "Tokens that went through the model."),
    "step_s": ("deepinfer_step_seconds", "Seconds in steps, drafting left out."),
    "draft_s": ("deepinfer_draft_seconds", "Seconds in drafting, rows in steps left out."),
}
"""Field of the engine's counters -> (metric, help)."""


class Metrics:
    """Counters, histograms and gauges of one server.

    Args:
        model: value of the label ``model``.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model
        make: dict[str, Any] = {"registry": self.registry}
        model_of = {"labelnames": ("model",), **make}
        self._http = Counter(
            "deepinfer_http_requests", "Answers by path and status.", ("path", "status"), **make
        )
        self._http_s = Histogram(
            "deepinfer_http_request_seconds", "Time to answer.", ("path",), buckets=SECONDS, **make
        )
        self._ended = Counter(
            "deepinfer_requests",
            "Generations that ended, by wire format and reason.",
            ("model", "format", "finish_reason"),
            **make,
        )
        self._refused = Counter(
            "deepinfer_requests_refused", "Requests refused, by status.", ("status",), **make
        )
        self._aborted = Counter(
            "deepinfer_requests_disconnected", "Requests whose client left.", **make
        )
        self._prompt = Counter("deepinfer_prompt_tokens", "Prompt tokens.", **model_of).labels(
            model
        )
        self._cached = Counter(
            "deepinfer_cached_prompt_tokens",
            "Prompt tokens that came from a cache, by tier.",
            ("model", "tier"),
            **make,
        )
        self._output = Counter(
            "deepinfer_generation_tokens", "Generated tokens.", **model_of
        ).labels(model)
        self._ttft = self._histogram("deepinfer_time_to_first_token_seconds", "Arrival to token 1.")
        self._itl = self._histogram(
            "deepinfer_inter_token_latency_seconds",
            "Gap between two deliveries of tokens; one delivery may carry several tokens.",
        )
        self._tpot = self._histogram(
            "deepinfer_time_per_output_token_seconds", "Mean time a token after the first."
        )
        self._e2e = self._histogram("deepinfer_e2e_request_latency_seconds", "Arrival to end.")
        self._queue = self._histogram("deepinfer_request_queue_seconds", "Arrival to first step.")
        self._prompt_size = self._histogram(
            "deepinfer_request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self._output_size = self._histogram(
            "deepinfer_request_generation_tokens", "Generated tokens of a request.", TOKENS
        )
        self.in_flight = Gauge("deepinfer_http_requests_in_flight", "Being answered now.", **make)

    def _histogram(self, name: str, text: str, buckets: Any = SECONDS) -> Any:
        made = Histogram(name, text, ("model",), buckets=buckets, registry=self.registry)
        return made.labels(self._model)

    # ------------------------------------------------------------------ what happens

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A response is complete."""
        self._http.labels(path, str(status)).inc()
        self._http_s.labels(path).observe(seconds)

    def refused(self, status: int) -> None:
        """A request was refused before anything was generated."""
        self._refused.labels(str(status)).inc()

    def disconnected(self) -> None:
        """A client left before its answer was complete."""
        self._aborted.inc()

    def gap(self, seconds: float) -> None:
        """Tokens came; so long after the ones before."""
        self._itl.observe(seconds)

    def ended(self, name: str, result: RequestOutput) -> None:
        """A generation of wire format ``name`` ended."""
        for output in result.outputs:
            self._ended.labels(self._model, name, str(output.finish_reason)).inc()
        num_output = sum(len(output.token_ids) for output in result.outputs)
        self._prompt.inc(len(result.prompt_token_ids))
        self._output.inc(num_output)
        if result.cached_tokens:
            tier = result.cached_tier or "device"
            self._cached.labels(self._model, tier).inc(result.cached_tokens)
        self._prompt_size.observe(len(result.prompt_token_ids))
        self._output_size.observe(num_output)
        self._e2e.observe(result.total_s)
        self._queue.observe(result.queue_s)
        if result.ttft_s is not None:
            self._ttft.observe(result.ttft_s)
            longest = max((len(output.token_ids) for output in result.outputs), default=0)
            if longest > 1:
                self._tpot.observe((result.total_s - result.ttft_s) / (longest - 1))

    # ------------------------------------------------------------------ how it is read

    def text(self, stats: Any, *, stored: int, stored_bytes: int) -> bytes:
        """Return everything in Prometheus's text format.

        Args:
            stats: what the engine says of itself now.
            stored: responses in the store.
            stored_bytes: their size.
        """
        now = CollectorRegistry()
        now.register(_Snapshot(_engine_families(stats, stored, stored_bytes)))
        return generate_latest(self.registry) + generate_latest(now)


class _Snapshot:
    """Families that were collected already."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        """Return them."""
        return self._families


def _engine_families(stats: Any, stored: int, stored_bytes: int) -> list[Any]:
    families: list[Any] = [
        GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("deepinfer_requests_running", "Sequences that hold pages.", stats.running),
            ("deepinfer_requests_waiting", "Sequences that wait for pages.", stats.waiting),
            ("deepinfer_responses_stored", "Responses that can be continued.", stored),
            ("deepinfer_responses_stored_bytes", "Their size.", stored_bytes),
        )
    ]
    used = GaugeMetricFamily("deepinfer_kv_pages_used", "Pages in use.", labels=["group"])
    total = GaugeMetricFamily("deepinfer_kv_pages_total", "Pages there are.", labels=["group"])
    usage = GaugeMetricFamily("deepinfer_kv_cache_usage_ratio", "Share in use.", labels=["group"])
    for index, pages in enumerate(getattr(stats, "pages", ())):
        group = str(getattr(pages, "name", index))
        used.add_metric([group], pages.used)
        total.add_metric([group], pages.total)
        usage.add_metric([group], pages.used / pages.total if pages.total else 0.0)
    store = GaugeMetricFamily("deepinfer_kv_store", "Figures of stored pages.", labels=["figure"])
    for figure, value in getattr(stats, "kv_store", {}).items():
        store.add_metric([figure], value)
    families += [used, total, usage, store]
    families += [
        CounterMetricFamily(name, text, value=getattr(stats, field))
        for field, (name, text) in COUNTERS.items()
        if hasattr(stats, field)
    ]
    return families + _draft_families(stats) + _thread_families()


def _draft_families(stats: Any) -> list[Any]:
    """Drafts by their place, the first one 0; nothing where the engine does not count them."""
    families = []
    for field, name, text in (
        ("drafted_by_position", "deepinfer_draft_tokens", "Drafts verified, by place."),
        ("accepted_by_position", "deepinfer_accepted_draft_tokens", "Drafts accepted, by place."),
        (
            "expected_by_position",
            "deepinfer_expected_draft_tokens",
            "Drafts that the drafter expected to be accepted, by place.",
        ),
    ):
        counted = CounterMetricFamily(name, text, labels=["position"])
        for position, value in enumerate(getattr(stats, field, ())):
            counted.add_metric([str(position)], value)
        families.append(counted)
    return families


def _thread_families() -> list[Any]:
    """What each thread of Python costs and waits for; nothing where the system does not count it.

    MainThread runs the event loop. Threads of native kernels are in ``process_cpu_seconds_total``.
    """
    ran = CounterMetricFamily("deepinfer_thread_cpu_seconds", "Spent running.", labels=["thread"])
    queued = CounterMetricFamily(
        "deepinfer_thread_queued_seconds", "Spent waiting for a core.", labels=["thread"]
    )
    for thread in threading.enumerate():
        try:
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
        except OSError:  # another system, or the thread has just ended
            continue
        ran.add_metric([thread.name], int(told[0]) / 1e9)
        queued.add_metric([thread.name], int(told[1]) / 1e9)
    return [ran, queued]
