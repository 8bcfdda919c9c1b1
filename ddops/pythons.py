"""Can the host's own Python run the engine? Asked before anything is started with it; it installs nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddops import commands
from ddops.errors import Refused

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.journal import Journal


def check(agent: Agent, journal: Journal) -> None:
    """Can the host's own Python run the engine?

    Raises:
        Refused: it cannot; says what is missing and the command that makes such a Python.
    """
    engine = agent.config.engine
    command = commands.python_check(engine.python, f"{engine.releases_dir}/{engine.release}")
    result = agent.remote.run(command.argv, deadline=command.deadline_seconds, sudo=False)
    try:
        report = json.loads(result.stdout.decode(errors="replace"))
    except ValueError:
        report = {"ok": False, "missing": [result.stderr.decode(errors="replace").strip()[-200:]]}
    if report.get("ok"):
        text = f"{engine.python}: Python {report.get('python')}, torch {report.get('torch')}"
        journal.emit("python", host=agent.config.name, text=text, report=report)
        return
    wrong = [str(item) for item in (*report.get("missing", []), *report.get("problems", []))]
    missing = ", ".join(wrong) or f"exit status {result.status}"
    raise Refused(
        f"{agent.config.name}: {engine.python} cannot run the engine: {missing}",
        means="the engine uses the host's own Python; nothing was started",
        hint="python3 -m venv /opt/ddtree/python && /opt/ddtree/python/bin/pip install torch numpy safetensors "
        "tokenizers jinja2 starlette uvicorn prometheus-client pydantic; then engine.python: /opt/ddtree/python/bin/python",
    )
