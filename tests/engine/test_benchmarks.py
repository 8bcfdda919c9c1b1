"""The comparison with peers: its statistics, its order of arms, what it says of peers that are missing. No peer is started."""

from __future__ import annotations

import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ENGINE = Path(__file__).resolve().parents[2] / "engine"
sys.path.insert(0, str(ENGINE))

from benchmarks.peers import figures, report, run  # noqa: E402
from benchmarks.peers.arms import OFF, Arm, Given, Job, NotRun, plan  # noqa: E402
from benchmarks.peers.process import Worker, WorkerError  # noqa: E402

PEERS = {"transformers generate", "DDTree authors' code 16", "DDTree authors' code 32", "vLLM off", "vLLM dflash"}
ARMS = ["a", "b", "c", "d"]


# Statistics ---------------------------------------------------------------------------------------------------------


def test_a_median_is_not_moved_by_one_wild_value() -> None:
    assert figures.spread([10.0, 11.0, 12.0, 13.0, 9000.0]).median == 12.0
    assert figures.spread([3.0]) == figures.Spread(3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="at least one"):
        figures.spread([])


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=30))
def test_quartiles_lie_around_the_median(values: list[float]) -> None:
    s = figures.spread(values)
    assert min(values) <= s.low <= s.median <= s.high <= max(values)
    assert s.count == len(values)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(10, 0, 2 / 1024), (0, 10, 2 / 1024), (8, 2, 2 * (1 + 10 + 45) / 1024), (5, 5, 1.0), (0, 0, 1.0), (5, 0, 2 / 32)],
)
def test_the_sign_test_counts_coin_flips(wins: int, losses: int, p: float) -> None:
    assert math.isclose(figures.sign_test(wins, losses), p)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_is_a_probability_and_takes_no_side(wins: int, losses: int) -> None:
    p = figures.sign_test(wins, losses)
    assert 0.0 < p <= 1.0
    assert p == figures.sign_test(losses, wins)


def test_ratios_are_taken_round_by_round() -> None:
    c = figures.compare([20.0, 200.0, 30.0], [10.0, 100.0, 30.0])
    assert (c.ratio.median, c.wins, c.losses) == (2.0, 2, 0)
    assert c.tied  # two rounds won are no evidence
    assert not figures.compare([2.0] * 6, [1.0] * 6).tied
    with pytest.raises(ValueError, match="not pairs"):
        figures.compare([1.0], [1.0, 2.0])


def test_the_first_difference_of_every_answer_is_found() -> None:
    expected = [[1, 2, 3], [4, 5], [6], [7, 8]]
    got = [[1, 2, 3], [4, 9], [6, 6], [7]]
    assert figures.differences(expected, got) == [
        figures.Difference(1, 1, 5, 9),
        figures.Difference(2, 1, None, 6),
        figures.Difference(3, 1, 8, None),
    ]
    with pytest.raises(ValueError, match="expected"):
        figures.differences(expected, got[:3])


def test_a_missed_goal_and_an_unmeasured_goal_are_said_so() -> None:
    goals = {"speed": (">=", 400.0), "start": ("<=", 3.0), "memory": ("<=", 700.0)}
    lines = figures.goal_lines({"speed": 120.0, "start": 2.0}, goals)
    assert [line.rsplit(": ", 1)[-1] for line in lines] == ["MISSED", "met", "not measured (goal <= 700)"]


# Order --------------------------------------------------------------------------------------------------------------


def test_every_round_runs_every_arm_once() -> None:
    assert all(sorted(figures.order(ARMS, n)) == ARMS for n in range(20))
    assert figures.order([], 3) == []


def test_no_arm_keeps_its_place_or_its_neighbour() -> None:
    rounds = [figures.order(ARMS, n) for n in range(2 * len(ARMS))]
    for arm in ARMS:
        assert {r.index(arm) for r in rounds} == set(range(len(ARMS)))
    for a, b in pairwise(ARMS):
        before = sum(r.index(a) < r.index(b) for r in rounds)
        assert before == len(rounds) / 2


# Peers --------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_given_is_listed_with_the_flag_to_give() -> None:
    arms, missing = plan(Given(), threads=2)
    assert all(a.ours for a in arms)
    assert {m.name for m in missing} == PEERS
    assert all("--" in m.why for m in missing)


