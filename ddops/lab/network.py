"""The lab's network: a bridge in the lab's own namespace, one virtual cable per host. Never the machine's network.

Were there a cable to the machine's namespace, a connect before the bridge exists, or after the lab has died, would
follow the machine's default route and leave it. Here it cannot, and no VPN or firewall rule of the machine interferes.
"""

import subprocess

from ddops.lab.spec import OPERATOR, HostSpec, LabError

BRIDGE = "br0"


def _ip(commands: list[str], *, in_namespace_of: int | None = None) -> None:
    enter = [] if in_namespace_of is None else ["nsenter", "-t", str(in_namespace_of), "-n"]
    script = "\n".join(commands) + "\n"
    result = subprocess.run(
        [*enter, "ip", "-batch", "-"], input=script, capture_output=True, text=True, timeout=30, check=False
    )
    if result.returncode != 0:
        raise LabError(f"ip: {result.stderr.strip()} (in: {'; '.join(commands)})")


def create() -> None:
    _ip(
        [
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"addr add {OPERATOR}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ]
    )


def plug(host: HostSpec, pid: int, *, bridge: str, up: bool) -> None:
    """A new cable from `bridge` into the network namespace of process `pid`, where it is called eth0."""
    _ip(
        [
            f"link add {host.interface} type veth peer name eth0 address {_mac(host)} netns {pid}",
            f"link set {host.interface} master {bridge}",
            *([f"link set {host.interface} up"] if up else []),
        ]
    )
    # No default route: a look-up of an address that isn't in the lab fails at once.
    _ip(["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"], in_namespace_of=pid)


def _mac(host: HostSpec) -> str:
    """The same at every boot, as a real network card's: others would go on sending to the address they have cached."""
    return f"02:dd:00:00:00:{int(host.address.rpartition('.')[2]):02x}"


def unplug(host: HostSpec) -> None:
    """Remove the cable: a host that is off answers nothing, not even with a reset."""
    subprocess.run(["ip", "link", "del", host.interface], capture_output=True, timeout=30, check=False)


def set_link(host: HostSpec, *, up: bool) -> None:
    _ip([f"link set {host.interface} {'up' if up else 'down'}"])


def detour(host: HostSpec, near: str, far: str) -> str:
    """Join two taps: `near` to the lab's bridge, `far` to a bridge of its own, which is returned."""
    bridge = detour_bridge(host)
    _ip(
        [
            f"link add {bridge} type bridge",
            f"link set {bridge} up",
            f"link set {near} master {BRIDGE}",
            f"link set {near} up",
            f"link set {far} master {bridge}",
            f"link set {far} up",
        ]
    )
    return bridge


def move(host: HostSpec, bridge: str) -> None:
    _ip([f"link set {host.interface} master {bridge}"])


def remove_detour(host: HostSpec) -> None:
    _ip([f"link del {detour_bridge(host)}"])


def detour_bridge(host: HostSpec) -> str:
    return f"{host.interface}-br"
