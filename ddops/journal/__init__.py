"""What happens in a run, as one stream of events; everything people and pipelines read is a view of it.

`Journal.emit` never fails a run: a sink that breaks is left behind, with a warning on the others. It
formats no final report (report/) and knows no host. Importing it is cheap; rich comes with the terminal.

An event is one flat dictionary:

    {"v": 1, "seq": 7, "time": "2026-01-31T12:00:00.123Z", "run": "20260131-120000-k3f9", "host": "gpu-01" or
     null, "event": "step.finished", ...}

    run.started    command, hosts                    phase     text, fraction (0..1 or null), elapsed, budget
    plan           what would change, and from where probe     evidence
    step.started   step                              verdict   verdict
    step.finished  step, ok, seconds                 warning   text
    outcome        result, exit, what, means, hint, facts
    halted         reason                            run.finished  exit

Readers ignore events and keys they do not know; `v` rises only when a key changes its meaning.
"""

from ddops.journal.events import VERSION, Journal, Sink, new_run_id
from ddops.journal.outputs import Outputs
from ddops.journal.secrets import SECRETS, Secrets, mask, redact
from ddops.journal.sinks import Collector, Ndjson

__all__ = [
    "SECRETS",
    "VERSION",
    "Collector",
    "Journal",
    "Ndjson",
    "Outputs",
    "Secrets",
    "Sink",
    "mask",
    "new_run_id",
    "redact",
]
