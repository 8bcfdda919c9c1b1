"""Text alarms: signs of a broken decode path that show in the text alone. Pure.

They find gross damage at a glance and say which sign it was; they cannot tell that fluent text is wrong. `quoted`
is what the prompt gave the model to repeat: what stands there is never held against the reply.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

_SPECIAL = re.compile(r"<\|[a-z_0-9]{2,24}\|>|</?s>|\[/?INST\]|<(?:pad|unk|bos|eos|mask)>|<0x[0-9A-F]{2}>|[\u2581\u0120]\w")
_THINK = re.compile(r"</?think>")
_WORD = re.compile(r"[^\W\d_]{6,}")
_DOUBLED = re.compile(r"([^\W\d_]{3,})\1", re.IGNORECASE)
_RUN = re.compile(r"(\S)\1{11,}")
# Rules and boxes of ordinary text: a line of these is drawing, not damage.
_DRAWING = set("-=_*#~.+|─═━ ")
_SCRIPTS = (
    "LATIN",
    "GREEK",
    "CYRILLIC",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
    "THAI",
    "HANGUL",
    "HIRAGANA",
    "KATAKANA",
    "CJK",
)


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    what: str  # the sign itself, short


def check(text: str, *, prompt: str = "", finish: str = "", allow_empty: bool = False) -> list[Alarm]:
    """Every alarm that a reply raises, the plainest first."""
    if not text.strip():
        return [] if allow_empty else [Alarm("empty", "the reply is empty")]
    found = (
        _replacement(text, prompt),
        _special_tokens(text, prompt),
        _dominance(text, prompt),
        loop(text, prompt, finish),
        _doubled(text, prompt),
        _scripts(text, prompt),
        _control(text, prompt),
    )
    return [alarm for alarm in found if alarm is not None]


def loop(text: str, prompt: str = "", finish: str = "") -> Alarm | None:
    """The same stretch again and again: at the end of the text (a decode that is stuck), or over most of it.

    Code repeats short lines honestly, so what counts is exact back-to-back repetition of a stretch: 6 times, or
    4 times when the reply ran to its length limit, over at least 60 characters.
    """
    times = 4 if finish == "length" else 6
    tail = _tail_period(text, times)
    if tail and tail.strip() not in prompt:
        return Alarm("loop", f"ends in a loop of {_shown(tail)}")
    words = text.split()
    if len(words) >= 60:
        grams = Counter(tuple(words[i : i + 6]) for i in range(len(words) - 5))
        gram, count = grams.most_common(1)[0]
        if count >= 8 and count * 6 > 0.5 * len(words) and " ".join(gram) not in prompt:
            return Alarm("loop", f"{count} times {_shown(' '.join(gram))}")
    return None


def _tail_period(text: str, times: int) -> str:
    """The stretch that the end of the text repeats at least `times` times over 60 characters, or ''."""
    end = text.rstrip()[-2400:]
    for period in range(1, min(400, len(end) // times) + 1):
        need = max(times, -(-60 // period))
        if period * need > len(end):
            continue
        unit = end[-period:]
        if end.endswith(unit * need) and not set(unit) <= _DRAWING:
            return unit
    return ""


def _replacement(text: str, prompt: str) -> Alarm | None:
    count = text.count("\ufffd")
    return Alarm("replacement", f"{count} x U+FFFD") if count and "\ufffd" not in prompt else None


def _special_tokens(text: str, prompt: str) -> Alarm | None:
    for found in _SPECIAL.finditer(text):
        if found.group(0) not in prompt:
            return Alarm("special", f"special token as text: {_shown(found.group(0))}")
    stray = _THINK.search(_without_thinking(text))
    return Alarm("special", f"stray {stray.group(0)}") if stray and stray.group(0) not in prompt else None


def _without_thinking(text: str) -> str:
    """A reply of a reasoning model without its (one, leading) thinking block."""
    return re.sub(r"\A\s*<think>.*?</think>|\A[^<]*</think>", "", text, count=1, flags=re.DOTALL)


def _dominance(text: str, prompt: str) -> Alarm | None:
    run = _RUN.search(text)
    if run and run.group(1) not in _DRAWING and run.group(0) not in prompt:
        return Alarm("dominance", f"{len(run.group(0))} x {_shown(run.group(1))} in a row")
    visible = [c for c in text if not c.isspace()]
    if len(visible) >= 40:
        char, count = Counter(visible).most_common(1)[0]
        if count > 0.4 * len(visible) and char not in _DRAWING and char * 12 not in prompt:
            return Alarm("dominance", f"{count} of {len(visible)} characters are {_shown(char)}")
    words = re.findall(r"\w+", text.lower())
    if len(words) >= 30:
        word, count = Counter(words).most_common(1)[0]
        if count > 0.4 * len(words) and word not in prompt.lower():
            return Alarm("dominance", f"{count} of {len(words)} words are {_shown(word)}")
    return None


def _doubled(text: str, prompt: str) -> Alarm | None:
    """`functionction`, `returnreturn`: words with a doubled stretch of 3 or more letters. Rare in truth."""
    words = _WORD.findall(text)
    bad = [w for w in words if _DOUBLED.search(w) and w not in prompt]
    if len(bad) >= 3 and len(bad) > 0.02 * len(words):
        return Alarm("doubled", f"doubled syllables: {_shown(', '.join(sorted(set(bad))[:3]))}")
    return None


def _scripts(text: str, prompt: str) -> Alarm | None:
    """Letters of a script that the prompt gives no reason for. Latin is always expected, Greek is mathematics."""
    expected = {"LATIN", "GREEK", *(s for c in prompt if (s := _script(c)))}
    letters = [(c, _script(c)) for c in text if ord(c) > 0x7F and c.isalpha()]
    odd = [(c, s) for c, s in letters if s and s not in expected]
    if odd:
        return Alarm("script", f"{len(odd)} letters of {odd[0][1]}: {_shown(''.join(c for c, _ in odd[:8]))}")
    return None


def _script(char: str) -> str:
    if not char.isalpha():
        return ""
    name = unicodedata.name(char, "")
    return next((s for s in _SCRIPTS if name.startswith(s)), name.split(" ")[0] if name else "")


def _control(text: str, prompt: str) -> Alarm | None:
    odd = [c for c in text if unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\n\r\t" and c not in prompt]
    return Alarm("control", f"{len(odd)} control or unassigned characters, first U+{ord(odd[0]):04X}") if odd else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
