"""Unit files: what is written is what systemd reads, what can't be understood is refused, and amendments keep bytes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ddops import units
from ddops.engines import PROFILES, Settings
from ddops.inventory import HostConfig, load
from ddops.units import UnitError, inventories_dir

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")

FLEET = """\
version: 1
hosts:
  one:
    address: 10.0.0.1
    engine: {release: r1, model: m, drafter: d, python: /usr/bin/env}
"""
SETTINGS = Settings("DDTREE", 16, 8, 4)


def config(extra: str = "") -> HostConfig:
    return load(FLEET + extra, "f").hosts["one"]


def unit_with(exec_start: str, service: str = "") -> bytes:
    return f"[Unit]\nDescription=x\n[Service]\nType=exec\n{service}ExecStart={exec_start}\n".encode()


# Everything a word may hold; line breaks, NUL and a last backslash are refused and tested on their own.
word = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\0"), max_size=30).map(
    lambda text: text.rstrip("\\")
)
nasty = st.text(st.sampled_from("ab$%{}\"'\\;:-@ \t=nx0"), max_size=20).map(lambda text: text.rstrip("\\"))


# ---------------------------------------------------------------- quoting, read back by our own parser
@settings(max_examples=400, deadline=None)
@given(st.lists(word | nasty, max_size=6))
@example([";", "$HOME", "${HOME}", "100%z", "%n", "a\\", "", "-x", "'", '"', "\\;", "$$", "%%", "a b", "\ta", "é\u2028"])
def test_arguments_survive_the_unit_file(words: list[str]) -> None:
    argv = ("/usr/bin/env", *[w for w in words if not w.endswith("\\")])
    assert units.parse(unit_with(units.exec_line(argv))).argv == argv


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), word | nasty, max_size=4))
def test_environment_survives_the_unit_file(variables: dict[str, str]) -> None:
    lines = "".join(f"Environment={units.env_quote(name, value)}\n" for name, value in variables.items())
    assert dict(units.parse(unit_with("/usr/bin/env", lines)).environment) == variables


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b", "a\\", "\\", "\ud800"])
def test_words_that_would_change_the_file_are_refused(bad: str) -> None:
    with pytest.raises(UnitError):
        units.exec_quote(bad)
    with pytest.raises(UnitError):
        units.env_quote("A", bad)


@pytest.mark.parametrize(
    "command", ["-/bin/x", "@/bin/x", "+/bin/x", "!/bin/x", ":/bin/x", "|/bin/x", "bin/x", "x", "", "/bin/", "/a b"]
)
def test_a_command_systemd_would_read_differently_is_refused(command: str) -> None:
    with pytest.raises(UnitError):
        units.exec_line([command])


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B"])
def test_a_variable_needs_a_name(name: str) -> None:
    with pytest.raises(UnitError):
        units.env_quote(name, "x")


# ---------------------------------------------------------------- read back by systemd itself
def verify(text: bytes, folder: Path, name: str = "engine.service") -> tuple[int, str]:
    file = folder / name
    file.write_bytes(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def as_systemd_reads(text: bytes, folder: Path) -> tuple[list[str], list[str]]:
    """ExecStart words and Environment= assignments as systemd's own parser has them (from verify's debug dump)."""
    file = folder / "engine.service"
    file.write_bytes(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(file)],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"SYSTEMD_LOG_LEVEL": "debug", "LC_ALL": "C.UTF-8"},
    )
    dump = done.stdout.decode()
    command = re.search(r"^\s*Command Line: (.*)$", dump, re.MULTILINE)
    assert command is not None, dump
    environment = re.findall(r"^\s*Environment: ([^\n]*)$", dump, re.MULTILINE)
    return unquoted(command[1]), environment


def unquoted(line: str) -> list[str]:
    """Undo the quoting systemd prints with: "" around a word, a backslash before \" \\ ` and $, C escapes."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    plain = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

    def one(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 8)) if code.isdigit() else chr(int(code[1:], 16)) if len(code) > 1 else plain.get(code, code)

    return [re.sub(r"\\([0-7]{3}|x[0-9a-f]{2}|.)", one, quoted or bare) for quoted, bare in words]


