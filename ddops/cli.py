"""The command line as a whole: its front, and how every command leaves. It decides nothing.

Heavy libraries are imported only by what uses them, so that `--help` stays instant.
"""

from __future__ import annotations

import os
import sys

import click

from ddops import __version__, cli_change, cli_look
from ddops.errors import DdopsError, Exit, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--inventory", "-i", metavar="FILE", envvar="DDOPS_INVENTORY", help="The fleet (else DDOPS_INVENTORY, "
              "./inventory.yaml, ./inventories/default.yaml, ~/.config/ddops/inventory.yaml).")  # fmt: skip
@click.version_option(__version__, prog_name="ddops")
def main(inventory: str | None) -> None:
    """Change the speculative-decoding configuration of inference hosts, and prove every change.

    A change that is not proven is taken back, and what was restored is proven too.
    """


for command in (*cli_change.COMMANDS, *cli_look.COMMANDS):
    main.add_command(command)


def run() -> None:
    """The console script: every expected error is three lines and an exit code, never a traceback."""
    try:
        main(standalone_mode=False)
    except DdopsError as problem:
        _leave(str(problem), problem.exit)
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.Abort:
        _leave("error: stopped\n       nothing was changed", Exit.SIGINT)
    except click.exceptions.NoArgsIsHelpError as problem:
        problem.show()
        raise SystemExit(Exit.USAGE) from None
    except click.UsageError as problem:
        _leave(str(_usage(problem)), Exit.USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(Exit.OK) from None


def _usage(problem: click.UsageError) -> UsageError:
    """What click says of a command line, in the same words and lines as every other error."""
    said = problem.format_message().rstrip(".")
    hint = f"{problem.ctx.command_path} --help" if problem.ctx else "ddops --help"
    return UsageError(said[:1].lower() + said[1:], means="nothing was done", hint=hint)


def _leave(text: str, code: int) -> None:
    click.echo(text, err=True)
    raise SystemExit(int(code)) from None
