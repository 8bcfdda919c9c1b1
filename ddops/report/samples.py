"""What was wrong, shown by one exchange: what was asked, what was expected, what came. Pure.

The requests and replies come with a probe's evidence (`replay`). Both are data from elsewhere: one line each,
shortened, without control characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddops.report.text import mapping, one_line, sequence

WIDTH = 160  # characters of a prompt or a reply
_BEFORE = 40  # of them before the place that matters

Turn = Mapping[str, Any]


def reason(evidence: Mapping[str, Any]) -> list[str]:
    """The detail of a probe that did not pass, where its own line says something else."""
    detail = one_line(evidence.get("detail") or "") if evidence.get("got") else ""
    return [_row("why", detail)] if detail else []


def exchange(evidence: Mapping[str, Any]) -> list[str]:
    """Its first wrong exchange; [] when the evidence keeps none."""
    turns = [mapping(turn) for turn in sequence(evidence.get("replay"))]
    turns = [turn for turn in turns if "text" in turn or turn.get("error")]
    if not turns:
        return []
    turn = next((turn for turn in turns if turn.get("ok") is False or turn.get("error")), turns[0])
    others = [other for other in turns if other is not turn]
    text, rival = str(turn.get("text") or ""), _rival(turn, others)
    rows = [("asked", one_line(_asked(turn), WIDTH)), ("expected", one_line(_expected(turn), WIDTH))]
    if rival is not None:
        there = _parting(text, rival)
        rows += [("came", _from(text, there)), ("and also", _from(rival, there))]
    else:
        rows.append(("came", _came(turn, text, others)))
    if turn.get("ok") is False and not evidence.get("detail"):
        rows.append(("found", one_line(turn.get("found") or "")))
    return [_row(name, said) for name, said in rows if said]


def _row(name: str, said: str) -> str:
    return f"{name:<8}  {said}"


def _asked(turn: Turn) -> str:
    """The last thing said to the engine; a prompt of bare ids has no words."""
    ask = mapping(turn.get("ask"))
    said = [pair[1] for pair in map(sequence, sequence(ask.get("messages"))) if len(pair) == 2]
    return str(said[-1] if said else ask.get("text") or "")


def _expected(turn: Turn) -> str:
    """In words what the reply is compared with; "" where only scores can tell."""
    expect = mapping(turn.get("expect"))
    if names := sequence(expect.get("functions")) or [expect[key] for key in ("function",) if expect.get(key)]:
        word = f", with {expect['mark']} in its first line" if expect.get("mark") else ""
        return f"code in which {', '.join(map(str, names))} gives the right values{word}"
    if ids := sequence(expect.get("ids")):
        return " ".join(map(str, ids))
    for key in ("mark", "number", "word"):
        if key in expect:
            return str(expect[key])
    return json.dumps(expect.get("object", expect), ensure_ascii=False, default=str) if expect else ""


def _came(turn: Turn, text: str, others: list[dict[str, Any]]) -> str:
    if turn.get("error"):
        return one_line(turn["error"], WIDTH)
    marks = [str(mark) for other in others for mark in sequence(other.get("marks"))]
    foreign = next((mark for mark in marks if mark in text and mark not in _asked(turn)), None)
    return _from(text, text.index(foreign) if foreign else 0)


def _rival(turn: Turn, others: list[dict[str, Any]]) -> str | None:
    """Another reply to the same prompt, where none is known to be wrong by itself."""
    if turn.get("ok") is False or turn.get("error") or not _asked(turn):
        return None
    texts = (str(other.get("text") or "") for other in others if _asked(other) == _asked(turn))
    return next((text for text in texts if text != turn.get("text")), None)


def _parting(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _from(text: str, at: int) -> str:
    """The text around one place, or from its beginning when that is near; an empty reply is said."""
    start = max(0, at - _BEFORE) if at >= WIDTH - _BEFORE else 0
    shown = one_line(text[start:], WIDTH - 3 * bool(start))
    return ("..." if start else "") + shown if shown else "(nothing)"
