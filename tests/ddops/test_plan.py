"""Plans: where values come from, what is refused before anything is touched, what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops import commands, plan, units
from ddops.engines import Settings
from ddops.errors import Refused, UsageError
from ddops.inventory import HostConfig, load
from ddops.plan import Action, Plan, Request, make
from ddops.state import Entry, Gpu, Kind, Lease, Observed, Trial, UnitState

DDTREE = """\
version: 1
hosts:
  one:
    address: 10.0.0.1
    arch: sm_103
    engine: {release: r1, model: m, drafter: d}
    spec: {budget: 16, topk_cap: 8, max_running_requests: 16}
"""
SGLANG = DDTREE.replace("release: r1", "kind: sglang, unit: sglang.service, python: /v/bin/python")
SGLANG = SGLANG.replace("budget: 16", "budget: 8, block_size: 8")
GPU = Gpu("NVIDIA B300", "sm_103", "580.1", 8, 250_000, 275_000)
PASS = {"kind": "pass", "why": "all good"}


def host(text: str = DDTREE) -> HostConfig:
    return load(text, "f").hosts["one"]


def seen(config: HostConfig | None = None, **fields: Any) -> Observed:
    """A host where ddops is installed, with nothing in the way and no unit."""
    base = Observed(
        host="one", boot="boot-1", uptime_seconds=1000.0, systemd=252, unit=UnitState(), etc_unit=None, trial_unit=None,
        argv=(), ledger=(), gpu=GPU, arch="sm_103", releases=("r1",),
        disk_free_mib={"/opt": 90_000, "/var/lib": 90_000}, script_digest=commands.script_digest(),
        addresses=("10.0.0.1",),
    )  # fmt: skip
    return replace(base, **fields)


def entry(kind: Kind, digest: str, **fields: Any) -> Entry:
    fields = {"run": "run-1", "time": "2026-01-01T00:00:00Z"} | fields
    return Entry(kind=kind, digest=digest, **fields)


def running(config: HostConfig, tuning: Settings, **fields: Any) -> Observed:
    """The same host with this configuration confirmed, proven in this start, and running."""
    unit = units.render(config, tuning)
    good = entry(
        Kind.CONFIRMED, unit.digest, invocation="inv-1", boot="boot-1", verdict=PASS, settings=tuning.to_dict(),
        key=plan.key(config, tuning, seen(), None),
    )  # fmt: skip
    return with_unit(unit.text, unit.argv, (good,), **fields)


def with_unit(text: bytes, argv: tuple[str, ...], ledger: tuple[Entry, ...] = (), **fields: Any) -> Observed:
    state = UnitState(
        load_state="loaded", active_state="active", sub_state="running", main_pid=7, invocation_id="inv-1",
        fragment_path="/etc/systemd/system/x.service",
    )  # fmt: skip
    return seen(**({"unit": state, "etc_unit": text, "loaded_fragment": text, "argv": argv, "ledger": ledger} | fields))


TUNED = Settings("DDTREE", 16, 8, 16)


def refusals(made: Plan) -> str:
    return "\n".join(f"{r.what} | {r.means} | {r.hint}" for r in made.refusals)


# ---------------------------------------------------------------- where values come from
def test_the_request_outweighs_the_host_and_the_host_outweighs_the_inventory() -> None:
    made = make(host(), Request(topk_cap=4), running(host(), Settings("DDTREE", 32, 8, 8)))
    assert made.settings == Settings("DDTREE", 32, 4, 8)
    assert made.sources["topk_cap"] == "request"
    assert made.sources["budget"] == "verified on the host"


def test_without_a_verified_configuration_the_inventory_counts_and_then_the_engine() -> None:
    made = make(host(DDTREE.replace(", topk_cap: 8, max_running_requests: 16", "")), Request(), seen())
    assert made.settings == Settings("DDTREE", 16, 8, 16)
    assert made.sources["budget"] == "inventory"
    assert made.sources["topk_cap"] == "engine default"


def test_a_ddtree_unit_says_every_speculative_setting() -> None:
    made = make(host(DDTREE.replace("spec: {budget: 16, topk_cap: 8, max_running_requests: 16}", "")), Request(), seen())
    for flag in (
        "--speculative-algorithm",
        "--speculative-ddtree-budget",
        "--speculative-ddtree-topk-cap",
        "--max-running-requests",
    ):
        assert flag in made.unit.argv


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 18), st.integers(1, 64))
def test_topk_cap_alone_never_changes_anything_else(budget: int, cap: int, most: int, asked: int) -> None:
    before = Settings("DDTREE", budget, cap, most)
    made = make(host(), Request(topk_cap=asked), running(host(), before))
    assert made.settings == replace(before, topk_cap=asked)


def test_a_setting_the_verified_unit_leaves_to_the_engine_is_not_filled_from_the_inventory() -> None:
    config = host(SGLANG)
    made = make(config, Request(topk_cap=2), running(config, Settings("DDTREE", None, 4, 16)))
    assert made.settings.budget is None
    assert made.sources["budget"] == "engine default"
    assert "--speculative-ddtree-budget" not in made.unit.argv


def test_an_inventory_value_that_the_verified_one_keeps_out_is_said() -> None:
    made = make(host(), Request(), running(host(), Settings("DDTREE", 32, 8, 16)))
    assert made.action is Action.UNCHANGED
    assert any("--budget 16" in warning for warning in made.warnings)


def test_speculation_switched_on_again_takes_the_tree_from_the_inventory() -> None:
    made = make(host(), Request(algorithm="ddtree"), running(host(), Settings("NONE", max_running=16)))
    assert made.settings == TUNED


def test_speculation_switched_off_keeps_no_tree() -> None:
    made = make(host(), Request(algorithm="NONE"), running(host(), TUNED))
    assert made.settings == Settings("NONE", max_running=16)


@pytest.mark.parametrize(
    "request_",
    [
        Request(budget=0), Request(budget=-1), Request(budget=True), Request(budget="many"), Request(topk_cap=0),
        Request(max_running=0), Request(max_running="all"), Request(algorithm="EAGLE"), Request(topk_cap="auto"),  # type: ignore[arg-type]
        Request(algorithm="NONE", budget=8), Request(algorithm="DFLASH", topk_cap=8), Request(budget=10**9),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_without_meaning_is_a_usage_error(request_: Request) -> None:
    with pytest.raises(UsageError):
        make(host(), request_, running(host(), TUNED))


def test_what_an_engine_can_not_have_is_a_usage_error() -> None:
    vllm = host(DDTREE.replace("release: r1", "kind: vllm").replace(", topk_cap: 8", ""))
    with pytest.raises(UsageError, match="topk"):
        make(vllm, Request(topk_cap=3), seen())
    with pytest.raises(UsageError, match="auto"):
        make(host(SGLANG), Request(budget="auto"), seen())
    assert make(host(), Request(budget="auto", max_running=16), seen()).settings.budget == "auto"
    assert make(vllm, Request(budget=7), seen()).settings == Settings("DFLASH", 7, None, 16)


# ---------------------------------------------------------------- unchanged, verify, switch
def test_what_runs_and_is_proven_is_left_alone_whatever_else_is_wrong() -> None:
    made = make(host(), Request(), running(host(), TUNED, systemd=240, script_digest="old", disk_free_mib={"/": 0}))
    assert made.action is Action.UNCHANGED
    assert made.refusals == ()
    assert made.diff == made.argv_diff == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("boot", "boot-2"),
        ("ledger", ()),
        ("gpu", replace(GPU, driver="590.2")),
    ],
)
def test_the_same_bytes_without_a_standing_proof_are_proven_again_without_a_restart(field: str, value: Any) -> None:
    observed = running(host(), TUNED)
    made = make(host(), Request(), replace(observed, **{field: value}))
    assert made.action is Action.VERIFY
    assert made.refusals == ()


def test_a_crash_restart_voids_the_proof() -> None:
    observed = running(host(), TUNED)
    observed = replace(observed, unit=replace(observed.unit, invocation_id="inv-2"))
    assert make(host(), Request(), observed).action is Action.VERIFY
    assert "restarted" in plan.verification(observed).text


@pytest.mark.parametrize("field", ["need_daemon_reload", "active_state", "argv", "loaded_fragment"])
def test_the_same_bytes_on_disk_are_not_enough(field: str) -> None:
    observed = running(host(), TUNED)
    unit = {"need_daemon_reload": True, "active_state": "failed"}
    other = {"argv": ("/usr/bin/python3", "-m", "other"), "loaded_fragment": b"[Service]\nExecStart=/bin/x\n"}
    if field in unit:
        observed = replace(observed, unit=replace(observed.unit, **{field: unit[field]}))  # type: ignore[arg-type]
    else:
        observed = replace(observed, **{field: other[field]})  # type: ignore[arg-type]
    assert make(host(), Request(), observed).action is Action.SWITCH
    assert field == "argv" or not plan.verification(observed).verified


def test_a_restart_can_be_forced() -> None:
    assert make(host(), Request(force_restart=True), running(host(), TUNED)).action is Action.SWITCH


def test_a_switch_shows_the_diff_of_unit_and_arguments_and_what_an_undo_goes_back_to() -> None:
    observed = running(host(), TUNED)
    made = make(host(), Request(budget=32), observed)
    assert made.action is Action.SWITCH
    assert made.action.changes_host
    assert made.restore == units.digest(observed.etc_unit or b"")
    assert "+    --speculative-ddtree-budget 32" in made.diff
    assert "+--speculative-ddtree-budget 32" in made.argv_diff
    assert made.refusals == ()
    assert make(host(), Request(budget=32), observed) == made


def test_a_fresh_host_has_nothing_to_go_back_to_and_that_is_said() -> None:
    made = make(host(), Request(), seen())
    assert (made.action, made.restore, made.refusals) == (Action.SWITCH, None, ())
    assert any("stopped" in warning for warning in made.warnings)


def test_a_plan_is_plain_data_for_events() -> None:
    import json

    made = make(host(), Request(budget=64, max_running=256), running(host(), TUNED))
    again = json.loads(json.dumps(made.to_dict()))
    assert again["settings"]["budget"] == 64
    assert again["refusals"][0]["hint"]


# ---------------------------------------------------------------- the product rule
INCIDENT = [  # budget, max-running, allowed on sm_103 with 1200 rows
    (8, 256, False),
    (16, 64, True),
    (64, 16, True),
    (64, 32, False),
    (32, 32, True),
    (24, 48, True),
    (25, 48, False),
]


@pytest.mark.parametrize(("budget", "most", "allowed"), INCIDENT)
def test_the_incidents_products_are_judged_before_anything_is_touched(budget: int, most: int, allowed: bool) -> None:
    made = make(host(SGLANG), Request(budget=budget, max_running=most), seen())
    assert ("rows a verify pass" not in refusals(made)) is allowed


def test_a_refused_product_names_the_largest_power_of_two_and_the_largest_value() -> None:
    made = make(host(SGLANG), Request(budget=32, max_running=64), seen())
    said = refusals(made)
    assert "64 x (budget 32 + 1) = 2112" in said
    assert "--max-running 32 (36 at most)" in said
    assert "--budget 17 at most" in said


def test_a_width_beyond_the_limit_offers_only_a_smaller_budget() -> None:
    made = make(host(SGLANG), Request(budget=2000, max_running=1), seen())
    assert "--max-running" not in made.refusals[0].hint
    assert "--budget 1199 at most" in made.refusals[0].hint


def test_an_absent_max_running_counts_as_what_the_engine_takes() -> None:
    config = host(SGLANG.replace(", max_running_requests: 16", ""))
    over, under = (make(config, Request(budget=budget), seen()) for budget in (25, 24))
    assert "sglang takes 48" in refusals(over)
    assert not under.refusals
    assert any("takes 48" in warning for warning in under.warnings)


def test_another_architecture_has_no_such_limit() -> None:
    config = host(SGLANG.replace("    arch: sm_103\n", ""))
    elsewhere = seen(gpu=replace(GPU, arch="sm_120"), arch="sm_120")
    assert not make(config, Request(budget=32, max_running=256), elsewhere).refusals


def test_a_hint_that_contradicts_the_host_is_said_and_the_stricter_limit_used() -> None:
    made = make(host(SGLANG), Request(budget=32, max_running=256), seen(gpu=None, arch="cpu"))
    assert "limit 1200 of sm_103" in refusals(made)
    assert any("the host shows cpu" in warning for warning in made.warnings)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.integers(65, 5000))
def test_auto_is_the_largest_power_of_two_that_fits(budget: int, most: int) -> None:
    config = host(DDTREE + f"    limits: {{verify_rows: {{sm_103: {most}}}}}\n")
    made = make(config, Request(budget=budget, max_running="auto"), seen())
    chosen = made.settings.max_running
    assert chosen is not None
    assert chosen & (chosen - 1) == 0
    assert chosen * (budget + 1) <= most < 2 * chosen * (budget + 1)
    assert not made.refusals


def test_auto_on_a_width_that_never_fits_is_refused_and_not_zero() -> None:
    config = host(DDTREE + "    limits: {verify_rows: {sm_103: 8}}\n")
    made = make(config, Request(budget=16, max_running="auto"), seen())
    assert made.settings.max_running == 1
    assert "above the limit 8" in refusals(made)


def test_auto_without_a_known_limit_is_the_engines_default_and_says_so() -> None:
    config = host(DDTREE.replace("    arch: sm_103\n", ""))
    made = make(config, Request(max_running="auto"), seen(gpu=None, arch="cpu"))
    assert made.settings.max_running == 16
    assert any("no limit is known for cpu" in warning for warning in made.warnings)


def test_capacity_that_is_given_up_is_said() -> None:
    made = make(host(), Request(budget=32, max_running="auto"), running(host(), Settings("DDTREE", 8, 8, 128)))
    assert made.settings.max_running == 32
    assert any("from 128 to 32" in warning and "75 %" in warning for warning in made.warnings)


# ---------------------------------------------------------------- preflight
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"systemd": 249}, "systemd 249"),
        ({"script_digest": ""}, "no ddops host script"),
        ({"script_digest": "0" * 64}, "another version"),
        ({"releases": ("r0",)}, "release r1 is not on one (there: r0)"),
        ({"disk_free_mib": {"/var/lib": 12}}, "/var/lib on one has 12 MiB free"),
        ({"port_owner": 4711}, "process 4711"),
        ({"port_owner": 0}, "another process"),
        ({"gpu": replace(GPU, memory_free_mib=10)}, "10 MiB free"),
        ({"gpu": replace(GPU, memory_total_mib=10)}, "10 MiB in all"),
        ({"trial": Trial("run-9", "d", "", "", 40.0, open=True)}, "run run-9 has an open trial"),
        ({"unit": UnitState(load_state="masked")}, "masked"),
        ({"unit": UnitState(load_state="loaded", fragment_path="/usr/lib/systemd/system/x.service")}, "/usr/lib"),
        ({"unit": UnitState(drop_in_paths=("/etc/systemd/system/x.service.d/more.conf",))}, "more.conf"),
        ({"etc_unit": b"[Service]\nExecStart=/usr/bin/python3 -m ddtree_engine\n"}, "ddops adopt"),
    ],
)
def test_each_obstacle_is_refused_with_what_to_do(fields: dict[str, Any], said: str) -> None:
    config = host(DDTREE + "    limits: {gpu_memory_free_mib: 1000}\n")
    made = make(config, Request(), seen(**fields))
    assert said in refusals(made)
    for refusal in made.refusals:
        assert refusal.hint
        assert refusal.means


def test_a_host_with_nothing_in_the_way_is_not_refused() -> None:
    for tuning in (Settings("DDTREE", 8, 8, 16), TUNED):
        made = make(host(), Request(budget=32), running(host(), tuning))
        assert made.refusals == ()


def test_memory_in_use_by_the_engine_itself_is_no_obstacle() -> None:
    config = host(DDTREE + "    limits: {gpu_memory_free_mib: 1000}\n")
    observed = running(config, TUNED, gpu=replace(GPU, memory_free_mib=10))
    assert not make(config, Request(budget=32), observed).refusals


def test_the_fence_and_the_distributions_own_drop_ins_are_not_foreign() -> None:
    paths = (
        "/usr/lib/systemd/system/service.d/10-timeout-abort.conf",
        f"/run/systemd/system.control/x.service.d/{units.FENCE_NAME}",
    )
    assert not make(host(), Request(), seen(unit=UnitState(drop_in_paths=paths))).refusals


def test_several_obstacles_are_all_named() -> None:
    made = make(host(), Request(budget=64, max_running=64), seen(systemd=240, port_owner=1))
    assert len(made.refusals) == 3


@pytest.mark.parametrize(("gpu", "allowed"), [(GPU, False), (None, True)])
def test_a_budget_above_the_kernels_own_limit_is_refused_on_a_gpu(gpu: Gpu | None, allowed: bool) -> None:
    config = host(DDTREE.replace("    arch: sm_103\n", ""))
    made = make(config, Request(budget=65, max_running=1), seen(gpu=gpu, arch=gpu.arch if gpu else "cpu"))
    assert ("own limit 64" not in refusals(made)) is allowed


def test_another_runs_lease_is_mentioned_and_our_own_is_not() -> None:
    held = seen(lease=Lease("run-2", "ann@ci", "ddops reconfig", 60.0))
    assert any("ann@ci" in w for w in make(host(), Request(), held, own_run="run-1").warnings)
    assert not any("ann@ci" in w for w in make(host(), Request(), held, own_run="run-2").warnings)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(budget=8), "below block size - 1 = 15"),
        (Request(budget=32, topk_cap=4), "topk-cap 4 is below the budget 32"),
    ],
)
def test_a_tree_that_can_not_pay_is_said(request_: Request, said: str) -> None:
    assert any(said in warning for warning in make(host(), request_, seen()).warnings)


def test_more_requests_than_captured_graphs_is_said() -> None:
    config = host(DDTREE.replace("budget: 16", "budget: 16, cuda_graph_max_bs: 8"))
    assert any("cuda-graph-max-bs 8" in warning for warning in make(config, Request(), seen()).warnings)


# ---------------------------------------------------------------- adopted units
HAND = b"""\
# ours since 2024
[Service]
Type=exec
ExecStart=/v/bin/python -m sglang.launch_server --model-path /m \\
    --speculative-algorithm DDTREE --speculative-draft-model-path /d \\
    --speculative-ddtree-budget 8 --max-running-requests 64
