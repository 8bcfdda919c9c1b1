"""The module map, kept by reading imports: pure modules decide, effect modules act, dependencies point one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = (
    "ddops.errors", "ddops.state", "ddops.outcome", "ddops.ledger", "ddops.inventory", "ddops.engines", "ddops.units",
    "ddops.commands", "ddops.plan", "ddops.rollout", "ddops.report", "ddops.prove.verdicts", "ddops.prove.evidence",
    "ddops.prove.power",
)  # fmt: skip
EFFECTS = frozenset(
    [
        "fabric",
        "paramiko",
        "invoke",
        "httpx",
        "httpcore",
        "subprocess",
        "socket",
        "time",
        "asyncio",
        "threading",
        "multiprocessing",
        "signal",
        "select",
        "tenacity",
        "wasmtime",
        "tempfile",
        "shutil",
        "urllib",
        "http",
        "requests",
        "getpass",
        "secrets",
        "concurrent",
        "ctypes",
    ]
)
HEAVY = frozenset(
    {
        "fabric",
        "paramiko",
        "invoke",
        "pydantic",
        "httpx",
        "httpcore",
        "jinja2",
        "wasmtime",
        "rich",
        "ruamel",
        "tenacity",
    }
)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(folder: str = "ddops") -> dict[str, ast.Module]:
    files = [file for file in (ROOT / folder).rglob("*.py") if "__pycache__" not in file.parts]
    return {module_of(file): ast.parse(file.read_text(encoding="utf-8"), str(file)) for file in files}


def imports(tree: ast.AST, name: str, known: frozenset[str]) -> Iterator[str]:
    """Every module an import anywhere in the tree names, function bodies and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: len(name.split(".")) - node.level + (name + ".__init__" in known)]
                base = ".".join([*package, base]).strip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else base


def is_pure(module: str) -> bool:
    return any(module == pure or module.startswith(pure + ".") for pure in PURE)


def test_the_listed_pure_modules_exist() -> None:
    missing = [pure for pure in PURE if pure not in modules()]
    assert not missing


@pytest.mark.parametrize("module", sorted(m for m in modules() if is_pure(m)))
def test_pure_modules_import_nothing_that_acts(module: str) -> None:
    known = frozenset(modules())
    for target in imports(modules()[module], module, known):
        assert target.split(".")[0] not in EFFECTS, f"{module} imports {target}"
        if target.split(".")[0] == "ddops" and target != "ddops":
            assert is_pure(target), f"{module} imports {target}, which acts"


def test_pure_modules_open_no_file_of_the_user() -> None:
    """Templates and other package data are read through importlib.resources; nothing is written, nothing executed."""
    banned = {"open", "exec", "eval", "print", "input", "__import__"}
    for module, tree in modules().items():
        if not is_pure(module):
            continue
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not called & banned, f"{module} calls {called & banned}"


def test_only_hosts_knows_how_to_log_in() -> None:
    for module, tree in modules().items():
        if module == "ddops.hosts" or module.startswith("ddops.hosts."):
            continue
        used = {target.split(".")[0] for target in imports(tree, module, frozenset(modules()))}
        assert not used & {"fabric", "paramiko", "invoke"}, module


def test_ddops_and_the_engine_know_nothing_of_each_other() -> None:
    for folder, other in (("ddops", "ddtree_engine"), ("engine/ddtree_engine", "ddops")):
        for module, tree in modules(folder).items():
            used = {target.split(".")[0] for target in imports(tree, module, frozenset())}
            assert other not in used, module


def runtime_imports(module: str) -> set[str]:
    """Imports at the module's top level that run, so without TYPE_CHECKING blocks and function bodies."""
    found: set[str] = set()
    for node in modules()[module].body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= set(imports(node, module, frozenset(modules())))
    return {target for target in found if target in modules()}


def test_imports_make_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module]) if module in path else ""
        if module in done:
            return
        package = module + "."
        for target in runtime_imports(module):
            # A package's __init__ gathers its own modules, and they may name it to reach a sibling.
            if not module.startswith(target + ".") and target != module:
                visit(target, path if target.startswith(package) else (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    code = "import sys, json, ddops.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & HEAVY


def test_help_needs_no_heavy_library_either() -> None:
    code = "\n".join(
        [
            "import sys, json, ddops.cli",
            "try: ddops.cli.main(['--help'])",
            "except SystemExit: pass",
            "print(json.dumps(sorted(sys.modules)), file=sys.stderr)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert "Usage" in done.stdout
    loaded = {name.split(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    assert not loaded & HEAVY


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(modules()[module]), f"{module} has no docstring"
