"""The documentation says what the code does: generated pages, command lines, links, exit codes, names."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ddops import reference, report
from ddops.cli import main as cli
from ddops.errors import Exit
from ddops.outcome import Result
from ddops.prove.battery import PROBES

ROOT = Path(reference.__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
OURS = [page for page in PAGES if page.name not in ("performance.md", "detection.md")]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- generated pages
def test_generated_references_are_current() -> None:
    assert list(reference.stale()) == [], "do: python -m ddops.reference --write"


def test_an_outdated_page_is_noticed(tmp_path: Path) -> None:
    for name, text in reference.pages().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(reference.stale(tmp_path)) == []
    (tmp_path / "cli.md").write_text(reference.pages()["cli.md"].replace("--budget", "--bugdet"), encoding="utf-8")
    (tmp_path / "inventory.md").unlink()
    assert list(reference.stale(tmp_path)) == ["cli.md", "inventory.md"]


def test_the_cli_page_has_every_command_and_option() -> None:
    page = reference.cli_page()
    for name, command in cli.commands.items():
        _, found, rest = page.partition(f"## ddops {name}\n")
        section = rest.partition("\n## ")[0]
        assert found, name
        missing = [flag for param in command.params for flag in param.opts if f"`{flag}`" not in section]
        assert not missing, f"{name}: {missing}"


def test_the_inventory_page_has_limits_defaults_and_words() -> None:
    page = reference.inventory_page()
    assert "| `port` | whole number, from 1 to 65535 | `22` |" in page
    assert "| `budget` | whole number, from 1 or `auto` | none | nodes of the draft tree" in page
    assert "| `address` | host name or IP address | required |" in page
    assert "| `copy` | number, from 0 to 1 | `1.0` |" in page


def test_comments_of_a_key_are_found_under_their_section() -> None:
    example = """\
defaults:
  ssh:
    port: 22 # where
  engine: # all of it
    port: 3 # example; there
hosts:
  a:
    arch: x # hint
"""
    assert reference.comments(example) == {
        "ssh.port": "where",
        "engine": "all of it",
        "engine.port": "there",
        "arch": "hint",
    }


# ---------------------------------------------------------------- command lines
def command_lines() -> Iterator[tuple[str, str]]:
    """Every `ddops ...` in code: fenced, indented or inline. A transcript's own output is no command."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in text.splitlines():
            shown = re.match(r"(?: {4,}|\s*- run: |\s*script: |(?: {4,})?\$ )(?:\$ )?(ddops(?: .*)?)$", line)
            if shown:
                yield named(page), shown[1]
        fenced = CODE.sub("", text)
        for inline in re.findall(r"`(ddops [^`]+)`", fenced):
            yield named(page), inline


LINES = sorted(set(command_lines()))


def parsed(line: str) -> click.Context:
    """The command line as click understands it; nothing is executed."""
    words = shlex.split(re.split(r" [>|] ", line)[0], comments=True)[1:]
    group = cli.make_context("ddops", words)
    rest = [*group._protected_args, *group.args]
    name, command, arguments = cli.resolve_command(group, rest)
    assert command is not None
    return command.make_context(name, arguments, parent=group)


def test_there_are_command_lines_to_check() -> None:
    assert len(LINES) > 30
    assert {page for page, _ in LINES} >= {"README.md", "docs/getting-started.md", "docs/guides/on-call.md"}


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}" for page, line in LINES])
def test_every_command_line_is_one(page: str, line: str) -> None:
    if "[OPTIONS]" in line:
        assert page == "docs/reference/cli.md"
        return
    parsed(line)


@pytest.mark.parametrize("line", ["ddops reconfig --bugdet 8", "ddops reconfigure", "ddops wait --until soon", "ddops logs x"])
def test_a_command_line_that_is_none_is_noticed(line: str) -> None:
    with pytest.raises(click.ClickException):
        parsed(line)


def test_every_command_is_in_the_readme_or_a_guide() -> None:
    told = {shlex.split(line, comments=True)[1] for page, line in LINES if page != "docs/reference/cli.md"}
    assert set(cli.commands) - told == set()


# ---------------------------------------------------------------- hints
def said() -> Iterator[tuple[str, str]]:
    """Every text in ddops' own code, with a word in place of each value."""
    for path in sorted((ROOT / "ddops").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in joined for part in node.values}
        for node in joined:
            yield named(path), "".join(str(v.value) if isinstance(v, ast.Constant) else "8" for v in node.values)
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield named(path), node.value


def test_every_command_a_message_names_exists_with_its_options() -> None:
    seen = 0
    for place, text in said():
        for name, options in re.findall(r"(?<![\w/-])ddops ([a-z]+)((?: --[a-z-]+(?: (?!or\b)\w+)?)*)", text):
            command = cli.commands.get(name)
            if command is None:
                assert not options, f"{place}: ddops {name}{options}"
                continue
            seen += 1
            known = {flag for param in command.params for flag in param.opts}
            assert set(re.findall(r"--[a-z-]+", options)) <= known, f"{place}: ddops {name}{options}"
    assert seen > 40


