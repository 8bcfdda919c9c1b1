"""The battery's stages: each sends its traffic and returns evidence. `battery.run` puts them in order.

A stage never decides about the run as a whole, and what an engine cannot be asked for becomes `not_scored`, by name.
"""

from ddops.prove.stages.alarms import alarms_stage
from ddops.prove.stages.coding import coding_stage
from ddops.prove.stages.glance import glance_stage
from ddops.prove.stages.golden import golden_stage
from ddops.prove.stages.long import long_stage
from ddops.prove.stages.modes import modes_stage
from ddops.prove.stages.options import options_stage
from ddops.prove.stages.repeatability import repeat_stage
from ddops.prove.stages.rescore import rescore_early_stage, rescore_stage
from ddops.prove.stages.sampled import sampled_stage
from ddops.prove.stages.shapes import shapes_stage
from ddops.prove.stages.speed import acceptance_stage, note_metrics, speed_stage
from ddops.prove.stages.stage import Stage
from ddops.prove.stages.stream import stream_stage
from ddops.prove.stages.sweep import sweep_stage

__all__ = ["CLOSING", "STAGES", "Stage", "note_metrics"]

STAGES = (
    Stage("glance", ("coding",), glance_stage, tells=False),
    Stage("coding", ("coding",), coding_stage, gross=True),
    Stage("shapes", ("isolation", "copy", "answers", "shapes"), shapes_stage, gross=True),
    Stage("rescore", ("rescore",), rescore_early_stage, tells=False, gross=True),
    Stage("long", ("long",), long_stage),
    Stage("speed", ("throughput",), speed_stage),
    Stage("modes", ("modes",), modes_stage),
    Stage("stream", ("stream",), stream_stage),
    Stage("sampled", ("sampled",), sampled_stage),
    Stage("options", ("options",), options_stage),
    Stage("repeatability", ("repeatability",), repeat_stage),
    Stage("golden", ("golden",), golden_stage),
    Stage("sweep", ("sweep",), sweep_stage),
)

# What every run ends with, also one that ended early: a look at all its replies.
CLOSING = (
    Stage("rescore", ("rescore",), rescore_stage),
    Stage("acceptance", ("acceptance",), acceptance_stage),
    Stage("alarms", ("alarms",), alarms_stage),
)
