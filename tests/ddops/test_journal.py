"""The event stream and its sinks: order, masking, terminals, and outputs that break."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops.errors import UsageError
from ddops.journal import Collector, Journal, Ndjson, Outputs, Secrets, new_run_id
from ddops.journal.lines import Lines
from ddops.journal.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell_a_story(journal: Journal, secret: str = "nothing") -> None:
    """A run with something of everything; `secret` stands wherever text can come from a host."""
    journal.emit("run.started", command=f"ddops reconfig --budget 32 # {secret}", hosts=["gpu-01", "gpu-02"])
    settings = {"budget": 32, "note": secret}
    diff = f"-Environment=A=old-{secret}\n+Environment=A=new-{secret}"
    journal.emit("plan", host="gpu-01", settings=settings, sources={}, diff=diff, argv_diff=f"-{secret}\n+x")
    with journal.step("gpu-01", "ready"):
        journal.emit("phase", host="gpu-01", text=f"loading weights {secret}", fraction=0.41, elapsed=3, budget=60)
        journal.emit("died", host="gpu-01", why=f"it printed {secret}", lines=["line", f"key={secret}"])
    with journal.step("gpu-01", "prove"):
        evidence = {"probe": "coding", "outcome": "fail", "expected": "5/5", "got": f"0/5 {secret}",
                    "sample": 5,
                    "threshold": "1.0", "detail": secret, "replay": [{"headers": {secret: secret}}]}  # fmt: skip
        journal.emit("probe", host="gpu-01", evidence=evidence)
        verdict = {"v": 1, "kind": "corrupt", "why": f"coding: {secret}", "power": secret, "evidence": [evidence]}
        journal.emit("verdict", host="gpu-01", verdict=verdict)
    journal.emit("warning", host="gpu-01", text=f"careful with {secret}")
    journal.emit("outcome", host="gpu-01", result="rolled-back", exit=4, what=f"gpu-01: not proven {secret}",
                 means=secret, hint=f"curl -H {secret}", facts={"argv": ["--key", secret], secret: 1})  # fmt: skip
    journal.emit("halted", reason=f"limit {secret}", left=["gpu-02"])
    journal.emit("run.finished", exit=4)


# ---------------------------------------------------------------- the stream
def test_events_are_numbered_stamped_and_in_order() -> None:
    seen = Collector()
    journal = Journal("run-1", [seen])
    with journal.step("gpu-01", "observe"):
        journal.emit("warning", host="gpu-01", text="x")
    assert [event["seq"] for event in seen.events] == [1, 2, 3]
    assert [event["event"] for event in seen.events] == ["step.started", "warning", "step.finished"]
    for event in seen.events:
        assert (event["v"], event["run"], event["host"]) == (1, "run-1", "gpu-01")
        assert abs(datetime.fromisoformat(event["time"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert seen.events[-1]["ok"] is True
    assert seen.events[-1]["seconds"] >= 0


def test_a_step_that_raises_is_finished_as_failed() -> None:
    seen = Collector()
    with pytest.raises(KeyboardInterrupt), Journal("r", [seen]).step("h", "switch"):
        raise KeyboardInterrupt
    assert seen.events[-1]["ok"] is False


def test_many_threads_make_one_sequence() -> None:
    seen = Collector()
    journal = Journal("r", [seen])

    def emit_many() -> None:
        for _ in range(200):
            journal.emit("x")

    threads = [threading.Thread(target=emit_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event["seq"] for event in seen.events] == list(range(1, 1601))


def test_no_field_can_change_what_an_event_is() -> None:
    seen = Collector()
    Journal("r", [seen]).emit("warning", "h", seq=99, run="other", v=7, text="t")
    assert (seen.events[0]["seq"], seen.events[0]["run"], seen.events[0]["v"]) == (1, "r", 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=10,
)


@given(values)
def test_whatever_is_emitted_becomes_one_line_of_valid_json(value: Any) -> None:
    stream = io.StringIO()
    Journal("r", [Ndjson(stream, "s", "r", owned=False)]).emit("x", value=value, odd={object, Path("/a")})
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    for line in lines[:2]:
        json.loads(line.encode("utf-8"), parse_constant=pytest.fail)


def test_the_first_line_of_a_stream_says_its_version(tmp_path: Path) -> None:
    outputs = Outputs(events=str(tmp_path / "events"), quiet=True)
    journal = outputs.journal("run-1")
    journal.emit("run.started", command="c", hosts=[])
    journal.close()
    first, second = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert (first["event"], first["v"], first["seq"], first["run"]) == ("version", 1, 0, "run-1")
    assert first["ddops"]
    assert second["seq"] == 1


def test_run_ids_are_short_sort_by_time_and_fit_into_names() -> None:
    early = datetime(2026, 1, 31, 12, tzinfo=UTC)
    ids = [new_run_id(early + timedelta(seconds=n)) for n in (0, 1, 60, 86_400, 40_000_000)]
    assert ids == sorted(ids)
    assert len({new_run_id(early) for _ in range(50)}) > 40
    assert all(re.fullmatch(r"[a-z0-9-]{8,24}", run) for run in ids)


# ---------------------------------------------------------------- secrets
SENTINEL = 'sk-S3NT1NEL/"quoted" é'


@pytest.mark.parametrize("environ", [{}, {"GITHUB_ACTIONS": "true"}, {"GITLAB_CI": "true"}])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("kind", ["md", "html"])
def test_no_output_shows_a_registered_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], environ: dict[str, str], as_json: bool, kind: str
) -> None:
    environ = environ | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_OUTPUT": str(tmp_path / "out")}
    outputs = Outputs(as_json=as_json, events=str(tmp_path / "events"), junit=str(tmp_path / "junit"),
                      report=str(tmp_path / f"report.{kind}"), environ=environ)  # fmt: skip
    journal = outputs.journal("run-1")
    journal.mask(SENTINEL)
    tell_a_story(journal, SENTINEL)
    outputs.write()
    shown = capfd.readouterr()
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()} | {"out!": shown.out, "err!": shown.err}
    assert len(texts) == 7
    for name, text in texts.items():
        assert text or (name == "out!" and not as_json), name  # an error is no data: stdout stays empty
        assert "S3NT1NEL" not in text, name
        assert "quoted" not in text, name


def test_a_secret_is_masked_in_every_form_it_takes() -> None:
    secrets = Secrets()
    secrets.add(b"p&ss/w\xc3\xb6rd\n")
    assert secrets.redact("x p&ss/wörd y p%26ss%2Fw%C3%B6rd") == "x *** y ***"
    secrets.add("p&ss/wörd-longer")
    assert secrets.redact("p&ss/wörd-longer") == "***"  # no half of it stays


def test_short_and_empty_secrets_do_not_eat_all_text() -> None:
    secrets = Secrets()
    for value in ("", "  ", None, "a"):
        secrets.add(value)
    assert secrets.redact("a banana") == "a banana"
    assert secrets.redact("a") == "***"


def test_a_key_file_is_masked_line_by_line() -> None:
    secrets = Secrets()
    secrets.add("-----BEGIN KEY-----\nabcdefghijkl\nmnopqrstuvwx\n")
    assert "mnopqrstuvwx" not in secrets.redact("found mnopqrstuvwx")


# ---------------------------------------------------------------- outputs that break
class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_sink_that_breaks_is_left_behind_with_a_warning_on_the_others() -> None:
    seen = Collector()
    good = io.StringIO()
    broken = Lines(Full())
    journal = Journal("r", [broken, seen, Lines(good)])
    tell_a_story(journal)
    warnings = [event for event in seen.events if event["event"] == "warning" and not event["host"]]
    assert [event["text"] for event in warnings] == ["the terminal cannot be written any more: No space left on device"]
    assert seen.events[-1]["event"] == "run.finished"
    assert "No space left" in good.getvalue()


def test_a_sink_that_breaks_with_a_closed_file_is_left_behind_too() -> None:
    stream, seen = io.StringIO(), Collector()
    journal = Journal("r", [Ndjson(stream, "events", "r", owned=False), seen])
    stream.close()
    journal.emit("x")
    journal.emit("y")
    journal.close()
    assert [event["event"] for event in seen.events] == ["x", "warning", "y"] or len(seen.events) == 3


PROGRAM = """
import sys
from ddops.journal import Outputs
sys.path.insert(0, {here!r})
from test_journal import tell_a_story
outputs = Outputs({options})
journal = outputs.journal("run-1")
for _ in range(300):
    tell_a_story(journal)
