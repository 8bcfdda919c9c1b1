"""The wheel: what it holds, what it does not, and that it works from where it lands."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def shipped(folder: str, inside: str) -> Iterator[str]:
    for file in sorted((ROOT / folder).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
            yield f"{inside}/{file.relative_to(ROOT / folder).as_posix()}"


def test_the_wheel_holds_the_package_the_templates_and_the_inventories_and_nothing_else(wheel: Path) -> None:
    wanted = set(shipped("ddops", "ddops"))
    wanted |= {*shipped("templates", "ddops/templates"), *shipped("inventories", "ddops/inventories")}
    assert names(wheel) == wanted


def test_the_wheel_holds_no_tests_no_caches_and_no_engine(wheel: Path) -> None:
    for name in zipfile.ZipFile(wheel).namelist():
        parts = set(Path(name).parts)
        assert not parts & {"tests", "__pycache__", "engine", "ddtree_engine", ".venv", "docs", "build"}, name
        assert not name.endswith((".pyc", ".orig", ".rej", "~")), name


def test_every_data_file_the_package_opens_is_there(wheel: Path) -> None:
    held = names(wheel)
    for needed in ("ddops-host.sh", "ddtree.service.j2", "sglang.service.j2", "vllm.service.j2", "fence.conf.j2"):
        assert f"ddops/templates/{needed}" in held
    for needed in ("example.yaml", "lab.yaml", "b300.yaml"):
        assert f"ddops/inventories/{needed}" in held


PROGRAM = """
import ddops, pathlib, sys
from ddops import commands, units
from ddops.engines import Settings
from ddops.inventory import load
here = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(ddops.__file__).resolve().is_relative_to(here), ddops.__file__
assert pathlib.Path(str(units.templates_dir())).resolve().is_relative_to(here), units.templates_dir()
fleet = load((units.inventories_dir() / "lab.yaml").read_bytes(), "lab.yaml")
for host in fleet.hosts.values():
    assert units.is_ours(units.render(host, Settings("DDTREE", 8, 4, 2)).text)
    assert b"Restart=no" in units.fence(host, ["10.231.0.11"])
assert commands.script().startswith(b"#!/bin/sh")
"""


def run_from(place: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, path]
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=place, env=environment)


def test_an_unpacked_wheel_finds_its_templates_and_renders(unpacked: Path, tmp_path: Path) -> None:
    done = run_from(tmp_path, str(unpacked))
    assert done.returncode == 0, done.stderr


def test_a_checkout_finds_them_beside_the_package(tmp_path: Path) -> None:
    done = run_from(tmp_path, str(ROOT))
    assert done.returncode == 0, done.stderr


def test_the_command_of_the_wheel_starts(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import ddops.cli; ddops.cli.main()", "--help"]
    environment = {"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_wheel_declares_every_library_that_is_imported(wheel: Path) -> None:
    import ast
    import re

    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    declared = re.findall(r"^Requires-Dist: ([A-Za-z0-9_.-]+)", archive.read(metadata).decode(), re.MULTILINE)
    known = {name.lower().replace("-", "_").replace(".", "_") for name in declared} | {"ruamel", "ddops"}
    for name in archive.namelist():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(archive.read(name))):
            tops = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                tops = [node.module]
            for top in {t.split(".")[0] for t in tops}:
                assert top in sys.stdlib_module_names or top.lower() in known, f"{name} imports {top}, not declared"
