"""One command over the named hosts: its journal, its outputs, its signals and its exit code.

Every expected error becomes an outcome here. The first signal asks the running transaction to go back to
a safe state, the second leaves, and the host's own guard does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from ddops import journal as journals
from ddops import rollout, stops
from ddops.agent import Agent
from ddops.errors import DdopsError, Exit, Interrupted
from ddops.outcome import Outcome, Result, from_error

if TYPE_CHECKING:
    from ddops.inventory import Fleet, HostConfig

CONNECT_SECONDS = 30.0

Act = Callable[[Agent], Outcome]


class Session:
    """What one invocation of ddops is.

    Args:
        fleet: the whole inventory.
        hosts: the ones this command is about, in the inventory's order.
        command: as typed, for leases and ledgers.
        as_json: one JSON object on stdout instead of text.
        events, junit, report: files to write (events: "-" is stdout).
        quiet: no progress; for commands that only look.
    """

    def __init__(
        self,
        fleet: Fleet,
        hosts: list[HostConfig],
        command: str,
        *,
        as_json: bool = False,
        events: str | None = None,
        junit: str | None = None,
        report: str | None = None,
        quiet: bool = False,
    ) -> None:
        self.fleet = fleet
        self.hosts = hosts
        self.command = command
        self.run = journals.new_run_id()
        self.outcomes: list[Outcome] = []
        self._as_json = as_json
        self._outputs = journals.Outputs(as_json=as_json, events=events, junit=junit, report=report, quiet=quiet)
        self.journal = self._outputs.journal(self.run)
        self.journal.emit("run.started", command=command, hosts=[host.name for host in hosts])

    def ask(self, verb: str) -> None:
        """On a terminal, say what is about to happen and wait for a yes. A pipeline is never asked."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()) or self._as_json:
            return
        names = ", ".join(host.name for host in self.hosts)
        click.confirm(f"{verb} {names}?", abort=True, err=True)

    @contextmanager
    def connected(self, config: HostConfig) -> Iterator[Agent]:
        """One host over one connection, closed again whatever happens."""
        from ddops.hosts import connect

        def note(text: str) -> None:
            self.journal.emit("warning", host=config.name, text=text)

        deadline = max(CONNECT_SECONDS, config.ssh.connect_timeout_seconds)
        with self.journal.step(config.name, "connect"):
            remote = connect(config, deadline_seconds=deadline, on_note=note)
        with remote:
            yield Agent(remote, config, self.run, self.journal, self.fleet.hosts)

    def over(self, act: Act) -> None:
        """Change the hosts one after the other: the canary of each architecture first, none once a limit is met."""
        policy = rollout.policy(self.fleet.rollout)
        by_name = {host.name: host for host in self.hosts}
        with stops.stoppable():
            while isinstance(step := rollout.decide(self.hosts, self.outcomes, policy), rollout.Continue):
                if not self._all([by_name[step.hosts[0].name]], act):  # the rest of the batch is decided on anew
                    return
        if isinstance(step, rollout.Halt):
            self.journal.emit("halted", reason=step.reason, left=list(step.left))

    def each(self, act: Act) -> None:
        """Every host gets its turn, whatever becomes of the others: for commands that change no configuration."""
        with stops.stoppable():
            self._all(self.hosts, act)

    def _all(self, hosts: Sequence[HostConfig], act: Act) -> bool:
        """False when the operator has stopped it."""
        for config in hosts:
            self.outcomes.append(self._one(config, act))
            if self.outcomes[-1].result is Result.INTERRUPTED:
                return False
        return True

    def _one(self, config: HostConfig, act: Act) -> Outcome:
        agent: Agent | None = None
        try:
            stops.check()
            with self.connected(config) as agent:
                outcome = act(agent)
        except Interrupted as problem:
            outcome = _left(config, problem) if agent is not None and agent.armed else from_error(config.name, problem)
        except DdopsError as problem:
            outcome = from_error(config.name, problem)
        self.journal.emit("outcome", host=config.name, **outcome.to_dict())
        return outcome

    def finish(self, *, changes_exit: bool = False) -> NoReturn:
        """Write every output and leave with the run's exit code."""
        stops.ignore()
        code = rollout.exit_code(self.outcomes)
        if changes_exit and code is Exit.OK and any(outcome.facts.get("changes") for outcome in self.outcomes):
            code = Exit.CHANGES
        self.journal.emit("run.finished", exit=int(code))
        self._outputs.write()
        raise SystemExit(int(code))


def _left(config: HostConfig, stop: Interrupted) -> Outcome:
    """Stopped so often that nobody waited for the end; the host goes on without us."""
    return Outcome(
        config.name,
        Result.INTERRUPTED,
        f"{config.name}: left while a change was under way ({stop.what})",
        means="the host takes back by itself what is not confirmed; what it runs then is not proven",
        hint=f"ddops resume --host {config.name}",
        exit_override=stop.exit,
    )