@needs_systemd
@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(words=st.lists(word | nasty, min_size=1, max_size=12))
@example(
    words=[
        ";",
        "$HOME",
        "${HOME}",
        "100%z",
        "%n",
        "",
        "-x",
        "'",
        '"',
        "$$",
        "%%",
        "a b",
        "\ta",
        "é\u2028",
        "\\x",
        "50%",
    ]
)
def test_systemd_accepts_every_rendered_line_without_a_word(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unit")
    text = unit_with(units.exec_line(["/usr/bin/env", *words]), f"Environment={units.env_quote('A', words[0])}\n")
    assert verify(text, folder) == (0, "")


# What `verify` prints back without loss: it escapes other control characters and C1 ones in ways of its own.
printable = st.text(
    st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc", "Cf", "Co", "Cn", "Zl", "Zp", "Zs"))
    | st.sampled_from(" \t$%\"'\\;{}-@:x0"), max_size=20,
).map(lambda text: text.rstrip("\\"))  # fmt: skip


@needs_systemd
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(words=st.lists(printable, min_size=1, max_size=12))
@example(words=[";", "$HOME", "${HOME}", "100%z", "%n", "", "-x", "'", '"', "$$", "%%", "a b", "\ta", "é", "\\x", "50%"])
def test_systemd_reads_just_the_words_that_were_rendered(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unit")
    text = unit_with(units.exec_line(["/usr/bin/env", *words]), f"Environment={units.env_quote('A', words[0])}\n")
    read, environment = as_systemd_reads(text, folder)
    # Variables are expanded at start only, so `$$` still stands in the dump.
    assert [word.replace("$$", "$") for word in read] == ["/usr/bin/env", *words]
    assert environment == [f"A={words[0]}"]


@needs_systemd
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(line=st.text(st.sampled_from("ab \\\"'%$;n\t#"), max_size=16))
@example(line="a'b c'd \\x41\\101 \\; %% \\\n # c \\\n b")
def test_our_parser_and_systemds_agree_on_any_line_we_take(line: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = unit_with("/usr/bin/env " + line.replace("$", "$$"))
    try:
        ours = units.parse(text).argv
    except UnitError:
        return
    theirs, _ = as_systemd_reads(text, tmp_path_factory.mktemp("unit"))
    assert [word.replace("$$", "$") for word in theirs] == list(ours)


@needs_systemd
@pytest.mark.parametrize(
    "line", ["/usr/bin/env 'a", "/usr/bin/env \\q", "/usr/bin/env 100%z", "/usr/bin/env a ; /usr/bin/env b"]
)
def test_what_systemd_complains_about_our_parser_does_not_take_either(line: str, tmp_path: Path) -> None:
    code, said = verify(unit_with(line), tmp_path)
    assert code != 0 or said
    if "%z" not in line:  # systemd's own complaint about an unknown specifier depends on its version
        with pytest.raises(UnitError):
            units.parse(unit_with(line))


@needs_systemd
@pytest.mark.parametrize("name", ["example.yaml", "lab.yaml", "b300.yaml"])
def test_rendered_units_of_the_shipped_inventories_pass_systemds_own_check(name: str, tmp_path: Path) -> None:
    for host in load((inventories_dir() / name).read_bytes(), name).hosts.values():
        engine = host.engine.model_copy(update={"python": "/usr/bin/env", "user": None})
        unit = units.render(host.model_copy(update={"engine": engine}), SETTINGS)
        assert verify(unit.text, tmp_path, unit.name) == (0, "")


@needs_systemd
def test_the_fence_passes_systemds_own_check(tmp_path: Path) -> None:
    unit = units.render(config(), SETTINGS)
    drop_in = tmp_path / f"{unit.name}.d"
    drop_in.mkdir()
    (drop_in / units.FENCE_NAME).write_bytes(units.fence(config(), ["10.0.0.1", "fe80::1%eth0"]))
    assert verify(unit.text, tmp_path, unit.name) == (0, "")


# ---------------------------------------------------------------- rendering
@pytest.mark.parametrize("kind", list(PROFILES))
def test_a_rendered_unit_runs_the_arguments_of_its_profile(kind: str) -> None:
    release = "r1" if kind == "ddtree" else ""
    host = load(FLEET.replace("release: r1", f"kind: {kind}, release: '{release}'"), "f").hosts["one"]
    tuning = SETTINGS if kind != "vllm" else Settings("DFLASH", 7, None, 4)
    unit = units.render(host, tuning)
    parsed = units.parse(unit.text, unit.name)
    assert list(parsed.argv) == PROFILES[kind].argv(host.engine, tuning)
    assert units.settings(unit, host) == tuning
    assert parsed.value("Service", "Type") == ("notify" if kind == "ddtree" else "exec")
    assert parsed.value("Service", "KillMode") == "control-group"
    assert parsed.value("Service", "Restart") == "always"
    assert parsed.value("Install", "WantedBy") == "multi-user.target"
    assert units.is_ours(unit.text)


def test_the_same_input_gives_the_same_bytes_and_another_budget_does_not() -> None:
    first, again, other = (units.render(config(), s) for s in (SETTINGS, SETTINGS, Settings("DDTREE", 17, 8, 4)))
    assert first == again
    assert first.digest != other.digest
    assert units.digest(first.text) == first.digest


def test_two_hosts_with_the_same_settings_have_the_same_unit() -> None:
    both = load(FLEET + FLEET.split("hosts:\n")[1].replace("one", "two").replace(".1", ".2"), "f").hosts
    assert units.render(both["one"], SETTINGS) == units.render(both["two"], SETTINGS)


def test_a_ddtree_unit_runs_the_release_and_leaves_no_caches_in_it() -> None:
    parsed = units.parse(units.render(config(), SETTINGS).text)
    assert parsed.value("Service", "WorkingDirectory") == "/opt/ddtree/releases/r1"
    assert parsed.environment["PYTHONPATH"] == "/opt/ddtree/releases/r1"
    assert parsed.environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_a_start_may_take_as_long_as_ddops_waits_for_it() -> None:
    host = config("    ready: {timeout_seconds: 500}\n")
    assert int(units.parse(units.render(host, SETTINGS).text).value("Service", "TimeoutStartSec")) > 500


def test_a_key_file_is_a_credential_and_its_content_is_nowhere() -> None:
    host = load(FLEET.replace("release: r1", "release: r1, api_key_file: /etc/ddtree/key"), "f").hosts["one"]
    parsed = units.parse(units.render(host, SETTINGS).text)
    assert parsed.values("Service", "LoadCredential") == ["api-key:/etc/ddtree/key"]
    assert "/run/credentials/ddtree-engine.service/api-key" in parsed.argv


@pytest.mark.parametrize("value", ["a b", "50% off", "$HOME", "a'b", 'a"b', "a\\b", "é", "%n"])
def test_awkward_values_from_the_inventory_reach_the_engine_unchanged(value: str) -> None:
    engine = config().engine.model_copy(update={"extra_args": ("--note", value), "environment": {"NOTE": value}})
    parsed = units.parse(units.render(config().model_copy(update={"engine": engine}), SETTINGS).text)
    assert parsed.argv[-2:] == ("--note", value)
    assert parsed.environment["NOTE"] == value


@pytest.mark.parametrize("field", ["user", "unit", "release", "api_key_file", "releases_dir"])
def test_no_value_can_start_a_new_directive(field: str) -> None:
    engine = config().engine.model_copy(update={field: "/x\nExecStartPre=/bin/rm"})
    with pytest.raises(UnitError):
        units.render(config().model_copy(update={"engine": engine}), SETTINGS)


def test_a_template_that_misses_a_value_is_an_error() -> None:
    import jinja2

    from ddops.units.render import _environment

    with pytest.raises(jinja2.UndefinedError):
        _environment().from_string("{{ nothing | value }}").render()


# ---------------------------------------------------------------- the fence
def test_the_fence_lets_in_this_host_and_what_the_inventory_names_and_makes_death_final() -> None:
    host = config("    fence: {allow: [10.1.0.0/24]}\n")
    lines = units.fence(host, ["10.0.0.1", "fe80::1%eth0", "10.0.0.1"]).decode().splitlines()
    assert "Restart=no" in lines
    assert "IPAddressDeny=any" in lines
    allowed = [line.partition("=")[2] for line in lines if line.startswith("IPAddressAllow=")]
    assert allowed == ["localhost", "10.0.0.1", "fe80::1", "10.1.0.0/24"]


def test_without_a_fence_death_is_still_final() -> None:
    text = units.fence(config("    fence: {enabled: false}\n"), ["10.0.0.1"]).decode()
    assert "Restart=no" in text
    assert "IPAddress" not in text


@pytest.mark.parametrize("address", ["any", "0.0.0.0/0", "x\nRestart=always", "", "10.0.0"])
def test_the_fence_takes_only_addresses(address: str) -> None:
    with pytest.raises(UnitError):
        units.fence(config(), [address])


# ---------------------------------------------------------------- reading what a person wrote
HAND_WRITTEN = """\
# our engine, do not touch
[Unit]
Description=SGLang; with DDTree

[Service]
Type=simple
User=ops
Environment=CUDA_VISIBLE_DEVICES=0,1 "NOTE=a b"
Environment=PORT=30000
ExecStart=/usr/bin/python3 -m sglang.launch_server \\
    # the model
    --model-path "/models/kimi k2" \\
    --speculative-algorithm DDTREE --speculative-draft-model-path '/d' \\
  ; another comment
    --speculative-ddtree-budget   8 --port ${PORT} \\
\t--max-running-requests=64
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
HAND_ARGV = (
    "/usr/bin/python3", "-m", "sglang.launch_server", "--model-path", "/models/kimi k2",
    "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "/d",
    "--speculative-ddtree-budget", "8", "--port", "30000",
    "--max-running-requests=64",
)  # fmt: skip


def test_a_hand_written_unit_is_understood() -> None:
    parsed = units.parse(HAND_WRITTEN.encode())
    assert parsed.argv == HAND_ARGV
    assert dict(parsed.environment) == {"CUDA_VISIBLE_DEVICES": "0,1", "NOTE": "a b", "PORT": "30000"}
    assert parsed.value("Service", "User") == "ops"
    assert PROFILES["sglang"].parse_argv(parsed.argv) == Settings("DDTREE", 8, None, 64)
    assert not units.is_ours(HAND_WRITTEN.encode())


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("/bin/x 'a b' c", ("/bin/x", "a b", "c")),
        ("/bin/x a'b c'd", ("/bin/x", "ab cd")),
        (r"/bin/x \x41\101\u00e9\s\t", ("/bin/x", "AAé \t")),
        (r"/bin/x \; a", ("/bin/x", ";", "a")),
        ('/bin/x ";" a', ("/bin/x", ";", "a")),
        ("/bin/x a;b", ("/bin/x", "a;b")),
        ("/bin/x %% %n %N %p", ("/bin/x", "%", "engine.service", "engine", "engine")),
        ("/bin/x 50%", ("/bin/x", "50%")),
        ("/bin/x $$A a$$b a$b", ("/bin/x", "$A", "a$b", "a$b")),
        ("-/bin/x a", ("/bin/x", "a")),
        ("!/bin/x a", ("/bin/x", "a")),
        (":/bin/x $A", ("/bin/x", "$A")),
        ("/bin/x $V ${V} x${V}y", ("/bin/x", "1", "2", "1 2", "x1 2y")),
        ("/bin/x  a \\\n  b", ("/bin/x", "a", "b")),
        ("/bin/x a \\\n# comment \\\n  b", ("/bin/x", "a", "b")),
        ("\nExecStart=/bin/x a", ("/bin/x", "a")),
        ("/bin/x \"\" ''", ("/bin/x", "", "")),
    ],
)
def test_systemds_grammar_is_followed(line: str, argv: tuple[str, ...]) -> None:
    assert units.parse(unit_with(line, 'Environment="V=1 2"\n')).argv == argv


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/bin/sh -c 'exec python -m sglang.launch_server'", "shell"),
        ("/usr/bin/bash /opt/start.sh", "shell"),
        ("/usr/bin/docker run --gpus all sglang", "Quadlet"),
        ("/usr/bin/podman start -a engine", "Quadlet"),
        ("/usr/bin/env docker run x", "Quadlet"),
        ("/usr/bin/sudo -u ops /bin/x", "User="),
        ("/bin/x a ; /bin/y b", "second command"),
        ("@/bin/x y", "begins with @"),
        ("/bin/x 'a", "never closed"),
        ("/bin/x 'a \\\n b'", "end of a line"),
        (r"/bin/x \q", "escape"),
        (r"/bin/x \x00", "no character"),
        ("/bin/x $NOWHERE", "NOWHERE"),
        ("/bin/x ${NOWHERE}", "NOWHERE"),
        ("/bin/x ${A:-b}", "variable"),
        ("/bin/x %h", "%h"),
        ("$BIN a", "variable"),
        ("/bin/a\nExecStart=/bin/b", "second ExecStart"),
        ("", "ExecStart"),
        ("/bin/x\nType=forking", "forking"),
        ("/bin/x\nType=oneshot", "oneshot"),
        ("/bin/x\nno assignment", "neither"),
        ("/bin/x\n[broken", "no section"),
        ("/bin/x\r", "carriage"),
        ("/bin/x \0", "NUL"),
    ],
)
def test_what_can_not_be_told_from_the_file_is_refused_with_the_reason(line: str, said: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse(unit_with(line))
    assert said in str(caught.value)
    assert "line" in caught.value.what or "ExecStart" in caught.value.what


@pytest.mark.parametrize("key", ["EnvironmentFile=/etc/x", "PassEnvironment=V", "UnsetEnvironment=V"])
def test_a_variable_that_another_file_could_change_is_not_certain(key: str) -> None:
    with pytest.raises(UnitError, match="V"):
        units.parse(unit_with("/bin/x $V", f"Environment=V=1\n{key}\n"))
    assert units.parse(unit_with("/bin/x a", f"{key}\n")).argv == ("/bin/x", "a")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[Service]\n", b"ExecStart=/bin/x\n", b"# only a comment"])
def test_files_that_are_no_service_unit_are_refused(text: bytes) -> None:
    with pytest.raises(UnitError):
        units.parse(text)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda t: unit_with(t.replace("\ud800", ""))))
def test_any_file_is_understood_or_refused(text: bytes) -> None:
    with contextlib.suppress(UnitError):
        units.parse(text)


# ---------------------------------------------------------------- amending
def changed_lines(old: bytes, new: bytes) -> list[str]:
    return [line for line in units.diff(old, new).splitlines()[2:] if line.startswith(("+", "-"))]


def test_an_amendment_changes_only_the_flags_words() -> None:
    argv = PROFILES["sglang"].amend(HAND_ARGV, Settings("DDTREE", 32, 8, 16))
    unit = units.amend(HAND_WRITTEN.encode(), argv, "sglang.service")
    assert unit.argv == tuple(argv)
    wanted = HAND_WRITTEN.replace("budget   8", "budget   32").replace(
        "requests=64", "requests=16 --speculative-ddtree-topk-cap 8"
    )
    assert unit.text.decode() == wanted


def test_an_amendment_to_the_same_arguments_keeps_every_byte() -> None:
    assert units.amend(HAND_WRITTEN.encode(), HAND_ARGV).text == HAND_WRITTEN.encode()


def test_switching_speculation_off_and_on_again_keeps_the_rest() -> None:
    profile = PROFILES["sglang"]
    off = units.amend(HAND_WRITTEN.encode(), profile.amend(HAND_ARGV, Settings("NONE", max_running=64)))
    assert b"speculative" not in off.text
    assert b"# the model" in off.text
    on = units.amend(off.text, profile.amend(off.argv, Settings("DDTREE", 8, None, 64), "/d"))
    assert profile.parse_argv(on.argv) == Settings("DDTREE", 8, None, 64)


def test_a_variable_that_holds_several_arguments_is_replaced_whole() -> None:
    text = unit_with("/bin/x --a 1 $OPTS --z", 'Environment="OPTS=--budget 8"\n')
    unit = units.amend(text, ["/bin/x", "--a", "1", "--budget", "32", "--z"])
    assert unit.text.endswith(b"ExecStart=/bin/x --a 1 --budget 32 --z\n")


def test_the_command_itself_is_never_amended() -> None:
    with pytest.raises(UnitError):
        units.amend(HAND_WRITTEN.encode(), ("/usr/bin/python4", *HAND_ARGV[1:]))
    with pytest.raises(UnitError):
        units.amend(HAND_WRITTEN.encode(), ())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(nasty, max_size=8),
    st.lists(nasty, max_size=8),
    st.lists(st.sampled_from([" ", "  ", " \\\n  ", "\t", " \\\n# c\n "]), min_size=9),
)
def test_any_arguments_can_be_amended_into_any_others(old: list[str], new: list[str], gaps: list[str]) -> None:
    quoted = [units.exec_quote(word) for word in old]
    line = "/bin/x" + "".join(gap + word for gap, word in zip(gaps, quoted, strict=False))
    text = b"# kept\n" + unit_with(line, "# kept, too\n") + b"\n[Install]\nWantedBy=x.target\n"
    assume(units.parse(text).argv == ("/bin/x", *old))
    unit = units.amend(text, ["/bin/x", *new])
    assert units.parse(unit.text).argv == ("/bin/x", *new)
    before, after = line.encode(), unit.text
    head, tail = text.split(before)[0], b"\n[Install]\nWantedBy=x.target\n"
    assert after.startswith(head)
    assert after.endswith(tail)


# ---------------------------------------------------------------- diffs
def test_a_diff_shows_the_flag_that_changed_and_nothing_else() -> None:
    old, new = units.render(config(), SETTINGS), units.render(config(), Settings("DDTREE", 32, 8, 4))
    lines = [line[1:].strip(" \\") for line in changed_lines(old.text, new.text) if "settings:" not in line]
    assert lines == ["--speculative-ddtree-budget 16", "--speculative-ddtree-budget 32"]
    assert units.diff(old.text, old.text) == ""
    shown = units.argv_diff(old.argv, new.argv)
    assert "-" + lines[0] in shown
    assert "+" + lines[1] in shown


SENTINEL = "S3NTINEL-9c1f"


@pytest.mark.parametrize(
    "line",
    [
        f"--api-key {SENTINEL}", f"--api-key={SENTINEL}", f"--api-key \\\n    {SENTINEL}", f'--api-key "{SENTINEL} x"',
        f"--enable-metrics --api-key {SENTINEL}", f"--hf-token {SENTINEL}", f"--admin-api-key {SENTINEL}",
        f"--x --password '{SENTINEL}'",
    ],
)  # fmt: skip
def test_secrets_are_masked_on_both_sides_of_a_diff(line: str) -> None:
    with_secret, without = unit_with(f"/bin/x {line}"), unit_with("/bin/x --other 1")
    for old, new in ((with_secret, without), (without, with_secret)):
        shown = units.diff(old, new)
        assert SENTINEL not in shown
        assert units.redact("***") in shown
        assert SENTINEL not in units.argv_diff(units.parse(old).argv, units.parse(new).argv)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "DB_PASSWORD", "APP_SECRET"])
def test_secret_variables_are_masked(name: str) -> None:
    text = unit_with("/bin/x", f'Environment="{name}={SENTINEL} and more"\nEnvironment={name}={SENTINEL}\n')
    shown = units.diff(text, unit_with("/bin/x"))
    assert SENTINEL not in shown
    assert "and more" not in shown


@pytest.mark.parametrize(
    "text", ["--num-speculative-tokens 15", "--api-key-file /etc/key", "--max-num-batched-tokens 8", "--tokenizer /t"]
)
def test_what_only_looks_like_a_secret_is_shown(text: str) -> None:
    assert units.redact(text) == text


# ---------------------------------------------------------------- where the files are
def test_templates_are_found_and_named_for_each_engine() -> None:
    names = {entry.name for entry in units.templates_dir().iterdir()}
    assert {f"{kind}.service.j2" for kind in PROFILES} | {"fence.conf.j2"} <= names


def test_templates_have_no_unquoted_value() -> None:
    for entry in units.templates_dir().iterdir():
        if entry.name.endswith(".j2"):
            for inside in re.findall(r"\{\{(.*?)\}\}", entry.read_text()):
                assert (
                    "| value" in inside
                    or "| env" in inside
                    or inside.strip() in ("exec_start", "start_seconds", "stop_seconds")
                )


@pytest.mark.parametrize(
    ("python", "hidden"),
    [
        ("/usr/bin/python3", True),
        ("/tmp/venv/bin/python", False),
        ("/var/tmp/v/bin/python", False),
        ("/tmpfs/bin/python", True),
    ],
)
def test_an_engine_that_lies_below_tmp_is_not_hidden_from_itself(python: str, hidden: bool) -> None:
    host = config()
    text = units.render(host.model_copy(update={"engine": host.engine.model_copy(update={"python": python})}), SETTINGS).text
    assert (b"PrivateTmp=yes" in text) is hidden
