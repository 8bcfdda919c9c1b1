"""ddops against the engine's side of the contract: flags, reported settings, log line, metrics, and recorded replies.

The engine's own light modules (flags, settings, metrics) are asked here, and the recorded replies in fixtures/ are
parsed; no engine is started.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddtree_engine import __main__ as engine_cli
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops.engines import PROFILES, Settings
from ddops.inventory import EngineSection
from ddops.prove import dialects
from ddops.prove.client import EngineClient
from ddops.prove.wire import Ask, EngineError

PROFILE = PROFILES["ddtree"]
ENGINE = EngineSection(
    release="r1", model="m", drafter="d", device="cpu", dtype="float32", context_length=2048, served_model_name="tiny",
    api_key_file="/etc/key", extra_args=("--decode-log-interval", "80", "--num-threads", "2"),
)  # fmt: skip


@st.composite
def tunings(draw: st.DrawFn) -> Settings:
    algorithm = draw(st.sampled_from(["DDTREE", "DFLASH", "NONE"]))
    tree, drafts = algorithm == "DDTREE", algorithm != "NONE"
    return Settings(
        algorithm=algorithm,
        budget=draw(st.integers(1, 1024) | st.just("auto")) if tree else None,
        topk_cap=draw(st.integers(1, 64)) if tree else None,
        max_running=draw(st.integers(1, 256)),
        block_size=draw(st.none() | st.integers(2, 64)) if drafts else None,
        cuda_graph_max_bs=draw(st.none() | st.integers(1, 256)),
    )


# ---------------------------------------------------------------- flags
@settings(max_examples=100, deadline=None)
@given(tunings())
def test_the_engine_takes_every_command_that_is_rendered_and_means_the_same(tuning: Settings) -> None:
    argv = PROFILE.argv(ENGINE, tuning)
    config = engine_cli.parse_config(argv[argv.index(PROFILE.module) + 1 :])
    assert str(config.speculative_algorithm) == tuning.algorithm
    assert config.max_running_requests == tuning.max_running
    assert config.cuda_graph_max_bs == tuning.cuda_graph_max_bs
    assert config.speculative_dflash_block_size == tuning.block_size
    assert config.speculative_ddtree_budget == tuning.budget
    assert config.speculative_ddtree_topk_cap == (tuning.topk_cap or 8)
    assert (config.model_path, config.port, config.host) == ("/opt/ddtree/releases/r1/m", 30000, "0.0.0.0")
    assert config.enable_metrics


@settings(max_examples=100, deadline=None)
@given(tunings())
def test_what_the_engine_reports_is_read_as_what_was_asked(tuning: Settings) -> None:
    argv = PROFILE.argv(ENGINE, tuning)
    config = engine_cli.parse_config(argv[argv.index(PROFILE.module) + 1 :])
    info = json.loads(json.dumps(dataclasses.asdict(config)))
    reported = PROFILE.reported(info)
    assert reported is not None
    for name, value in tuning.to_dict().items():
        if value is not None:
            assert getattr(reported, name) == value


def test_every_flag_ddops_sets_is_one_the_engine_has() -> None:
    known = {flag for action in engine_cli.parser()._actions for flag in action.option_strings}
    ours = {names[0] for names in PROFILE.flags.values()} | (set(PROFILE.owned) - {"--api-key"})
    assert ours <= known


def test_ddops_and_the_engine_assume_the_same_when_nothing_is_said() -> None:
    config = engine_cli.parse_config(["--model-path", "m"])
    assert config.max_running_requests == PROFILE.default_max_running == PROFILE.defaults.max_running
    assert config.speculative_ddtree_topk_cap == PROFILE.defaults.topk_cap


def test_the_engines_own_limits_are_those_that_preflight_knows() -> None:
    from ddtree_engine.config import MAX_BUDGET
    from ddtree_engine.loading import AUTO_BUDGET_LIMIT

    assert PROFILE.max_budget == MAX_BUDGET
    assert PROFILE.max_budget_gpu == AUTO_BUDGET_LIMIT
    assert PROFILE.verify_width(Settings("DDTREE", "auto")) == AUTO_BUDGET_LIMIT + 1


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (["--speculative-ddtree-budgets", "8"], "flag"),
        (["--dtype", "int3"], "value"),
        (["--model-path"], "value"),
    ],
)
def test_what_the_engine_says_of_a_wrong_flag_is_understood(
    words: list[str], meaning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        engine_cli.parse_config(["--model-path", "m", *words])
    (found,) = PROFILE.classify_log(capsys.readouterr().err.splitlines())
    assert meaning in found.meaning
    assert not found.environment


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("length", [6.5, None])
def test_the_engines_log_line_is_understood(length: float | None) -> None:
    from ddtree_engine import metrics
    from ddtree_engine.requests import Stats

    numbers = {field.name: 3 for field in dataclasses.fields(Stats)} | {"cuda_graph": False, "stage_seconds": {}}
    line = metrics.decode_line(Stats(**numbers), metrics.Figures(length, 0.42, 301.25))
    assert dialects.acceptance_from_log([line]) == length


# ---------------------------------------------------------------- recorded replies
FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str) -> dict[str, Any]:
    found = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def replayed(*names: str) -> EngineClient:
    """The real client over recorded replies; what was not recorded is a 404."""
    recorded = {(f["request"]["method"], f["request"]["path"]): f for f in map(fixture, names)}

    def answer(request: httpx.Request) -> httpx.Response:
        found = recorded.get((request.method, request.url.path))
        if found is None:
            return httpx.Response(404, json={"error": {"message": "no such path"}})
        if "events" in found:
            return httpx.Response(found["status"], text="".join(f"{line}\n\n" for line in found["events"]))
        if "text" in found:
            return httpx.Response(found["status"], text=found["text"])
        return httpx.Response(found["status"], json=found["reply"])

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://engine")
    return EngineClient(http, PROFILE, model="ddtree-tiny")


ASK = Ask.user("Your code word is ZEBRA-4417. Reply with the code word only.", max_tokens=32)


def test_the_fixtures_are_there_for_every_kind_of_reply() -> None:
    names = {file.stem for file in FIXTURES.glob("*.json")}
    assert {
        "chat", "chat_stream", "generate", "generate_off", "generate_score", "generate_stream", "server_info",
        "metrics", "tokenize", "detokenize", "health", "health_starting", "models", "error_too_long",
        "error_unsupported",
    } <= names  # fmt: skip


def test_the_recorded_server_info_gives_the_settings_it_was_started_with() -> None:
    info = replayed("server_info").server_info()
    reported = PROFILE.reported(info)
    assert info is not None
    assert reported is not None
    assert (reported.algorithm, reported.budget) == ("DDTREE", info["speculative_ddtree_budget"])
    assert reported.max_running == info["max_running_requests"]
    assert reported.block_size == info["speculative_dflash_block_size"]


def test_what_a_configuration_is_remembered_by_includes_build_and_weights() -> None:
    from ddops import plan
    from ddops.inventory import HostConfig
    from ddops.state import Observed, UnitState

    config = HostConfig(name="one", address="10.0.0.1", engine=ENGINE)
    bare: dict[str, Any] = dict.fromkeys(("etc_unit", "trial_unit"))
    observed = Observed(
        host="one", boot="b", uptime_seconds=1.0, systemd=252, unit=UnitState(), argv=(), ledger=(), **bare
    )  # fmt: skip
    info = fixture("server_info")["reply"]
    found = plan.key(config, Settings("DDTREE", 16, 4, 8), observed, info)
    assert found["build"] == info["ddtree"]["build"]
    assert found["target_digest"] == info["ddtree"]["target_digest"]
    assert found["drafter_digest"] == info["ddtree"]["drafter_digest"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", ["chat", "chat_stream"])
def test_recorded_chat_replies_are_read_whole(name: str) -> None:
    recorded = fixture(name)
    reply = replayed(name).ask(dataclasses.replace(ASK, stream="events" in recorded))
    assert reply.text == "ZEBRA-4417"
    assert reply.finish == "stop"
    assert reply.tokens == len(reply.ids or ()) > 0


@pytest.mark.parametrize("name", ["generate", "generate_off", "generate_stream"])
def test_recorded_native_replies_are_read_with_their_speculation(name: str) -> None:
    from ddops.prove import dialects

    recorded = fixture(name)
    ask = Ask(text=recorded["request"]["body"]["text"], max_tokens=16, stream="events" in recorded)
    reply = replayed(name).ask(ask)
    assert reply.text == "ZEBRA-4417"
    found = dialects.speculation(reply.meta)
    if name == "generate_off":
        assert found is None or found.length is None
    else:
        assert found is not None
        assert found.length == 4.0


def test_a_recorded_score_gives_each_token_and_its_gap() -> None:
    ids = fixture("generate_score")["request"]["body"]["input_ids"]
    scores = replayed("generate_score").score(ids, 1, top=1)
    assert [scored.token for scored in scores.tokens] == ids[1:]
    assert all(scored.gap is not None and scored.gap >= 0 for scored in scores.tokens)
    assert scores.cached_tokens == 0


def test_recorded_text_and_ids_go_both_ways() -> None:
    ids, text = fixture("tokenize")["reply"]["tokens"], fixture("detokenize")["reply"]["text"]
    assert replayed("tokenize").tokenize(text) == tuple(ids)
    assert replayed("detokenize").detokenize(ids) == text


def test_recorded_health_tells_starting_from_ready() -> None:
    assert replayed("health").healthy()
    assert not replayed("health_starting").healthy()
    assert not replayed("models").healthy()


@pytest.mark.parametrize("name", ["error_model", "error_too_long", "error_unsupported"])
def test_recorded_errors_are_errors_that_say_why(name: str) -> None:
    message = fixture(name)["reply"]["error"]["message"]
    with pytest.raises(EngineError) as caught:
        replayed(name).ask(ASK)
    assert message[:40] in str(caught.value)


def test_the_numbers_acceptance_is_read_from_are_in_the_recorded_metrics() -> None:
    found = replayed("metrics").metrics()
    assert "sglang:num_requests_total" in found, "by which a reference is told from the engine itself"
    read = dialects.speculation_between({}, found)
    assert read is not None
    assert 0 < read.verify_passes <= read.committed
