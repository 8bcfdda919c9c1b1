"""`python_mounts` finds all that an interpreter needs, however it was installed (interpreters here are stand-ins)."""

import json
from pathlib import Path

import pytest

from ddops.lab import LabError, python_mounts


def _interpreter(path: Path, *, prefix: Path, base: Path) -> Path:
    """A program that answers as an interpreter with these prefixes would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = json.dumps([str(prefix), str(prefix), str(base), str(base)])
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    (base / "lib").mkdir(parents=True, exist_ok=True)
    prefix.mkdir(parents=True, exist_ok=True)
    return path


def _link(path: Path, target: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def test_virtual_environment_on_a_version_manager_needs_both(tmp_path: Path) -> None:
    venv, base = tmp_path / "venv", tmp_path / "pyenv/versions/3.11.7"
    _interpreter(base / "bin/python3.11", prefix=venv, base=base)
    _link(base / "bin/python3", "python3.11")
    _link(venv / "bin/python3", base / "bin/python3")
    assert python_mounts(_link(venv / "bin/python", "python3")) == [str(base), str(venv)]


def test_conda_like_environment_is_one_folder(tmp_path: Path) -> None:
    env = tmp_path / "conda/envs/serve"
    assert python_mounts(_interpreter(env / "bin/python", prefix=env, base=env)) == [str(env)]


def test_uv_style_folder_links_are_mounted_under_every_name(tmp_path: Path) -> None:
    full, short, venv = tmp_path / "uv/cpython-3.12.7-linux", tmp_path / "uv/cpython-3.12-linux", tmp_path / "venv"
    _interpreter(full / "bin/python3.12", prefix=venv, base=full)
    _link(short, full.name)
    python = _link(venv / "bin/python", short / "bin/python3.12")
    assert python_mounts(python) == sorted(map(str, (full, short, venv)))


def test_base_prefix_known_by_its_linked_name_is_mounted_by_its_real_one_too(tmp_path: Path) -> None:
    real, linked = tmp_path / "data/python", tmp_path / "opt/python"
    real.mkdir(parents=True)
    _link(linked, real)
    _interpreter(real / "bin/python3", prefix=linked, base=linked)
    assert python_mounts(linked / "bin/python3") == sorted(map(str, (real, linked)))


def test_link_on_the_way_in_a_folder_of_its_own_is_mounted(tmp_path: Path) -> None:
    base, venv, between = tmp_path / "base", tmp_path / "venv", tmp_path / "tools/bin"
    _interpreter(base / "bin/python3", prefix=venv, base=base)
    _link(between / "py", base / "bin/python3")
    python = _link(venv / "bin/python", between / "py")
    assert python_mounts(python) == sorted(map(str, (base, between, venv)))


def test_what_is_in_usr_needs_no_mount(tmp_path: Path) -> None:
    python = _interpreter(tmp_path / "venv/bin/python", prefix=tmp_path / "venv", base=Path("/usr"))
    assert python_mounts(python) == [str(tmp_path / "venv")]


@pytest.mark.parametrize("content", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho no json\n"])
def test_program_that_is_no_interpreter_is_refused_by_name(tmp_path: Path, content: str) -> None:
    program = tmp_path / "python"
    program.write_text(content)
    program.chmod(0o755)
    with pytest.raises(LabError, match=f"{program} does not run as a Python"):
        python_mounts(program)
