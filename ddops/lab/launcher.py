"""`up`: from a process on the machine to a running lab, and back to nothing however that process ends.

    caller <- watched by - launcher <- parent-death signal - unshare <- --kill-child - supervisor (PID 1 of the lab)

Mounts, interfaces and processes are all in the namespaces of the supervisor: when it dies, the kernel removes them.
What the kernel cannot remove (cgroup directories, the state directory) the janitor does: it waits for a lock that only
the lab's own processes hold. Should the janitor be killed too, `sweep` at the next start does its work.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import ddops
from ddops.lab import cgroups, janitor, linux
from ddops.lab.spec import LabError, Spec, State
from ddops.lab.waiting import START_SECONDS, until


def python(module: str, *arguments: str) -> list[str]:
    """Command line of one of the lab's own modules: no site-packages, nothing from the working directory."""
    # That the package has imported the module before it runs as a program is no fault of whoever started the lab.
    quiet = ["-W", "ignore::RuntimeWarning:runpy"]
    return [sys.executable, "-P", "-S", *quiet, "-m", f"ddops.lab.{module}", *arguments]


def environment() -> dict[str, str]:
    """For `python`: this very package, the system's own tools (no shims of version managers), no oddities."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    kept = {k: v for k, v in os.environ.items() if k in ("XDG_RUNTIME_DIR", "HOME", "LANG")}
    return {**kept, "PATH": path, "PYTHONPATH": str(Path(ddops.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}


def command(spec: Spec, *, tied_to: int | None) -> list[str]:
    """Command line that runs `spec`; see `run`."""
    return python("launcher", spec.dump(), str(tied_to or 0))


def run(spec: Spec, *, tied_to: int | None) -> int:
    """Run the lab until a signal, its own end, or the end of process `tied_to`; returns an exit status."""
    caller = _watch(tied_to)
    state = State.of(spec.id)
    lock = _acquire(state)
    state.spec.write_text(spec.dump())
    layout = cgroups.plan(spec.id)
    state.cgroups.write_text(layout.dump())
    janitor.start(state)
    cgroups.create(layout)
    _make_keys(state, spec)
    _write_ssh_files(state, spec)
    return _wait(_unshare(state, lock), caller)


def running(state: State) -> int | None:
    """The launcher's process id while the lab is alive, else None."""
    lock = janitor.take_lock(state.lock, create=False)
    if lock is not None:  # nobody holds it
        os.close(lock)
        return None
    try:
        pid = int(state.pid.read_text())
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None  # being started, or being cleaned up
    return pid


def _watch(pid: int | None) -> int | None:
    try:
        return None if pid is None else os.pidfd_open(pid)
    except ProcessLookupError:
        raise LabError("the process that started the lab has ended") from None


def _acquire(state: State) -> int:
    """The lab's lock, in a clean state directory. Raises LabError when a lab of that id is alive."""
    for _ in until(START_SECONDS, f"lab {state.id} is still being cleaned up"):
        if running(state) is not None:
            raise LabError(f"lab {state.id} is running; end it with: python -m ddops.lab down --id {state.id}")
        state.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = janitor.take_lock(state.lock, create=True)
        if lock is not None:
            janitor.remove_remains(state)
            state.pid.write_text(str(os.getpid()))
            os.set_inheritable(lock, True)
            return lock
    raise AssertionError("until() raises")


def _make_keys(state: State, spec: Spec) -> None:
    wanted = {state.identity_file: "operator", **{state.host_key(name): name for name in spec.names}}
    makers = [
        subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])
        for path, comment in wanted.items()
    ]
    if any(maker.wait(timeout=60) for maker in makers):
        raise LabError("ssh-keygen could not make the lab's keys")


def _write_ssh_files(state: State, spec: Spec) -> None:
    keys = ((host, Path(f"{state.host_key(host.name)}.pub").read_text().split()[:2]) for host in spec.hosts)
    state.known_hosts.write_text("".join(f"{host.name},{host.address} {' '.join(key)}\n" for host, key in keys))
    for user in ("root", "deploy") if spec.sudoers else ("root",):
        state.ssh_config(user).write_text(
            "".join(f"Host {h.name}\n  HostName {h.address}\n" for h in spec.hosts)
            + f"""
Host *
  User {user}
  IdentityFile {state.identity_file}
  IdentitiesOnly yes
  UserKnownHostsFile {state.known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
"""
        )


def _unshare(state: State, lock: int) -> subprocess.Popen[bytes]:
    rootless = os.geteuid() != 0
    user = ["--user", "--map-root-user", "--map-auto"] if rootless else []
    command = [
        "unshare", *user, "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child=KILL",
        "--mount-proc", "--propagation=private", "--",
        *python("supervisor", str(state.directory), "rootless" if rootless else "root"),
    ]  # fmt: skip
    launcher = os.getpid()

    def tie() -> None:
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)  # the launcher died before we could ask to be told

    return subprocess.Popen(
        command,
        env=environment(),
        cwd="/",
        stdin=subprocess.DEVNULL,
        pass_fds=[lock],
        preexec_fn=tie,  # noqa: PLW1509  (the launcher has one thread)
        process_group=0,
    )


def _wait(lab: subprocess.Popen[bytes], caller: int | None) -> int:
    ended = os.pidfd_open(lab.pid)
    signal_read, signal_write = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(signal_write, b"s"))
    watched = [ended, signal_read] + ([] if caller is None else [caller])
    ready = select.select(watched, [], [])[0]
    lab.kill()
    status = lab.wait()
    if ended not in ready:
        return 0
    return status if status > 0 else 1  # it was to run until somebody ended it


def main() -> int:
    """`python -m ddops.lab.launcher SPEC PID`"""
    try:
        return run(Spec.load(sys.argv[1]), tied_to=int(sys.argv[2]) or None)
    except LabError as exc:
        print(exc, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
