"""Turns a run's report into the model card README.md: data, steps, figures, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMITS = """\
## Limits

These are test instruments of a few million parameters, not assistants.

- They know the task families of the generators in `training/` and nothing else. A request outside them gets a
  confident answer to some other request. Wordings are held out in the figures above, families are not.
- JSON keys and tool arguments are copied for the field names in `training/records.py`; another name tends to come
  out as one of those (see the `fresh tool` row).
- Arithmetic holds for numbers as small as those trained: sums and differences up to three digits, products up to
  30 x 30 and one digit by two. Products are remembered, not worked out. Sorting more than a few items is weak.
- A function with a made-up name and an unusual description may come out as another function.
- Text after the end of an answer, and any language but English, is noise. Standard library text is partly
  remembered: the models are not for writing code anyone relies on.
"""


def write_card(report: dict[str, Any], path: Path) -> None:
    recipe, machine = report["recipe"], report["machine"]
    target, generation = recipe["target"], recipe["generation"]
    tokens = target["steps"] * target["rows"] * target["row_tokens"] / 1e6
    lines = [
        "# Bundled models",
        "",
        "A Qwen3 target and two DFlash drafters (block 16 and 8), trained from scratch by `training/` so that the engine",
        "and everything around it can be tried without downloading anything. Licence and provenance: made by this",
        "project from its own generators and the text of the Python standard library; no other data.",
        "",
        "```",
        "python -m training.run_all --out DIR      # in engine/, on one GPU",
        "```",
        "",
        f"Made on {machine['device']}, {machine['cpus']} CPUs, torch {machine['torch']}, Python {machine['python']}; "
        f"seed {recipe['seed']}; steps are fixed, so a run can be repeated (the bits still depend on machine and torch).",
        "",
        "| | steps | data |",
        "| --- | --- | --- |",
        f"| target | {target['steps']} | {tokens:.0f} M tokens in rows of {target['row_tokens']}, "
        f"{target['library_rows']} of {target['rows']} rows standard library, the rest fresh chats |",
    ]
    for d in recipe["drafters"]:
        lines.append(
            f"| {d['name']} | {d['steps']} | the target's own text: {generation['chats']} chats and "
            f"{generation['library_prompts']} library continuations, {100 * generation['greedy_share']:.0f} % greedy, "
            f"the rest at T {generation['temperature']} |"
        )
    lines += ["", *_passes(report), "", *_acceptances(report), *_notes(report), LIMITS]
    path.write_text("\n".join(lines), encoding="utf8")


def _notes(report: dict[str, Any]) -> list[str]:
    """Measurements made by hand on these checkpoints after the run, kept in the report."""
    notes = [f"- {note}" for note in report.get("notes", ())]
    return ["## Measured afterwards", "", *notes, ""] if notes else []


def _passes(report: dict[str, Any]) -> list[str]:
    lines = [
        "## Held-out answers that are right",
        "",
        "Greedy, bfloat16. Held-out wordings and grammar combinations; code is executed, JSON parsed, the rest must match",
        "exactly. `probe` and `fresh` rows are the hand-written prompts of `training/probes.txt` and `training/fresh.txt`;",
        "many held-out prompts also carry filler words or made-up words on purpose.",
        "",
        "| | right |",
        "| --- | --- |",
    ]
    for group, (passed, total) in report["pass"].items():
        lines.append(f"| {group} | {passed}/{total} ({100 * passed / max(1, total):.1f} %) |")
    passed, total = report["copied ids"]
    lines.append(f"| single ids of the copy tasks | {passed}/{total} ({100 * passed / max(1, total):.2f} %) |")
    losses = ", ".join(f"{name} {value:.2f}" for name, value in report["library_loss"].items())
    return [*lines, "", f"Loss per token on standard library text: {losses}."]


def _acceptances(report: dict[str, Any]) -> list[str]:
    lines = ["## Tokens committed per verify pass", ""]
    lines += [
        "Temperature 0, float32, held-out prompts, replayed on the target's greedy text (`training/acceptance.py`);",
        "the bonus token is counted. `bN` is a tree of N nodes with 8 candidates per depth.",
        "",
    ]
    for name in (d["name"] for d in report["recipe"]["drafters"]):
        table = report[f"acceptance {name}"]
        policies = list(next(iter(table.values()))["mean"])
        lines += [f"### {name}", "", "| text | tokens | " + " | ".join(policies) + " |"]
        lines.append("| --- " * (len(policies) + 2) + "|")
        for group, row in table.items():
            values = " | ".join(f"{row['mean'].get(p, 0):.2f}" for p in policies)
            lines.append(f"| {group} | {row['tokens']} | {values} |")
        lines += ["", *_ranks(table), ""]
    return lines


def _ranks(table: dict[str, Any]) -> list[str]:
    """Where the true token stands among the candidates, by depth, over all texts."""
    depths = sorted({int(d) for row in table.values() for d in row["ranks"]})
    lines = ["Rank of the true token where all tokens before it were among the candidates (all texts):", ""]
    lines += ["| depth | first | second | third | fourth | 5 to 8 | missed |", "| --- " * 7 + "|"]
    for depth in depths:
        counts = [row["ranks"][str(depth)] for row in table.values() if str(depth) in row["ranks"]]
        summed = [sum(c) for c in zip(*counts, strict=True)]
        total = max(1, sum(summed))
        cells = [*summed[:4], sum(summed[4:8]), summed[8]]
        lines.append(f"| {depth} | " + " | ".join(f"{100 * c / total:.1f} %" for c in cells) + " |")
    return lines
