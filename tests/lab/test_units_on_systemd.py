"""Units on a real systemd: the words, variables and hardening that were rendered are those a process really gets."""

import base64
from pathlib import PurePosixPath

from ddops import units
from ddops.engines import Settings
from ddops.inventory import HostConfig, load
from ddops.lab import Host

AWKWARD = [
    "a b", "", ";", "\\;", "$HOME", "${HOME}", "$$", "a$b", "100%", "100%z", "%n", "%%", "'", '"', "\\x", "a\\b",
    "-x", "@y", "é", "\u2028", "\t", "\x01", "\x7f", "{x}", "*", "~", "#", "a=b", "--flag=$X y",
]  # fmt: skip
INVENTORY = """\
version: 1
hosts:
  one:
    address: 10.0.0.1
    engine:
      release: r1
      model: m
      drafter: d
      extra_args: [--note, "50% of $HOME; 'quoted' \\\\ \\"twice\\""]
      environment: {NOTE: "50% of $HOME"}
"""
# Says it is ready and waits; it stands where the engine would.
STAND_IN = """\
import os, socket, time
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
    s.connect(os.environ["NOTIFY_SOCKET"]); s.send(b"STATUS=loading weights 41 %\\nREADY=1")
open(os.environ["XDG_CACHE_HOME"] + "/written", "w").close()
time.sleep(600)
"""


def _pid(host: Host, unit: str) -> str:
    return host.console(["systemctl", "show", unit, "-p", "MainPID", "--value"]).strip()


def _of_process(host: Host, pid: str, file: str) -> list[str]:
    raw = base64.b64decode(host.console(f"base64 -w0 /proc/{pid}/{file}"))
    return [word.decode(errors="surrogateescape") for word in raw.removesuffix(b"\0").split(b"\0")]


def _start(host: Host, name: str, text: bytes) -> None:
    host.write(f"/etc/systemd/system/{name}", text)
    host.console(f"systemctl daemon-reload && systemctl start {name}")


def test_a_process_gets_just_the_words_and_variables_that_were_written(hosts: list[Host]) -> None:
    words = [word for word in AWKWARD if not word.endswith("\\")]
    argv = ["/usr/bin/python3", "-c", "import time; time.sleep(600)", *words]
    variables = {f"V{number}": word for number, word in enumerate(words) if "\x01" not in word and "\x7f" not in word}
    lines = "".join(f"Environment={units.env_quote(name, value)}\n" for name, value in variables.items())
    text = f"[Service]\nType=exec\n{lines}ExecStart={units.exec_line(argv)}\n".encode()
    _start(hosts[0], "words.service", text)
    pid = _pid(hosts[0], "words.service")
    assert _of_process(hosts[0], pid, "cmdline") == argv
    environment = dict(line.split("=", 1) for line in _of_process(hosts[0], pid, "environ"))
    assert {name: environment.get(name) for name in variables} == variables
    assert units.parse(text).argv == tuple(argv)


def _config() -> HostConfig:
    return load(INVENTORY, "f").hosts["one"]


def _release(host: Host) -> PurePosixPath:
    package = PurePosixPath("/opt/ddtree/releases/r1/ddtree_engine")
    host.console(f"mkdir -p {package}")
    host.write(f"{package}/__init__.py", "")
    host.write(f"{package}/__main__.py", STAND_IN)
    return package


def test_a_rendered_unit_starts_with_all_its_hardening_and_runs_what_it_says(hosts: list[Host]) -> None:
    host, unit = hosts[0], units.render(_config(), Settings("DDTREE", 16, 8, 4))
    package = _release(host)
    _start(host, unit.name, unit.text)  # Type=notify: this returns once the stand-in has said READY=1
    pid = _pid(host, unit.name)
    assert _of_process(host, pid, "cmdline") == list(unit.argv)
    environment = dict(line.split("=", 1) for line in _of_process(host, pid, "environ"))
    assert environment["NOTE"] == "50% of $HOME"
    assert environment["PYTHONPATH"] == str(package.parent)
    shown = host.console(["systemctl", "show", unit.name, "-p", "StatusText,NeedDaemonReload,KillMode,Restart,FragmentPath"])
    assert "StatusText=loading weights 41 %" in shown
    assert "NeedDaemonReload=no" in shown
    assert "Restart=always" in shown
    assert host.console(f"ls /var/cache/{unit.name.removesuffix('.service')}").split() == ["written"]
    assert "__pycache__" not in host.console(f"ls {package}")


def test_the_fence_makes_a_death_final_and_lets_in_only_whom_it_names(hosts: list[Host]) -> None:
    host, unit = hosts[0], units.render(_config(), Settings("DDTREE", 16, 8, 4))
    _release(host)
    host.console(f"mkdir -p /run/systemd/system.control/{unit.name}.d")
    drop_in = units.fence(_config(), [host.address])
    host.write(f"/run/systemd/system.control/{unit.name}.d/{units.FENCE_NAME}", drop_in)
    _start(host, unit.name, unit.text)
    shown = host.console(["systemctl", "show", unit.name, "-p", "Restart,IPAddressAllow,IPAddressDeny"])
    assert "Restart=no" in shown
    assert "0.0.0.0/0" in shown
    assert f"{host.address}/32" in shown
    assert "127.0.0.0/8" in shown


def test_the_hosts_own_check_accepts_every_unit_that_is_rendered(hosts: list[Host]) -> None:
    unit = units.render(_config(), Settings("DDTREE", 16, 8, 4))
    hosts[0].write(f"/tmp/{unit.name}", unit.text)
    assert hosts[0].console(f"systemd-analyze verify --recursive-errors=no /tmp/{unit.name} 2>&1").strip() == ""