"""


def adopted() -> Observed:
    argv = units.parse(HAND).argv
    word = entry(Kind.ADOPTED, units.digest(HAND), invocation="inv-1", boot="boot-1", verdict=PASS)
    return with_unit(HAND, argv, (word,))


def test_an_adopted_unit_gets_only_the_flag_that_changes() -> None:
    made = make(host(SGLANG), Request(budget=16), adopted())
    assert made.unit.text == HAND.replace(b"budget 8", b"budget 16")
    assert made.settings == Settings("DDTREE", 16, None, 64)
    assert made.refusals == ()


def test_an_adopted_unit_with_nothing_to_change_is_unchanged_byte_for_byte() -> None:
    made = make(host(SGLANG), Request(), adopted())
    assert made.action is Action.UNCHANGED
    assert made.unit.text == HAND


def test_a_confirmed_amendment_is_amended_again_and_not_replaced_by_the_template() -> None:
    first = make(host(SGLANG), Request(budget=16), adopted()).unit
    word = entry(Kind.CONFIRMED, first.digest, invocation="inv-2", boot="boot-1", verdict=PASS)
    observed = with_unit(first.text, first.argv, (*adopted().ledger, word))
    assert make(host(SGLANG), Request(budget=15), observed).unit.text == HAND.replace(b"budget 8", b"budget 15")


def test_proving_a_hand_written_unit_does_not_adopt_it() -> None:
    word = entry(Kind.VERIFIED, units.digest(HAND), invocation="inv-1", boot="boot-1", verdict=PASS)
    observed = with_unit(HAND, units.parse(HAND).argv, (word,))
    assert "ddops adopt" in refusals(make(host(SGLANG), Request(budget=16), observed))


def test_what_may_be_adopted() -> None:
    plan.adoptable(host(SGLANG), with_unit(HAND, ()))
    for observed, said in [
        (seen(), "has no /etc"),
        (with_unit(HAND.replace(b"sglang.launch_server", b"http.server"), ()), "does not start sglang"),
        (with_unit(b"[Service]\nExecStart=/bin/sh -c x\n", ()), "shell"),
        (with_unit(HAND.replace(b"requests 64", b"requests many"), ()), "no positive number"),
        (with_unit(HAND, (), unit=UnitState(drop_in_paths=("/etc/x.d/a.conf",))), "drop-ins"),
    ]:
        with pytest.raises(Refused) as caught:
            plan.adoptable(host(SGLANG), observed)
        assert said in str(caught.value)


# ---------------------------------------------------------------- memory
def failed(tuning: Settings, observed: Observed | None = None, **fields: Any) -> Entry:
    fields = {"verdict": {"kind": "corrupt", "why": "0 of 5 coding checks"}} | fields
    return entry(Kind.FAILED, "f" * 64, key=plan.key(host(), tuning, observed or seen(), None), **fields)


def test_a_known_bad_configuration_is_refused_with_its_evidence_unless_asked_for() -> None:
    bad = failed(Settings("DDTREE", 32, 8, 16))
    observed = running(host(), TUNED)
    observed = replace(observed, ledger=(*observed.ledger, bad))
    made = make(host(), Request(budget=32), observed)
    assert "0 of 5 coding checks" in refusals(made)
    assert "--retry-known-bad" in refusals(made)
    assert not make(host(), Request(budget=32, retry_known_bad=True), observed).refusals


@pytest.mark.parametrize(
    "request_",
    [Request(budget=31), Request(budget=33), Request(budget=32, topk_cap=4), Request(budget=32, max_running=8)],
)
def test_nothing_is_inferred_from_a_neighbouring_configuration(request_: Request) -> None:
    observed = running(host(), TUNED)
    observed = replace(observed, ledger=(*observed.ledger, failed(Settings("DDTREE", 32, 8, 16))))
    assert not make(host(), request_, observed).refusals


@pytest.mark.parametrize("gpu", [replace(GPU, driver="590.2"), replace(GPU, arch="sm_120"), replace(GPU, count=4)])
def test_known_bad_does_not_carry_over_to_another_gpu_or_driver(gpu: Gpu) -> None:
    bad = failed(Settings("DDTREE", 32, 8, 16), seen(gpu=gpu, arch=gpu.arch))
    assert not make(host(), Request(budget=32), seen(ledger=(bad,))).refusals


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": {"kind": "inconclusive"}},
        {"verdict": {"kind": "degraded"}},
        {"verdict": {}, "extra": {}},
        {"verdict": {"kind": "crashed"}, "extra": {"environment": True}},
    ],
)
def test_what_says_nothing_of_the_configuration_never_makes_it_known_bad(fields: dict[str, Any]) -> None:
    bad = failed(Settings("DDTREE", 32, 8, 16), **fields)
    assert not make(host(), Request(budget=32), seen(ledger=(bad,))).refusals


def test_a_death_without_a_verdict_counts_when_it_was_recorded_as_such() -> None:
    bad = failed(Settings("DDTREE", 32, 8, 16), verdict={}, extra={"known_bad": True}, why="CUBLAS")
    assert "CUBLAS" in refusals(make(host(), Request(budget=32), seen(ledger=(bad,))))


def test_a_later_proof_clears_known_bad() -> None:
    tuning = Settings("DDTREE", 32, 8, 16)
    good = entry(Kind.CONFIRMED, "f" * 64, key=plan.key(host(), tuning, seen(), {"ddtree": {"build": "b2"}}))
    assert not make(host(), Request(budget=32), seen(ledger=(failed(tuning), good))).refusals


def test_another_build_of_the_engine_is_another_configuration_where_both_are_known() -> None:
    tuning = Settings("DDTREE", 32, 8, 16)
    bad = failed(tuning)
    bad = replace(bad, key=bad.key | {"build": "b1"})
    wanted = plan.key(host(), tuning, seen(), None)
    assert plan.known_bad(wanted, seen(ledger=(bad,))) is bad
    assert plan.known_bad(wanted | {"build": "b2"}, seen(ledger=(bad,))) is None


A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.mark.parametrize(
    ("ledger", "good"),
    [
        ([], None),
        ([entry(Kind.ATTEMPT, A), entry(Kind.UNDONE, A)], None),
        ([entry(Kind.PROVEN, A)], None),
        ([entry(Kind.PROVEN, A), entry(Kind.CONFIRMED, A)], A),
        ([entry(Kind.CONFIRMED, A), entry(Kind.CONFIRMED, B)], B),
        ([entry(Kind.CONFIRMED, A), entry(Kind.CONFIRMED, B), entry(Kind.VERIFIED, A)], A),
        ([entry(Kind.CONFIRMED, A), entry(Kind.CONFIRMED, B), entry(Kind.REVOKED, B)], A),
        ([entry(Kind.CONFIRMED, A), entry(Kind.FAILED, A, verdict={"kind": "corrupt"})], None),
        ([entry(Kind.CONFIRMED, A), entry(Kind.FAILED, A, verdict={"kind": "inconclusive"})], A),
        ([entry(Kind.CONFIRMED, A), entry(Kind.FAILED, B, verdict={"kind": "corrupt"})], A),
        ([entry(Kind.REVOKED, A), entry(Kind.CONFIRMED, A)], A),
        ([entry(Kind.ADOPTED, A), entry(Kind.ATTEMPT, A), entry(Kind.UNDONE, A)], A),
    ],
)
def test_the_latest_word_about_a_digest_counts(ledger: list[Entry], good: str | None) -> None:
    found = plan.last_verified(seen(ledger=tuple(ledger)))
    assert (found.digest if found else None) == good


def test_rollback_goes_to_the_previous_verified_one_and_never_to_a_revoked_one() -> None:
    text = b"current"
    here = units.digest(text)
    ledger = (entry(Kind.CONFIRMED, A), entry(Kind.CONFIRMED, B), entry(Kind.REVOKED, B), entry(Kind.CONFIRMED, here))
    observed = seen(etc_unit=text, ledger=ledger)
    assert plan.rollback_target(observed).digest == A
    assert plan.rollback_target(observed, "aaaa").digest == A
    assert plan.rollback_target(observed, here[:8]).digest == here
    for to, error in [("bbbb", Refused), ("aa", UsageError), ("eeee", UsageError)]:
        with pytest.raises(error):
            plan.rollback_target(observed, to)
    with pytest.raises(Refused, match="no other verified"):
        plan.rollback_target(seen(etc_unit=text, ledger=(ledger[-1],)))


def test_an_ambiguous_digest_is_refused() -> None:
    with pytest.raises(UsageError, match="2 configurations"):
        plan.rollback_target(seen(ledger=(entry(Kind.CONFIRMED, A), entry(Kind.CONFIRMED, "aaaa" + "c" * 60))), "aaaa")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "verified since"),
        ({"etc_unit": None}, "no unit"),
        ({"boot": "boot-2"}, "booted"),
        ({"trial": Trial("r9", A, "", "", 1.0, open=True)}, "trial"),
        ({"loaded_fragment": b"other"}, "not the one that was loaded"),
        ({"ledger": ()}, "never proven"),
        ({"gpu": replace(GPU, driver="1")}, "driver"),
        ({"unit": UnitState(active_state="failed", result="exit-code")}, "failed (exit-code)"),
    ],
)
def test_verification_says_since_when_or_why_not(change: dict[str, Any], said: str) -> None:
    found = plan.verification(replace(running(host(), TUNED), **change))
    assert said in found.text
    assert found.verified is not bool(change)
    assert found.state == ("unverified" if change else "verified")


@pytest.mark.parametrize("kind", [Kind.REVOKED, Kind.FAILED])
def test_a_later_bad_word_ends_verification(kind: Kind) -> None:
    observed = running(host(), TUNED)
    word = entry(kind, observed.ledger[0].digest, invocation="inv-1", boot="boot-1", verdict={"kind": "inconclusive"})
    assert not plan.verification(replace(observed, ledger=(*observed.ledger, word))).verified


def test_drift_names_each_pair_that_differs() -> None:
    observed = running(host(), TUNED)
    assert plan.drift(observed) == []
    assert "arguments" in plan.drift(replace(observed, argv=("/bin/other",)))[0]
    stale = replace(observed, unit=replace(observed.unit, need_daemon_reload=True))
    assert "daemon-reload" in plan.drift(stale)[0]
    edited = replace(observed, etc_unit=(observed.etc_unit or b"") + b"# by hand\n")
    assert any("last verified" in line for line in plan.drift(edited))
    assert any("loaded" in line for line in plan.drift(edited))


def test_a_variable_changed_without_a_restart_is_drift_and_its_values_are_not_shown() -> None:
    observed = replace(
        running(host(), TUNED), loaded_environment={"TOKEN": "new-value"}, environment={"TOKEN": "old-value", "OTHER": "x"}
    )
    [line] = plan.drift(observed)
    assert "TOKEN" in line
    assert not any(word in line for word in ("new-value", "old-value", "OTHER"))
    assert plan.drift(replace(observed, environment={"TOKEN": "new-value"})) == []
    assert plan.drift(replace(observed, environment=None)) == []


def test_settings_are_told_in_one_line_for_any_unit() -> None:
    assert plan.settings_text(running(host(), TUNED)) == "DDTREE budget 16 topk-cap 8 max-running 16"
    assert plan.settings_text(with_unit(HAND, ())) == "DDTREE budget 8 max-running 64"
    assert plan.settings_text(with_unit(b"\xff", ())) == "?"
    assert plan.settings_text(seen()) == ""


def test_a_unit_edited_by_hand_since_it_was_verified_is_said_before_it_is_replaced() -> None:
    observed = running(host(), TUNED)
    made = make(host(), Request(budget=32), replace(observed, etc_unit=(observed.etc_unit or b"") + b"# mine\n"))
    assert any("not the last verified" in warning for warning in made.warnings)
    assert "-# mine" in made.diff


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"unit": UnitState(active_state="active", main_pid=7, need_daemon_reload=True)}, "daemon-reload"),
        ({"argv": ("/bin/old", "--speculative-ddtree-budget", "4")}, "arguments"),
        ({"loaded_fragment": HAND.replace(b"budget 8", b"budget 4")}, "loaded"),
        ({"loaded_environment": {"A": "1"}, "environment": {"A": "2"}}, "other values of A"),
    ],
)
def test_a_unit_that_was_edited_and_not_restarted_is_not_adopted(fields: dict[str, Any], said: str) -> None:
    argv = units.parse(HAND).argv
    plan.adoptable(host(SGLANG), with_unit(HAND, argv))
    with pytest.raises(Refused, match="edited and not restarted") as caught:
        plan.adoptable(host(SGLANG), replace(with_unit(HAND, argv), **fields))
    assert said in caught.value.what
    assert "systemctl daemon-reload && systemctl restart sglang.service; then ddops adopt --host one" in caught.value.hint


def test_with_nowhere_to_roll_back_to_a_dead_engine_is_said_and_how_it_is_started() -> None:
    alive = running(host(), TUNED)
    with pytest.raises(Refused) as caught:
        plan.rollback_target(alive)
    assert "history" in caught.value.hint
    with pytest.raises(Refused, match="is failed") as caught:
        plan.rollback_target(replace(alive, unit=replace(alive.unit, active_state="failed", main_pid=0)))
    assert "ddops reconfig --force-restart --from-broken --host one" in caught.value.hint
