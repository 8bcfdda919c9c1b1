"""Inventories through the front: what loads, what is refused, and that every refusal names its place."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops.errors import Exit, InventoryError, UsageError
from ddops.inventory import Fleet, load
from ddops.units import inventories_dir

BASE = """\
version: 1
defaults:
  engine:
    release: r1
    model: models/target
    drafter: models/drafter
  spec:
    budget: 16
groups:
  fast:
    spec: {budget: 32}
    limits: {verify_rows: {sm_90: 800}}
  odd: {ssh: {port: 2222}}
hosts:
  one: {address: 10.0.0.1, groups: [fast]}
  two: {address: 10.0.0.2, groups: [fast, odd], spec: {budget: 64}}
"""


def fleet(text: str = BASE) -> Fleet:
    return load(text, "fleet.yaml")


def refused(text: str | bytes) -> InventoryError:
    with pytest.raises(InventoryError) as caught:
        load(text, "fleet.yaml")
    assert {fault.file for fault in caught.value.faults} == {"fleet.yaml"}
    assert caught.value.exit is Exit.USAGE
    assert "fleet.yaml" in str(caught.value)
    return caught.value


def line_of(needle: str, text: str) -> int:
    return text[: text.index(needle)].count("\n") + 1


# ---------------------------------------------------------------- merging
def test_a_host_overrides_its_groups_and_groups_override_the_defaults() -> None:
    hosts = fleet().hosts
    assert hosts["one"].spec.budget == 32
    assert hosts["two"].spec.budget == 64
    assert hosts["two"].ssh.port == 2222
    assert hosts["one"].ssh.port == 22
    assert hosts["one"].engine.drafter == "models/drafter"


def test_sections_merge_key_by_key() -> None:
    text = BASE.replace("{verify_rows: {sm_90: 800}}", "{disk_free_mib: 5}")
    text = text.replace("  spec:\n    budget: 16", "  limits: {verify_rows: {sm_80: 9}, gpu_memory_free_mib: 7}")
    limits = fleet(text).hosts["one"].limits
    assert (limits.verify_rows, limits.gpu_memory_free_mib, limits.disk_free_mib) == ({"sm_80": 9}, 7, 5)


def test_a_list_replaces_a_list() -> None:
    text = BASE.replace("    model:", "    extra_args: [--a, b]\n    model:")
    text = text.replace("spec: {budget: 64}", "engine: {extra_args: [--c]}")
    hosts = fleet(text).hosts
    assert hosts["one"].engine.extra_args == ("--a", "b")
    assert hosts["two"].engine.extra_args == ("--c",)


def test_what_nobody_gave_is_told_apart_from_what_was_given() -> None:
    spec = fleet().hosts["one"].spec
    assert "budget" in spec.model_fields_set
    assert "topk_cap" not in spec.model_fields_set


def test_vllm_without_an_algorithm_drafts_a_chain() -> None:
    text = BASE.replace("release: r1", "kind: vllm").replace("models/", "/m/")
    spec = fleet(text).hosts["one"].spec
    assert spec.algorithm == "DFLASH"
    assert "algorithm" not in spec.model_fields_set


def test_anchors_aliases_and_merge_keys_work() -> None:
    text = BASE.replace("fast:\n    spec: {budget: 32}", "fast:\n    spec: &s {budget: 32, topk_cap: 4}")
    text = text.replace("spec: {budget: 64}", "spec: {<<: *s, budget: 48}")
    spec = fleet(text).hosts["two"].spec
    assert (spec.budget, spec.topk_cap) == (48, 4)


def test_select_takes_hosts_groups_and_all_each_once_in_file_order() -> None:
    chosen = fleet()
    assert [h.name for h in chosen.select(["two", "fast", "one"])] == ["one", "two"]
    assert [h.name for h in chosen.select(["odd"])] == ["two"]
    assert [h.name for h in chosen.select(["all"])] == ["one", "two"]


def test_select_of_an_unknown_host_offers_near_matches() -> None:
    with pytest.raises(UsageError, match="tow") as caught:
        fleet().select(["tow"])
    assert "two" in caught.value.hint


def test_select_of_nothing_is_never_everything() -> None:
    with pytest.raises(UsageError):
        fleet().select([])


def test_the_prove_section_is_what_the_battery_takes() -> None:
    from ddops.prove.verdicts import Gates, Policy

    text = BASE.replace("spec: {budget: 64}", "prove: {gates: {copy: 0.5, gap: 0.25}, sampling: {top_p: 0.9}}")
    section = fleet(text).hosts["two"].prove
    gates = Gates(**section.gates.model_dump())
    assert (gates.copy, gates.gap, gates.coding) == (0.5, 0.25, 1.0)
    assert Gates(**fleet().hosts["one"].prove.gates.model_dump()) == Gates()
    assert Policy(gates, **section.sampling).top_p == 0.9
    assert Policy(**fleet().hosts["one"].prove.sampling) == Policy()


# ---------------------------------------------------------------- refusals: (what is replaced, by what, field, line of)
WRONG = [
    ("budget: 16", "bugdet: 16", "defaults.spec.bugdet", "bugdet"),
    ("budget: 16", "budget: -1", "defaults.spec.budget", "budget: -1"),
    ("budget: 16", "budget: 0", "defaults.spec.budget", "budget: 0"),
    ("budget: 16", "budget: '16'", "defaults.spec.budget", "budget: '16'"),
    ("budget: 16", "budget: 1.5", "defaults.spec.budget", "budget: 1.5"),
    ("budget: 16", "budget: true", "defaults.spec.budget", "budget: true"),
    ("budget: 16", "budget: autp", "defaults.spec.budget", "autp"),
    ("budget: 16", "budget: [16]", "defaults.spec.budget", "[16]"),
    ("budget: 32", "budget: 2000", "groups.fast.spec.budget", "2000"),  # above the engine's own limit
    ("budget: 16", "algorithm: EAGLE", "defaults.spec.algorithm", "EAGLE"),
    ("version: 1", "version: 2", "version", "version"),
    ("version: 1", "version: true", "version", "version"),
    ("version: 1\n", "", "", None),
    ("release: r1", "release: ../r1", "defaults.engine.release", "../r1"),
    ("release: r1", "release: a b", "defaults.engine.release", "a b"),
    ("release: r1", "kind: trtllm", "defaults.engine.kind", "trtllm"),
    ("release: r1", "unit: engine", "defaults.engine.unit", "unit: engine"),
    ("release: r1", "unit: a/b.service", "defaults.engine.unit", "a/b"),
    ("release: r1", "unit: ../b.service", "defaults.engine.unit", "../b"),
    ("release: r1", "unit: a@.service", "defaults.engine.unit", "a@"),
    ("release: r1", "unit: ddops-guard.service", "defaults.engine.unit", "ddops-guard"),
    ("release: r1", "python: python3", "defaults.engine.python", "python3"),
    ("release: r1", "releases_dir: opt", "defaults.engine.releases_dir", "opt"),
    ("release: r1", "releases_dir: /opt/../etc", "defaults.engine.releases_dir", "/opt"),
    ("release: r1", "port: 70000", "defaults.engine.port", "70000"),
    ("release: r1", "port: 0", "defaults.engine.port", "port: 0"),
    ("release: r1", "listen: everywhere", "defaults.engine.listen", "everywhere"),
    ("release: r1", 'dtype: "a\\nb"', "defaults.engine.dtype", "a\\nb"),
    ("release: r1", 'served_model_name: "a\\0b"', "defaults.engine.served_model_name", "a\\0b"),
    ("release: r1", "served_model_name: --x", "defaults.engine.served_model_name", "--x"),
    ("release: r1", "extra_args: --x", "defaults.engine.extra_args", "--x"),
    ("release: r1", "extra_args: [--x, 3]", "defaults.engine.extra_args[1]", "--x"),
    ("release: r1", "environment: {'A B': x}", "defaults.engine.environment", "A B"),
    ("release: r1", "environment: {HF_TOKEN: x}", "defaults.engine.environment.HF_TOKEN", "HF_TOKEN"),
    ("release: r1", "environment: {A: 1.5}", "defaults.engine.environment.A", "A: 1.5"),
    ("release: r1", "user: a b", "defaults.engine.user", "a b"),
    ("release: r1", "api_key_file: key", "defaults.engine.api_key_file", "key"),
    ("release: r1", "flags: {budget: budget}", "defaults.engine.flags.budget", "flags"),
    ("release: r1", "name: 2026-01-01", "defaults.engine.name", "2026"),
    ("port: 2222", "prot: 2222", "groups.odd.ssh.prot", "prot"),
    ("port: 2222", "connect_timeout_seconds: .inf", "groups.odd.ssh.connect_timeout_seconds", ".inf"),
    ("port: 2222", "connect_timeout_seconds: -1", "groups.odd.ssh.connect_timeout_seconds", "-1"),
    ("port: 2222", "known_hosts: [3]", "groups.odd.ssh.known_hosts[0]", "[3]"),
    ("port: 2222", "sudo: yes please", "groups.odd.ssh.sudo", "yes please"),
    ("odd: {ssh: {port: 2222}}", "odd: {ssh: }", "groups.odd.ssh", "odd:"),
    ("odd: {ssh: {port: 2222}}", "odd:", "groups.odd", "odd:"),
    ("odd: {ssh: {port: 2222}}", "odd: [a]", "groups.odd", "odd:"),
    ("odd: {ssh: {port: 2222}}", "odd: {shh: {}}", "groups.odd.shh", "odd:"),
    ("sm_90: 800", "sm_90: -800", "groups.fast.limits.verify_rows.sm_90", "sm_90"),
    ("sm_90: 800", "SM 90: 800", "groups.fast.limits.verify_rows", "SM 90"),
    ("address: 10.0.0.2, groups: [fast, odd]", "address: 10.0.0.1, groups: [fast]", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: 10.0.0.256", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: root@h", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: 'h:22'", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: '[::1]'", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: -oProxyCommand=x", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: 'a b'", "hosts.two.address", "two:"),
    ("address: 10.0.0.2", "address: ''", "hosts.two.address", "two:"),
    ("address: 10.0.0.2, ", "", "hosts.two", "two:"),
    ("[fast, odd]", "[fast, fats]", "hosts.two.groups[1]", "two:"),
    ("[fast, odd]", "[fast, fast]", "hosts.two.groups[1]", "two:"),
    ("[fast, odd]", "fast", "hosts.two.groups", "two:"),
    ("  two:", "  'two words':", "hosts.two words", "two words"),
    ("  two:", "  all:", "hosts.all", "all:"),
    ("  two:", "  fast:", "hosts.fast", None),
    ("  two:", "  one:", "", "two:"),  # a duplicate key
    ("defaults:", "defualts:", "defualts", "defualts"),
]


@pytest.mark.parametrize(("old", "new", "field", "place"), WRONG, ids=[f"{w[1]}" for w in WRONG])
def test_every_mistake_names_its_line_and_field(old: str, new: str, field: str, place: str | None) -> None:
    assert old in BASE
    text = BASE.replace(old, new, 1)
    (problem,) = refused(text).faults  # and nothing that only follows from it
    assert problem.field.startswith(field)
    if place is not None and place in text:
        assert problem.line == line_of(place, text)
    assert problem.line is not None or not field


def test_an_unknown_key_offers_what_was_meant() -> None:
    assert "budget" in refused(BASE.replace("budget: 16", "bugdet: 16")).faults[0].hint


SPOILT = """\
version: 1
defaults:
  engine: {release: r1, model: models/target, drafter: models/drafter}
  spec: {budget: -1, topk_cap: none}
