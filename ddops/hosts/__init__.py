"""The only package that imports fabric and paramiko: log in, run one command, speak HTTP to the engine.

Effects only. One hop and one connection per host; the host key is always checked; every wait ends.
"""

from ddops.hosts.login import LoginRejected, Timings
from ddops.hosts.remote import Remote, connect
from ddops.hosts.session import OutputTooLarge, Result
from ddops.hosts.target import HostLike, SshLike
from ddops.hosts.words import Script

__all__ = [
    "HostLike",
    "LoginRejected",
    "OutputTooLarge",
    "Remote",
    "Result",
    "Script",
    "SshLike",
    "Timings",
    "connect",
]