def test_no_arm_is_dropped_whatever_is_given() -> None:
    here = Path("/nowhere")
    for given_peers in (Given(hf_python=here), Given(vllm_python=here), Given(here, here, here), Given(ddtree_checkout=here)):
        arms, missing = plan(given_peers, threads=2)
        names = [x.name for x in [*arms, *missing]]
        assert len(names) == len(set(names))
        assert set(names) >= PEERS | {OFF}


def test_eager_vllm_is_labelled() -> None:
    compiled, eager = (plan(Given(vllm_python=Path("/v"), vllm_eager=e), 2)[0] for e in (False, True))
    assert all("eager" not in a.execution for a in compiled if a.name.startswith("vLLM"))
    assert all("eager" in a.execution for a in eager if a.name.startswith("vLLM"))


def _run(**changes: object) -> dict[str, object]:
    cell = {"clients": 1, "execution": "eager", "seconds_to_ready": 1.0, "other_cores": [0.0] * 6, "loads": [0.1] * 6}
    cell |= {"outputs": [[1, 2]], "rss_bytes": 10**8, "unequal_rounds": 0, "tokens_per_pass": 1.0}
    cells = [cell | {"arm": name, "speeds": [v] * 6} for name, v in ((OFF, 10.0), ("ours tree 16", 40.0), ("vLLM off", 5.0))]
    floor = {"target_bytes": 10**7, "draft_bytes": 10**6, "cached_bytes_per_second": 1e10, "memory_bytes_per_second": 1e10}
    return {"dtype": "bfloat16", "cells": cells, "partings": [], "not_run": [], "floor": floor} | changes


def test_the_table_names_missing_peers_ratios_and_differences() -> None:
    parting = {"arm": "vLLM off", "clients": 1, "prompt": 0, "at": 1, "expected": 2, "got": 9, "gap": 0.03}
    text = report.dtype_report(
        _run(not_run=[{"name": "vLLM dflash", "why": "--vllm-python was not given"}], partings=[parting])
    )
    assert "vLLM dflash: --vllm-python was not given" in text
    assert "4.00 (6:0)" in text
    assert "8.00 (6:0)" in text
    assert "token 1: 9 for 2, gap 0.03" in text
    assert "every peer was run" not in text


def test_goals_are_judged_from_the_medians_of_the_run() -> None:
    text = report.goals_report([_run()])
    assert "bf16 off, tokens/s: 10 (goal >= 400): MISSED" in text
    assert "bf16 best tree / off, 1 client: 4 (goal >= 4): met" in text
    assert "bf16 best tree / vLLM dflash, 1 client: not measured" in text


def test_a_path_that_does_not_exist_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run.main(["--hf-python", "/no/such/python"])
    assert left.value.code == 2
    assert "--hf-python" in capsys.readouterr().err


# Processes ----------------------------------------------------------------------------------------------------------

ECHO = """
import json, sys
print(json.dumps({"ok": "ready"}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    print(json.dumps({"error": "no"} if call["do"] == "fail" else {"ok": call["n"] + 1}), flush=True)
"""


def test_an_arm_is_called_and_sleeps_between_calls(tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", ECHO], {}, tmp_path / "log", deadline=60)
    try:
        assert [worker.call("add", n=i, deadline=60).value for i in (1, 2)] == [2, 3]
        stat = Path(f"/proc/{worker._process.pid}/stat")
        ends = time.monotonic() + 30  # the stop is sent, and seen a moment later
        while (state := stat.read_text().rsplit(")", 1)[1].split()[0]) != "T" and time.monotonic() < ends:
            time.sleep(0.01)
        assert state == "T"
        with pytest.raises(WorkerError, match="no; see"):
            worker.call("fail", deadline=60)
    finally:
        worker.close()


def test_an_arm_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="log"):
        Worker([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log", deadline=60)


def test_an_arm_that_does_not_start_is_listed_and_the_others_run(tmp_path: Path) -> None:
    good = Arm("good one", "eager", Path(sys.executable), "../no-worker.py", {})
    job = Job(tmp_path, tmp_path, "float32", 1, 64, (2,), 16)
    workers, failed = run.start([good], job, tmp_path)
    assert workers == {}
    assert [(f.name, isinstance(f, NotRun)) for f in failed] == [("good one", True)]
    assert "did not start" in failed[0].why
    assert json.loads(good.command(job)[2])["max_running"] == 4