groups:
  fast: {limits: {verify_rows: {sm_90: -800}}, shh: {}}
  plain: {ssh: {sudo: never}}
hosts:
  one: {address: 10.0.0.256, groups: [fast, fats]}
  two: {address: 10.0.0.2, engine: {environment: {A: 1.5}}, groups: [plain]}
  three: {address: 10.0.0.3, groups: [plain], prove: {level: 2026-01-01}}
  all: {groups: plain}
rollout: {canary: -1}
"""


def test_all_mistakes_are_told_at_once_each_with_its_line_and_field() -> None:
    problem = refused(SPOILT)
    assert [(fault.line, fault.field) for fault in problem.faults] == [
        (4, "defaults.spec.budget"),
        (4, "defaults.spec.topk_cap"),
        (6, "groups.fast.shh"),
        (6, "groups.fast.limits.verify_rows.sm_90"),
        (9, "hosts.one.groups[1]"),
        (9, "hosts.one.address"),
        (10, "hosts.two.engine.environment.A"),
        (11, "hosts.three.prove.level"),
        (12, "hosts.all"),
        (12, "hosts.all.address"),
        (12, "hosts.all.groups"),
        (13, "rollout.canary"),
    ]
    lines = str(problem).splitlines()
    assert lines[0].startswith("error: fleet.yaml:4: defaults.spec.budget: ")
    assert [line[:18] for line in lines[1:12]] == ["       fleet.yaml:"] * 11
    assert lines[12].strip() == "the inventory was not used and no host was contacted"
    assert "did you mean ssh?" in lines[2] + lines[3]


def test_a_rule_one_host_breaks_is_told_beside_a_mistake_in_another() -> None:
    text = BASE.replace("address: 10.0.0.1,", "address: 10.0.0.1, arch: SM 1,")
    text = text.replace("spec: {budget: 64}", "engine: {extra_args: [--port, '3', --host, h], dtype: int8}")
    assert [fault.field for fault in refused(text).faults] == [
        "hosts.one.arch",
        "hosts.two.engine.dtype",
        "hosts.two.engine.extra_args[0]",
        "hosts.two.engine.extra_args[2]",
    ]


def test_a_rule_broken_in_a_shared_layer_is_told_once_and_where_it_stands() -> None:
    (fault,) = refused(BASE.replace("release: r1", "release: r1\n    extra_args: [--seed, '1', --port, '3']")).faults
    assert fault.field == "defaults.engine.extra_args[2]"
    assert fault.line == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "a list"),
        ("just text\n", "text"),
        (b"version: 1\nhosts: \xff\n", "UTF-8"),
        ("version: 1\nhosts:\n\ta: b\n", "tab"),
        ("version: 1\nversion: 1\n", "duplicate"),
        ("version: 1\nhosts: *nowhere\n", "alias"),
        ("version: 1\nhosts: &a [*a]\n", ""),
        ("version: 1\nhosts: !!python/object:os.system x\n", "tag"),
        ("version: 1\nhosts: !secret {a: {address: h}}\n", "tag"),
        ("version: 1\nhosts: {a: {address: 'h\n", ""),
        ("version: 1\n---\nversion: 1\n", "second document"),
        ("version: 1\nhosts: \x07\n", "character"),
        ("version: 1\nhosts: {1: {address: h}}\n", "not text"),
        ("version: 1\nhosts: {}\n", "no hosts"),
        ("version: 1\nhosts:\n", "empty"),
        ("version: 1\n", "missing"),
        ("version: 1\nhosts: " + "[" * 2000, ""),
        ("version: 1\nhosts: " + "{a: " * 60 + "1" + "}" * 60, ""),
        ("version: " + "9" * 5000 + "\nhosts: {a: {address: h}}\n", ""),
    ],
    ids=range(21),
)
def test_what_is_no_plain_yaml_is_refused_with_a_reason(text: str | bytes, said: str) -> None:
    assert said in str(refused(text))


def test_aliases_that_explode_are_refused_quickly() -> None:
    lines = ["version: 1", "a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join(['*' + old] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    refused("\n".join(lines))


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ("{model: ''}", "engine.model"),
        ("{drafter: ''}", "engine.drafter"),
        ("{release: ''}", "engine.release"),
        ("{kind: sglang}", "engine.release"),
        ("{kind: vllm, release: ''}, spec: {algorithm: DDTREE}", "spec.algorithm"),
        ("{kind: vllm, release: ''}, spec: {topk_cap: 3}", "spec.topk_cap"),
        ("{kind: sglang, release: ''}, spec: {budget: auto}", "spec.budget"),
        ("{flags: {budget: --b}}", "engine.flags"),
        ("{dtype: int8}", "engine.dtype"),
        ("{device: tpu}", "engine.device"),
        ("{python: '/opt/my python'}", "engine.python"),
        ("{python: '/opt/$X'}", "engine.python"),
        ("{extra_args: [--port, '3']}", "engine.extra_args[0]"),
        ("{extra_args: ['--port=3']}", "engine.extra_args[0]"),
        ("{extra_args: [--speculative-ddtree-budget, '3']}", "engine.extra_args[0]"),
        ("{extra_args: [--api-key, s3cret]}", "engine.extra_args[0]"),
        ("{environment: {PYTHONPATH: /x}}", "engine.environment.PYTHONPATH"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(engine: str, field: str) -> None:
    assert refused(BASE.replace("spec: {budget: 64}", f"engine: {engine}")).faults[0].field.endswith(field)


def test_a_guard_that_would_undo_an_engine_still_allowed_to_load_is_refused() -> None:
    problem = refused(BASE.replace("spec: {budget: 64}", "ready: {timeout_seconds: 4000}"))
    assert problem.faults[0].field.endswith("guard.cap_seconds")


@pytest.mark.parametrize("name", ["one", "nobody", "tow"])
def test_a_reference_is_another_host_of_the_fleet_or_an_address(name: str) -> None:
    text = BASE.replace("address: 10.0.0.1", f"address: 10.0.0.1, prove: {{reference: {name}}}")
    assert refused(text).faults[0].field == "hosts.one.prove.reference"
    assert fleet(text.replace(f"reference: {name}", "reference: two")).hosts["one"].prove.reference == "two"
    assert fleet(text.replace(f"reference: {name}", "reference: 'http://10.0.0.9:1'"))


def test_one_machine_may_have_two_units_on_two_ports_only() -> None:
    same = BASE.replace("address: 10.0.0.2, groups: [fast, odd]", "address: 10.0.0.1, groups: [fast]")
    other_unit = same.replace("spec: {budget: 64}", "engine: {unit: b.service}")
    assert "port" in str(refused(other_unit))
    assert fleet(same.replace("spec: {budget: 64}", "engine: {unit: b.service, port: 30001}"))


def test_no_value_of_an_error_message_carries_a_secret_argument() -> None:
    assert "s3cret" not in str(refused(BASE.replace("spec: {budget: 64}", "engine: {extra_args: ['--api-key=s3cret']}")))


# ---------------------------------------------------------------- the shipped files
@pytest.mark.parametrize("name", ["example.yaml", "lab.yaml", "b300.yaml"])
def test_shipped_inventories_load(name: str) -> None:
    assert load((inventories_dir() / name).read_bytes(), name).hosts


def test_the_lab_has_three_hosts_with_the_ddtree_engine_on_the_processor() -> None:
    lab = load((inventories_dir() / "lab.yaml").read_bytes(), "lab.yaml")
    assert [(h.name, h.address) for h in lab.hosts.values()] == [(f"lab-0{n}", f"10.231.0.1{n}") for n in (1, 2, 3)]
    assert {(h.engine.kind, h.engine.device) for h in lab.hosts.values()} == {("ddtree", "cpu")}


def test_the_example_shows_every_key_there_is() -> None:
    from pydantic import BaseModel

    from ddops.inventory.model import SECTIONS, Rollout

    text = (Path(str(inventories_dir())) / "example.yaml").read_text()

    def keys(model: type[BaseModel]) -> list[str]:
        return [info.alias or name for name, info in model.model_fields.items()]

    wanted = [key for model in (*SECTIONS.values(), Rollout) for key in keys(model)]
    missing = [key for key in wanted if not re.search(rf"(^|[ {{]){key}:", text, re.MULTILINE)]
    assert not missing


def test_the_example_gives_the_default_where_it_does_not_say_example() -> None:
    from ddops.inventory import Guard, Ready, Ssh

    host = load((inventories_dir() / "example.yaml").read_bytes(), "example.yaml").hosts["gpu-01"]
    assert host.ready == Ready()
    assert host.guard == Guard()
    assert host.ssh.model_copy(update={"identity_file": None, "config": None}) == Ssh()


# ---------------------------------------------------------------- anything at all
@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_any_file_loads_or_is_refused(text: str | bytes) -> None:
    with contextlib.suppress(InventoryError):
        load(text, "f")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, BASE.count("\n") - 1),
    st.text(st.sampled_from("abz09 :-{}[]&*!|>'\"#%@`,?\t\n~<.=\\é\u2028\x85"), max_size=12),
)
def test_any_line_may_be_spoilt_without_a_traceback(number: int, spoilt: str) -> None:
    lines = BASE.split("\n")
    lines[number] += spoilt
    with contextlib.suppress(InventoryError):
        load("\n".join(lines), "f")
