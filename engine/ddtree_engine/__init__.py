"""ddtree-engine: a small, real DDTree inference engine. It knows nothing of ddops."""

__version__ = "0.1.0"