outputs.write()
print("done", file=open({done!r}, "w"))
"""


@pytest.mark.parametrize("options", ['events="-"', "as_json=True", ""])
def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path, options: str) -> None:
    done = tmp_path / "done"
    program = PROGRAM.format(here=str(Path(__file__).parent), options=options, done=str(done))
    with (tmp_path / "err").open("wb") as log:
        running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=log)
    assert running.stdout is not None
    running.stdout.read(10)
    running.stdout.close()
    code, err = running.wait(60), (tmp_path / "err").read_text()
    assert code == 0, err
    assert done.exists()
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_a_disk_that_is_full_from_the_start_is_found_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match="No space left"):
        Outputs(events="/dev/full", quiet=True).journal("run-1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"as_json": True, "events": "-"}, "both write to stdout"),
        ({"report": "report.pdf"}, "not known"),
        ({"junit": "/no/such/folder/x.xml"}, "cannot be written"),
        ({"report": "/no/such/folder/x.md"}, "cannot be written"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_anything_is_done(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Outputs(**options)


def test_an_events_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Outputs(events=str(tmp_path / "no" / "folder"), quiet=True).journal("r")


def test_a_report_that_cannot_be_written_at_the_end_is_only_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    outputs = Outputs(junit=str(folder / "junit.xml"))
    tell_a_story(outputs.journal("r"))
    folder.rmdir()
    outputs.write()
    assert "could not be written" in capfd.readouterr().err


# ---------------------------------------------------------------- streams
def test_progress_and_errors_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs()
    tell_a_story(outputs.journal("r"))
    outputs.write()
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "\nerror: gpu-01: not proven" in shown.err
    assert "hint:" in shown.err
    assert "gpu-01  FAIL  prove" in shown.err


def test_what_a_good_run_says_in_the_end_goes_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs()
    journal = outputs.journal("r")
    journal.emit("run.started", command="ddops reconfig", hosts=["gpu-01"])
    journal.emit("outcome", host="gpu-01", result="applied", exit=0, what="gpu-01 runs budget 16", means="", hint="", facts={})
    journal.emit("run.finished", exit=0)
    outputs.write()
    shown = capfd.readouterr()
    assert shown.out.startswith("gpu-01 runs budget 16")


def test_json_is_one_object_on_stdout_and_the_words_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(as_json=True)
    tell_a_story(outputs.journal("r"))
    outputs.write()
    shown = capfd.readouterr()
    assert json.loads(shown.out)["exit"] == 4
    assert "error: gpu-01: not proven" in shown.err


def test_events_on_stdout_are_pure_ndjson(capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(events="-")
    tell_a_story(outputs.journal("r"))
    outputs.write()
    lines = capfd.readouterr().out.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(len(lines)))


def test_looking_shows_warnings_and_no_steps(capfd: pytest.CaptureFixture[str]) -> None:
    journal = Outputs(quiet=True).journal("r")
    with journal.step("gpu-01", "connect"):
        journal.emit("warning", host="gpu-01", text="StrictHostKeyChecking no is not obeyed")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == "gpu-01  warning: StrictHostKeyChecking no is not obeyed\n"


def test_files_for_pipelines_are_written_where_the_pipeline_says(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before=1\n")
    environ = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_OUTPUT": str(tmp_path / "out")}
    outputs = Outputs(junit=str(tmp_path / "junit.xml"), environ=environ)
    tell_a_story(outputs.journal("run-1"))
    outputs.write()
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert "rolled-back" in (tmp_path / "summary").read_text()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:2] == ["before=1", "run=run-1"]
    assert all(re.fullmatch(r"[a-z-]+=.*", line) for line in lines)


# ---------------------------------------------------------------- lines without a terminal
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_wait_says_something_every_thirty_seconds_and_not_more() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock=clock)
    journal = Journal("r", [lines])
    journal.emit("step.started", host="gpu-01", step="ready")
    for second in range(181):
        clock.now = float(second)
        journal.emit("phase", host="gpu-01", text=f"loading weights {second // 2} %", fraction=second / 200,
                     elapsed=second, budget=1200)  # fmt: skip
        lines.beat()
    said = stream.getvalue().splitlines()
    assert len(said) == 7
    assert said[0] == "gpu-01  ...   loading weights 0 % (0.0 s of 20 min)"
    assert said[1] == "gpu-01  ...   loading weights 15 % (30 s of 20 min)"
    journal.close()


def test_a_silent_step_gets_a_heartbeat_of_its_own() -> None:
    stream, before = io.StringIO(), set(threading.enumerate())
    journal = Journal("r", [Lines(stream, heartbeat_seconds=0.3)])
    journal.emit("step.started", host="gpu-01", step="prove")
    time.sleep(1.1)
    said = stream.getvalue().splitlines()
    assert 2 <= len(said) <= 4
    assert all(line.startswith("gpu-01  ...   prove (") for line in said)
    journal.emit("step.finished", host="gpu-01", step="prove", ok=True, seconds=1.1)
    count = len(stream.getvalue().splitlines())
    time.sleep(0.8)
    assert len(stream.getvalue().splitlines()) == count  # nothing is waited for now
    journal.close()
    assert set(threading.enumerate()) <= before


def test_one_reason_why_probes_were_not_run_is_said_once() -> None:
    stream = io.StringIO()
    journal = Journal("r", [Lines(stream)])
    for step in ("prove", "prove the restored configuration"):
        with journal.step("a", step):
            for probe in ("copy", "answers", "long"):
                evidence = {"probe": probe, "outcome": "not_scored", "detail": "not run: coding has failed already"}
                journal.emit("probe", host="a", evidence=evidence)
            journal.emit("probe", host="a", evidence={"probe": "golden", "outcome": "not_scored", "detail": "no recording"})
    told = [line for line in stream.getvalue().splitlines() if "not scored" in line]
    assert (
        told
        == [
            "a        not scored copy and others: not run: coding has failed already",
            "a        not scored golden: no recording",
        ]
        * 2
    )


def test_a_proof_is_not_said_to_wait_for_what_came_before_it() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock=clock)
    journal = Journal("r", [lines])
    journal.emit("step.started", host="gpu-01", step="prove")
    journal.emit("phase", host="gpu-01", text="importing torch 0 %", fraction=0.0, elapsed=1, budget=120)
    journal.emit("probe", host="gpu-01", evidence={"probe": "coding", "outcome": "pass", "got": "5/5"})
    clock.now = 46.0
    lines.beat()
    assert stream.getvalue().splitlines()[-1] == "gpu-01  ...   prove (46 s)"
    terminal = Terminal()
    screen = Screen(terminal)
    told = Journal("r", [screen])
    told.emit("step.started", host="gpu-01", step="prove")
    told.emit("phase", host="gpu-01", text="importing torch 0 %", fraction=0.0, elapsed=1, budget=120)
    told.emit("probe", host="gpu-01", evidence={"probe": "coding", "outcome": "pass", "got": "5/5"})
    assert "importing" not in str(screen._progress.tasks[0].description)
    told.close()


def test_a_step_with_a_bad_verdict_or_a_dead_engine_is_not_shown_as_ok() -> None:
    stream = io.StringIO()
    journal = Journal("r", [Lines(stream)])
    tell_a_story(journal)
    with journal.step("gpu-01", "undo"):
        pass
    journal.close()
    marks = dict(re.findall(r"gpu-01  (?:(ok|FAIL) +)(\w+)", stream.getvalue()))
    found = {step: mark for mark, step in re.findall(r"gpu-01  (ok|FAIL)\s+(ready|prove|undo)", stream.getvalue())}
    assert found == {"ready": "FAIL", "prove": "FAIL", "undo": "ok"}, marks


HOSTILE = ["\x1b[2J\x1b[1;1Hgone", "\x1b]0;title\x07", "a\rb", "x\u202eevil", "\x9b31m", "one\n::set-output name=x::y"]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("environ", [{}, {"GITHUB_ACTIONS": "true"}])
def test_text_from_a_host_cannot_drive_the_terminal_or_the_pipeline(
    capfd: pytest.CaptureFixture[str], text: str, environ: dict[str, str]
) -> None:
    outputs = Outputs(environ=environ)
    journal = outputs.journal("r")
    journal.emit("run.started", command="c", hosts=["h"])
    with journal.step("h", "ready"):
        journal.emit("phase", host="h", text=text, fraction=None, elapsed=1, budget=2)
        journal.emit("died", host="h", why=text, lines=[text, f"##[add-mask]{text}"])
        journal.emit("warning", host="h", text=text)
    plan = {"settings": {}, "diff": f" {text}\n ::add-mask::x", "argv_diff": text}
    journal.emit("outcome", host="h", result="planned", exit=0, what=text, means=text, hint=text, facts={"plan": plan})
    journal.emit("run.finished", exit=0)
    outputs.write()
    shown = capfd.readouterr()
    for output in (shown.out, shown.err):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", output)
        if environ:
            commands = re.findall(r"(?m)^\s*::(\w+)", output)
            assert set(commands) <= {"group", "endgroup", "error", "warning"}
            assert "##[" not in output


def test_gitlab_sections_are_opened_and_closed(capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outputs(environ={"GITLAB_CI": "true"})
    tell_a_story(outputs.journal("r"))
    outputs.write()
    err = capfd.readouterr().err
    opened = re.findall(r"\x1b\[0Ksection_start:(\d+):([\w.-]+)\r\x1b\[0Kgpu-01", err)
    closed = re.findall(r"\x1b\[0Ksection_end:(\d+):([\w.-]+)\r\x1b\[0K", err)
    assert [name for _, name in opened] == [name for _, name in closed] == ["ddops_gpu-01"]
    assert int(opened[0][0]) > 1_700_000_000


# ---------------------------------------------------------------- a terminal
def on_a_terminal(program: str, **environ: str) -> str:
    """What a program writes to stderr when that is a terminal."""
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | environ
    running = subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=subprocess.DEVNULL, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.close(master)
    assert running.wait(30) == 0, shown
    return shown.decode()


STORY = textwrap.dedent(
    f"""
    import sys, time
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from ddops.journal import Outputs
    outputs = Outputs()
    journal = outputs.journal("r")
    journal.emit("run.started", command="c", hosts=["gpu-01"])
    with journal.step("gpu-01", "observe"):
        pass
    with journal.step("gpu-01", "ready"):
        journal.emit("phase", host="gpu-01", text="loading weights 41 %", fraction=0.41, elapsed=3, budget=60)
        time.sleep(0.5)
    journal.emit("outcome", host="gpu-01", result="applied", exit=0, what="done")
    journal.emit("run.finished", exit=0)
    outputs.write()
    """
)


def test_a_terminal_shows_ticks_and_a_bar_with_the_phase() -> None:
    shown = on_a_terminal(STORY, PYTHONIOENCODING="utf-8")
    assert "✓" in shown
    assert "loading weights 41 %" in shown
    assert "━" in shown
    assert "\x1b[?25h" in shown  # the cursor is given back


def test_no_color_and_dumb_terminals_are_honoured() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", on_a_terminal(STORY, NO_COLOR="1"))
    plain = on_a_terminal(STORY, TERM="dumb")
    assert "\x1b" not in plain
    assert "gpu-01  ok    ready" in plain


def test_text_on_a_terminal_is_never_markup() -> None:
    stream = Terminal()
    screen = Screen(stream)
    journal = Journal("r", [screen])
    with journal.step("[red]h[/red]", "[bold]step[/bold]"):
        journal.emit("phase", host="[red]h[/red]", text="[/nope] 41 %", fraction=0.4, elapsed=1, budget=2)
        journal.emit("warning", host="h", text="[link=x]y[/link] \x1b[31m")
    journal.close()
    assert "[link=x]y[/link]" in stream.getvalue()


def test_importing_the_journal_and_the_reports_is_light() -> None:
    program = "import sys, ddops.journal, ddops.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"rich", "jinja2", "paramiko", "fabric", "httpx", "pydantic"} & set(loaded)
