"""Stage: the first few dozen tokens of the standard prompts. Gross damage shows here, whatever it does to the speed.

A corrupt engine often crawls, and a drafter that is never right makes every answer long: so that such a run ends within
seconds, the coding stage that follows asks for less when this one saw damage in most of its replies.
"""

from __future__ import annotations

from ddops.prove import alarms
from ddops.prove.evidence import Evidence
from ddops.prove.judging import Bench
from ddops.prove.session import Turn

GROSS = "gross damage"  # note for the coding stage
_TOKENS = 40


def glance_stage(bench: Bench) -> list[Evidence]:
    """No evidence of its own: its replies are rescored with all others."""
    turns = bench.session.send_items("glance", bench.session.make.standard(), max_tokens=_TOKENS, stream=True)
    bench.judge(turns)
    damaged = [t for t in turns if t.whole and _damaged(t)]
    bench.session.notes[GROSS] = 2 * len(damaged) > len(turns)
    return []


def _damaged(turn: Turn) -> bool:
    if turn.judged is not None:
        return turn.judged.wrong
    return bool(alarms.check(turn.text, prompt=turn.ask.messages[0][1], allow_empty=turn.item is None))
