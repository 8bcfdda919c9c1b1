"""The run as tables on a terminal. Pure: takes what `run.py` writes as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import figures
from benchmarks.peers.arms import OFF

GOALS = {
    "bf16 off, tokens/s": (">=", 400.0),
    "bf16 best tree / off, 1 client": (">=", 4.0),
    "off, seconds to ready": ("<=", 3.0),
    "tree, resident MB": ("<=", 700.0),
    "bf16 off / vLLM off, 1 client": (">=", 1.0),
    "bf16 off / vLLM off, 4 clients": (">=", 1.0),
    "bf16 best tree / vLLM dflash, 1 client": (">=", 1.0),
    "bf16 best tree / vLLM dflash, 4 clients": (">=", 1.0),
}

Run = Mapping[str, Any]


def dtype_report(run: Run) -> str:
    parts = [f"\n== {run['dtype']} =="]
    for clients in dict.fromkeys(c["clients"] for c in run["cells"]):
        cells = [c for c in run["cells"] if c["clients"] == clients]
        parts += [speed_table(cells, clients), ratio_table(cells)]
    parts += [floor_lines(run), exactness(run), not_run(run)]
    return "\n\n".join(parts)


def speed_table(cells: Sequence[Run], clients: int) -> str:
    head = f"{clients} client(s)" + " " * 15
    lines = [f"{head:<26}{'tok/s':>7}{'quartiles':>14}{'tok/pass':>10}{'ready s':>9}{'RSS MB':>8}{'others':>8}  runs as"]
    for c in cells:
        s, others = figures.spread(c["speeds"]), statistics.median(c["other_cores"])
        lines.append(
            f"{c['arm']:<26}{s.median:>7.0f}{f'{s.low:.0f}-{s.high:.0f}':>14}{c['tokens_per_pass']:>10.2f}"
            f"{c['seconds_to_ready']:>9.1f}{c['rss_bytes'] / 1e6:>8.0f}{others:>8.2f}  {c['execution']}"
        )
    loads = [x for c in cells for x in c["loads"]]
    lines.append(
        f"load average {min(loads):.1f}-{max(loads):.1f}; others: cores that other work used while the arm ran (median)"
    )
    return "\n".join(lines)


def ratio_table(cells: Sequence[Run]) -> str:
    """Rows: our arms; columns: our plain decoding and every peer. `2.10 (10:0)`: ratio, rounds won and lost."""
    ours = [c for c in cells if c["arm"].startswith("ours")]
    peers = [c for c in cells if c["arm"] == OFF or not c["arm"].startswith("ours")]
    width = max(len(p["arm"]) for p in peers) + 2
    lines = ["ours / peer, median of the rounds' ratios (won:lost, ~ no difference by the sign test at 5 %)"]
    lines.append(f"{'':<16}" + "".join(f"{p['arm']:>{width}}" for p in peers))
    for c in ours:
        cells_text = [_ratio(c, p) for p in peers]
        lines.append(f"{c['arm']:<16}" + "".join(f"{t:>{width}}" for t in cells_text))
    return "\n".join(lines)


def _ratio(ours: Run, peer: Run) -> str:
    if ours["arm"] == peer["arm"]:
        return "-"
    c = figures.compare(ours["speeds"], peer["speeds"])
    return f"{c.ratio.median:.2f} ({c.wins}:{c.losses}){'~' if c.tied else ''}"


def floor_lines(run: Run) -> str:
    f = run["floor"]
    plain = f["cached_bytes_per_second"] / f["target_bytes"]
    return (
        f"memory floor: {f['target_bytes'] / 1e6:.1f} MB of target weights a pass, {f['draft_bytes'] / 1e6:.1f} MB a draft; "
        f"read at {f['cached_bytes_per_second'] / 1e9:.1f} GB/s (a buffer of the target's size), "
        f"{f['memory_bytes_per_second'] / 1e9:.1f} GB/s (512 MB): at most {plain:.0f} plain tokens/s"
    )


def exactness(run: Run) -> str:
    count = len(run["cells"][0]["outputs"])
    lines = [f"answers that differ from ours off, 1 client ({count} prompts; every first difference, with its gap in nats):"]
    if not run["partings"]:
        lines.append("  none")
    for p in run["partings"]:
        gap = "one answer ended" if p["gap"] is None else f"gap {p['gap']:.2g}"
        where = f"{p['arm']}, {p['clients']} client(s): prompt {p['prompt']}, token {p['at']}"
        lines.append(f"  {where}: {p['got']} for {p['expected']}, {gap}")
    changing = [f"{c['arm']} ({c['clients']})" for c in run["cells"] if c["unequal_rounds"]]
    lines.append(f"arms whose answers changed between rounds: {', '.join(changing) or 'none'}")
    return "\n".join(lines)


def not_run(run: Run) -> str:
    if not run["not_run"]:
        return "every peer was run"
    return "\n".join(["not run:", *(f"  {n['name']}: {n['why']}" for n in run["not_run"])])


def goals_report(runs: Sequence[Run]) -> str:
    return "\n".join(["\ngoals", *(f"  {line}" for line in figures.goal_lines(goal_figures(runs), GOALS))])


def goal_figures(runs: Sequence[Run]) -> dict[str, float]:
    bf16 = next((r for r in runs if r["dtype"] == "bfloat16"), None)
    if bf16 is None:
        return {}
    found: dict[str, float] = {}
    for clients in (1, 4):
        cells = {c["arm"]: c for c in bf16["cells"] if c["clients"] == clients}
        trees = [c for name, c in cells.items() if name.startswith("ours tree")]
        if OFF not in cells or not trees:
            continue
        best = max(trees, key=lambda c: statistics.median(c["speeds"]))
        if clients == 1:
            found["bf16 off, tokens/s"] = statistics.median(cells[OFF]["speeds"])
            found["bf16 best tree / off, 1 client"] = _median_ratio(best, cells[OFF])
            found["off, seconds to ready"] = cells[OFF]["seconds_to_ready"]
        found["tree, resident MB"] = best["rss_bytes"] / 1e6
        pairs = (("off", cells[OFF], "vLLM off"), ("best tree", best, "vLLM dflash"))
        for name, ours, peer in pairs:
            if peer in cells:
                found[f"bf16 {name} / {peer}, {clients} client{'s' * (clients > 1)}"] = _median_ratio(ours, cells[peer])
    return found


def _median_ratio(a: Run, b: Run) -> float:
    return figures.compare(a["speeds"], b["speeds"]).ratio.median
