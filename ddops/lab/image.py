"""The files a host starts from: one read-only layer shared by all hosts, made from this machine's own /usr and /etc.

Not an overlay of the machine's `/`: that would show /root, /home and keys to the hosts and boot every service of the
machine. /usr is shown as it is; /etc gets a short list of harmless entries; users, units and sshd are our own.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ddops.lab.spec import OPERATOR, HostSpec, LabError, Spec, State

DEPLOY = "deploy"
_DEPLOY_ID = 1000
_PLAIN_DIRECTORIES = (
    "usr", "etc/ssh", "etc/systemd/system", "etc/systemd/journald.conf.d", "etc/systemd/system.conf.d",
    "etc/systemd/system-generators", "var/log/journal", "var/lib", "var/cache", "var/spool", "var/tmp",
    "proc", "sys", "dev", "run", "tmp", "root/.ssh", "home", "opt", "srv", "mnt",
)  # fmt: skip
_FROM_THE_MACHINE = (
    "alternatives", "bash.bashrc", "ca-certificates.conf", "dbus-1", "debian_version", "default",
    "environment", "host.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
    "localtime", "login.defs", "os-release", "pam.conf", "pam.d", "profile", "profile.d", "protocols",
    "python3", "security", "services", "shells", "skel", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip

# The vendor's units that a host boots. All others that would be pulled in are masked: a list of what to keep holds for
# systemd versions to come, a list of what to leave out does not.
_BOOTED = re.compile(
    r"systemd-journald?([-.].*)?|systemd-journal-flush\.service|systemd-user-sessions\.service"
    r"|systemd-tmpfiles-(setup|setup-dev|setup-dev-early)\.service|systemd-tmpfiles-clean\.timer"
    r"|systemd-initctl\.socket|dbus(-broker)?\.(socket|service)|.*\.target|.*\.slice"
)
_NEVER = (
    "systemd-networkd.service", "systemd-resolved.service", "systemd-timesyncd.service",
    "systemd-remount-fs.service", "systemd-udevd.service", "systemd-udevd-kernel.socket",
    "systemd-udevd-control.socket", "apparmor.service", "e2scrub_reap.service", "dev-hugepages.mount",
    "dev-mqueue.mount", "systemd-journal-catalog-update.service", "systemd-update-utmp.service",
)  # fmt: skip

_SSHD_CONFIG = """\
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
MaxSessions 100
PrintMotd no
Subsystem sftp internal-sftp
"""
_SSH_UNIT = """\
[Unit]
Description=sshd of the lab host
[Service]
ExecStart=/usr/sbin/sshd -D -e
ExecReload=/bin/kill -HUP $MAINPID
RuntimeDirectory=sshd
KillMode=process
Restart=always
RestartSec=200ms
"""
_MULTI_USER = """\
[Unit]
Description=Multi-User System
Requires=basic.target
After=basic.target
AllowIsolate=yes
"""
_JOURNALD = "[Journal]\nStorage=persistent\nSystemMaxUse=16M\nRateLimitBurst=0\nSyncIntervalSec=1s\n"
_MANAGER = "[Manager]\nDefaultTimeoutStopSec=10s\n"
_NSSWITCH = "passwd: files systemd\ngroup: files systemd\nshadow: files\nhosts: files dns\nservices: files\n"
# The machine's PAM rules may want logind or a login keyring; sudo in a host asks sudoers only.
_PAM_SUDO = "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "password", "session"))


def build(layer: Path, spec: Spec, state: State) -> None:
    """Make the shared layer below `layer` (an empty directory on the lab's tmpfs)."""
    _skeleton(layer)
    _users(layer, Path(f"{state.identity_file}.pub"), with_deploy=bool(spec.sudoers))
    _units(layer / "etc/systemd/system")
    _generators(layer / "etc/systemd/system-generators")
    _write(layer / "etc/ssh/sshd_config", _SSHD_CONFIG + _penalties())
    _write(layer / "etc/systemd/journald.conf.d/ddlab.conf", _JOURNALD)
    _write(layer / "etc/systemd/system.conf.d/ddlab.conf", _MANAGER)
    _write(layer / "etc/hosts", hosts_file(spec.hosts))
    if spec.sudoers:
        _sudo(layer / "etc", spec.sudoers)


def hosts_file(hosts: Iterable[HostSpec]) -> str:
    lines = ["127.0.0.1 localhost", f"{OPERATOR} operator", *(f"{h.address} {h.name}" for h in hosts)]
    return "\n".join(lines) + "\n"


def personalise(upper: Path, host: HostSpec, state: State) -> None:
    """What differs from host to host: name, machine id and host key, written to the host's own layer."""
    (upper / "etc/ssh").mkdir(parents=True)
    _write(upper / "etc/hostname", host.name + "\n")
    _write(upper / "etc/machine-id", os.urandom(16).hex() + "\n", 0o444)
    key = state.host_key(host.name)
    _write(upper / "etc/ssh/ssh_host_ed25519_key", key.read_text(), 0o600)
    _write(upper / "etc/ssh/ssh_host_ed25519_key.pub", Path(f"{key}.pub").read_text())


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)


