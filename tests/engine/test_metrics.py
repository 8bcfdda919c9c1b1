"""Metrics and the decode log line: names, counts by difference, windows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ddtree_engine.config import Algorithm
from ddtree_engine.metrics import Meter, Tally, Totals, decode_line
from ddtree_engine.requests import Finish, Stats, Update
from prometheus_client.parser import text_string_to_metric_families

Serve = Callable[..., Any]
STATS = Stats(
    running=3, queued=1, tokens_in_use=812, capacity_tokens=20000, rounds=0, verify_passes=0, committed_tokens=0,
    accepted_drafts=0, proposed_drafts=0, spec_requests=0, prompt_tokens=0, cached_tokens=0, cuda_graph=False,
    stage_seconds={},
)  # fmt: skip
NAMES = {
    "sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:gen_throughput", "sglang:num_running_reqs",
    "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate", "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total", "sglang:time_to_first_token_seconds_bucket",
    "sglang:inter_token_latency_seconds_bucket", "sglang:e2e_request_latency_seconds_bucket",
    "sglang:num_requests_total", "sglang:num_aborted_requests_total", "ddtree:verify_passes_total",
    "ddtree:committed_tokens_total", "ddtree:spec_requests_total",
}  # fmt: skip


def scrape(served: Any) -> dict[str, float]:
    families = text_string_to_metric_families(served.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    return {sample.name: sample.value for sample in samples}


def spec(served: Any, text: str, **body: Any) -> Any:
    params = {"max_new_tokens": 64, "temperature": 0}
    return served.post("/generate", {"text": text, "sampling_params": params} | body).json()["meta_info"]


def test_every_promised_name_is_there_before_the_first_request(serve: Serve) -> None:
    assert scrape(serve()).keys() >= NAMES


def test_acceptance_can_be_read_by_difference(serve: Serve) -> None:
    served = serve(speculative_algorithm=Algorithm.DDTREE, speculative_draft_model_path="d")
    spec(served, "warm up is_even")
    before = scrape(served)
    metas = [spec(served, "is_even"), spec(served, "def is_even(n)"), spec(served, "n", speculative="off")]
    after = scrape(served)
    grown = {name: after[name] - before[name] for name in after}
    passes = sum(meta["spec_verify_ct"] for meta in metas)
    assert grown["ddtree:verify_passes_total"] == passes > 0
    assert grown["ddtree:spec_requests_total"] == 2
    committed = sum(meta["completion_tokens"] - 1 for meta in metas[:2])
    assert grown["ddtree:committed_tokens_total"] / passes == pytest.approx(committed / passes)
    assert grown["sglang:num_requests_total"] == 3
    assert grown["sglang:generation_tokens_total"] == sum(meta["completion_tokens"] for meta in metas)
    assert grown["sglang:prompt_tokens_total"] == sum(meta["prompt_tokens"] for meta in metas)
    assert grown["sglang:time_to_first_token_seconds_count"] == 3
    assert grown["sglang:e2e_request_latency_seconds_count"] == 3


def test_a_failed_request_counts_as_aborted(serve: Serve) -> None:
    def die() -> None:
        raise RuntimeError("boom")

    served = serve(engine={"on_step": die})
    served.post("/generate", {"text": "x"})
    after = scrape(served)
    assert after["sglang:num_aborted_requests_total"] == after["sglang:num_requests_total"] == 1


def test_the_decode_line_has_sglangs_fields() -> None:
    meter = Meter(interval=40)
    assert meter.round(STATS, Totals(), 0.0) is None
    later = Totals(tokens=602, verify_passes=100, committed_tokens=671, accepted_drafts=42, proposed_drafts=100)
    line = meter.round(replace(STATS, rounds=40), later, 2.0)
    assert line == (
        "Decode batch, #running-req: 3, #token: 812, token usage: 0.04, accept len: 6.71, accept rate: 0.42, "
        "cuda graph: False, gen throughput (token/s): 301.00, #queue-req: 1,"
    )


def test_without_speculation_the_line_has_no_accept_fields() -> None:
    meter = Meter(interval=1)
    meter.round(STATS, Totals(), 0.0)
    assert "accept" not in str(meter.round(replace(STATS, rounds=1), Totals(tokens=5), 1.0))


def test_windows_do_not_remember_earlier_ones() -> None:
    meter = Meter(interval=10)
    meter.round(STATS, Totals(), 0.0)
    first = Totals(verify_passes=10, committed_tokens=80)
    meter.round(replace(STATS, rounds=10), first, 1.0)
    assert meter.figures.accept_length == 8.0
    meter.round(replace(STATS, rounds=20), replace(first, verify_passes=20, committed_tokens=90), 2.0)
    assert meter.figures.accept_length == 1.0


def test_gauges_keep_the_acceptance_while_nothing_speculates() -> None:
    meter = Meter(interval=10)
    meter.round(STATS, Totals(), 0.0)
    meter.round(replace(STATS, rounds=10), Totals(tokens=80, verify_passes=10, committed_tokens=80), 1.0)
    line = meter.round(replace(STATS, rounds=20), Totals(tokens=90, verify_passes=10, committed_tokens=80), 2.0)
    assert "accept" not in str(line)
    assert meter.figures.accept_length == 8.0
    assert meter.figures.tokens_per_second == 10.0


def test_going_idle_closes_the_window_without_counting_the_pause() -> None:
    meter = Meter(interval=1000)
    meter.round(STATS, Totals(), 0.0)
    meter.idle(replace(STATS, rounds=5), Totals(tokens=100), 1.0)
    assert meter.figures.tokens_per_second == pytest.approx(100.0)
    meter.round(replace(STATS, rounds=6), Totals(tokens=101), 1000.0)
    meter.idle(replace(STATS, rounds=7), Totals(tokens=111), 1001.0)
    assert meter.figures.tokens_per_second == pytest.approx(10.0)


def test_lines_appear_in_the_log_while_decoding(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddtree_engine"):
        served = serve(speculative_algorithm=Algorithm.DDTREE, speculative_draft_model_path="d")
        spec(served, "def is_even(n): return n % 2 == 0 and so on and on")
    lines = [record.getMessage() for record in caplog.records if "Decode batch" in record.getMessage()]
    assert lines
    assert re.search(r"accept len: \d+\.\d\d, accept rate: 0\.\d\d, cuda graph: False", lines[0])


def update(request_id: str, tokens: int, passes: int, finish: Finish | None = None) -> Update:
    return Update(request_id, (9,) * tokens, finish, None, passes, 0, accepted_drafts=passes, proposed_drafts=8 * passes)


def test_the_tally_leaves_the_prompts_own_token_and_other_modes_out() -> None:
    tally = Tally()
    tally.start("a", speculates=True)
    tally.start("b", speculates=False)
    for one in (update("a", 1, 0), update("b", 1, 0), update("a", 5, 1), update("b", 1, 1), update("a", 3, 2)):
        tally.note(one)
    assert tally.totals.tokens == 11
    assert (tally.totals.verify_passes, tally.totals.committed_tokens) == (2, 8)
    assert tally.totals.accept_length == 4.0
    assert (tally.totals.accepted_drafts, tally.totals.proposed_drafts) == (2, 16)


def test_line_formatting_survives_an_empty_cache() -> None:
    assert "token usage: 0.00" in decode_line(replace(STATS, capacity_tokens=0), Meter(1).figures)
