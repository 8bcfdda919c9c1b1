"""From replies to evidence: which are right, whether a wrong one is the engine's fault, and how that was confirmed.

A wrong answer is not yet corruption: the model itself may answer so. Prefill settles it where it can (the target's own
scores convict or clear the reply); elsewhere the same traffic is sent once more. One finding that neither convicts is
reported as open, which is never a pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddops.errors import DdopsError
from ddops.prove import coding, prompts
from ddops.prove.answers import Check
from ddops.prove.endings import Endings
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.rescore import Scorer, ScorerBroken
from ddops.prove.session import Session, Turn, named
from ddops.prove.wire import Failure, Unsupported

REPLAY_LIMIT = 12  # turns kept per evidence: all wrong ones first


class Confirmation(StrEnum):
    """What became of a finding."""

    TOTAL = "total"  # most replies are wrong: nothing to confirm
    CONVICTED = "convicted"  # prefill says the target would not have said this
    AGAIN = "again"  # seen once more when the same traffic was repeated
    CLEARED = "cleared"  # prefill says the target says exactly this
    ONCE = "once"  # seen once, not seen again, and nothing can score it

    @property
    def corrupt(self) -> bool:
        return self in (Confirmation.TOTAL, Confirmation.CONVICTED, Confirmation.AGAIN)

    @property
    def means(self) -> str:
        return _MEANS[self]


_MEANS = {
    Confirmation.TOTAL: "",
    Confirmation.CONVICTED: "prefill disagrees with the generated tokens",
    Confirmation.AGAIN: "seen again when repeated",
    Confirmation.CLEARED: "the model itself gives these answers (prefill agrees throughout): no test for this model",
    Confirmation.ONCE: "seen once and not again, and the engine cannot score it: open",
}


@dataclass(slots=True)
class Bench:
    """Checks turns of one session; holds the scorer, made and tested on first use."""

    session: Session
    endings: Endings = field(init=False)
    scorer: Scorer | None = None
    why_unscored: str = ""  # the engine gives no scores
    why_broken: str = ""  # the scorer contradicts itself
    sandbox_missing: str = ""
    off_turns: list[Turn] = field(default_factory=list)
    ran: dict[coding.Key, Check] = field(default_factory=dict)  # the same text need not run twice

    def __post_init__(self) -> None:
        self.endings = Endings(self.session.client)

    # ---- right or wrong

    def check(self, turns: Sequence[Turn]) -> None:
        """Fill in `check` of every whole turn with an item. Thinking that ate all tokens is asked again, with more."""
        self._think_longer(turns)
        todo = [t for t in turns if t.whole and t.item is not None and t.check is None]
        code = [t for t in todo if t.item is not None and t.item.kind.is_code]
        for turn in todo:
            if turn.item is not None and not turn.item.kind.is_code:
                turn.check = prompts.check(turn.item, turn.text)
        jobs = [_job(t) for t in code]
        new = list({j.key: j for j in jobs if j.key not in self.ran}.values())
        try:
            checks = coding.judge(new, random.Random(self.session.seed)) if new else []
        except DdopsError as exc:
            self.sandbox_missing = exc.what
            return
        self.ran |= {job.key: check for job, check in zip(new, checks, strict=True)}
        for turn, job in zip(code, jobs, strict=True):
            turn.check = self.ran[job.key]

    def _think_longer(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if turn.whole and turn.reply is not None and _only_thought(turn):
                turn.ask = replace(turn.ask, max_tokens=turn.ask.max_tokens * 3)
                self.session.fill(turn)
                if turn.whole and _only_thought(turn):
                    turn.check = None
                    turn.item = None  # it cannot be judged: neither right nor wrong

    # ---- scoring

    def ready(self) -> bool:
        """Make, test and calibrate the scorer once. False: `why_unscored` or `why_broken` says why."""
        if self.scorer is not None or self.why_unscored or self.why_broken:
            return self.scorer is not None
        scorer = Scorer(self.session.client, self.endings, self.session.reference)
        try:
            scorer.self_test()
            scorer.calibrate(self._off_replies(), self.session.policy.gates.gap)
        except Unsupported as exc:
            self.why_unscored = str(exc)
        except ScorerBroken as exc:
            self.why_broken = str(exc)
        else:
            self.scorer = scorer
        return self.scorer is not None

    def _off_replies(self) -> list[Any]:
        """A few honest replies of this host: the same engine with speculation off."""
        if not (self.session.client.dialect.spec_switch and self.session.speculates):
            return []
        make = self.session.make
        items = [*make.standard()[:2], make.copy(6), make.json(), make.open(), make.open()]
        # A hundred tokens of each calibrate well enough, and a damaged engine may never stop by itself.
        asks = [(item, self.session.ask_for(item, mode="off", max_tokens=100)) for item in items]
        self.off_turns = self.session.send("off", asks, overtime=True)
        return [t.reply for t in self.off_turns if t.whole and t.reply is not None and t.reply.ids]

    def judge(self, turns: Sequence[Turn]) -> None:
        """Fill in `judged` of greedy turns. A turn that cannot be scored stays without."""
        if not self.ready() or self.scorer is None:
            return
        scorer = self.scorer

        def one(turn: Turn) -> None:
            try:
                assert turn.reply is not None
                turn.judged = scorer.judge(turn.reply)
            except Unsupported as exc:
                self.session.notes.setdefault("unscored", str(exc))
            except ScorerBroken as exc:
                self.why_broken = self.why_broken or str(exc)

        self.session.parallel(one, [t for t in self.session.greedy(turns) if t.judged is None])

    # ---- confirming

    def confirm(self, wrong: Sequence[Turn], all_turns: Sequence[Turn]) -> Confirmation:
        """Whether wrong replies are the engine's fault. May send the same traffic once more."""
        self.judge(wrong)
        judged = [t.judged for t in wrong if t.judged is not None]
        if any(j.wrong for j in judged):
            return Confirmation.CONVICTED
        if len(judged) == len(wrong):
            return Confirmation.CLEARED
        if len(wrong) >= 3 and 2 * len(wrong) >= len(all_turns):
            return Confirmation.TOTAL
        again = self.session.send("repeat", [(t.item, t.ask) for t in all_turns], overtime=True)
        self.check(again)
        return Confirmation.AGAIN if any(t.check and not t.check.ok for t in again) else Confirmation.ONCE

    def content(self, probe: str, turns: Sequence[Turn], gate: float, *, expected: str = "") -> Evidence:
        """One probe's evidence from checked turns."""
        mine = [t for t in turns if t.item is not None and t.item.probe == probe and t.check is not None]
        if not mine:
            return self._nothing(probe, turns)
        wrong = [t for t in mine if t.check is not None and not t.check.ok]
        right = len(mine) - len(wrong)
        asked = sum(t.item is not None and t.item.probe == probe for t in turns)
        unanswered = f"{asked - len(mine)} of {asked} questions unanswered or not judged" if asked > len(mine) else ""
        self.session.shorten(probe, unanswered)
        base = Evidence(
            probe,
            Outcome.PASS,
            expected=expected or f"{len(mine)}/{len(mine)} right",
            got=", ".join(filter(None, (f"{right}/{len(mine)} right", unanswered))),
            threshold=f">= {gate:.0%} right",
            sample=len(mine),
            replay=replay_of(mine),
        )
        if right >= gate * len(mine):
            return base
        how = self.confirm(wrong, mine)
        first = wrong[0]
        assert first.check is not None
        assert first.item is not None
        what = f"{first.item.kind}: {first.check.got}"
        detail = f"{what}; {how.means}" if how.means else what
        if how.corrupt:
            return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail)
        if how is Confirmation.CLEARED and probe not in self.session.policy.require:
            return cleared(base, right, len(wrong), detail)
        return replace(base, outcome=Outcome.ERROR, detail=detail)

    def _nothing(self, probe: str, turns: Sequence[Turn]) -> Evidence:
        refused = next((str(t.error) for t in turns if t.error is not None), "")
        why = self.sandbox_missing or refused or "no reply of this kind came back"
        broke = self.sandbox_missing or any(isinstance(t.error, Failure) for t in turns)
        return Evidence(probe, Outcome.ERROR if broke else Outcome.NOT_SCORED, detail=why)


