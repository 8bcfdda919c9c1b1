"""Flags of SGLang and vLLM as their versions have them: today's name is written, another in the unit is understood."""

from __future__ import annotations

import pytest

from ddops.engines import PROFILES, ArgvError, Settings
from ddops.inventory import EngineSection

SGLANG = PROFILES["sglang"]
ENGINE = EngineSection(kind="sglang", python="/v/bin/python", model="/m", drafter="/d")
HEAD = ["python", "-m", "sglang.launch_server", "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "/d"]


def test_todays_flag_of_the_graph_batch_is_written() -> None:
    argv = SGLANG.argv(ENGINE, Settings("DFLASH", cuda_graph_max_bs=8))
    assert argv[argv.index("--cuda-graph-max-bs-decode") + 1] == "8"
    assert SGLANG.parse_argv(argv).cuda_graph_max_bs == 8


@pytest.mark.parametrize("name", ["--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"])
def test_the_flag_that_a_unit_has_is_the_one_that_changes(name: str) -> None:
    argv = [*HEAD, name, "8", "--cuda-graph-max-bs-prefill", "4"]
    assert SGLANG.parse_argv(argv).cuda_graph_max_bs == 8
    changed = SGLANG.amend(argv, Settings("DFLASH", cuda_graph_max_bs=16), "/d")
    assert changed == [*HEAD, name, "16", "--cuda-graph-max-bs-prefill", "4"]


@pytest.mark.parametrize(
    "names",
    [
        ("--speculative-num-draft-tokens",),
        ("--speculative-dflash-block-size",),
        ("--speculative-dflash-block-size", "--speculative-num-draft-tokens"),
        ("--speculative-num-draft-tokens", "--speculative-dflash-block-size"),
    ],
)
def test_a_block_size_said_twice_stays_one_size(names: tuple[str, ...]) -> None:
    argv = [*HEAD, *(word for name in names for word in (name, "16"))]
    assert SGLANG.parse_argv(argv).block_size == 16
    assert SGLANG.verify_width(SGLANG.parse_argv(argv)) == 16
    changed = SGLANG.amend(argv, Settings("DFLASH", block_size=8), "/d")
    assert changed == [*HEAD, *(word for name in names for word in (name, "8"))]


def test_what_the_server_resolved_by_itself_is_reported() -> None:
    info = {
        "speculative_algorithm": "DFLASH", "speculative_dflash_block_size": None, "speculative_num_draft_tokens": 16,
        "max_running_requests": 48, "cuda_graph_max_bs_decode": None, "tp_size": 8,
    }  # fmt: skip
    assert SGLANG.reported(info) == Settings("DFLASH", max_running=48, block_size=16)


def test_a_flag_of_another_version_is_explained() -> None:
    line = "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, ..."
    [finding] = SGLANG.classify_log([line])
    assert "engine.flags" in finding.meaning
    assert not finding.environment


# ---- vLLM: one configuration, four spellings

VLLM = PROFILES["vllm"]
SERVE = ["vllm", "serve", "/m"]


@pytest.mark.parametrize(
    "words",
    [
        ("--spec-method", "dflash", "--spec-model", "/d", "--spec-tokens", "15"),
        ("--spec_method=dflash", "--spec_model=/d", "--spec_tokens=15"),
        ("--speculative-config.method", "dflash", "--speculative-config.model=/d", "--spec-tokens", "15"),
        ("-sc", '{"method":"dflash","model":"/d","num-speculative-tokens":15}'),
        ("--speculative-config", '{"method":"dflash","model":"/d"}', "--spec-tokens", "15"),
    ],
)
def test_every_spelling_of_the_drafter_is_understood_and_becomes_one_value(words: tuple[str, ...]) -> None:
    argv = [*SERVE, *words, "--max-num-seqs", "8"]
    assert VLLM.parse_argv(argv) == Settings("DFLASH", 15, max_running=8)
    assert VLLM.amend(argv, Settings("DFLASH", 15, max_running=8), "/d") == argv
    changed = VLLM.amend(argv, Settings("DFLASH", 7, max_running=8), "/d")
    assert VLLM.parse_argv(changed) == Settings("DFLASH", 7, max_running=8)
    spoken = [w for w in changed if w.startswith(("-sc", "--spec"))]
    assert spoken in (["--speculative-config"], ["-sc"])
    assert VLLM.amend(argv, Settings("NONE", max_running=8)) == [*SERVE, "--max-num-seqs", "8"]


@pytest.mark.parametrize("flag", ["--spec-method", "--spec-model", "--spec-tokens", "--speculative-config"])
def test_the_drafters_flags_are_ours_to_set(flag: str) -> None:
    assert flag in VLLM.owned_flags()


def test_a_number_of_tokens_that_is_none_is_refused() -> None:
    with pytest.raises(ArgvError, match="no positive number"):
        VLLM.parse_argv([*SERVE, "--spec-method", "dflash", "--spec-tokens", "many"])
