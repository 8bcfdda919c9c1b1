"""`python -m ddops`: the same as the console script."""

from ddops.cli import run

run()