def test_every_option_a_plan_names_is_one_of_reconfig() -> None:
    known = {flag for param in cli.commands["reconfig"].params for flag in param.opts}
    plans = [re.sub(r"ddops (?!reconfig)[a-z]+( --[a-z-]+ \w+)*", "", t) for p, t in said() if p.startswith("ddops/plan/")]
    told = {flag for text in plans for flag in re.findall(r"(?<![\w-])--[a-z-]+", text)}
    assert told & {"--budget", "--retry-known-bad"}
    assert told - known - {"--host"} == set()


# ---------------------------------------------------------------- links and words
def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(head) for head in re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_points_to_something(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


# Addresses in the pages are examples: nothing is fetched from a place that somebody else may change or take away.
_EXAMPLES = r"(?:127\.0\.0\.1|localhost|10\.[\d.]+|ADDRESS|(?:[\w-]+\.)*example\.(?:net|com|org))"
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$~])/(?:work|home|Users|tmp|root)\b",
    "an address that is no example": rf"(?i)https?://(?!{_EXAMPLES}(?![\w.-]))",
    "a folder beside the project": r"\.\./(?:\.\./)*shared\b",
    "something unfinished": r"\b(?:TODO|FIXME|TBD|XXX|[A-Z]+_TRANSCRIPT)\b",
}


@pytest.mark.parametrize("page", OURS, ids=named)
@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_page_holds(page: Path, what: str) -> None:
    found = re.search(FORBIDDEN[what], page.read_text(encoding="utf-8"))
    assert found is None, f"{what}: {found}"


def test_decisions_are_short_numbered_and_listed() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    index = text_of("docs/decisions/README.md")
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, page.name
        assert all(part in text for part in ("Status:", "## Context", "## Decision", "## Consequences")), page.name
        assert f"]({page.name})" in index, page.name


def test_the_readme_says_what_it_is_within_thirty_lines() -> None:
    top = "\n".join(text_of("README.md").splitlines()[:30])
    assert "$ ddops reconfig" in top
    assert "make demo" in top
    assert "docs/architecture.md" in top


# ---------------------------------------------------------------- names the code has
@pytest.mark.parametrize("code", Exit)
def test_every_exit_code_is_documented(code: Exit) -> None:
    assert f"| {int(code)} | `{code.name}` |" in text_of("docs/reference/exit-codes.md")


def test_every_result_is_documented() -> None:
    page = text_of("docs/reference/events.md")
    assert [str(result) for result in Result if str(result) not in page] == []


def emitted() -> set[str]:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ddops").rglob("*.py")]
    return {name for text in sources for name in re.findall(r"\.emit\(\s*\"([a-z.]+)\"", text)}


def test_every_event_is_documented() -> None:
    page = text_of("docs/reference/events.md")
    assert len(emitted()) > 8
    assert [name for name in sorted(emitted()) if f"| `{name}` |" not in page] == []


def test_every_probe_is_in_the_readme() -> None:
    told = text_of("README.md").partition("## What a proof is")[2].partition("## ")[0]
    assert [probe for probe in PROBES if not re.search(rf"^\|.*\b{probe}\b.*\|", told, re.MULTILINE)] == []


def test_every_key_of_the_json_output_is_documented() -> None:
    page = text_of("docs/reference/events.md").partition("## --json")[2]
    events = [{"event": "run.started", "run": "r", "hosts": ["a"]}, {"event": "outcome", "host": "a", "result": "applied"}]
    made = report.document(report.fold(events))
    keys = {*made, *made["hosts"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_every_step_is_documented() -> None:
    page = text_of("docs/reference/events.md")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ddops").glob("*.py")]
    steps = {name for text in sources for name in re.findall(r"\.step\((?:[\w.]+, )?\"([^\"]+)\"\)", text)}
    assert len(steps) > 10
    assert [step for step in sorted(steps) if step not in page] == []


def test_every_route_and_flag_of_the_engine_is_in_its_contract() -> None:
    page = text_of("docs/reference/engine-contract.md")
    engine = ROOT / "engine" / "ddtree_engine"
    routes = re.findall(r'Route\("([^":]+)', (engine / "api.py").read_text(encoding="utf-8"))
    front = (engine / "__main__.py").read_text(encoding="utf-8")
    flags = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', front)) - {"--version"}
    assert len(routes) > 12
    assert len(flags) > 20
    assert [name for name in (*routes, *sorted(flags)) if name.partition("{")[0] not in page] == []


def test_every_file_and_unit_of_the_host_script_is_documented() -> None:
    page = text_of("docs/reference/host-state.md")
    script = text_of("templates/ddops-host.sh")
    units = set(re.findall(r"\b(ddops-(?:guard|switch|settle))-", script))
    assert units == {"ddops-guard", "ddops-switch", "ddops-settle"}
    assert [name for name in sorted(units) if name not in page] == []
    for kept in ("ledger.ndjson", "units", "evidence", "lease", "trial", "last", "lock"):
        assert f"/{kept}" in script
        assert f"/{kept}" in page
