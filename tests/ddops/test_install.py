"""A release is the same bytes wherever it is packed, holds all of the engine, and nothing else."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from ddops import install
from ddops.errors import UsageError


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A small engine's folder, with things in it that are no part of a release."""
    folder = tmp_path / "engine"
    for name, text in {
        "ddtree_engine/__init__.py": '"""An engine."""\n\n__version__ = "3.1.4"\n',
        "ddtree_engine/decode.py": "x = 1\n",
        "ddtree_engine/__pycache__/decode.cpython-311.pyc": "no",
        "ddtree_engine/parts/kernel.py": "y = 2\n",
        "models/target/config.json": "{}",
        "models/target/model.safetensors": "weights",
        "training/train.py": "no",
        "pyproject.toml": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def members(release: install.Release) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(release.tar)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_a_release_holds_the_package_and_the_models_and_nothing_else(engine: Path) -> None:
    release = install.pack(engine)
    assert release.version == "3.1.4"
    assert sorted(members(release)) == [
        "SHA256SUMS",
        "ddtree_engine/__init__.py",
        "ddtree_engine/decode.py",
        "ddtree_engine/parts/kernel.py",
        "models/target/config.json",
        "models/target/model.safetensors",
    ]


def test_every_file_is_in_the_sums_and_the_sums_are_the_releases_name(engine: Path) -> None:
    release = install.pack(engine)
    files = members(release)
    sums = files.pop("SHA256SUMS")
    assert hashlib.sha256(sums).hexdigest() == release.manifest_digest
    listed = dict(reversed(line.split("  ", 1)) for line in sums.decode().splitlines())  # type: ignore[misc]
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_the_same_engine_gives_the_same_bytes_and_another_does_not(engine: Path) -> None:
    first = install.pack(engine)
    assert install.pack(engine) == first
    (engine / "ddtree_engine/decode.py").write_text("x = 2\n")
    assert install.pack(engine).manifest_digest != first.manifest_digest


def test_a_wheel_and_its_folder_are_the_same_release(engine: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "ddtree_engine-3.1.4-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members(install.pack(engine)).items():
            if name != "SHA256SUMS":
                archive.writestr(f"ddtree_engine/{name}" if name.startswith("models/") else name, data)
        archive.writestr("ddtree_engine-3.1.4.dist-info/METADATA", "no")
    assert install.pack(wheel) == install.pack(engine)


@pytest.mark.parametrize("name", ["nothing", "empty", "broken.whl", "other.whl"])
def test_what_is_no_engine_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.whl").write_bytes(b"PK\x03\x04 no")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(UsageError):
        install.pack(tmp_path / name)


def test_the_checkouts_own_engine_is_the_default_and_has_its_models() -> None:
    source = install.default_source()
    assert source is not None
    names = members(install.pack(source))
    for model in ("target", "drafter-b16", "drafter-b8"):
        assert f"models/{model}/model.safetensors" in names
