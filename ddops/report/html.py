"""The run as one HTML file: no scripts, nothing loaded from elsewhere, everything escaped. Pure."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from ddops.report.model import Run
from ddops.report.summary import counts_line, score
from ddops.report.text import clean, one_line, seconds_text, settings_text

if TYPE_CHECKING:
    from jinja2 import Template


def html(run: Run) -> str:
    """The whole report."""
    return str(_template().render(run=run, counts=counts_line(run)))


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "clean": clean,
        "line": one_line,
        "seconds": seconds_text,
        "settings": settings_text,
        "score": score,
    }
    source = files("ddops.report").joinpath("report.html.j2").read_text("utf-8")
    return environment.from_string(source)
