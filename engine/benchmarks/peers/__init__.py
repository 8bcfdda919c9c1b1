"""Our engine beside its peers, in one interleaved run: `run.py`; and checked against the reference code: `check.py`.

Peers (Hugging Face transformers, the DDTree authors' code, vLLM on CPU) live in virtual environments and checkouts of their
own, outside this repository; every arm is a process of its own that speaks JSON lines (`workers/`). Nothing of a peer is
imported here, and a peer that is not given is listed as not run.
"""
