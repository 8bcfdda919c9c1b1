"""JSON lines between the run and one arm; standard library only, since every peer has its own Python packages.

A worker reads {"do": NAME, ...} from standard input and answers {"ok": ...} or {"error": ...}. Whatever a library
prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], Any]


def settings() -> dict[str, Any]:
    """What the run passed on the command line."""
    return dict(json.loads(sys.argv[1]))


def serve(load: Callable[[], dict[str, Handler]]) -> None:
    """Load, say ready, then answer until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        handlers = load()
    except Exception as exc:
        traceback.print_exc()
        say({"error": f"{type(exc).__name__}: {exc}"})
        sys.exit(1)
    say({"ok": "ready"})
    for line in sys.stdin:
        call = json.loads(line)
        try:
            say({"ok": handlers[call["do"]](call)})
        except Exception as exc:
            traceback.print_exc()
            say({"error": f"{type(exc).__name__}: {exc}"})


def cut(token_ids: list[int], stops: list[int]) -> list[int]:
    """Up to and including the first stop token."""
    for i, token in enumerate(token_ids):
        if token in stops:
            return token_ids[: i + 1]
    return token_ids