def cleared(base: Evidence, right: int, set_aside: int, detail: str) -> Evidence:
    """Replies that the target itself gives are no test for this model: they are set aside, and that is said."""
    if right == 0:
        return replace(base, outcome=Outcome.NOT_SCORED, got="", detail=detail)
    got = f"{right}/{right} right, {set_aside} set aside"
    return replace(base, expected=f"{right}/{right} right", got=got, sample=right, detail=detail)


def replay_of(turns: Sequence[Turn], limit: int = REPLAY_LIMIT) -> tuple[dict[str, Any], ...]:
    """Turns to keep: wrong and suspicious ones first."""

    def rank(turn: Turn) -> int:
        bad = (turn.check is not None and not turn.check.ok) or bool(turn.judged and turn.judged.wrong)
        return 0 if bad or turn.error is not None else 1

    return tuple(t.to_dict() for t in sorted(turns, key=rank)[:limit])


def served(turns: Sequence[Turn]) -> Evidence:
    """Whether every request was answered at all. Refusals (4xx) are not failures: the engine said no.

    One request that failed and was answered when repeated stays open; two of them are a pattern.
    """
    failed = [t for t in turns if isinstance(t.error, Failure)]
    stuck = [t for t in turns if t.error is not None and not isinstance(t.error, (Failure, Unsupported))]
    cut = [t for t in turns if t.cut]
    refused = [t for t in turns if isinstance(t.error, Unsupported)]
    told = f", {len(refused)} refused" if refused else ""
    base = Evidence(
        "served",
        Outcome.PASS,
        expected="every request answered",
        got=f"{len(turns) - len(failed) - len(stuck) - len(refused)} of {len(turns)} answered{told}",
        threshold="no request fails twice, nor do two fail once",
        sample=len(turns),
        replay=replay_of([*failed, *stuck, *cut], 4),
    )
    if turns and len(refused) == len(turns):
        return replace(base, outcome=Outcome.NOT_SCORED, detail=f"the engine refused everything: {named(refused[0].error)}")
    if failed or len(cut) > 1:
        got = f"{len(failed)} of {len(turns)} requests failed, {len(cut)} more only when sent first"
        why = named(failed[0].error) if failed else cut[0].cut
        return replace(base, outcome=Outcome.FAIL, fault=Fault.CRASH, got=got, detail=why)
    if stuck:
        return replace(base, outcome=Outcome.ERROR, detail=named(stuck[0].error))
    if cut:
        return replace(base, outcome=Outcome.ERROR, detail=f"failed once, answered when repeated: {cut[0].cut}")
    return base


def _job(turn: Turn) -> coding.Job:
    return coding.Job(turn.text, turn.item.problems if turn.item else ())


def _only_thought(turn: Turn) -> bool:
    """A reasoning model that used up its tokens before it answered."""
    if turn.reply is None or turn.reply.finish != "length":
        return False
    unfinished = turn.text.lstrip().startswith("<think>") and "</think>" not in turn.text
    return unfinished or (bool(turn.reply.reasoning) and not turn.text.strip())


def wrong(turns: Sequence[Turn]) -> list[Turn]:
    return [t for t in turns if t.check is not None and not t.check.ok]


__all__ = ["Bench", "Check", "Confirmation", "replay_of", "served", "wrong"]
