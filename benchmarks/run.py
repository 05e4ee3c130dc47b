"""Times the cells and writes the record: python -m benchmarks.run [--quick] [--filter PATTERN ...] [--out PATH]

Every provider runs every cell in one process, in interleaved rounds, and its output is compared with float64 on some
rows first: a wrong or missing result of ours ends in exit status 1, a peer's is left out. A full run writes
benchmarks/results/h200.json; a partial run writes only where --out says.
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import RECORD, ROOT, cells, providers, report, timing

WRONG = 1e-2  # relative error; 16-bit rounding of P and out gives 2e-3 to 4e-3 in bf16
OVERHEAD = cells.Cell("overhead", "bf16", 128, 128, 1, 8, 8, 128, 128, False)


def say(text: str = "") -> None:
    print(text, flush=True)


def digest_that_ran() -> str:
    """Digest of the sources of the installed build; of the checkout where that is what runs."""
    from buildtools.digest import source_digest
    from flash_attn3 import ops

    current, build = source_digest(ROOT), Path(ops.EXTENSION).with_name("_build.json")
    built = json.loads(build.read_text()).get("digest") if build.exists() else None
    if built and built != current:
        say(f"WARNING: {ops.EXTENSION} was built from sources {built}, this checkout is {current}")
    return built or current


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(device: str) -> dict:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "driver": driver_version() if device == "cuda" else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "source_digest": digest_that_ran(),
    }


def prepare(cell: cells.Cell, candidates: list[providers.Provider], device: str) -> tuple[dict, dict, dict]:
    """Calls, contexts and relative errors of the providers that do this cell, and do it right."""
    q, k, v = providers.make_inputs(cell, device)
    calls, contexts, errors = {}, {}, {}
    for provider in candidates:

        def call(run=provider.call):
            return run(q, k, v, cell.causal)

        try:
            with provider.context():
                error = providers.relative_error(call(), q, k, v, cell.causal)
        except (RuntimeError, ValueError, TypeError, AssertionError) as refusal:
            say(f"    {provider.name} does not run {cell.name}: {str(refusal).strip().splitlines()[0][:100]}")
            continue
        if not error < WRONG:
            say(f"    {provider.name} is WRONG in {cell.name}: relative error {error:.2e}")
            if provider.name != report.OURS:
                continue
        calls[provider.name], contexts[provider.name], errors[provider.name] = call, provider.context, error
    return calls, contexts, errors


def measure(
    cell: cells.Cell, candidates: list[providers.Provider], device: str, rounds: int, round_ms: float
) -> list[dict]:
    """Rows of the record for one cell."""
    calls, contexts, errors = prepare(cell, candidates, device)
    times = timing.interleaved_ms(calls, contexts, device, rounds, round_ms, cell.graph)
    return [
        {
            **cell.fields(),
            "provider": name,
            "ms": float(f"{ms:.5g}"),
            "tflops": float(f"{cell.flops / ms / 1e9:.5g}"),
            "rel_err": float(f"{errors[name]:.3g}"),
        }
        for name, ms in times.items()
    ]


def measure_overhead(candidates: list[providers.Provider], device: str) -> list[dict]:
    """Host time a call: our function, and everybody through the interface of F.scaled_dot_product_attention."""
    rows, peers = [], [p for p in candidates if p.name in ("cudnn", "fa2", "math")]
    groups = {"fwd": candidates[:1], "sdpa_fwd": [providers.ours_through_sdpa(), *peers]}
    for what, group in groups.items():
        calls, contexts, _ = prepare(OVERHEAD, group, device)
        for name, us in timing.host_us(calls, contexts, device, 500 if device == "cuda" else 5).items():
            rows.append({**OVERHEAD.fields(), "provider": name, "what": what, "us": round(us, 2)})
    return rows


def run(selected: list[cells.Cell], device: str, rounds: int, round_ms: float, full: bool) -> dict:
    """The whole record; ceilings and host times only in a full run."""
    candidates = providers.available(device)
    say(f"providers: {', '.join(provider.name for provider in candidates)}; {len(selected)} cells")
    record = machine(device) | {"ceilings": timing.ceilings(device) if full else {}, "cells": []}
    begin = time.monotonic()
    for number, cell in enumerate(selected, 1):
        rows = measure(cell, candidates, device, rounds, round_ms)
        record["cells"] += rows
        rates = "  ".join(f"{row['provider']} {row['tflops']:.1f}" for row in rows)
        say(f"[{number:>3}/{len(selected)} {time.monotonic() - begin:6.1f} s] {cell.name:<32} {rates}")
        if device == "cuda":
            torch.cuda.empty_cache()
    if full:
        record["cells"] += measure_overhead(candidates, device)
    return record


def wrong_cells(record: dict) -> list[str]:
    ours = [row for row in record["cells"] if row["provider"] == report.OURS and "rel_err" in row]
    wrong = [row for row in ours if not row["rel_err"] < WRONG]  # NaN is wrong too
    return [f"{report.cell_of(row).name}: relative error {row['rel_err']}" for row in wrong]


def missing_cells(record: dict) -> list[str]:
    """Cells that we did not run, though somebody did."""
    return [cell.name for cell, rows in report.by_cell(record["cells"]).items() if report.OURS not in rows]


def show(record: dict, previous: Path) -> None:
    rates = report.table(record) + report.overhead_table(record)
    sections = [("", rates), ("below their floor", report.below_floor(record))]
    if previous.exists():
        earlier = json.loads(previous.read_text())
        sections.append((f"more than 3 % slower than {previous.name}", report.fallen(record, earlier)))
    sections += [("NOT RUN BY US", missing_cells(record)), ("WRONG RESULTS", wrong_cells(record))]
    say()
    if record["ceilings"]:
        say("ceilings: " + ", ".join(f"{name} {value}" for name, value in record["ceilings"].items()))
    for title, lines in sections:
        if title:
            say(f"{title}: {len(lines) or 'none'}")
        for line in lines:
            say(f"  {line}" if title else line)


def write(record: dict, path: Path) -> None:
    """JSON with one cell a line, so that a changed record reads well as a diff."""
    head = json.dumps({key: value for key, value in record.items() if key != "cells"}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(row) for row in record["cells"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "cells": [\n{rows}\n ]\n}}\n')
    say(f"written: {path}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells of the standard grid")
    parser.add_argument("--filter", nargs="+", metavar="PATTERN", help="cells by name, as fwd-bf16-d128-causal-s*")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--previous", type=Path, default=RECORD, help="the record to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=30)
    options = parser.parse_args(arguments)
    patterns = options.filter or (cells.QUICK if options.quick else ["*"])
    selected = cells.select(cells.all_cells(), patterns)
    if options.list or not selected:
        say("\n".join(cell.name for cell in selected) or f"no cell matches {' '.join(patterns)}")
        return 0 if options.list else 2
    if not torch.cuda.is_available():
        say("no CUDA device: the benchmarks need a GPU")
        return 2
    full = patterns == ["*"]
    with torch.no_grad():
        record = run(selected, "cuda", options.rounds, options.round_ms, full)
    show(record, options.previous)
    path = options.out or (RECORD if full else None)
    if path:
        write(record, path)
    return 1 if wrong_cells(record) or missing_cells(record) else 0


if __name__ == "__main__":
    sys.exit(main())
