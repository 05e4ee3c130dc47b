"""Tables of a record: rates beside cuDNN and the targets, cells below their floor, cells that fell since the last."""

from collections.abc import Iterable
from dataclasses import fields, replace

import torch

from benchmarks.cells import UNBOUNDED, Cell, dense_peer, fp8_floor, load_targets, target_of
from flash_attn3 import ops

OURS, YARDSTICK, PACKED_YARDSTICK = "flash_attn3", "cudnn", "fa2"
DETERMINISTIC = f"{OURS} deterministic"
FALL = 0.03
ROWS_OF_A_WARPGROUP = 64  # of a line of torch.ops.flash_attn3.schedule


def cell_of(row: dict) -> Cell:
    """The problem of a row of a record."""
    given = {field.name: row[field.name] for field in fields(Cell) if field.name in row}
    return Cell(**given | {"window": tuple(row.get("window", UNBOUNDED))})


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


def ratio(providers: dict[str, dict], yardstick: str = YARDSTICK) -> float | None:
    """Our rate over cuDNN's, or another's, in the same cell."""
    if OURS in providers and yardstick in providers:
        return providers[OURS]["tflops"] / providers[yardstick]["tflops"]
    return None


def of_dense(cell: Cell, grouped: dict[Cell, dict[str, dict]]) -> float | None:
    """Time of the dense call on the same sequences over that of the packed one: their rates' ratio."""
    dense, packed = grouped.get(dense_peer(cell), {}), grouped.get(cell, {})
    return dense[OURS]["ms"] / packed[OURS]["ms"] if OURS in dense and OURS in packed else None


def verdict(cell: Cell, measured: float | None, targets: dict) -> str:
    target = target_of(cell, targets)
    if target is None or measured is None:
        return ""
    return "BELOW FLOOR" if measured < target.floor else "aim reached" if measured >= target.aim else "ok"


def table(record: dict) -> list[str]:
    """One line a cell: rates of all providers, ours over cuDNN, parity, floor, aim, share of the matmul ceiling."""
    targets, grouped = load_targets(), by_cell(record["cells"])
    grouped = {cell: rows for cell, rows in grouped.items() if not cell.packed and cell.window == UNBOUNDED}
    names = list(dict.fromkeys(name for providers in grouped.values() for name in providers if name != DETERMINISTIC))
    ceilings = record.get("ceilings", {})
    header = f"{'TFLOP/s':<32}" + "".join(f"{name:>12}" for name in names)
    lines = [header + f"{'/cudnn':>8}{'parity':>7}{'floor':>7}{'aim':>7}{'ceiling':>9}  verdict"]
    for cell, providers in grouped.items():
        line = f"{cell.name:<32}"
        line += "".join(f"{providers[n]['tflops']:>12.1f}" if n in providers else f"{'-':>12}" for n in names)
        measured, target = ratio(providers), target_of(cell, targets)
        line += f"{measured:>8.3f}" if measured else f"{'-':>8}"
        limits = (f"{x:.2f}" for x in (target.parity, target.floor, target.aim)) if target else "---"
        line += "".join(f"{text:>7}" for text in limits)
        ceiling = ceilings.get(f"{'fp8' if cell.dtype == 'fp8' else 'bf16'}_matmul_tflops")
        share = providers[OURS]["tflops"] / ceiling if ceiling and OURS in providers else None
        line += f"{share:>9.0%}" if share else f"{'-':>9}"
        lines.append(f"{line}  {verdict(cell, measured, targets)}".rstrip())
    return lines


def packed_table(record: dict) -> list[str]:
    """One line a packed cell: rates, ours over FlashAttention-2's with its targets, and over that of a dense call."""
    targets, grouped = load_targets(), by_cell(record["cells"])
    lines = []
    for cell, providers in grouped.items():
        if cell.packed:
            rates = ", ".join(f"{name} {row['tflops']:.1f}" for name, row in providers.items())
            line, target = f"{cell.name:<48}{rates}", target_of(cell, targets)
            measured = ratio(providers, PACKED_YARDSTICK)
            if measured:
                line += f"  {measured:.2f} x fa2"
            if measured and target:
                line += f" (parity {target.parity:.2f}, floor {target.floor:.2f}, aim {target.aim:.2f}: "
                line += f"{verdict(cell, measured, targets)})"
            dense = of_dense(cell, grouped)
            lines.append(line + (f"  {dense:.3f} of the dense rate" if dense else ""))
    return lines


