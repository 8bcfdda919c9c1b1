"""Which directories of this machine a Python interpreter needs, so that a host can run it at the same path."""

import json
import os
import subprocess
from pathlib import Path

from ddops.lab.spec import LabError

_FACTS = "import json, sys; print(json.dumps([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]))"


def python_mounts(executable: str | os.PathLike[str]) -> list[str]:
    """Directories to mount in a host so that `executable` runs there with the packages installed for it.

    Works for /usr/bin/python3, virtual environments, pyenv, uv, conda and /usr/local alike: the interpreter is asked
    for its prefixes, and its symbolic links are followed step by step, because every link on the way must exist in the
    host too. Editable installs stay out: a host has the code that is put there. So does what lies below /usr, which
    hosts have anyway. Raises LabError when `executable` does not run.
    """
    path = Path(os.path.abspath(executable))
    facts = [Path(p) for p in _ask(path) if os.path.isdir(p)]
    roots = [form for fact in facts for form in (fact, fact.resolve())]
    for step in _links(path):
        if not _covered(step, roots):
            roots.append(_prefix_of(step, roots))
    return [str(root) for root in _outermost(roots)]


def _ask(path: Path) -> list[str]:
    """The interpreter's prefixes, as it says itself whatever the environment says (-I)."""
    try:
        answer = subprocess.run([path, "-I", "-c", _FACTS], capture_output=True, text=True, timeout=60, check=True)
        facts: list[str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise LabError(f"{path} does not run as a Python interpreter: {exc}") from exc
    return facts


def _links(path: Path) -> list[Path]:
    """Every name `path` goes through until it is a file: links of the file itself and of the folders it is in."""
    steps = [path]
    while True:
        real_folder = Path(os.path.realpath(path.parent)) / path.name
        if real_folder != path:
            steps.append(path := real_folder)
        if not path.is_symlink():
            return steps
        steps.append(path := Path(os.path.normpath(path.parent / os.readlink(path))))


def _covered(path: Path, roots: list[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _prefix_of(step: Path, roots: list[Path]) -> Path:
    """The folder to mount for a link that lies outside all `roots`.

    The folder may be another name of a root (uv: cpython-3.12-linux -> cpython-3.12.7-linux): then that whole name.
    """
    real = step.parent.resolve()
    for root in sorted((r for r in roots if real.is_relative_to(r)), key=lambda r: len(r.parts), reverse=True):
        inside = real.relative_to(root).parts
        if inside and step.parent.parts[-len(inside) :] == inside:
            return Path(*step.parent.parts[: -len(inside)])
    return step.parent


def _outermost(roots: list[Path]) -> list[Path]:
    """`roots` sorted, without those inside another one or below /usr."""
    kept: list[Path] = []
    for root in sorted({r for r in roots if r != Path("/")}):
        if not _covered(root, [Path("/usr"), *kept]):
            kept.append(root)
    return kept