def _skeleton(layer: Path) -> None:
    for name in _PLAIN_DIRECTORIES:
        (layer / name).mkdir(parents=True, exist_ok=True)
    for link in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):  # merged /usr: Debian >= 12, Ubuntu >= 20.04
        if os.path.islink(f"/{link}"):
            (layer / link).symlink_to(os.readlink(f"/{link}"))
    (layer / "var/run").symlink_to("/run")
    (layer / "var/lock").symlink_to("/run/lock")
    for path, mode in [("tmp", 0o1777), ("var/tmp", 0o1777), ("root/.ssh", 0o700), ("root", 0o711)]:
        (layer / path).chmod(mode)  # /root: services without root may run an interpreter mounted below it
    for name in _FROM_THE_MACHINE:
        _copy(Path("/etc", name), layer / "etc" / name)
    for name in ("fstab", "resolv.conf"):
        _write(layer / "etc" / name, "")
    _write(layer / "etc/nsswitch.conf", _NSSWITCH)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif os.path.lexists(source):
            shutil.copy2(source, target, follow_symlinks=False)
    except (PermissionError, shutil.Error):
        return  # without root some entries can't be read: the hosts do without


def _users(layer: Path, public_key: Path, *, with_deploy: bool) -> None:
    """The machine's system users only (its people are none of the hosts' business), nobody with a password."""
    etc = layer / "etc"
    users = [line for line in Path("/etc/passwd").read_text().splitlines() if _is_system(line)]
    groups = [line for line in Path("/etc/group").read_text().splitlines() if _is_system(line)]
    groups = [re.sub(r":[^:]*$", ":", line) for line in groups]
    if with_deploy:
        users.append(f"{DEPLOY}:x:{_DEPLOY_ID}:{_DEPLOY_ID}::/home/{DEPLOY}:/bin/bash")
        groups.append(f"{DEPLOY}:x:{_DEPLOY_ID}:")
    _write(etc / "passwd", "\n".join(users) + "\n")
    _write(etc / "group", "\n".join(groups) + "\n")
    shadow = [f"{line.split(':')[0]}:*:19000:0:99999:7:::" for line in users]
    _write(etc / "shadow", "\n".join(shadow) + "\n", 0o600)
    _write(layer / "root/.ssh/authorized_keys", public_key.read_text(), 0o600)
    if with_deploy:
        _deploy_home(layer / "home" / DEPLOY, public_key)


def _is_system(line: str) -> bool:
    fields = line.split(":")
    return len(fields) > 3 and fields[2].isdigit() and (int(fields[2]) < 1000 or int(fields[2]) == 65534)


def _deploy_home(home: Path, public_key: Path) -> None:
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh").chmod(0o700)
    _write(home / ".ssh/authorized_keys", public_key.read_text(), 0o600)
    for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(path, _DEPLOY_ID, _DEPLOY_ID)


def _units(units: Path) -> None:
    """multi-user.target is our own, so that units enabled by a test come up after a reboot, and the vendor's do not."""
    wants = units / "multi-user.target.wants"
    wants.mkdir()
    _write(units / "multi-user.target", _MULTI_USER)
    (units / "default.target").symlink_to("multi-user.target")
    _write(units / "ssh.service", _SSH_UNIT)
    (wants / "ssh.service").symlink_to("../ssh.service")
    (wants / "systemd-logind.service").symlink_to("/dev/null")  # not at boot; D-Bus may still start it
    vendor = Path("/usr/lib/systemd/system")
    pulled_in = {u.name for w in vendor.glob("*.target.wants") for u in w.iterdir()} - {"systemd-logind.service"}
    for name in {u for u in pulled_in if not _BOOTED.fullmatch(u)} | set(_NEVER):
        if not os.path.lexists(units / name):
            (units / name).symlink_to("/dev/null")


def _generators(masks: Path) -> None:
    """A host has no fstab, no serial consoles, no init scripts: no generator has anything to do, some do harm."""
    for generator in Path("/usr/lib/systemd/system-generators").glob("*"):
        (masks / generator.name).symlink_to("/dev/null")


def _penalties() -> str:
    """sshd >= 9.8 locks out addresses with many broken connections; tests break connections on purpose."""
    answer = subprocess.run(["ssh", "-V"], check=False, capture_output=True, text=True, timeout=10).stderr
    version = re.match(r"OpenSSH_(\d+)\.(\d+)", answer)
    newer = version is not None and (int(version[1]), int(version[2])) >= (9, 8)
    return "PerSourcePenalties no\n" if newer else ""


def _sudo(etc: Path, line: str) -> None:
    (etc / "sudoers.d").mkdir(exist_ok=True)
    _write(etc / "sudoers", f"Defaults env_reset, use_pty\nroot ALL=(ALL:ALL) ALL\n{line}\n", 0o440)
    visudo = ["visudo", "-cf", str(etc / "sudoers")]
    verdict = subprocess.run(visudo, check=False, capture_output=True, text=True, timeout=10)
    if verdict.returncode != 0:
        raise LabError(f"sudoers line {line!r}: {verdict.stderr.strip()}")
    _write(etc / "pam.d/sudo", _PAM_SUDO)
