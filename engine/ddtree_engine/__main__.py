"""The command line: `python -m ddtree_engine` (console script `ddtree-engine`).

Flags are SGLang's where SGLang has them. Nothing heavy is imported before they are known to be right, so --help and a
wrong flag answer at once. Not here: what the settings mean (config.py) and running them (server.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import NoReturn

from ddtree_engine import __version__
from ddtree_engine.config import AUTO, LOG_LEVELS, Algorithm, ConfigError, EngineConfig
from ddtree_engine.selfcheck import REQUIRED

PROG = "ddtree-engine"
_ONE_DEVICE = "runs one model on one device; for several GPUs or nodes use SGLang or vLLM"
# Flags of bigger engines -> why not here. Their value 1 (0 for a rank) changes nothing and is taken.
_PARALLEL_FLAGS = (
    "--tp-size", "--tp", "--tensor-parallel-size", "--dp-size", "--dp", "--data-parallel-size", "--pp-size", "--pp",
    "--pipeline-parallel-size", "--ep-size", "--ep", "--nnodes", "--node-rank", "--dist-init-addr",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line that says what to do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROG}: error: {message}\nhint: {PROG} --help lists every flag\n")


def parser() -> argparse.ArgumentParser:
    """The flags. Destinations are EngineConfig's field names."""
    p = _Parser(
        PROG,
        description="Serve a Qwen3 model with DDTree speculative decoding.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what is not given takes EngineConfig's default, stated there alone
    )
    p.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    _model_flags(p.add_argument_group("model and device"))
    _speculation_flags(p.add_argument_group("speculation"))
    _serving_flags(p.add_argument_group("serving"))
    _fault_flags(p.add_argument_group("fault injection (for proving detectors; never in production)"))
    for flag in _PARALLEL_FLAGS:
        p.add_argument(flag, dest=f"parallel{flag}", help=argparse.SUPPRESS)
    return p


def _model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-path", required=True, metavar="DIR", help="folder of the target (Hugging Face layout)")
    group.add_argument("--served-model-name", metavar="NAME", help="name clients use (default: the model path)")
    group.add_argument("--dtype", choices=["auto", "float32", "bfloat16"])
    group.add_argument("--device", choices=["auto", "cpu", "cuda"])
    group.add_argument("--num-threads", type=int, metavar="N", help="processor threads (default: torch's)")
    group.add_argument("--random-seed", type=int, metavar="N", help="seed for requests that bring none")
    group.add_argument("--context-length", type=int, metavar="N", help="longest prompt plus answer, in tokens")


def _speculation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speculative-algorithm", type=_algorithm, metavar="DDTREE|DFLASH|NONE",
        help="what requests use that do not say: tree, chain or no speculation (default: NONE)",
    )  # fmt: skip
    group.add_argument("--speculative-draft-model-path", metavar="DIR", help="folder of the DFlash drafter")
    group.add_argument(
        "--speculative-ddtree-budget", type=_budget, metavar="N|auto",
        help="tree nodes below the root; verify width is N + 1 (default: the block size)",
    )  # fmt: skip
    group.add_argument("--speculative-ddtree-topk-cap", type=int, metavar="N", help="children considered")
    group.add_argument("--speculative-dflash-block-size", type=int, metavar="N", help="default: the drafter's own")


def _serving_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, metavar="N", help="default: 30000; 0 takes a free one")
    group.add_argument("--max-running-requests", type=int, metavar="N", help="default: 16")
    group.add_argument("--cuda-graph-max-bs", type=int, metavar="N", help="default: --max-running-requests")
    group.add_argument("--chunked-prefill-size", type=int, metavar="N", help="default: 512")
    group.add_argument("--disable-radix-cache", action="store_true", help="never reuse a prefix")
    group.add_argument("--disable-cuda-graph", action="store_true")
    group.add_argument("--enable-metrics", action="store_true", help="serve /metrics")
    group.add_argument("--api-key-file", metavar="FILE", help="keys, one a line; asked for but on /health and /metrics")
    group.add_argument("--decode-log-interval", type=int, metavar="N", help="rounds between log lines (default: 40)")
    group.add_argument("--log-level", choices=LOG_LEVELS, help="default: info")


def _fault_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--enable-fault-injection", action="store_true")
    group.add_argument(
        "--fault", dest="faults", action="append", metavar="KIND[,key=value...]",
        help="switch a fault on; repeatable; `--fault help` lists kinds and keys",
    )  # fmt: skip


def parse_config(argv: Sequence[str]) -> EngineConfig:
    """The settings in `argv`. Leaves with code 2 and one line for anything wrong."""
    p = parser()
    if "--fault=help" in argv or ("--fault", "help") in pairwise(argv):
        _print_fault_help()
    values = vars(p.parse_args(argv))
    _refuse_parallel(p, values)
    values["faults"] = tuple(values.get("faults", ()))
    try:
        config = EngineConfig(**values)
    except ConfigError as exc:
        p.error(f"--{exc.field.replace('_', '-')}: {exc.message}")
    _check_faults(p, config.faults)
    return config


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parse, serve, leave. Exit codes are those of server.py."""
    config = parse_config(sys.argv[1:] if argv is None else argv)
    _set_up_logging(config.log_level)
    code = _run(config)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The device thread may be deep inside a kernel; an orderly interpreter exit would wait for it or crash on it.
    os._exit(code)


def _run(config: EngineConfig) -> int:
    _check_packages()
    from ddtree_engine.server import CannotStart, serve

    try:
        return serve(config)
    except CannotStart as exc:
        print(f"{PROG}: error: {exc}", file=sys.stderr)
        return exc.code


def _check_packages() -> None:
    """Leaves with code 2 and says all that this Python lacks, at once; a library is not imported for it."""
    missing = [distribution for module, distribution in REQUIRED.items() if find_spec(module) is None]
    if missing:
        said = f"{sys.executable} lacks {', '.join(missing)}"
        print(f"{PROG}: error: {said}\nhint: {sys.executable} -m pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)


def _check_faults(p: argparse.ArgumentParser, faults: Sequence[str]) -> None:
    if not faults:
        return
    _check_packages()
    from ddtree_engine.faults import FaultError, check_faults

    try:
        check_faults(faults)
    except FaultError as exc:
        p.error(f"--fault: {exc}")


def _print_fault_help() -> NoReturn:
    from ddtree_engine.faults import describe_kinds

    print(describe_kinds())
    sys.exit(0)


def _refuse_parallel(p: argparse.ArgumentParser, values: dict[str, object]) -> None:
    for flag in _PARALLEL_FLAGS:
        value = values.pop(f"parallel{flag}", None)
        neutral = "0" if flag == "--node-rank" else "1"
        if value is not None and value != neutral:
            p.error(f"{flag} {value}: {PROG} {_ONE_DEVICE}")


def _algorithm(text: str) -> Algorithm:
    try:
        return Algorithm(text.upper())
    except ValueError:
        known = ", ".join(Algorithm)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}; other algorithms: SGLang or vLLM") from None


def _budget(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'") from None


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    logging.getLogger("ddtree_engine").setLevel(level.upper())
    if level == "debug":
        logging.getLogger("uvicorn").setLevel("INFO")


if __name__ == "__main__":
    main()
