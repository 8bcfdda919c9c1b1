"""ddops: change the speculative-decoding configuration of an inference fleet, and prove it."""

__version__ = "0.1.0"
