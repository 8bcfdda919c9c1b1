"""Engine profiles: settings into arguments and back, changes that touch nothing else, logs that say why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops.engines import PROFILES, ArgvError, Settings, normalise_argv, profile_of
from ddops.inventory import EngineSection

DDTREE = EngineSection(release="r1", model="m", drafter="d", device="cpu", extra_args=("--num-threads", "2"))
SGLANG = EngineSection(kind="sglang", python="/v/bin/python", model="/m", drafter="/d", extra_args=("--tp-size", "8"))
VLLM = EngineSection(kind="vllm", python="/v/bin/python", model="/m", drafter="/d")
ENGINES = {"ddtree": DDTREE, "sglang": SGLANG, "vllm": VLLM}

numbers = st.integers(1, 4096)
maybe = st.none() | numbers


@st.composite
def tunings(draw: st.DrawFn, kind: str) -> Settings:
    """Settings this engine can have, with nothing set that has no effect."""
    algorithm = draw(st.sampled_from(PROFILES[kind].algorithms))
    tree, drafts = algorithm == "DDTREE", algorithm != "NONE"
    budget = draw(maybe | st.just("auto") if kind == "ddtree" else maybe)
    return Settings(
        algorithm=algorithm,
        budget=budget if tree or (kind == "vllm" and drafts) else None,
        topk_cap=draw(maybe) if tree else None,
        max_running=draw(maybe),
        block_size=draw(maybe) if drafts and kind != "vllm" else None,
        cuda_graph_max_bs=draw(maybe),
    )


kinds = pytest.mark.parametrize("kind", list(PROFILES))


# ---------------------------------------------------------------- there and back
@kinds
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_rendered_is_read_back(kind: str, data: st.DataObject) -> None:
    wanted = data.draw(tunings(kind))
    profile = profile_of(ENGINES[kind])
    argv = profile.argv(ENGINES[kind], wanted)
    assert profile.parse_argv(argv) == wanted
    assert profile.runs_in(argv)


@kinds
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_amended_command_has_the_new_settings_and_keeps_every_other_word(kind: str, data: st.DataObject) -> None:
    engine, profile = ENGINES[kind], PROFILES[kind]
    before, after = data.draw(tunings(kind)), data.draw(tunings(kind))
    old = profile.argv(engine, before)
    new = profile.amend(old, after, engine.drafter)
    got = profile.parse_argv(new)
    for name in ("algorithm", "budget", "topk_cap", "max_running", "block_size", "cuda_graph_max_bs"):
        asked = getattr(after, name)
        if asked is not None:
            assert getattr(got, name) == asked
    rest = [word for word in old if word in ("/m", "--tp-size", "--num-threads", "--enable-metrics", "--port", "30000")]
    assert [word for word in new if word in rest] == rest
    assert profile.amend(new, after, engine.drafter) == new


@kinds
def test_amending_to_the_same_settings_changes_no_word(kind: str) -> None:
    profile = PROFILES[kind]
    argv = profile.argv(ENGINES[kind], Settings(profile.algorithms[0], 16, None, 8))
    assert profile.amend(argv, profile.parse_argv(argv)) == argv


def test_amending_changes_the_occurrence_that_counts_and_keeps_its_form() -> None:
    profile = PROFILES["sglang"]
    argv = ["python", "-m", "sglang.launch_server", "--max-running-requests", "4", "--speculative-algorithm=DDTREE"]
    argv += ["--speculative-draft-model-path", "/d", "--max-running-requests=8", "--speculative-ddtree-budget", "8"]
    new = profile.amend(argv, Settings("DDTREE", 32, None, 16))
    assert new == [w.replace("=8", "=16") if w.endswith("=8") else "32" if i == 10 else w for i, w in enumerate(argv)]
    assert profile.parse_argv(new) == Settings("DDTREE", 32, None, 16)


def test_switching_speculation_on_needs_a_drafter() -> None:
    profile = PROFILES["sglang"]
    off = profile.argv(SGLANG, Settings("NONE"))
    assert "--speculative-algorithm" not in off
    with pytest.raises(ArgvError, match="drafter"):
        profile.amend(off, Settings("DDTREE", 8))
    assert profile.parse_argv(profile.amend(off, Settings("DDTREE", 8), "/d")) == Settings("DDTREE", 8)


def test_ddtree_says_none_in_so_many_words_and_names_no_drafter_then() -> None:
    argv = PROFILES["ddtree"].argv(DDTREE, Settings("NONE"))
    assert argv[argv.index("--speculative-algorithm") + 1] == "NONE"
    assert "--speculative-draft-model-path" not in argv


def test_paths_of_a_ddtree_release_are_made_absolute() -> None:
    argv = PROFILES["ddtree"].argv(DDTREE, Settings("DDTREE", 8))
    assert "/opt/ddtree/releases/r1/m" in argv
    assert "/opt/ddtree/releases/r1/d" in argv
    absolute = DDTREE.model_copy(update={"model": "/w/m"})
    assert "/w/m" in PROFILES["ddtree"].argv(absolute, Settings("DDTREE", 8))


def test_a_key_file_becomes_a_credential_and_never_a_value() -> None:
    engine = DDTREE.model_copy(update={"api_key_file": "/etc/key"})
    argv = PROFILES["ddtree"].argv(engine, Settings("DDTREE", 8))
    assert argv[argv.index("--api-key-file") + 1] == "/run/credentials/ddtree-engine.service/api-key"


# ---------------------------------------------------------------- forks, forms and mistakes
def test_a_forks_own_flag_names_are_written_and_read() -> None:
    engine = SGLANG.model_copy(update={"flags": type(SGLANG.flags)(topk_cap="--ddtree-topk", budget="--ddtree-nodes")})
    profile = profile_of(engine)
    argv = profile.argv(engine, Settings("DDTREE", 8, 4))
    assert argv[argv.index("--ddtree-topk") + 1] == "4"
    assert profile.parse_argv(argv) == Settings("DDTREE", 8, 4)
    assert profile.reported({"speculative_algorithm": "DDTREE", "ddtree_nodes": 8}) == Settings("DDTREE", 8)
    assert PROFILES["sglang"].flag("topk_cap") == "--speculative-ddtree-topk-cap"


@pytest.mark.parametrize(
    "head", ["/usr/bin/python3 -m sglang.launch_server", "/usr/bin/python3 /opt/bin/sglang serve", "sglang serve"]
)
def test_an_interpreter_in_front_does_not_matter(head: str) -> None:
    argv = [*head.split(), "--speculative-algo=DFLASH", "--max-running-requests", "8"]
    assert PROFILES["sglang"].parse_argv(argv) == Settings("DFLASH", max_running=8)
    assert PROFILES["sglang"].runs_in(argv)
    assert not PROFILES["vllm"].runs_in(argv)


def test_a_flag_may_be_cut_short_as_argparse_allows() -> None:
    argv = ["sglang", "--max-running", "8", "--speculative-ddtree-b", "4", "--speculative-alg", "DDTREE"]
    assert PROFILES["sglang"].parse_argv(argv) == Settings("DDTREE", 4, None, 8)
    assert PROFILES["sglang"].amend(argv, Settings("DDTREE", 5), "/d")[:5] == [*argv[:4], "5"]


@pytest.mark.parametrize(
    "words",
    [
        ["--max-running-requests"],
        ["--max-running-requests", "many"],
        ["--max-running-requests", "-4"],
        ["--max-running-requests", "0"],
        ["--max-running-requests="],
        ["--speculative-ddtree-budget", "auto"],
        ["--speculative-ddtree-budget", "1e3"],
    ],
)
def test_a_value_that_is_no_number_is_an_error_not_a_guess(words: list[str]) -> None:
    with pytest.raises(ArgvError):
        PROFILES["sglang"].parse_argv(["sglang", *words])


@pytest.mark.parametrize("text", ["{", "[]", "8", "", '{"num_speculative_tokens": "7"}', '{"num_speculative_tokens": 0}'])
def test_a_broken_speculative_config_is_an_error(text: str) -> None:
    with pytest.raises(ArgvError):
        PROFILES["vllm"].parse_argv(["vllm", "serve", "/m", "--speculative-config", text])


def test_vllm_keeps_what_else_its_config_holds() -> None:
    config = {"method": "dflash", "model": "/d", "num_speculative_tokens": 7, "attention_backend": "flash_attn"}
    argv = ["vllm", "serve", "/m", "--speculative-config", json.dumps(config), "--max_num_seqs", "8"]
    assert PROFILES["vllm"].parse_argv(argv) == Settings("DFLASH", 7, max_running=8)
    new = PROFILES["vllm"].amend(argv, Settings("DFLASH", 15, max_running=4))
    assert json.loads(new[4]) == config | {"num_speculative_tokens": 15}
    assert new[5:] == ["--max_num_seqs", "4"]


def test_vllms_dotted_form_is_read_and_folded_into_one_value() -> None:
    argv = ["vllm", "serve", "/m", "--speculative-config.method", "dflash", "--speculative-config.model=/d"]
    argv += ["--speculative-config.num_speculative_tokens", "7", "--port", "1"]
    assert PROFILES["vllm"].parse_argv(argv) == Settings("DFLASH", 7)
    new = PROFILES["vllm"].amend(argv, Settings("DFLASH", 3))
    assert PROFILES["vllm"].parse_argv(new) == Settings("DFLASH", 3)
    assert new[:5] == ["vllm", "serve", "/m", "--port", "1"]


# ---------------------------------------------------------------- what really runs
@pytest.mark.parametrize(
    ("written", "running"),
    [
        ("/usr/local/bin/vllm serve /m", "/usr/bin/python3 /usr/local/bin/vllm serve /m"),
        ("/usr/local/bin/vllm serve /m", "/opt/v/bin/python3.12 -I /usr/local/bin/vllm serve /m"),
        ("vllm serve /m", "/usr/bin/python3 /usr/bin/vllm serve /m"),
        ("/v/bin/python -m sglang.launch_server", "/v/bin/python -m sglang.launch_server"),
        ("/usr/bin/numactl --interleave=all /v/bin/python -m x", "/v/bin/python -m x"),
        ("/usr/bin/env A=b python3 -m x", "/usr/bin/python3 -m x"),
    ],
)
def test_a_faithful_start_compares_equal(written: str, running: str) -> None:
    assert normalise_argv(written.split(), running.split()) == written.split()


@pytest.mark.parametrize(
    ("written", "running"),
    [
        ("/usr/bin/python3 -m ddtree_engine --port 1", "/usr/bin/python3 -m ddtree_engine --port 2"),
        ("/usr/local/bin/vllm serve /m", "/usr/bin/python3 /usr/local/bin/vllm serve /n"),
        ("/usr/local/bin/vllm serve /m", "/usr/bin/python3 /opt/bin/vllm serve /m"),
        ("/usr/local/bin/vllm serve /m", "/usr/bin/tail /usr/local/bin/vllm serve /m"),
        ("/usr/bin/numactl --all /v/bin/python -m x", "-m x"),
        ("/v/bin/python -m x", "/usr/bin/python -m x"),
        ("/v/bin/python -m x", ""),
    ],
)
def test_a_start_with_other_words_stays_different(written: str, running: str) -> None:
    assert normalise_argv(written.split(), running.split()) != written.split()


def test_reported_settings_are_read_at_both_places_where_servers_put_them() -> None:
    flat = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 8, "max_running_requests": 4}
    assert PROFILES["sglang"].reported(flat) == Settings("DDTREE", 8, None, 4)
    assert PROFILES["sglang"].reported({"server_args": flat}) == Settings("DDTREE", 8, None, 4)
    assert PROFILES["ddtree"].reported(flat | {"speculative_ddtree_budget": "auto"}) == Settings("DDTREE", "auto", None, 4)
    assert PROFILES["sglang"].reported({"speculative_algorithm": None}) == Settings("NONE")


@pytest.mark.parametrize("info", [None, {}, {"unrelated": 1}])
def test_an_engine_that_reports_nothing_is_not_taken_for_speculation_off(info: dict[str, int] | None) -> None:
    assert PROFILES["sglang"].reported(info) is None
    assert PROFILES["vllm"].reported(info) is None


# ---------------------------------------------------------------- arithmetic
@pytest.mark.parametrize(
    ("kind", "tuning", "width"),
    [
        ("sglang", Settings("DDTREE", 32), 33),
        ("sglang", Settings("DDTREE", None, block_size=8), 8),
        ("sglang", Settings("DFLASH", None, block_size=8), 8),
        ("sglang", Settings("DFLASH"), 16),
        ("sglang", Settings("NONE"), 1),
        ("vllm", Settings("DFLASH", 7), 8),
        ("vllm", Settings("NONE"), 1),
        ("ddtree", Settings("DDTREE", "auto"), 65),
        ("ddtree", Settings("DDTREE", None), 17),
    ],
)
def test_verify_width_counts_the_root(kind: str, tuning: Settings, width: int) -> None:
    assert PROFILES[kind].verify_width(tuning) == width


def test_settings_survive_the_ledger_and_ignore_what_is_not_theirs() -> None:
    wanted = Settings("DDTREE", "auto", 4, 8)
    assert Settings.from_dict(json.loads(json.dumps(wanted.to_dict()))) == wanted
    assert Settings.from_dict({"budget": -3, "topk_cap": True, "max_running": "8", "novel": 1}) == Settings()


# ---------------------------------------------------------------- logs
LINES = [
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmStridedBatchedEx",
        False,
        "product",
    ),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True, "memory"),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", False, "outside its memory"),
    ("cudaErrorIllegalAddress", False, "outside its memory"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True, "GPU ran out"),
    ("oom-kill:constraint=CONSTRAINT_MEMCG,task=python", True, "host ran out"),
    ("OSError: [Errno 98] Address already in use", True, "port"),
    ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 30000)", True, "port"),
    ("OSError: [Errno 28] No space left on device", True, "disk"),
    ("NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, name=python, MMU Fault", False, "stopped by the driver"),
    ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.", True, "Xid"),
    (
        "Exception: Capture cuda graph failed: CUDA error: operation failed due to a previous error during capture",
        False,
        "graph",
    ),
    ("launch_server.py: error: unrecognized arguments: --speculative-ddtree-budgets 8", False, "flag"),
    ("vllm: error: argument --dtype: invalid choice: 'int3'", False, "value"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/models/k2/config.json'", True, "weights"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata", True, "damaged"),
    ("ModuleNotFoundError: No module named 'sgl_kernel'", False, "package"),
    ("Fatal Python error: Segmentation fault", False, "native"),
    ("RuntimeError: CUDA error: device-side assert triggered", False, "index"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", False, "between GPUs"),
    ("CUDA error: no kernel image is available for execution on the device", False, "kernels"),
    ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", False, "NaN"),
]


@kinds
@pytest.mark.parametrize(("line", "environment", "meaning"), LINES, ids=[text[:30] for text, _, _ in LINES])
def test_fatal_lines_are_explained(kind: str, line: str, environment: bool, meaning: str) -> None:
    (found,) = PROFILES[kind].classify_log(["INFO loading", line])
    assert meaning in found.meaning
    assert (found.environment, found.line, found.number) == (environment, line, 1)


def test_a_python_without_the_engines_packages_is_the_hosts_fault_and_a_refused_setting_the_configurations() -> None:
    lacking = ["ddtree-engine: error: /usr/bin/python3 lacks torch, numpy", "hint: /usr/bin/python3 -m pip install torch numpy"]
    (found,) = PROFILES["ddtree"].classify_log(lacking)
    assert (found.environment, found.number) == (True, 0)
    (found,) = PROFILES["ddtree"].classify_log(["ddtree-engine: error: --speculative-ddtree-budget: 65 is above 64"])
    assert not found.environment
    assert "configuration" in found.meaning


@kinds
@pytest.mark.parametrize(
    "line",
    [
        "Decode batch, #running-req: 3, #token: 812, token usage: 0.04, accept len: 6.71, #queue-req: 0,",
        "WARNING: failed to automatically increase ulimit -n, error current limit 20000",
        "Capture cuda graph bs [1, 2, 4, 8]",
        "The server is fired up and ready to roll!",
        "INFO: Application startup complete.",
        "Loading safetensors checkpoint shards: 41% Completed",
        'INFO: 127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK',
        "Memory profiling takes 1.2 seconds. Total non KV cache memory: 3 GiB",
        "max_total_num_tokens=81920, chunked_prefill_size=8192, max_running_requests=48, context_len=4096",
        "tokenizer vocabulary does not contain a pad token",
    ],
)
def test_ordinary_lines_are_not_fatal(kind: str, line: str) -> None:
    assert PROFILES[kind].classify_log([line]) == []


def test_a_consequence_is_named_only_when_no_cause_is() -> None:
    cause, after = "CUDA error: an illegal memory access was encountered", "vllm.v1.EngineDeadError: EngineCore died"
    assert [f.number for f in PROFILES["vllm"].classify_log([cause, after])] == [0]
    assert "engine process died" in PROFILES["vllm"].classify_log([after])[0].meaning


@settings(max_examples=50, deadline=2000)
@given(st.lists(st.text(max_size=300), max_size=5))
def test_any_log_can_be_read(lines: list[str]) -> None:
    for profile in PROFILES.values():
        profile.classify_log(lines)


def test_a_very_long_line_is_read_quickly() -> None:
    import time

    begun = time.perf_counter()
    PROFILES["vllm"].classify_log(["model not found " * 20_000, "weights " * 20_000])
    assert time.perf_counter() - begun < 2
