"""Tables of a record: rates beside cuDNN and the targets, cells below their floor, cells that fell since the last."""

from collections.abc import Iterable
from dataclasses import fields

from benchmarks.cells import Cell, load_targets, target_of

OURS, YARDSTICK = "flash_attn3", "cudnn"
DETERMINISTIC = f"{OURS} deterministic"
FALL = 0.03


def cell_of(row: dict) -> Cell:
    """The problem of a row of a record."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell) if field.name in row})


def label(row: dict) -> str:
    """The provider of a row; our deterministic mode is one of its own."""
    return f"{row['provider']} deterministic" if row.get("deterministic") else row["provider"]


def by_cell(rows: Iterable[dict]) -> dict[Cell, dict[str, dict]]:
    """{cell: {label: row}} of the rows with a rate, in their order."""
    grouped: dict[Cell, dict[str, dict]] = {}
    for row in rows:
        if row["op"] != "overhead":
            grouped.setdefault(cell_of(row), {})[label(row)] = row
    return grouped


def ratio(providers: dict[str, dict]) -> float | None:
    """Our rate over cuDNN's in the same cell."""
    if OURS in providers and YARDSTICK in providers:
        return providers[OURS]["tflops"] / providers[YARDSTICK]["tflops"]
    return None


def verdict(cell: Cell, measured: float | None, targets: dict) -> str:
    target = target_of(cell, targets)
    if target is None or measured is None:
        return ""
    return "BELOW FLOOR" if measured < target.floor else "aim reached" if measured >= target.aim else "ok"


def table(record: dict) -> list[str]:
    """One line a cell: rates of all providers, ours over cuDNN, parity, floor, aim, share of the matmul ceiling."""
    targets, grouped = load_targets(), by_cell(record["cells"])
    names = list(dict.fromkeys(name for providers in grouped.values() for name in providers if name != DETERMINISTIC))
    ceiling = record.get("ceilings", {}).get("bf16_matmul_tflops")
    header = f"{'TFLOP/s':<32}" + "".join(f"{name:>12}" for name in names)
    lines = [header + f"{'/cudnn':>8}{'parity':>7}{'floor':>7}{'aim':>7}{'ceiling':>9}  verdict"]
    for cell, providers in grouped.items():
        line = f"{cell.name:<32}"
        line += "".join(f"{providers[n]['tflops']:>12.1f}" if n in providers else f"{'-':>12}" for n in names)
        measured, target = ratio(providers), target_of(cell, targets)
        line += f"{measured:>8.3f}" if measured else f"{'-':>8}"
        limits = (f"{x:.2f}" for x in (target.parity, target.floor, target.aim)) if target else "---"
        line += "".join(f"{text:>7}" for text in limits)
        share = providers[OURS]["tflops"] / ceiling if ceiling and OURS in providers else None
        line += f"{share:>9.0%}" if share else f"{'-':>9}"
        lines.append(f"{line}  {verdict(cell, measured, targets)}".rstrip())
    return lines


def overhead_table(record: dict) -> list[str]:
    """Host time a call."""
    rows, limits = [row for row in record["cells"] if row["op"] == "overhead"], load_targets()["overhead_us"]
    lines = []
    for row in rows:
        limit = limits.get(row["what"]) if row["provider"] == OURS else None
        note = f"  floor {limit['floor']}, aim {limit['aim']}" if limit else ""
        lines.append(f"{'host us a call, ' + row['what']:<32}{row['provider']:>12}{row['us']:>8.1f}{note}")
    return lines


def slowdowns(record: dict) -> dict[Cell, float]:
    """By how much our deterministic mode is slower than the default one, where both were measured."""
    return {
        cell: providers[OURS]["tflops"] / providers[DETERMINISTIC]["tflops"] - 1
        for cell, providers in by_cell(record["cells"]).items()
        if OURS in providers and DETERMINISTIC in providers
    }


def deterministic_table(record: dict) -> list[str]:
    """One line a cell with a deterministic rate."""
    limits, grouped = load_targets()["deterministic_slowdown"], by_cell(record["cells"])
    lines = []
    for cell, slower in slowdowns(record).items():
        rate = grouped[cell][DETERMINISTIC]["tflops"]
        verdict = "BELOW FLOOR" if slower > limits["floor"] else "aim reached" if slower <= limits["aim"] else "ok"
        lines.append(f"{cell.name:<32}{rate:>12.1f}  deterministic, {slower:+.1%} time  {verdict}")
    return lines


def below_floor(record: dict) -> list[str]:
    """A line for each of our cells under its floor."""
    targets, lines = load_targets(), []
    for cell, providers in by_cell(record["cells"]).items():
        measured = ratio(providers)
        if verdict(cell, measured, targets) == "BELOW FLOOR":
            floor = target_of(cell, targets).floor
            lines.append(f"{cell.name}: {measured:.3f} of cuDNN, floor {floor:.3f} ({measured / floor - 1:+.1%})")
    allowed = targets["deterministic_slowdown"]["floor"]
    for cell, slower in slowdowns(record).items():
        if slower > allowed:
            lines.append(f"{cell.name}: deterministic {slower:.1%} slower, floor {allowed:.0%}")
    return lines


def fallen(record: dict, previous: dict) -> list[str]:
    """A line for each of our cells more than 3 % slower than in the previous record, with cuDNN's own change."""
    before, lines = by_cell(previous["cells"]), []
    for cell, providers in by_cell(record["cells"]).items():
        old = before.get(cell, {})
        if OURS in providers and OURS in old:
            change = providers[OURS]["tflops"] / old[OURS]["tflops"] - 1
            if change < -FALL:
                both = YARDSTICK in providers and YARDSTICK in old
                other = providers[YARDSTICK]["tflops"] / old[YARDSTICK]["tflops"] - 1 if both else float("nan")
                rates = f"{old[OURS]['tflops']:.1f} -> {providers[OURS]['tflops']:.1f} TFLOP/s"
                lines.append(f"{cell.name}: {change:+.1%} ({rates}; cuDNN {other:+.1%})")
    return lines
