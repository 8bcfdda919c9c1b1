"""The command line: light, clear about mistakes, and never a traceback for one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

INVENTORY = """\
version: 1
hosts:
  b300-01: {address: 10.0.0.1, engine: {release: r1, model: models/target, drafter: models/drafter-b16}}
  b300-02: {address: 10.0.0.2, engine: {release: r1, model: models/target, drafter: models/drafter-b16}}
"""


def ddops(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("DDOPS_")}
    return subprocess.run(
        [sys.executable, "-m", "ddops", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=cleaned | {"HOME": str(cwd)} | environment,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return tmp_path


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, ddops.cli\n"
        "heavy = {'fabric', 'paramiko', 'pydantic', 'httpx', 'jinja2', 'wasmtime', 'rich', 'ruamel', 'torch'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["reconfig", "rollback", "verify", "adopt", "resume", "wait", "status", "history"])
def test_every_command_has_help(folder: Path, command: str) -> None:
    done = ddops(command, "--help", cwd=folder)
    assert done.returncode == 0
    assert "--host" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reconfig", "--budget", "0", "--host", "b300-01"], "whole number"),
        (["reconfig", "--budget", "-8", "--host", "b300-01"], "whole number"),
        (["reconfig", "--budget", "1e3", "--host", "b300-01"], "whole number"),
        (["reconfig", "--budget", "٣", "--host", "b300-01"], "whole number"),
        (["reconfig", "--topk-cap", "0", "--host", "b300-01"], "topk-cap"),
        (["reconfig", "--budget", "8", "--host", "b300-11"], "b300-01"),
        (["reconfig", "--budget", "8"], "--host"),
        (["reconfig", "--bugdet", "8", "--host", "b300-01"], "budget"),
        (["wait", "--host", "b300-01", "--timeout", "soon"], "duration"),
        (["probe", "--url", "ftp://x"], "http"),
        (["probe", "--url", "http://127.0.0.1:1", "--only", "nonsense"], "nonsense"),
        (["probe", "--url", "http://127.0.0.1:1", "--host", "b300-01"], "exclude"),
        (["probe", "--url", "http://127.0.0.1:1", "--save", "/nowhere/x.json"], "/nowhere"),
        (["probe", "--url", "http://127.0.0.1:1", "--reference", "notaurl"], "notaurl"),
        (["reconfig", "--level", "thorough", "--host", "b300-01"], "standard"),
        (["reconfig", "--detailed-exitcode", "--host", "b300-01"], "--dry-run"),
        (["logs", "--lines", "0", "--host", "b300-01"], "lines"),
        (["status", "b300-01"], "b300-01"),
        (["history", "--limit"], "--limit"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_mistake_on_the_command_line_is_exit_2_and_names_it(folder: Path, words: list[str], said: str) -> None:
    done = ddops(*words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    what, means, *_ = done.stderr.splitlines()
    assert what.startswith("error: "), done.stderr
    assert means.startswith("       no"), done.stderr
    assert "Usage:" not in done.stderr
    assert done.stdout == ""


def test_a_missing_inventory_says_where_it_looked(tmp_path: Path) -> None:
    done = ddops("status", cwd=tmp_path)
    assert done.returncode == 2
    assert "DDOPS_INVENTORY" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("version: 1\nhosts:\n  a: {address: 10.0.0.1, budgte: 3}\n", "3"),
        ("version: 1\nhosts:\n\ta: {}\n", "3"),
        ("version: 9\nhosts: {}\n", "1"),
        ("", ""),
        ("version: 1\nhosts:\n  a: {address: 10.0.0.1, ssh: {port: 99999}}\n", "3"),
    ],
)
def test_a_malformed_inventory_names_file_and_line(folder: Path, text: str, line: str) -> None:
    (folder / "inventory.yaml").write_text(text)
    done = ddops("reconfig", "--budget", "8", "--host", "a", cwd=folder)
    assert done.returncode == 2
    assert f"inventory.yaml:{line}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_host_ends_in_time_with_exit_6(folder: Path) -> None:
    text = INVENTORY.replace("10.0.0.1,", "127.0.0.1, ssh: {port: 1, connect_timeout_seconds: 2},")
    (folder / "inventory.yaml").write_text(text)
    begun = time.monotonic()
    done = ddops("reconfig", "--budget", "8", "--host", "b300-01", cwd=folder)
    assert done.returncode == 6, done.stderr
    assert time.monotonic() - begun < 50
    assert "Traceback" not in done.stderr


def test_the_inventory_command_lists_hosts_and_prints_a_valid_example(folder: Path) -> None:
    listed = ddops("inventory", cwd=folder)
    assert listed.returncode == 0
    assert "b300-02" in listed.stdout
    (folder / "inventory.yaml").write_text(ddops("inventory", "--example", cwd=folder).stdout)
    assert ddops("inventory", cwd=folder).returncode == 0


def test_a_probe_of_nothing_says_that_nothing_answers(folder: Path) -> None:
    done = ddops("probe", "--url", "http://127.0.0.1:1", "--engine", "sglang", "--only", "coding", cwd=folder)
    assert done.returncode == 6
    assert "nothing answers there" in done.stderr
    assert "died" not in done.stderr
    assert "Traceback" not in done.stderr


def test_probes_that_can_come_to_nothing_alone_are_found_without_any_host(folder: Path) -> None:
    (folder / "inventory.yaml").write_text(INVENTORY.replace("10.0.0.1,", "10.0.0.1, prove: {probes: [applied, rescore]},"))
    done = ddops("inventory", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "prove.probes: rescore sends nothing by itself" in done.stderr


def test_a_probe_that_does_not_exist_is_found_without_any_host(folder: Path) -> None:
    (folder / "inventory.yaml").write_text(INVENTORY.replace("10.0.0.1,", "10.0.0.1, prove: {probes: [codng]},"))
    for words in (["inventory"], ["verify", "--host", "b300-01"]):
        done = ddops(*words, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert "codng" in done.stderr


def test_what_only_looks_says_of_an_unreachable_host_what_and_what_to_do_once(folder: Path) -> None:
    text = INVENTORY.replace("10.0.0.1,", "127.0.0.1, ssh: {port: 1, connect_timeout_seconds: 2},")
    (folder / "inventory.yaml").write_text(text)
    for command in ("status", "history", "known", "logs", "doctor"):
        done = ddops(command, "--host", "b300-01", cwd=folder)
        assert done.returncode == 6, done.stderr
        said = done.stdout + done.stderr
        assert said.count("Connection refused") == 1, said
        assert said.count("ssh -v -p 1 root@127.0.0.1 true") == 1, said
        assert "nothing is known" not in said
