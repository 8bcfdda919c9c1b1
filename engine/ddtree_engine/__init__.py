"""ddtree-engine: a small, real DDTree inference engine. It knows nothing of ddops."""

import os

# Read by OpenMP when torch is first imported. Threads that spin while they wait make a round 10-20 times slower when the
# processor is shared with anything else; threads that sleep cost a few per cent when it is not.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
