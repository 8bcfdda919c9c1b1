"""Answers recorded once on a host with speculation off, for the golden probe: made, kept on the host, read back.

They are bound to the engine, its release and its models: with any other they say nothing and are made anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddops import commands
from ddops.errors import DdopsError

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.engines import Settings
    from ddops.inventory import HostConfig
    from ddops.prove.client import EngineClient
    from ddops.prove.golden import Golden

ANSWERS = 5


def source(config: HostConfig) -> str:
    """What a recording was made with; only the same may be compared with it."""
    engine = config.engine
    return f"{config.name} {engine.kind} {engine.release} {engine.model} {engine.dtype or 'auto'}"


def read(agent: Agent) -> Golden | None:
    """The host's recording; None when there is none, it cannot be read, or it was made with something else."""
    from ddops.prove.golden import Golden

    text = agent.call(commands.golden(agent.unit)).stdout
    if not text.strip():
        return None
    try:
        found = Golden.from_json(text.decode())
    except ValueError as problem:
        agent.warn(f"the recorded answers cannot be read ({problem}); they will be made anew")
        return None
    return found if found.source == source(agent.config) else None


def make(agent: Agent, engine: EngineClient, settings: Settings) -> Golden | None:
    """Record answers with speculation off; None where this engine cannot switch it off for a request."""
    from ddops.prove import golden
    from ddops.prove.evidence import Level
    from ddops.prove.session import Session
    from ddops.prove.verdicts import Policy

    if settings.drafts and not engine.dialect.spec_switch:
        return None
    session = Session(engine, Level.QUICK, Policy())
    prompts = golden.reference_prompts(session, ANSWERS)
    made = golden.record(session, prompts, source=source(agent.config), mode="off" if settings.drafts else None)
    return made if made.takes else None


def keep(agent: Agent, made: Golden) -> None:
    """Keep a recording on the host; a host that cannot keep it is told of, and loses nothing else."""
    try:
        agent.call(commands.keep_golden(agent.unit, agent.run, made.to_json().encode()))
    except DdopsError as problem:
        agent.warn(f"the recorded answers could not be kept: {problem.what}")
