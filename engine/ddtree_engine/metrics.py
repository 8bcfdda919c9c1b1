"""Figures for operators: counters and gauges in Prometheus' text form, and the `Decode batch` log line.

Names are SGLang's, so that dashboards and probes need no change. Everything is measured outside the decoding path:
the device thread hands over counts it has anyway. Not here: per-request figures (meta_info, see api_native.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddtree_engine.requests import Stats, Update

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the start. All but `tokens` are over requests that speculate: the others would only blur them."""

    tokens: int = 0  # that left the engine, of every request
    spec_requests: int = 0
    verify_passes: int = 0
    committed_tokens: int = 0  # by these passes: a prompt's own pass gives the first token and is none of them
    accepted_drafts: int = 0
    proposed_drafts: int = 0

    def since(self, earlier: Totals) -> Totals:
        return Totals(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    def plus(self, more: Totals) -> Totals:
        return Totals(*(one + other for one, other in zip(astuple(self), astuple(more), strict=True)))

    @property
    def accept_length(self) -> float | None:
        return self.committed_tokens / self.verify_passes if self.verify_passes else None

    @property
    def accept_rate(self) -> float | None:
        return self.accepted_drafts / self.proposed_drafts if self.proposed_drafts else None


class Tally:
    """Adds updates up to Totals. Used by the device thread only."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._last: dict[str, Update | None] = {}  # of speculating requests that have not ended

    def start(self, request_id: str, *, speculates: bool) -> None:
        if speculates:
            self._last[request_id] = None
            self.totals = self.totals.plus(Totals(spec_requests=1))

    def note(self, update: Update) -> None:
        self.totals = self.totals.plus(Totals(tokens=len(update.token_ids)))
        if update.request_id not in self._last:
            return
        last = self._last[update.request_id]
        passes = update.verify_passes - (last.verify_passes if last else 0)
        more = Totals(
            verify_passes=passes,
            committed_tokens=len(update.token_ids) if passes else 0,
            accepted_drafts=update.accepted_drafts - (last.accepted_drafts if last else 0),
            proposed_drafts=update.proposed_drafts - (last.proposed_drafts if last else 0),
        )
        self.totals = self.totals.plus(more)
        self._last[update.request_id] = update
        if update.finish is not None:
            del self._last[update.request_id]


@dataclass(frozen=True, slots=True)
class Figures:
    """The last closed window: what gauges show and the log line says."""

    accept_length: float | None = None
    accept_rate: float | None = None
    tokens_per_second: float = 0.0


class Meter:
    """Cuts the run into windows of `interval` rounds. The device thread writes, anyone reads the frozen results."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._mark: tuple[Stats, Totals, float] | None = None
        self.figures = Figures()
        self.stats: Stats | None = None
        self.totals = Totals()

    def round(self, stats: Stats, totals: Totals, now: float, *, ran: Stats | None = None) -> str | None:
        """Note the state after a round; a log line when a window is full. The line is about what `ran` in it."""
        self.stats, self.totals = stats, totals
        if self._mark is None:
            self._mark = (stats, totals, now)
            return None
        if stats.rounds - self._mark[0].rounds < self._interval:
            return None
        return decode_line(ran or stats, self._close(stats, totals, now))

    def idle(self, stats: Stats, totals: Totals, now: float) -> None:
        """Nothing is running: close the window, so that the gauges are about what just ran."""
        self.stats, self.totals = stats, totals
        if self._mark is not None and stats.rounds > self._mark[0].rounds:
            self._close(stats, totals, now)
        self._mark = None

    def _close(self, stats: Stats, totals: Totals, now: float) -> Figures:
        """The figures of the window that ends here. Gauges keep the acceptance of the last window that had one."""
        assert self._mark is not None
        _, before, then = self._mark
        window = totals.since(before)
        elapsed = max(now - then, 1e-9)
        closed = Figures(window.accept_length, window.accept_rate, window.tokens / elapsed)
        last = closed if window.verify_passes else self.figures
        self.figures = Figures(last.accept_length, last.accept_rate, closed.tokens_per_second)
        self._mark = (stats, totals, now)
        return closed


def decode_line(stats: Stats, figures: Figures) -> str:
    """SGLang's line. Its accept fields are left out when nothing speculated in the window."""
    accept = ""
    if figures.accept_length is not None:
        accept = f"accept len: {figures.accept_length:.2f}, accept rate: {figures.accept_rate or 0.0:.2f}, "
    return (
        f"Decode batch, #running-req: {stats.running}, #token: {stats.tokens_in_use}, "
        f"token usage: {token_usage(stats):.2f}, {accept}cuda graph: {stats.cuda_graph}, "
        f"gen throughput (token/s): {figures.tokens_per_second:.2f}, #queue-req: {stats.queued},"
    )


def token_usage(stats: Stats) -> float:
    return stats.tokens_in_use / stats.capacity_tokens if stats.capacity_tokens else 0.0


class Metrics:
    """The registry behind /metrics. Request events come from the web thread; the rest is read when scraped."""

    def __init__(self, model_name: str, meter: Meter) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series
        self._label = {"model_name": model_name}
        self._registry = CollectorRegistry()
        self._registry.register(_Live(model_name, meter))
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens of finished requests.")
        self._output_tokens = self._counter("sglang:generation_tokens", "Tokens generated.")
        self._requests = self._counter("sglang:num_requests", "Requests that ended, aborted ones included.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Requests aborted by clients or by failures.")
        self._ttft = self._histogram("sglang:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._itl = self._histogram("sglang:inter_token_latency_seconds", "Time per token after it.", _ITL_BUCKETS)
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)

    def first_token(self, seconds: float) -> None:
        self._ttft.labels(**self._label).observe(seconds)

    def more_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the ones before: each waited its share of it."""
        histogram = self._itl.labels(**self._label)
        for _ in range(count):
            histogram.observe(seconds / count)

    def request_ended(self, *, prompt_tokens: int, output_tokens: int, seconds: float, aborted: bool) -> None:
        self._requests.labels(**self._label).inc()
        self._prompt_tokens.labels(**self._label).inc(prompt_tokens)
        self._output_tokens.labels(**self._label).inc(output_tokens)
        if aborted:
            self._aborted.labels(**self._label).inc()
        else:
            self._e2e.labels(**self._label).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(name, help_text, ["model_name"], registry=self._registry)
        counter.labels(**self._label)  # shown as 0 before the first event
        return counter

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)
        histogram.labels(**self._label)
        return histogram


class _Live(Collector):
    """Gauges and counters read from the meter at scrape time."""

    def __init__(self, model_name: str, meter: Meter) -> None:
        self._model_name = model_name
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        stats, totals, figures = self._meter.stats, self._meter.totals, self._meter.figures
        cached = stats.cached_tokens / stats.prompt_tokens if stats and stats.prompt_tokens else 0.0
        yield self._gauge("sglang:spec_accept_length", "Committed tokens per pass, last window.", figures.accept_length)
        yield self._gauge("sglang:spec_accept_rate", "Accepted share of drafts, last window.", figures.accept_rate)
        yield self._gauge("sglang:gen_throughput", "Tokens per second, last window.", figures.tokens_per_second)
        yield self._gauge("sglang:num_running_reqs", "Requests being decoded.", stats.running if stats else 0)
        yield self._gauge("sglang:num_queue_reqs", "Requests waiting.", stats.queued if stats else 0)
        yield self._gauge("sglang:token_usage", "Share of KV slots in use.", token_usage(stats) if stats else 0)
        yield self._gauge("sglang:cache_hit_rate", "Share of prompt tokens from the prefix cache.", cached)
        yield self._count("ddtree:verify_passes", "Verify passes of speculating requests.", totals.verify_passes)
        yield self._count("ddtree:committed_tokens", "Tokens these passes committed.", totals.committed_tokens)
        yield self._count("ddtree:spec_requests", "Requests that speculated.", totals.spec_requests)

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], 0.0 if value is None else value)
        return family

    def _count(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
