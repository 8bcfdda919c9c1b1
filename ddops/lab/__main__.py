"""`python -m ddops.lab`: labs from the command line. Parses, calls one function, prints."""

# ruff: noqa: T201  (a command line: printing is what it is for)

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ddops.lab import janitor, launcher
from ddops.lab.lab import Lab
from ddops.lab.preflight import install_command, packages, preflight
from ddops.lab.pythons import python_mounts
from ddops.lab.spec import LabError, Spec, default_names
from ddops.lab.waiting import START_SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        do: Callable[[argparse.Namespace], int] = options.do
        return do(options)
    except LabError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nhint:  {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m ddops.lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: Callable[[argparse.Namespace], int], text: str, *, lab: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(do=do)
        if lab:
            sub.add_argument("--id", default="a", help="which lab (default: a)")
        return sub

    up = command("up", _up, "start a lab; in the foreground it ends with Ctrl-C, or with the shell", lab=True)
    up.add_argument("hosts", type=int, metavar="N", help="number of hosts")
    up.add_argument("--name", action="append", default=[], help="host name; as often as there are hosts")
    up.add_argument("--mount", action="append", default=[], help="path to show read-only in every host")
    up.add_argument("--python", action="store_true", help="show this Python, with all it consists of, in every host")
    up.add_argument("--tmpfs-size", default="512M", help="size of each host's disk (default: 512M)")
    up.add_argument("--sudoers", default="", help="a line for sudoers; hosts then have a login user deploy")
    up.add_argument("--detach", action="store_true", help="return when the hosts are ready; end it with down")
    command("wait", _wait, "wait until every host answers on port 22", lab=True)
    run = command("exec", _exec, "run a command of this machine in the lab's network", lab=True)
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    ssh = command("ssh", _ssh, "ssh to a host as root", lab=True)
    ssh.add_argument("host")
    ssh.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    command("down", _down, "end a lab and wait until nothing is left of it", lab=True)
    command("sweep", _sweep, "clean up after labs whose clean-up was killed", lab=False)
    left = command(
        "leftovers", _leftovers, "list labs, and what is left of those that have ended; exit 1 if anything is", lab=False
    )
    left.add_argument("--id", help="of this lab only")
    check = command("preflight", _preflight, "say whether a lab can run here, and if not, what helps", lab=False)
    check.add_argument("--packages", action="store_true", help="print the Debian packages that a lab needs")
    check.add_argument("--fix-command", action="store_true", help="print the command that installs them")
    return parser


def _up(options: argparse.Namespace) -> int:
    names = tuple(options.name) or default_names(options.hosts)
    if len(names) != options.hosts:
        raise LabError(f"{options.hosts} hosts need {options.hosts} names, not {len(names)}")
    mounts = [*options.mount, *(python_mounts(sys.executable) if options.python else ())]
    if options.detach:
        size = options.tmpfs_size
        lab = Lab(id=options.id, names=names, mounts=mounts, tmpfs_size=size, sudoers=options.sudoers)
        lab.start(tied=False)
        print("\n".join(f"{host.name} {host.address}" for host in lab.hosts))
        print(f"identity_file {lab.identity_file}\nknown_hosts {lab.known_hosts}\npython {sys.executable}")
        return 0
    obstacle = preflight(sudo=bool(options.sudoers))
    if obstacle is not None:
        raise LabError(str(obstacle))
    janitor.sweep()
    spec = Spec(options.id, names, tuple(mounts), options.tmpfs_size, options.sudoers)
    return launcher.run(spec, tied_to=os.getppid())


def _wait(options: argparse.Namespace) -> int:
    for host in Lab.attach(options.id, timeout=START_SECONDS).hosts:
        host.wait_ssh()
    return 0


def _exec(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise LabError("exec needs a command: python -m ddops.lab exec --id ID -- COMMAND")
    words = [*Lab.attach(options.id).enter(), *argv]
    os.execvp(words[0], words)  # in our place, so that signals reach the command itself and nobody else


def _ssh(options: argparse.Namespace) -> int:
    lab = Lab.attach(options.id)
    return subprocess.call([*lab.enter(), "ssh", "-F", lab.ssh_config, options.host, *options.argv])


def _down(options: argparse.Namespace) -> int:
    Lab.attach(options.id).stop()
    return 0


def _sweep(_: argparse.Namespace) -> int:
    for lab_id in janitor.sweep():
        print(f"swept {lab_id}")
    return 0


def _leftovers(options: argparse.Namespace) -> int:
    running = janitor.alive()
    found = {lab: what for lab, what in janitor.remains().items() if options.id in (None, lab)}
    for lab in sorted(found):
        print(f"running: {lab}" if lab in running else "\n".join(f"left: {what}" for what in found[lab]))
    return 1 if set(found) - set(running) else 0


def _preflight(options: argparse.Namespace) -> int:
    if options.packages or options.fix_command:
        print(" ".join(packages()) if options.packages else install_command(packages()))
        return 0
    obstacle = preflight()
    print(obstacle or "a lab can run here")
    return 1 if obstacle else 0


if __name__ == "__main__":
    sys.exit(main())
