"""Fixtures for tests on real hosts: one lab per session (per xdist worker), clean hosts per test, evidence on failure.

Nothing here knows of ddops itself, only of `ddops.lab`.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddops.lab import Host, Lab, LabError, preflight, python_mounts
from ddops.lab.janitor import leftovers
from tests.lab.fleet import Operator

HOSTS = 3
# The one line an operator adds for logins that aren't root; hosts have the user `deploy` where sudo is installed.
SUDOERS = "deploy ALL=(root) NOPASSWD: /usr/local/lib/ddops/ddops-host"
_HERE = Path(__file__).parent
_EVIDENCE_CHARACTERS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """This machine can run labs. In CI that must be so, or a green run would have tried nothing."""
    obstacle = preflight()
    if obstacle is None:
        return
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(str(obstacle), pytrace=False)
    pytest.skip(str(obstacle))


@pytest.fixture(scope="session")
def lab_id() -> str:
    """Its own for every worker, so that nothing needs coordination."""
    return f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"


@pytest.fixture(scope="session")
def session_lab(lab_machine: None, lab_id: str) -> Iterator[Lab]:
    sudoers = SUDOERS if shutil.which("visudo", path="/usr/sbin:/usr/bin") else ""
    with Lab(HOSTS, id=lab_id, mounts=python_mounts(sys.executable), sudoers=sudoers) as lab:
        yield lab
    assert leftovers(lab_id) == []


@pytest.fixture
def lab(session_lab: Lab) -> Lab:
    """The session's lab, all faults undone. What earlier tests left in the hosts is still there: see `hosts`."""
    for host in session_lab.hosts:
        host.undo_faults()
    return session_lab


@pytest.fixture
def hosts(session_lab: Lab) -> list[Host]:
    """Three hosts as after their first boot: no faults, no units, files or journal of earlier tests."""
    session_lab.reset_touched()
    return session_lab.hosts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """A failed test shows the journal and the console of every host it used."""
    report = yield
    if report.failed and report.when in ("setup", "call"):
        for host in _hosts_of(item):
            for title, read in [("journal", host.journal), ("console", lambda h=host: h.lab.console_log(h.name))]:
                with contextlib.suppress(LabError, OSError):
                    report.sections.append((f"{title} of {host.name}", read()[-_EVIDENCE_CHARACTERS:]))
    return report


def _hosts_of(item: pytest.Item) -> list[Host]:
    labs = {id(value): value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Lab)}
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, list):
            labs.update({id(host.lab): host.lab for host in value if isinstance(host, Host)})
    return [host for lab in labs.values() for host in lab.hosts]


@pytest.fixture(scope="session")
def operator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operator")


@pytest.fixture
def operator(lab: Lab, operator_folder: Path) -> Operator:
    """Somebody with ddops and an inventory of the lab; hosts keep what earlier stories left verified on them."""
    return Operator(lab, operator_folder)
