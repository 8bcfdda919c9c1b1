"""Hosts with real systemd, sshd and journald on one machine, in namespaces, in about a second; for tests and the demo.

Only the standard library is used, and nothing of the rest of ddops. `spec` and `preflight` are where to start reading;
`launcher` says how a lab is held together and why nothing of it can be left behind.
"""

from ddops.lab.host import Host
from ddops.lab.lab import Lab
from ddops.lab.preflight import Obstacle, preflight
from ddops.lab.pythons import python_mounts
from ddops.lab.spec import LabError

__all__ = ["Host", "Lab", "LabError", "Obstacle", "preflight", "python_mounts"]
