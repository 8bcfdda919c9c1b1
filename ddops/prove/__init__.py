"""The proof battery: does the engine that runs here give the output that its model gives?

`battery.run` is the front. Importing this package loads nothing heavy: httpx and wasmtime come in only where a
probe uses them. The pure halves (evidence, verdicts, alarms, power, answers, ...) decide; client and sandbox act.
"""
