"""Unit files: rendered from a template, read back, amended where a person wrote them. Pure.

A unit is the whole configuration of an engine; the sha256 of its bytes is the configuration's id. Nothing
here touches a host: systemd's grammar lives in `quoting` (writing) and `parse` (reading).
"""

from ddops.units.amend import amend
from ddops.units.diff import argv_diff, diff, redact
from ddops.units.parse import Assignment, ParsedUnit, UnitError, parse
from ddops.units.quoting import env_quote, exec_line, exec_quote
from ddops.units.render import (
    FENCE_NAME,
    Unit,
    digest,
    fence,
    from_text,
    inventories_dir,
    is_ours,
    render,
    settings,
    templates_dir,
)

__all__ = [
    "FENCE_NAME",
    "Assignment",
    "ParsedUnit",
    "Unit",
    "UnitError",
    "amend",
    "argv_diff",
    "diff",
    "digest",
    "env_quote",
    "exec_line",
    "exec_quote",
    "fence",
    "from_text",
    "inventories_dir",
    "is_ours",
    "parse",
    "redact",
    "render",
    "settings",
    "templates_dir",
]
