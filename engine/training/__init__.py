"""Trains the bundled target and its two drafters from scratch: `python -m training.run_all --out DIR`.

Everything the models learn is made here (task generators, family files, prose grammar) or is the text of the
running interpreter's standard library. This package is for making checkpoints; the engine does not import it.
"""
