"""Views of a run's events: terminal, JSON, JUnit, GitHub, GitLab, Markdown, HTML; and the look-at tables. Pure.

Events come in as dictionaries (see ddops.journal), text goes out; nothing is read or written here. Text that
came from a host is data in every view: control characters go, markup is escaped, and no line of it can act as a
command of the pipeline it is printed in. Importing is cheap: jinja2 and xml come with the view that uses them.
"""

from ddops.report.document import document
from ddops.report.github import annotate, outputs, step_summary
from ddops.report.html import html
from ddops.report.junit import junit
from ddops.report.markdown import markdown
from ddops.report.model import HostRun, Run, Step, fold, not_passed
from ddops.report.progress import not_run
from ddops.report.summary import summary, wrong
from ddops.report.tables import history_table, status_table
from ddops.report.text import clean, for_ci, one_line

__all__ = [
    "HostRun",
    "Run",
    "Step",
    "annotate",
    "clean",
    "document",
    "fold",
    "for_ci",
    "history_table",
    "html",
    "junit",
    "markdown",
    "not_passed",
    "not_run",
    "one_line",
    "outputs",
    "status_table",
    "step_summary",
    "summary",
    "wrong",
]
