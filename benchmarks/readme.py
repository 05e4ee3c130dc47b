"""Puts the table of the committed record into README.md, between the benchmark markers.

usage: python -m benchmarks.readme [--check]

--check changes nothing and exits with status 1 if the section is not the one that the record makes. Without a record
it passes.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import RECORD, ROOT, report
from benchmarks.cells import HEAD_DIMS, SEQLENS, UNBOUNDED, Cell, packed_cell

START, END = "<!-- benchmark:start -->", "<!-- benchmark:end -->"


def row_of(grid: dict[Cell, dict[str, dict]], op: str, dim: int, causal: bool, dtype: str) -> str | None:
    """A line of the table: our TFLOP/s and the ratio to cuDNN at each length."""
    texts = []
    for seqlen in SEQLENS:
        found = [
            providers
            for cell, providers in grid.items()
            if (cell.op, cell.dtype, cell.head_dim, cell.head_dim_v) == (op, dtype, dim, dim)
            and (cell.causal, cell.seqlen_q, cell.graph) == (causal, seqlen, False)
            and (cell.standard or dtype == "fp8")
        ]
        if not found or report.OURS not in found[0]:
            texts.append("-")
            continue
        ratio = report.ratio(found[0])
        texts.append(f"{found[0][report.OURS]['tflops']:.0f}" + (f" ({ratio:.2f}x)" if ratio else ""))
    if set(texts) == {"-"}:
        return None
    return f"| {dim} | {'yes' if causal else 'no'} | " + " | ".join(texts) + " |"


def table(grid: dict[Cell, dict[str, dict]], op: str, dtype: str = "bf16") -> list[str]:
    """The standard grid of an op; empty if the record has none of it."""
    rows = [row_of(grid, op, dim, causal, dtype) for dim in HEAD_DIMS for causal in (False, True)]
    head = ["| head dim | causal | " + " | ".join(map(str, SEQLENS)) + " |", "|---|---|" + "---|" * len(SEQLENS)]
    return [*head, *filter(None, rows)] if any(rows) else []


BATCHES = {
    "lognormal": "64 of lognormal lengths (8 to 16384)",
    "short": "512 of 32 to 255 tokens",
    "one-long": "one of 16384, 63 of 128",
    "equal": "16 of 2048",
    "tiny": "8192 of 34, not causal, D 256, 8/8 heads",
}


def packed_rows(grid: dict[Cell, dict[str, dict]]) -> list[str]:
    """A table of the packed batches; empty if the record has none."""
    rows = []
    for case, text in BATCHES.items():
        texts = []
        for op in ("varlen_fwd", "varlen_bwd"):
            cell = packed_cell(op, case)
            found = grid.get(cell, {})
            ratio, dense = report.ratio(found, report.PACKED_YARDSTICK), report.of_dense(cell, grid)
            notes = [*([f"{ratio:.2f}x"] if ratio else []), *([f"{dense:.2f} of dense"] if dense else [])]
            rate = f"{found[report.OURS]['tflops']:.0f}" if report.OURS in found else "-"
            texts.append(rate + (f" ({', '.join(notes)})" if notes else ""))
        if set(texts) != {"-"}:
            rows.append(f"| {text} | " + " | ".join(texts) + " |")
    return ["| sequences | forward | backward |", "|---|---|---|", *rows] if rows else []


def window_lines(grid: dict[Cell, dict[str, dict]]) -> list[str]:
    """A sentence for each cell with a window."""
    lines = []
    for cell, found in grid.items():
        if cell.window != UNBOUNDED and not cell.packed and report.OURS in found:
            walked = found[report.OURS].get("walked_tflops")
            direction = "backward" if cell.backward else "forward"
            lines.append(
                f"Window {cell.window}, {direction}, S {cell.seqlen_q}, D {cell.head_dim}: "
                f"{found[report.OURS]['tflops']:.0f} TFLOP/s on visible positions"
                + (f", {walked:.0f} on the blocks that hold them." if walked else ".")
            )
    return lines


def section(record: dict | None) -> str:
    """The text between the markers."""
    if record is None:
        return ""
    grid = report.by_cell(record["cells"])
    lines = [
        f"Forward, bf16, TFLOP/s (and times cuDNN in the same run) by sequence length. {record['device']}, torch "
        f"{record['torch']}, {record['date']}, sources {record['source_digest']};",
        "16384 tokens, heads x head dim 2048, through the Python API in eager mode. Every cell and provider:",
        f"[{RECORD.relative_to(ROOT)}]({RECORD.relative_to(ROOT)}).",
        "",
        *table(grid, "fwd"),
    ]
    backward = table(grid, "bwd")
    if backward:
        slower = report.slowdowns(record).values()
        lines += ["", "Backward, timed alone, the same way:", "", *backward]
        if slower:
            lines += ["", f"With `deterministic=True` it takes {min(slower):+.1%} to {max(slower):+.1%} more time."]
    fp8 = table(grid, "fwd", "fp8")
    if fp8:
        ceiling = record["ceilings"].get("fp8_matmul_tflops", float("nan"))
        lines += [
            "",
            "Forward of float8_e4m3fn inputs, quantisation not included, TFLOP/s (a float8_e4m3fn matrix product",
        ]
        lines += [f"of 8192 cubed: {ceiling:.0f}):", "", *fp8]
    packed = packed_rows(grid)
    if packed:
        lines += ["", "Packed sequences (`flash_attn_varlen_func`), causal, D 128, 32 query heads on 8, TFLOP/s"]
        lines += ["(and times torch's FlashAttention-2 in the same run):", "", *packed]
    for line in window_lines(grid):
        lines += ["", line]
    host = [row for row in record["cells"] if row["op"] == "overhead" and row["provider"] == report.OURS]
    if host:
        names = {
            "fwd": "`flash_attn_func`",
            "sdpa_fwd": "`scaled_dot_product_attention`",
            "fwd_bwd": "`flash_attn_func` and its backward",
        }
        times = ", ".join(f"{names.get(row['what'], row['what'])} {row['us']:.0f} us" for row in host)
        lines += ["", f"Host time of a call (B 1, S 128, H 8, D 128): {times}."]
    return "\n".join(lines)


def replaced(readme: str, text: str) -> str:
    """README.md with `text` between the markers. Raises ValueError if it does not have them, in order and once."""
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(START) > readme.index(END):
        raise ValueError(f"README.md needs one {START} and behind it one {END}")
    before, rest = readme.split(START)
    body = f"\n{text}\n" if text else "\n"
    return before + START + body + END + rest.split(END)[1]


def load(path: Path = RECORD) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def main(arguments: list[str] | None = None, readme: Path = ROOT / "README.md") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    record = load()
    if options.check and record is None:
        print("no record yet")
        return 0
    current = readme.read_text()
    wanted = replaced(current, section(record))
    if options.check:
        print("README.md is up to date" if current == wanted else "README.md: run python -m benchmarks.readme")
        return int(current != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