def window_table(record: dict) -> list[str]:
    """One line a cell with a window: rates on visible positions, ours on walked blocks, and the causal rate."""
    grouped = by_cell(record["cells"])
    lines = []
    for cell, providers in grouped.items():
        if cell.window != UNBOUNDED and not cell.packed:
            line = f"{cell.name:<48}" + ", ".join(f"{name} {row['tflops']:.1f}" for name, row in providers.items())
            walked = providers.get(OURS, {}).get("walked_tflops")
            dense = grouped.get(replace(cell, window=UNBOUNDED, causal=True), {}).get(OURS)
            line += f"  {walked:.1f} on the blocks walked" if walked else ""
            lines.append(line + (f", causal {dense['tflops']:.1f}" if dense else ""))
    return lines


def walked_rate(cell: Cell, provider: str, ms: float) -> dict[str, float]:
    """Of our cells with a window, the rate on whole blocks that hold a visible position, as the schedule has them."""
    if cell.window == UNBOUNDED or cell.packed or provider != OURS or not ops.loaded:
        return {}
    lengths, mask = (cell.seqlen_q, cell.seqlen_k), (*cell.window, 0)
    dims, bf16 = (cell.head_dim, cell.head_dim_v), cell.dtype == "bf16"
    sizes = (cell.batch, cell.heads, cell.kv_heads, *lengths, *mask, 1)
    if cell.backward:
        row = ops.kernel_table()[torch.ops.flash_attn3.select_backward(*dims, *lengths, *mask, False, bf16, False)[1]]
        # A block of keys may be cut into parts; every line of one says the whole range of queries.
        lines = torch.ops.flash_attn3.schedule_backward(row["id"], *sizes)[:, [2, 3, 4, 5, 6]].unique(dim=0)
        positions = (lines[:, 4] - lines[:, 3]).sum().item() * row["block_m"] * row["block_n"]
        positions *= cell.heads // cell.kv_heads
    else:
        row = ops.kernel_table()[torch.ops.flash_attn3.select_kernel(*dims, *lengths, False, bf16)]
        lines = torch.ops.flash_attn3.schedule(row["id"], *sizes)
        positions = (lines[:, 7] - lines[:, 6]).clamp(min=0).sum().item() * ROWS_OF_A_WARPGROUP * row["block_n"]
    flops = 2.0 * positions * sum(dims) * (2.5 if cell.backward else 1.0)
    return {"walked_tflops": float(f"{flops / ms / 1e9:.5g}")}


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
    targets, lines, grouped = load_targets(), [], by_cell(record["cells"])
    for cell, providers in grouped.items():
        yardstick, name = (PACKED_YARDSTICK, "FlashAttention-2") if cell.packed else (YARDSTICK, "cuDNN")
        measured, dense = ratio(providers, yardstick), of_dense(cell, grouped)
        if verdict(cell, measured, targets) == "BELOW FLOOR":
            floor = target_of(cell, targets).floor
            lines.append(f"{cell.name}: {measured:.3f} of {name}, floor {floor:.3f} ({measured / floor - 1:+.1%})")
        floor, ceiling = fp8_floor(cell, targets), record.get("ceilings", {}).get("fp8_matmul_tflops")
        if floor and ceiling and OURS in providers and providers[OURS]["tflops"] < floor * ceiling:
            share = providers[OURS]["tflops"] / ceiling
            lines.append(
                f"{cell.name}: {share:.3f} of the fp8 matrix product, floor {floor:.3f} ({share / floor - 1:+.1%})"
            )
        if dense is not None and dense < targets["of_dense"]["floor"]:
            lines.append(f"{cell.name}: {dense:.3f} of the dense rate, floor {targets['of_dense']['floor']}")
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
