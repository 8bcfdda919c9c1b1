"""GitLab's collapsible log sections. Pure. (Its test report is JUnit, and exit codes do the rest.)"""

from __future__ import annotations

import re

from ddops.report.progress import Sections
from ddops.report.text import one_line

_CLEAR = "\x1b[0K"


class GitLabSections(Sections):
    """A section per host."""

    def _start(self, host: str, at: int) -> str:
        return f"{_CLEAR}section_start:{at}:{_name(host)}\r{_CLEAR}{one_line(host)}"

    def _end(self, host: str, at: int) -> str:
        return f"{_CLEAR}section_end:{at}:{_name(host)}\r{_CLEAR}"


def _name(host: str) -> str:
    return "ddops_" + re.sub(r"[^A-Za-z0-9_.-]", "_", host)
