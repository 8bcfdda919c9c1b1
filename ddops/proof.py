"""Prove the engine that runs on a host: bound to its unit and its start, and to nothing else.

It runs the battery over the one connection and tells a broken connection from a broken engine. It never
starts, stops or records anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddops import recording, twins
from ddops.engines import Settings, profile_of
from ddops.errors import ConnectionLost, DdopsError, RemoteTimeout, UsageError
from ddops.plan import key as memory_key
from ddops.state import Observed
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.inventory import HostConfig
    from ddops.inventory import Prove as ProveSection
    from ddops.journal import Journal
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Baseline, Evidence, Verdict
    from ddops.prove.golden import Golden
    from ddops.prove.verdicts import Policy
    from ddops.readiness import Died

ATTEMPTS = 3  # of one battery, each after a lost connection


@dataclass(frozen=True, slots=True)
class Proof:
    """A verdict, what it is remembered by, and what was observed when it was reached."""

    verdict: Verdict
    key: dict[str, Any]
    observed: Observed
    settings: Settings
    golden: Golden | None = None  # answers recorded now, where the host had none; kept once the verdict counts
    death: Died | None = None  # what became of an engine that crashed in mid-proof

    @property
    def why(self) -> str:
        return f"{self.verdict.why}; {self.death.why}" if self.death else self.verdict.why

    @property
    def blames_host(self) -> bool:
        """Whether the end says nothing of the configuration: memory ran out, or somebody stopped the engine."""
        return self.death is not None and self.death.environment


@contextmanager
def client(agent: Agent) -> Iterator[EngineClient]:
    """The engine's HTTP, over the connection that is open already: no port is opened anywhere."""
    from ddops.prove.client import EngineClient

    engine = agent.config.engine
    with agent.remote.http(engine.port) as http:
        yield EngineClient(http, profile_of(engine), api_key=_api_key(agent), model=engine.served_model_name)


@contextmanager
def reference(agent: Agent) -> Iterator[EngineClient | None]:
    """The engine that scores answers where the proven one cannot; None where none is named, or none answers."""
    from ddops.hosts import connect
    from ddops.prove.client import EngineClient

    named = agent.config.prove.reference
    if named is None:
        yield None
    elif named.startswith(("http://", "https://")):
        with ExitStack() as stack:
            yield _at_address(agent, named, stack)
    else:
        other = agent.hosts[named]
        with ExitStack() as stack:
            try:
                remote = stack.enter_context(connect(other, deadline_seconds=other.ssh.connect_timeout_seconds))
                http = stack.enter_context(remote.http(other.engine.port))
            except DdopsError as problem:
                text = f"the reference {named} cannot be asked ({problem.what}); what only it can score is not scored"
                agent.warn(text)
                yield None
                return
            yield _living(agent, named, EngineClient(http, profile_of(other.engine)))


def _at_address(agent: Agent, named: str, stack: ExitStack) -> EngineClient | None:
    """Any engine with the same weights, whatever it speaks."""
    from ddops.endpoint import Address, connected

    if twins.same_place(named, address(agent.config)):
        agent.warn(_ITSELF.format(named))
        return None
    try:
        return stack.enter_context(connected(Address(named, option="prove.reference")))
    except DdopsError as problem:
        agent.warn(f"the reference {named} cannot be asked ({problem.what}); what only it can score is not scored")
        return None


_ITSELF = (
    "the reference {} is the engine that is proven: it proves nothing of itself; what only another can score is not scored"
)


def address(config: HostConfig) -> str:
    """Where others reach the engine of a host."""
    host = f"[{config.address}]" if ":" in config.address else config.address
    return f"http://{host}:{config.engine.port}"


def _another(agent: Agent, engine: EngineClient, scorer: EngineClient | None) -> EngineClient | None:
    """The reference, unless it is the proven engine by another name."""
    if scorer is None or not twins.same_process(engine, scorer):
        return scorer
    agent.warn(_ITSELF.format(agent.config.prove.reference))
    return None


def _living(agent: Agent, name: str, scorer: EngineClient) -> EngineClient | None:
    """A reference that does not answer must never be taken for a fault of the engine it should have scored."""
    if scorer.healthy(timeout=10.0):
        return scorer
    agent.warn(f"the reference {name} does not answer; what only it can score is not scored")
    return None


def only(config: HostConfig) -> frozenset[str] | None:
    """The probes the inventory restricts a proof to; None: all of the level's. Raises as `restricted`."""
    return restricted(config.prove.probes, f"{config.name}: prove.probes", means="nothing was done")


_OF_A_HOST = {"applied": "compares what runs with a host's unit", "golden": "compares with answers recorded on a host"}


