"""What a change would do to one host, and whether it may be done at all. Pure.

`make` takes what is wanted and what was observed; the plan it returns is all the transaction needs, and all
a dry run shows. The host's memory (verified, known bad) is read in `memory`.
"""

from ddops.plan.make import Action, Plan, Request, make
from ddops.plan.memory import (
    Verification,
    drift,
    key,
    known_bad,
    last_verified,
    lost_attempt,
    previous_verified,
    rollback_target,
    settings_text,
    stale,
    verification,
)
from ddops.plan.preflight import Refusal, adoptable

__all__ = [
    "Action",
    "Plan",
    "Refusal",
    "Request",
    "Verification",
    "adoptable",
    "drift",
    "key",
    "known_bad",
    "last_verified",
    "lost_attempt",
    "make",
    "previous_verified",
    "rollback_target",
    "settings_text",
    "stale",
    "verification",
]
