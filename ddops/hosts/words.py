"""Turn an argument list into one command line for the host's shell. Pure; the only place that quotes.

It does not run anything. A command travels as one string (SSH has nothing else), so every word is
quoted here exactly once, and nowhere else in ddops.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ddops.errors import Refused

# The kernel takes at most 128 KiB in one argument, and sshd hands the whole line to `sh -c` as one.
LONGEST_COMMAND_BYTES = 131_071

_SUDO_WANTS_TTY = re.compile(r"^sudo: (sorry, )?you must have a tty", re.M)
_SUDO_REFUSALS = (
    re.compile(r"^sudo: a password is required", re.M),
    re.compile(r"^sudo: a terminal is required", re.M),
    _SUDO_WANTS_TTY,
    re.compile(r"is not in the sudoers file", re.M),
    re.compile(r"^Sorry, user \S+ is not allowed to execute", re.M),
    re.compile(r"^sudo: .*(no new privileges|must be owned by uid 0)", re.M),
)
_SUDO_MISSING = re.compile(r"sudo['’]?: (command )?not found|sudo['’]?: No such file", re.M)  # env, busybox, sh


@dataclass(frozen=True, slots=True)
class Script:
    """A small POSIX shell script and its arguments ($1, $2, ...). stdin stays free for data."""

    text: str
    args: tuple[str, ...] = ()
    name: str = "ddops"  # $0, shown in the shell's own error messages


def argv_of(command: Sequence[str] | Script) -> list[str]:
    """The argument list behind a command."""
    if isinstance(command, Script):
        return ["sh", "-c", command.text, command.name, *command.args]
    if isinstance(command, str):
        raise TypeError("a command is a list of words or a Script, never a string")
    return [str(word) for word in command]


def command_line(command: Sequence[str] | Script, *, sudo: bool, mark: str) -> str:
    """One line for the host's shell: every word quoted, LC_ALL=C, `sudo -n` in front when asked.

    A line `mark` is printed first: what comes before it was written by the login shell's own start-up
    files, and a login shell that runs no commands (nologin) never prints it. `env` sets the locale because
    it works in any login shell, and it stands before sudo because a sudoers line names the command itself
    (sudo lets LC_* through).

    Raises:
        ValueError: an empty command, a NUL byte, or more bytes than the kernel takes.
    """
    argv = argv_of(command)
    if not argv or not argv[0]:
        raise ValueError("a command needs at least one word")
    if any("\0" in word for word in argv):
        raise ValueError("a command cannot hold a NUL byte; send such data on stdin")
    prefix = ["env", "LC_ALL=C", *(["sudo", "-n", "--"] if sudo else [])]
    line = f"printf '%s\\n' {shlex.quote(mark)}; exec {shlex.join([*prefix, *argv])}"
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > LONGEST_COMMAND_BYTES:
        raise ValueError(f"a command of {size} bytes is over the host's limit; send the data on stdin")
    return line


def sudo_refusal(host: str, user: str, argv: Sequence[str], status: int, stderr: str) -> Refused | None:
    """What to raise when sudo itself said no, else None (the command ran and failed by itself)."""
    if status == 0:
        return None
    means = f"nothing was run as root on {host}"
    if status == 127 and _SUDO_MISSING.search(stderr):
        return Refused(f"sudo is not installed on {host}", means=means, hint="log in as root (ssh.user), or install sudo")
    if not any(pattern.search(stderr) for pattern in _SUDO_REFUSALS):
        return None
    said = next((line for line in stderr.splitlines() if line.strip()), "").strip()
    lacks, line = "a password", f"{user} ALL=(root) NOPASSWD: {argv[0]}"
    if _SUDO_WANTS_TTY.search(stderr):
        lacks, line = "a terminal", f"Defaults:{user} !requiretty"
    return Refused(
        f"sudo on {host} does not let {user} run {argv[0]} without {lacks} ({said})",
        means=f"{means}; ddops asks for no terminal and never sends a password",
        hint=f"add this line with visudo on {host}:  {line}",
    )