def restricted(names: Sequence[str], what: str, *, means: str, on_host: bool = True) -> frozenset[str] | None:
    """The probes that are named, if they can come to anything; None: all of the level's.

    Args:
        what: what named them, for messages.
        on_host: False where only an address is known.

    Raises:
        UsageError: one does not exist, needs a host, or looks at replies that no other one asks for.
    """
    from ddops.prove.battery import PROBES
    from ddops.prove.stages import CLOSING

    for name in names:
        if name not in PROBES:
            raise UsageError(f"{what}: no probe is called {name!r}", means=means, hint=f"there are {', '.join(PROBES)}")
        if name in _OF_A_HOST and not on_host:
            raise UsageError(f"{what}: {name} {_OF_A_HOST[name]}", means=means, hint="probe the host itself: --host NAME")
    looking = {"served", *(probe for stage in CLOSING for probe in stage.probes)}
    looks = [name for name in names if name in looking]
    if looks and not set(names) - looking - {"applied"}:
        hint = f"name one that asks for replies as well, such as coding or copy; {looks[0]} then judges those"
        said = f"{what}: {looks[0]} sends nothing by itself: it looks at the other probes' replies"
        raise UsageError(said, means=means, hint=hint)
    return frozenset(names) or None


def _api_key(agent: Agent) -> str | None:
    """The key the engine asks for, read from the host's own file; it is masked wherever events go."""
    from ddops.journal import mask

    path = agent.config.engine.api_key_file
    if not path:
        return None
    result = agent.remote.run(["cat", "--", path], deadline=15.0, sudo=False)
    key = result.stdout.decode(errors="replace").strip()
    mask(key)
    return key or None


def prove(
    agent: Agent,
    unit: Unit,
    settings: Settings,
    invocation: str,
    journal: Journal,
    *,
    level: str,
    baseline: Baseline | None = None,
    check: Callable[[], None] = lambda: None,
) -> Proof:
    """Run the battery against what runs now.

    Args:
        unit: what should be running; compared with the loaded unit, the argv and the engine's own report.
        invocation: the start that counts.
        check: called between probes; raises to stop (a trial taken by the guard, an operator's Ctrl-C).

    Raises:
        whatever `check` raises; ConnectionLost when the host stays away; DdopsError otherwise.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            proof = _once(agent, unit, settings, invocation, journal, level, baseline, check)
            if proof.verdict.kind not in ("crashed", "inconclusive") or agent.remote.alive(timeout=5.0):
                return proof  # the connection held: what the battery says is about the engine
        except (ConnectionLost, RemoteTimeout):
            if attempt == ATTEMPTS:
                raise
        agent.look()  # reconnects, or raises when the host stays away
        check()
        journal.emit("warning", host=agent.config.name, text="the connection broke in mid-proof; proving anew")
    return proof


def _once(
    agent: Agent,
    unit: Unit,
    settings: Settings,
    invocation: str,
    journal: Journal,
    level: str,
    baseline: Baseline | None,
    check: Callable[[], None],
) -> Proof:
    from ddops.prove import applied, battery
    from ddops.prove.evidence import Level

    config = agent.config
    profile = profile_of(config.engine)
    observed = agent.look()

    def on_event(evidence: Evidence) -> None:
        journal.emit("probe", host=config.name, evidence=evidence.to_dict())
        check()

    with client(agent) as engine, reference(agent) as scorer:
        info = _report(engine)
        golden = recording.read(agent)
        same = applied.compare(unit, observed, info, profile, settings, invocation)
        scorer = _another(agent, engine, scorer)
        verdict = battery.run(
            engine,
            level=Level(level),
            policy=policy(config.prove, settings),
            baseline=baseline,
            applied=same,
            reference=scorer,
            golden=golden,
            only=only(config),
            on_event=on_event,
            digest=unit.digest,
            invocation=invocation,
        )
        made = recording.make(agent, engine, settings) if golden is None and verdict.kind == "pass" else None
    journal.emit("verdict", host=config.name, verdict=verdict.to_dict(replay=False))
    return Proof(verdict, memory_key(config, settings, observed, info), observed, settings, made)


def standing(agent: Agent, engine: EngineClient) -> tuple[Evidence | None, Golden | None]:
    """What a proof on a host has beside its traffic, for a look that changes nothing: whether what runs is what the
    unit says (None without a unit), and the recorded answers.

    Raises:
        Refused: the unit cannot be read.
    """
    from ddops import units
    from ddops.prove import applied

    observed, config = agent.look(), agent.config
    golden = recording.read(agent) if observed.script_digest else None
    on_trial = observed.trial is not None and observed.trial.open
    text = observed.trial_unit if on_trial else observed.etc_unit or observed.loaded_fragment
    if text is None:
        return None, golden
    unit = units.from_text(agent.unit, text)
    settings, start = units.settings(unit, config), observed.unit.invocation_id
    return applied.compare(unit, observed, _report(engine), profile_of(config.engine), settings, start), golden


def _report(engine: EngineClient) -> dict[str, Any] | None:
    """What the engine says of itself; an engine that has just died says nothing, and the battery finds that out."""
    from ddops.prove.wire import EngineError

    try:
        return engine.server_info()
    except EngineError:
        return None


def policy(prove: ProveSection, settings: Settings) -> Policy:
    """The inventory's `prove` section as the battery's policy."""
    from ddops.prove.verdicts import Gates, Policy

    sampling = prove.sampling
    return Policy(
        gates=Gates(**prove.gates.model_dump(by_alias=True)),
        max_running=settings.max_running,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
