"""Draws a record: one PNG an op, TFLOP/s by sequence length, one panel a head dim; solid not causal, dashed causal.

Our deterministic mode is a line of its own. Packed batches are bars, forward and backward in one PNG.

usage: python -m benchmarks.plot [RECORD] [--out FOLDER]      (needs matplotlib)
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import RECORD, RESULTS, report
from benchmarks.cells import TOKENS, UNBOUNDED, Cell

COLORS = {
    "flash_attn3": "#d62728",
    "flash_attn3 deterministic": "#ff9896",
    "cudnn": "#2ca02c",
    "fa2": "#7f7f7f",
    "fa3": "#1f77b4",
    "fa4": "#9467bd",
}


def series(record: dict, op: str) -> dict[str, dict[tuple[str, bool], list[tuple[int, float]]]]:
    """{panel: {(provider, causal): [(seqlen, TFLOP/s), ...]}}: bf16 in eager mode, as many heads in K and V as in Q."""
    panels: dict = {}
    for cell, providers in report.by_cell(record["cells"]).items():
        if (cell.op, cell.dtype, cell.graph) != (op, "bf16", False) or cell.heads != cell.kv_heads:
            continue
        if cell.window != UNBOUNDED or cell.batch * cell.seqlen_q != TOKENS:
            continue
        for name, row in providers.items():
            lines = panels.setdefault(panel_name(cell), {})
            lines.setdefault((name, cell.causal), []).append((cell.seqlen_q, row["tflops"]))
    return panels


def panel_name(cell: Cell) -> str:
    same = cell.head_dim == cell.head_dim_v
    return f"head dim {cell.head_dim}" if same else f"head dims {cell.head_dim} and {cell.head_dim_v}"


def draw(record: dict, op: str, path: Path) -> bool:
    """Writes the PNG of one op; False if the record has none of its cells with more than two lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = series(record, op)
    panels = {name: lines for name, lines in panels.items() if any(len(points) > 2 for points in lines.values())}
    if not panels:
        return False
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for (provider, causal), points in lines.items():
            lengths, rates = zip(*sorted(points), strict=True)
            style = "--" if causal else "-"
            label = f"{provider}{', causal' if causal else ''}"
            axis.plot(lengths, rates, style, color=COLORS.get(provider), marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        ticks = sorted({length for points in lines.values() for length, _ in points})
        axis.set_xticks(ticks, [str(length) for length in ticks], rotation=45, minor=False)
        axis.set_title(name)
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)  # shared by all panels, so set when all lines are there
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][-1].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"{op}, bf16, {record['device']}, torch {record['torch']}, {record['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def draw_packed(record: dict, path: Path) -> bool:
    """Writes the PNG of the packed batches; False if the record has none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grouped = {cell: rows for cell, rows in report.by_cell(record["cells"]).items() if cell.packed}
    ops = list(dict.fromkeys(cell.op for cell in grouped))
    if not ops:
        return False
    figure, axes = pyplot.subplots(1, len(ops), figsize=(6 * len(ops), 4.2), squeeze=False, layout="constrained")
    for axis, op in zip(axes[0], ops, strict=True):
        batches = [(cell, rows) for cell, rows in grouped.items() if cell.op == op]
        names = list(dict.fromkeys(name for _, rows in batches for name in rows))
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            rates = [rows[name]["tflops"] if name in rows else 0 for _, rows in batches]
            places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(batches))]
            bars = axis.bar(places, rates, width, color=COLORS.get(name), label=name)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(batches)), [describe(cell) for cell, _ in batches], fontsize=7)
        axis.set_title(op)
        axis.grid(alpha=0.3, axis="y")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"packed sequences, bf16, {record['device']}, torch {record['torch']}, {record['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def describe(cell: Cell) -> str:
    mask = "causal" if cell.causal else "full"
    return f"{cell.batch} x {cell.case}\nup to {cell.seqlen_q}\nD {cell.head_dim}, {cell.heads}/{cell.kv_heads}, {mask}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the PNGs")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    for op in dict.fromkeys(row["op"] for row in record["cells"]):
        path = options.out / f"{op}.png"
        if op in ("fwd", "bwd") and draw(record, op, path):
            print(f"written: {path}")
    if draw_packed(record, options.out / "varlen.png"):
        print(f"written: {options.out / 'varlen.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
