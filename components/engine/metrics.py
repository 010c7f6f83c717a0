"""Prometheus metrics under SGLang's names where it has the same quantity."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Counters:
    """One registry per engine, so that tests and embedded uses don't share process-wide state."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.running = gauge("num_running_reqs", "Samples that are being decoded")
        self.queued = gauge("num_queue_reqs", "Samples that wait for a row")
        self.paused = gauge("engine_paused", "1 while generation is paused")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted samples")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose keys and values were already computed")
        self.generation_tokens = counter("generation_tokens", "Tokens drawn")
        self.requests = counter("num_requests", "Finished /generate requests")
        self.aborted = counter("num_aborted_requests", "Samples that ended as abort")
        self.retracted = counter("num_retracted_requests", "Samples put back in the queue with their tokens")
        self.latency = histogram("e2e_request_latency_seconds", "From arrival of a sample to its last token")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival of a sample to its first token")
        self.weight_loads = counter("weight_loads", "Weight updates by result", ("result",))
        self.weight_load_seconds = gauge(
            "weight_load_duration_seconds", "Of the last update, from the request to serving", ("source",)
        )

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"sglang:{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"sglang:{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"sglang:{name}", help_text, registry=self.registry, buckets=SECONDS)

    def exposition(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self.registry)
