"""The views of a run's events: what a person, a pipeline and an auditor read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops import journal as journals
from ddops import report
from ddops.journal import Collector, Journal
from ddops.report.markdown import cell, fenced
from ddops.report.text import columns, width


def evidence(probe: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {"probe": probe, "outcome": outcome, "expected": "5/5", "got": "", "threshold": "1.0", "sample": 5,
            "seconds": 1.5, "detail": "", "values": {}, "replay": [{"prompt": "secret prompt"}]} | more  # fmt: skip


CODING = evidence("coding", "pass", got="5/5 passed, 301.2 tok/s avg")
GARBAGE = evidence("coding", "fail", got="0/5 passed, 53.0 tok/s avg")
PASS = {"v": 1, "kind": "pass", "why": "2 probes passed", "power": "a fault in 1 of 20 requests is seen with 95 %",
        "evidence": [CODING, evidence("copy", "pass"), evidence("reference", "not_scored")]}  # fmt: skip
CORRUPT = {"v": 1, "kind": "corrupt", "why": "coding: 0/5", "power": "", "evidence": [GARBAGE]}


class Story:
    """Tell what happened; `run` is the folded picture of it."""

    def __init__(self, *hosts: str) -> None:
        self.seen = Collector()
        self.journal = Journal("20260131-120000-k3f9", [self.seen])
        self.journal.emit("run.started", command="ddops reconfig --budget 32", hosts=list(hosts))

    def proves(self, host: str, verdict: dict[str, Any], step: str = "prove") -> Story:
        with self.journal.step(host, step):
            for item in verdict["evidence"]:
                self.journal.emit("probe", host=host, evidence=item)
            self.journal.emit("verdict", host=host, verdict=verdict)
        return self

    def ends(self, host: str, result: str, code: int, what: str = "", **more: Any) -> Story:
        self.journal.emit("outcome", host=host, result=result, exit=code, what=what or f"{host}: {result}", **more)
        return self

    def run(self, code: int = 0) -> report.Run:
        self.journal.emit("run.finished", exit=code)
        return report.fold(self.seen.events)


def good() -> Story:
    return Story("gpu-01").proves("gpu-01", PASS).ends(
        "gpu-01", "applied", 0, "gpu-01 runs budget 32, topk-cap 8: proven, and now the last known good"
    )  # fmt: skip


def bad() -> Story:
    story = Story("gpu-03").proves("gpu-03", PASS, "fresh baseline").proves("gpu-03", CORRUPT)
    return story.proves("gpu-03", PASS, "prove the restored configuration").ends(
        "gpu-03", "rolled-back", 4, "gpu-03: not proven (corrupt: coding: 0/5)",
        means="gpu-03 is back on its last verified configuration", hint="ddops history --host gpu-03",
    )  # fmt: skip


# ---------------------------------------------------------------- the terminal's last words
def test_a_good_change_is_told_in_two_lines() -> None:
    assert report.summary(good().run()) == (
        "gpu-01 runs budget 32, topk-cap 8: proven, and now the last known good\n"
        "       5/5 passed, 301.2 tok/s avg; 2 of 2 probes passed, 1 not scored\n"
    )


def test_a_bad_change_says_what_happened_what_it_means_and_what_to_do() -> None:
    assert report.summary(bad().run(4)) == (
        "error: gpu-03: not proven (corrupt: coding: 0/5)\n"
        "       coding: 0/5 passed, 53.0 tok/s avg (expected 5/5, threshold 1.0, n=5)\n"
        "       gpu-03 is back on its last verified configuration\n"
        "hint:  ddops history --host gpu-03\n"
    )


def turn(prompt: str, text: str, **more: Any) -> dict[str, Any]:
    return {"label": "coding", "ask": {"messages": [["user", prompt]]}, "text": text} | more


def told(*evidence: dict[str, Any], kind: str = "corrupt") -> str:
    verdict = {"kind": kind, "why": "", "evidence": [{**item, "replay": []} for item in evidence]}
    story = Story("a")
    with story.journal.step("a", "prove"):
        for item in evidence:
            story.journal.emit("probe", host="a", evidence=item)
        story.journal.emit("verdict", host="a", verdict=verdict)
    result = "inconclusive" if kind == "inconclusive" else "rolled-back"
    return report.summary(story.ends("a", result, 4, facts={"verdict": verdict}).run(4))


def test_what_was_wrong_is_shown_with_what_was_asked_expected_and_came() -> None:
    good, wrong = turn("What is 1 + 1?", "2", ok=True), turn("What is 2 + 2?\nDigits.", "5\nsurely", ok=False, found="5")
    said = told(evidence("answers", "fail", got="1/2 right", replay=[good, wrong | {"expect": {"number": 4}}]))
    assert said.splitlines()[2:6] == [
        "         asked     What is 2 + 2? Digits.",
        "         expected  4",
        "         came      5 surely",
        "         found     5",
    ]


def test_two_probes_show_what_was_wrong_and_the_same_reply_is_shown_once() -> None:
    one, two = turn("P", "garbage", ok=False), turn("Q", "rubbish", ok=False)
    probes = [evidence(name, "fail", got="0/1", detail=f"{name} is bad", replay=[one]) for name in ("coding", "rescore")]
    said = told(*probes, evidence("copy", "fail", got="0/1", detail="copy is bad", replay=[two]))
    assert said.count("garbage") == 1
    assert [f"{name} is bad" in said for name in ("coding", "rescore", "copy")] == [True, True, False]
    assert "copy: 0/1" in said
    assert "rubbish" not in said


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"function": "gcd"}, "code in which gcd gives the right values"),
        ({"function": "gcd", "mark": "K7-X"}, "code in which gcd gives the right values, with K7-X in its first line"),
        ({"functions": ["a", "b"]}, "code in which a, b gives the right values"),
        ({"ids": ["k1", "k2"]}, "k1 k2"),
        ({"mark": "K7-X"}, "K7-X"),
        ({"word": "Tomar", "others": ["Veska"]}, "Tomar"),
        ({"object": {"name": "Alice"}}, '{"name": "Alice"}'),
        ({"tool": "get_weather", "arguments": {"city": "Oslo"}}, '{"tool": "get_weather", "arguments": {"city": "Oslo"}}'),
    ],
)
def test_what_was_expected_is_said_in_words_for_every_kind_of_prompt(expect: dict[str, Any], words: str) -> None:
    said = told(evidence("copy", "fail", got="0/1", replay=[turn("P", "no", ok=False, expect=expect)]))
    assert f"expected  {words}\n" in said


def test_an_inconclusive_verdict_shows_the_request_that_got_no_answer() -> None:
    lost = turn("Write", "", error="Hung: nothing came for 30 s")
    said = told(evidence("served", "error", got="1 of 2 answered", detail="hung", replay=[lost]), kind="inconclusive")
    assert "came      Hung: nothing came for 30 s" in said
    empty = told(evidence("answers", "error", got="0/1", replay=[turn("Write", "", ok=False)]), kind="inconclusive")
    assert "came      (nothing)" in empty


def test_replies_that_should_be_equal_are_shown_from_where_they_part() -> None:
    same = "word " * 100
    said = told(evidence("modes", "fail", got="0 equal", replay=[turn("P", same + "left on"), turn("P", same + "right")]))
    assert "came      ...word" in said
    assert "left on\n" in said
    assert "and also  ...word" in said
    assert "right\n" in said


def test_a_leak_is_shown_where_it_stands() -> None:
    reader = turn("Write gcd", "def gcd(a, b): pass # " * 20 + "ZEBRA-4417 end", marks=["K7-X"])
    said = told(evidence("isolation", "fail", got="1 mark", replay=[reader, turn("ZEBRA?", "x", marks=["ZEBRA-4417"])]))
    assert "ZEBRA-4417 end\n" in said


def test_what_came_is_short_and_neither_controls_the_terminal_nor_shows_a_secret() -> None:
    journal_secret = "hunter2-secret"
    journals.mask(journal_secret)
    nasty = "\x1b[31mred\x07\r\u202e ::error::x " + "y" * 149 + journal_secret
    said = told(evidence("coding", "fail", got="0/1", replay=[turn(nasty, nasty, ok=False)]))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", said)
    assert "hunter" not in said
    assert max(map(len, said.splitlines())) < 200


def test_reports_show_what_was_wrong_too() -> None:
    story = Story("a")
    wrong = evidence("answers", "fail", got="0/1", detail="arith: 5", replay=[turn("What is `2 + 2`?", "5 ```", ok=False)])
    story.proves("a", CORRUPT | {"evidence": [wrong, CODING]})
    run = story.ends("a", "rolled-back", 4).run(4)
    [case] = [case for case in ElementTree.fromstring(report.junit(run)).iter("testcase") if case.get("name") == "answers"]
    assert (case[0].text or "").splitlines() == ["arith: 5", "asked     What is `2 + 2`?", "came      5 ```"]
    assert "answers: arith: 5\n\n````\nasked     What is `2 + 2`?\ncame      5 ```\n````\n" in report.markdown(run)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["ask", "text", "expect", "marks", "ok", "error", "found", "messages", "ids", "functions", "function", "mark", "object"]


@settings(max_examples=150, deadline=2000)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON)), max_size=3))
def test_no_evidence_of_another_version_breaks_the_summary(replay: list[dict[str, Any]]) -> None:
    said = told(evidence("copy", "fail", got="0/1", detail="bad", replay=replay))
    assert said.startswith("error: a: rolled-back\n       copy: 0/1 (expected")
    assert all(len(line) < 330 for line in said.splitlines())


def test_a_fleet_is_counted_and_hosts_left_out_are_named() -> None:
    story = Story("a", "b", "c").ends("a", "applied", 0).ends("b", "rolled-back", 4)
    story.journal.emit("halted", reason="1 host failed and 0 may", left=["c"])
    said = report.summary(story.run(9))
    assert said.endswith("halted: 1 host failed and 0 may\nnot started: c\n3 hosts: 1 applied, 1 rolled-back, 1 not-started\n")


def test_a_dry_run_shows_every_value_with_its_source_and_both_differences() -> None:
    story = Story("gpu-01")
    plan = {"action": "switch", "settings": {"budget": 32, "topk_cap": 4, "block_size": None},
            "sources": {"budget": "request", "topk_cap": "verified on the host"},
            "diff": "-ExecStart=a --budget 8\n+ExecStart=a --budget 32", "argv_diff": "-8\n+32"}  # fmt: skip
    story.journal.emit("plan", host="gpu-01", **plan)
    said = report.summary(story.ends("gpu-01", "planned", 0, "dry run: would switch gpu-01").run())
    assert "budget 32  (request)" in said
    assert "topk-cap 4  (verified on the host)" in said
    assert "block-size" not in said
    assert "  -8\n  +32" in said
    assert "  +ExecStart=a --budget 32" in said
    again = Story("gpu-01").ends("gpu-01", "planned", 0, facts={"plan": plan}).run()
    assert "budget 32  (request)" in report.summary(again)  # from the outcome alone as well


# ---------------------------------------------------------------- --json
def test_the_json_object_holds_the_run_and_leaves_prompts_out() -> None:
    made = report.document(bad().run(4))
    assert (made["v"], made["exit"], made["result"]) == (1, 4, "rolled-back")
    assert made["run"] == "20260131-120000-k3f9"
    (host,) = made["hosts"]
    assert [step["step"] for step in host["steps"]] == ["fresh baseline", "prove", "prove the restored configuration"]
    assert host["verdict"]["kind"] == "corrupt"  # of the change, not of what was restored
    assert {"step": "prove", "probe": "coding", "outcome": "fail"}.items() <= host["probes"][3].items()
    assert "replay" not in json.dumps(made["hosts"][0]["probes"])
    json.dumps(made, allow_nan=False)


def test_hosts_with_different_ends_make_a_mixed_result() -> None:
    made = report.document(Story("a", "b").ends("a", "applied", 0).ends("b", "unknown", 6).run(9))
    assert made["result"] == "mixed"
    assert made["counts"] == {"applied": 1, "unknown": 1}


def test_a_stream_that_breaks_off_is_told_as_far_as_it_goes() -> None:
    story = Story("a", "b")
    story.journal.emit("step.started", host="a", step="switch")
    made = report.document(report.fold(story.seen.events))
    assert made["exit"] is None
    assert [host["result"] for host in made["hosts"]] == ["unknown", "not-started"]
    assert made["hosts"][0]["steps"] == [{"step": "switch", "ok": None, "seconds": 0.0}]


# ---------------------------------------------------------------- JUnit
def cases(run: report.Run) -> dict[str, str]:
    """`class/name` -> "", failure, error or skipped."""
    root = ElementTree.fromstring(report.junit(run))
    found = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}/{case.get('name')}"
        assert name not in found
        found[name] = case[0].tag if len(case) else ""
    return found


def test_junit_has_a_suite_a_host_and_a_case_a_step_and_probe() -> None:
    found = cases(bad().run(4))
    assert found["gpu-03/prove"] == ""
    assert found["gpu-03.prove/coding"] == "failure"
    assert found["gpu-03.prove/verdict"] == "failure"
    assert found["gpu-03.fresh baseline/coding"] == ""
    assert found["gpu-03.fresh baseline/reference"] == "skipped"
    assert found["gpu-03/outcome"] == "failure"
    root = ElementTree.fromstring(report.junit(Story("a", "b").ends("a", "applied", 0).run()))
    assert [suite.get("name") for suite in root] == ["a", "b"]


def test_junit_gives_every_step_and_probe_its_seconds_and_counts_none_twice() -> None:
    story = Story("a")
    story.journal.emit("step.started", host="a", step="prove")
    for name in ("coding", "copy"):
        story.journal.emit("probe", host="a", evidence=evidence(name, "pass"))
    story.journal.emit("verdict", host="a", verdict=PASS)
    for name, seconds in (("prove", 4.25), ("confirm", 0.5)):
        story.journal.emit("step.finished", host="a", step=name, ok=True, seconds=seconds)
    root = ElementTree.fromstring(report.junit(story.ends("a", "applied", 0).run()))
    seconds = {case.get("name"): float(case.get("time", "")) for case in root.iter("testcase")}
    assert seconds == {"prove": 4.25, "coding": 1.5, "copy": 1.5, "verdict": 0.0, "confirm": 0.5, "outcome": 0.0}
    assert [element.get("time") for element in (root, root[0])] == ["4.750", "4.750"]


def test_junit_totals_are_the_sum_of_the_cases() -> None:
    for story in (good(), bad()):
        root = ElementTree.fromstring(report.junit(story.run()))
        states = [case[0].tag if len(case) else "" for case in root.iter("testcase")]
        for suite in root:
            assert int(suite.get("tests", "")) == len(suite)
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(root.get(name, "")) == states.count(tag)


def test_what_could_not_be_decided_is_an_error_and_what_was_not_needed_is_skipped() -> None:
    inconclusive = {"kind": "inconclusive", "why": "no probe came to a result", "evidence": [evidence("copy", "error")]}
    found = cases(Story("a").proves("a", inconclusive).ends("a", "inconclusive", 11).run(11))
    assert (found["a.prove/copy"], found["a.prove/verdict"], found["a/outcome"]) == ("error", "error", "error")
    assert cases(Story("a").ends("a", "unchanged", 0).run())["a/outcome"] == "skipped"
    assert cases(Story("a").run())["a/outcome"] == "skipped"
    for result in ("unknown", "locked", "host-key", "refused"):
        assert cases(Story("a").ends("a", result, 6).run(6))["a/outcome"] == "error"


def test_slowness_the_policy_takes_is_no_failure() -> None:
    slow = {"kind": "degraded", "why": "throughput", "evidence": [evidence("throughput", "degraded")]}
    taken = cases(Story("a").proves("a", slow).ends("a", "applied", 0).run())
    assert (taken["a.prove/throughput"], taken["a.prove/verdict"]) == ("", "")
    undone = cases(Story("a").proves("a", slow).ends("a", "rolled-back", 4).run())
    assert (undone["a.prove/throughput"], undone["a.prove/verdict"]) == ("failure", "failure")


def test_an_engine_that_died_fails_its_step_with_its_last_lines() -> None:
    story = Story("a")
    with story.journal.step("a", "ready"):
        story.journal.emit("died", host="a", why="the engine ended (status 1)", lines=["CUBLAS_STATUS_EXECUTION_FAILED"])
    root = ElementTree.fromstring(report.junit(story.ends("a", "rolled-back", 4).run(4)))
    failure = next(case[0] for case in root.iter("testcase") if case.get("name") == "ready")
    assert failure.get("message") == "the engine ended (status 1)"
    assert "CUBLAS" in (failure.text or "")


# ---------------------------------------------------------------- GitHub
def test_one_annotation_a_failed_host_and_never_more_than_ten() -> None:
    story = Story(*(f"h{n}" for n in range(30)))
    for number in range(25):
        story.ends(f"h{number}", "rolled-back", 4, hint="look")
        story.journal.emit("warning", host=f"h{number}", text="w")
    lines = report.annotate(story.run(4))
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10
    assert errors[0].startswith("::error title=ddops%3A h0 rolled-back::h0")
    assert "and 16 more" in errors[-1]
    assert sum(line.startswith("::warning") for line in lines) == 10
    assert len(lines) == 20


def test_a_good_run_has_no_annotation() -> None:
    assert report.annotate(good().run()) == []


@given(st.text(), st.text())
def test_no_text_can_end_an_annotation_or_start_another(what: str, host: str) -> None:
    story = Story(host or "h").ends(host or "h", "rolled-back", 4, what or "x", means=what, hint=f"::error::{what}")
    lines = report.annotate(story.run(4))
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "\r" not in lines[0]
    title = re.match(r"::error title=([^:,]*)::", lines[0])
    assert title is not None


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.text())
def test_outputs_are_one_line_each(hosts: list[str], text: str) -> None:
    story = Story(*hosts)
    story.ends(hosts[0], f"x\ninjected={text}", 4)
    lines = report.outputs(story.run(4))
    names = [line.split("=", 1)[0] for line in lines]
    assert names == ["run", "result", "exit", "hosts-good", "hosts-not-good", "summary"]
    assert not any(re.search(r"[\n\r]", line) for line in lines)


def test_the_step_summary_stays_under_github_s_limit() -> None:
    story = Story("a")
    for _ in range(3000):
        story.proves("a", {"kind": "corrupt", "why": "é" * 300, "evidence": [evidence("p", "fail", got="ü" * 300)]})
    text = report.step_summary(story.ends("a", "rolled-back", 4).run(4))
    assert len(text.encode()) <= 1_048_576
    assert "cut off" in text


# ---------------------------------------------------------------- Markdown and HTML
def test_the_markdown_report_tells_the_whole_run() -> None:
    text = report.markdown(bad().run(4))
    for part in ("# ddops 20260131-120000-k3f9", "1 host: 1 rolled-back; exit 4", "| prove | failed |",
                 "Verdict: **corrupt** coding: 0/5", "What to do: ddops history"):  # fmt: skip
        assert part in text, part


@given(st.text())
def test_text_from_a_host_is_never_markup(text: str) -> None:
    made = cell(text)
    assert "\n" not in made
    assert "<" not in made
    assert "@" not in made
    assert not re.search(r"(?<!\\)[`*_\[\]|#]", made.replace("&#64;", ""))


@given(st.text("`ab\n"))
def test_a_code_block_ends_where_it_should(text: str) -> None:
    fence, body, end = fenced(text)
    assert fence == end
    assert fence not in body


class Page(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_html_report_is_one_file_and_escapes_everything() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=y>\"'&{{ 12345679*9 }}"
    story = Story(evil).proves(evil, {"kind": evil, "why": evil, "power": evil, "evidence": [evidence(evil, evil)]})
    with story.journal.step(evil, evil):
        story.journal.emit("died", host=evil, why=evil, lines=[evil])
        story.journal.emit("warning", host=evil, text=evil)
        story.journal.emit("plan", host=evil, settings={evil: evil}, diff=evil, argv_diff=evil)
    story.journal.emit("halted", reason=evil)
    text = report.html(story.ends(evil, evil, 4, evil, means=evil, hint=evil).run(4))
    page = Page()
    page.feed(text)
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert {name for name, _ in page.attributes} <= {"lang", "charset", "name", "content", "http-equiv", "class"}
    assert "111111111" not in text
    assert "&lt;script&gt;" in text


def test_a_good_run_makes_every_view() -> None:
    run = good().run()
    assert "301.2 tok/s avg" in report.html(run)
    assert "301.2 tok/s avg" in report.markdown(run)


# ---------------------------------------------------------------- any events at all
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
anything = st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3))
names = st.sampled_from(
    ["run.started", "plan", "step.started", "step.finished", "phase", "probe", "verdict", "warning", "outcome", "died",
     "halted", "run.finished", "from.the.future"]
)  # fmt: skip
keys = st.sampled_from(
    ["command", "hosts", "step", "ok", "seconds", "text", "fraction", "elapsed", "budget", "evidence", "verdict",
     "result", "exit", "what", "means", "hint", "facts", "reason", "left", "why", "lines", "settings", "sources"]
)  # fmt: skip
deeper = st.fixed_dictionaries(
    {}, optional={"probe": anything, "outcome": anything, "kind": anything, "evidence": st.lists(anything),
                  "got": anything, "values": anything, "seconds": anything, "verdict": anything}
)  # fmt: skip


@given(st.lists(st.tuples(names, st.none() | st.sampled_from("ab"), st.dictionaries(keys, anything | deeper)), max_size=8))
@settings(max_examples=60, deadline=None, report_multiple_bugs=False)
def test_events_of_any_shape_make_every_view_without_an_error(events: list[tuple[str, Any, dict[str, Any]]]) -> None:
    """A stream may be cut off, edited, or written by a newer version."""
    stream = [{"v": 1, "seq": n, "event": name, "host": host, **more} for n, (name, host, more) in enumerate(events)]
    run = report.fold(stream)
    for event in stream:
        report.progress.lines(event)
        report.progress.tone(event)
    json.dumps(report.document(run), allow_nan=False)
    ElementTree.fromstring(report.junit(run))
    for made in (report.summary(run), report.markdown(run), report.html(run), report.step_summary(run)):
        assert isinstance(made, str)
    assert all(isinstance(line, str) for line in [*report.annotate(run), *report.outputs(run)])


# ---------------------------------------------------------------- status and history
def test_status_is_a_table_with_what_else_there_is_to_know_below() -> None:
    rows = [
        {"host": "gpu-01", "unit": "active", "verification": "verified since 2026-01-31", "verified": True,
         "settings": "budget 32", "digest": "ab" * 32, "drift": [], "lease": None, "trial": None, "notes": []},
        {"host": "b300-long-name", "unit": "activating", "verification": "unverified: a new boot", "verified": False,
         "settings": {"budget": 8, "topk_cap": None}, "digest": "", "drift": ["on disk is newer than loaded"],
         "lease": {"run": "r1", "holder": "ann", "expires_in_seconds": 42.4},
         "trial": {"run": "r1", "digest": "cd" * 32, "guard_in_seconds": 30.0},
         "notes": ["ledger line 7 is torn"], "n_restarts": 2},
        {"host": "gpu-09", "error": "gpu-09 is not reachable: no answer", "exit": 6},
    ]  # fmt: skip
    assert report.status_table(rows).splitlines() == [
        "HOST            UNIT        STATE                      SETTINGS   CONFIGURATION",
        "gpu-01          active      verified since 2026-01-31  budget 32  abababababab",
        "b300-long-name  activating  unverified: a new boot     budget 8",
        "gpu-09          ?           unknown",
        "",
        "b300-long-name: drift: on disk is newer than loaded",
        "b300-long-name: restarted 2 times by systemd since it was started",
        "b300-long-name: held by ann (run r1, expires in 42 s)",
        "b300-long-name: open trial cdcdcdcdcdcd of run r1, its guard undoes it in 30 s",
        "b300-long-name: ledger line 7 is torn",
    ]


def test_history_shows_every_entry_with_its_verdict() -> None:
    entry = {"time": "2026-01-31T12:00:00Z", "kind": "proven", "digest": "ab" * 32, "settings": {"budget": 32},
             "verdict": {"kind": "pass"}, "by": "ann@ci", "why": ""}  # fmt: skip
    rows = [{"host": "gpu-01", "entries": [entry, entry | {"kind": "undone", "verdict": {}, "why": "the guard fired"}]},
            {"host": "gpu-02", "entries": []}, {"host": "gpu-03", "error": "gpu-03 is not reachable", "exit": 6}]  # fmt: skip
    assert report.history_table(rows).splitlines() == [
        "HOST    TIME                 ENTRY   CONFIGURATION  SETTINGS   VERDICT  BY      WHY",
        "gpu-01  2026-01-31 12:00:00  proven  abababababab   budget 32  pass     ann@ci",
        "gpu-01  2026-01-31 12:00:00  undone  abababababab   budget 32           ann@ci  the guard fired",
        "",
        "gpu-02: no history",
        "gpu-03: unknown",
    ]
    assert report.history_table([]) == ""


@given(st.lists(st.lists(st.text(), min_size=3, max_size=3), min_size=1))
def test_columns_line_up_whatever_stands_in_them(rows: list[list[str]]) -> None:
    lines = columns([["a", "b", "c"], *rows])
    assert len(lines) == len(rows) + 1
    assert not any("\n" in line or "\x1b" in line for line in lines)
    assert {width(line[: line.index("b")]) for line in lines[:1]} == {
        2 + max(width(report.text.one_line(row[0])) for row in [["a"], *rows])
    }


@pytest.mark.parametrize("module", ["report", "report.model", "report.junit", "report.html", "report.progress"])
def test_reports_do_nothing_but_compute(module: str) -> None:
    """No report module can reach a file, a socket or the clock."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec(f"ddops.{module}")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"os", "sys", "socket", "time", "subprocess", "pathlib"}
