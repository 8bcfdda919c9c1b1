"""`python -m ddtree_engine.selfcheck`: can the engine run here at all? One JSON object, exit code 0 or 1.

It looks at the interpreter, the libraries and the devices, and multiplies one small matrix on each. It loads no model
and opens no port. Written so that it still answers when a library is missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from ddtree_engine import __version__
from ddtree_engine.build import build_digest

OLDEST_PYTHON = (3, 11)
# Import name -> distribution name.
REQUIRED = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}


def report() -> dict[str, Any]:
    """Everything found. `missing` names distributions to install, `problems` says what else is wrong."""
    versions, missing, problems = _libraries()
    if sys.version_info < OLDEST_PYTHON:
        problems.append(f"Python {platform.python_version()} is older than {'.'.join(map(str, OLDEST_PYTHON))}")
    devices = _devices(problems) if "torch" in versions else []
    return {
        "ok": not missing and not problems,
        "version": __version__,
        "build": build_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": versions.get("torch"),
        "cuda": _cuda_version() if "torch" in versions else None,
        "devices": devices,
        "packages": versions,
        "missing": missing,
        "problems": problems,
    }


def main() -> int:
    found = report()
    print(json.dumps(found, indent=2))
    return 0 if found["ok"] else 1


def _libraries() -> tuple[dict[str, str], list[str], list[str]]:
    versions: dict[str, str] = {}
    missing: list[str] = []
    problems: list[str] = []
    for module, distribution in REQUIRED.items():
        try:
            importlib.import_module(module)
            versions[module] = importlib.metadata.version(distribution)
        except ModuleNotFoundError as exc:
            missing.append(distribution if exc.name == module else f"{distribution} (needs {exc.name})")
        except Exception as exc:  # a library may fail in any way while it is imported
            problems.append(f"{distribution} does not import: {type(exc).__name__}: {exc}")
    return versions, missing, problems


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    import torch

    cpu = {
        "type": "cpu",
        "name": platform.processor() or platform.machine(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    found = [cpu]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        props = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        arch = f"sm_{props.major}{props.minor}"
        found.append(
            {
                "type": "cuda",
                "index": index,
                "name": props.name,
                "arch": arch,
                "memory_free": free,
                "memory_total": total,
            }
        )
    for device in found:
        name = device["type"] if device["type"] == "cpu" else f"cuda:{device['index']}"
        device["works"] = _multiplies(name, problems)
    return found


def _multiplies(device: str, problems: list[str]) -> bool:
    """Whether a product that is known by heart comes out right."""
    import torch

    try:
        ones = torch.ones(16, 16, device=device)
        right = bool((ones @ ones == 16).all())
    except RuntimeError as exc:
        problems.append(f"{device} cannot compute: {' '.join(str(exc).split())}")
        return False
    if not right:
        problems.append(f"{device} computes wrongly: a matrix product of ones is not 16")
    return right


def _cuda_version() -> str | None:
    import torch

    version: str | None = torch.version.cuda
    return version


if __name__ == "__main__":
    sys.exit(main())
