"""Times the cells and writes the record: python -m benchmarks.run [--quick] [--filter PATTERN ...] [--out PATH]

Every provider runs every cell in one process, in interleaved rounds, and its result is compared with float64 on some
rows first: a wrong or missing result of ours ends in exit status 1, a peer's is left out. A backward is timed through
torch.autograd.grad on a forward that is kept. A full run writes benchmarks/results/h200.json; a partial run writes only
where --out says. The parts of a full run may be several calls: --ops fwd --out A, then --ops bwd --merge A --out B, ..
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import RECORD, ROOT, cells, providers, reference, report, timing

# Relative error; 16-bit rounding of P and out gives 2e-3 to 4e-3 in bf16, P in e4m3 (4 bits) 2.5e-2 to 6e-2.
WRONG = {"bf16": 1e-2, "fp16": 1e-2, "fp8": 8e-2}
OVERHEAD = cells.Cell("overhead", "bf16", 128, 128, 1, 8, 8, 128, 128, False)
SAME_MACHINE = ("device", "driver", "cuda", "torch", "source_digest")  # of records that may be merged


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


def forward_call(provider: providers.Provider, cell: cells.Cell, tensors: tuple) -> Callable:
    q, k, v, _ = tensors
    return lambda: provider.call(q, k, v, cell.causal)


def backward_call(provider: providers.Provider, cell: cells.Cell, tensors: tuple) -> Callable:
    """The backward alone: dq, dk, dv from a forward that is kept."""
    leaves, dout = [x.detach().requires_grad_() for x in tensors[:3]], tensors[3]
    out = provider.call(*leaves, cell.causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def training_call(provider: providers.Provider, cell: cells.Cell, tensors: tuple) -> Callable:
    """Forward and backward."""
    leaves, dout = [x.detach().requires_grad_() for x in tensors[:3]], tensors[3]
    return lambda: torch.autograd.grad(provider.call(*leaves, cell.causal), leaves, dout)


def compared(cell: cells.Cell, tensors: tuple) -> list[tuple]:
    """What is compared with the reference: dense tensors whole, of packed ones some sequences as batches of one."""
    if not cell.packed:
        return [tensors]
    slices = reference.compared_sequences(cells.sequence_lengths(cell.case))
    return [tuple(x[None, rows] for x in tensors) for rows in slices]


def prepare(
    cell: cells.Cell, candidates: list[providers.Provider], device: str, make_call: Callable
) -> tuple[dict, dict, dict]:
    """Calls, contexts and relative errors, by label, of the providers that do this cell, and do it right."""
    tensors = providers.make_inputs(cell, device)
    with_gradients, mask = make_call is not forward_call, (cell.causal, cell.window)
    refs = [reference.sampled_gradients(*part, *mask) for part in compared(cell, tensors)] if with_gradients else None
    calls, contexts, errors = {}, {}, {}
    for provider in candidates:

        @contextmanager
        def context(provider=provider):
            with provider.context(), torch.set_grad_enabled(with_gradients):
                yield

        try:
            with context():
                call = make_call(provider, cell, providers.repeated(tensors, provider.repeats))
                result = call()
            if with_gradients:
                grads = compared(cell, providers.gradients_of(result, provider.repeats))
                error = reference.largest(list(map(reference.gradient_error, grads, refs)))
            else:
                parts = compared(cell, (result, *tensors[:3]))
                error = reference.largest([reference.relative_error(*part, *mask) for part in parts])
        except (RuntimeError, ValueError, TypeError, AssertionError) as refusal:
            say(f"    {provider.label} does not run {cell.name}: {str(refusal).strip().splitlines()[0][:100]}")
            continue
        if not error < WRONG[cell.dtype]:
            say(f"    {provider.label} is WRONG in {cell.name}: relative error {error:.2e}")
            if provider.name != report.OURS:
                continue
        calls[provider.label], contexts[provider.label], errors[provider.label] = call, context, error
    return calls, contexts, errors


def measure(
    cell: cells.Cell, candidates: list[providers.Provider], device: str, rounds: int, round_ms: float
) -> list[dict]:
    """Rows of the record for one cell."""
    make_call = backward_call if cell.backward else forward_call
    calls, contexts, errors = prepare(cell, candidates, device, make_call)
    times = timing.interleaved_ms(calls, contexts, device, rounds, round_ms, cell.graph)
    return [
        {
            **cell.fields(),
            "provider": provider.name,
            **({"deterministic": True} if provider.deterministic else {}),
            "ms": float(f"{times[provider.label]:.5g}"),
            "tflops": float(f"{cell.flops / times[provider.label] / 1e9:.5g}"),
            **report.walked_rate(cell, provider.name, times[provider.label]),
            "rel_err": float(f"{errors[provider.label]:.3g}"),
        }
        for provider in candidates
        if provider.label in times
    ]


def measure_overhead(candidates: list[providers.Provider], device: str, ops: tuple[str, ...]) -> list[dict]:
    """Host time a call: our function, and everybody through the interface of F.scaled_dot_product_attention."""
    rows, peers = [], [p for p in candidates if p.name in ("cudnn", "fa2", "math")]
    groups = {
        "fwd": ("fwd", forward_call, candidates[:1]),
        "sdpa_fwd": ("fwd", forward_call, [providers.ours_through_sdpa(), *peers]),
        "fwd_bwd": ("bwd", training_call, [candidates[0], *peers]),
    }
    for what, (op, make_call, group) in groups.items():
        if op in ops:
            calls, contexts, _ = prepare(OVERHEAD, group, device, make_call)
            for name, us in timing.host_us(calls, contexts, device, 500 if device == "cuda" else 5).items():
                rows.append({**OVERHEAD.fields(), "provider": name, "what": what, "us": round(us, 2)})
    return rows


def run(selected: list[cells.Cell], device: str, rounds: int, round_ms: float, full_ops: tuple[str, ...]) -> dict:
    """The whole record; ceilings and host times only of ops that are measured in full."""
    candidates = providers.available(device)
    say(f"providers: {', '.join(provider.name for provider in candidates)}; {len(selected)} cells")
    record = machine(device) | {"ceilings": timing.ceilings(device) if full_ops else {}, "cells": []}
    begin = time.monotonic()
    for number, cell in enumerate(selected, 1):
        rows = measure(cell, providers.for_cell(cell, candidates, device), device, rounds, round_ms)
        record["cells"] += rows
        rates = "  ".join(f"{report.label(row)} {row['tflops']:.1f}" for row in rows)
        say(f"[{number:>3}/{len(selected)} {time.monotonic() - begin:6.1f} s] {cell.name:<32} {rates}")
        if device == "cuda":
            torch.cuda.empty_cache()
    record["cells"] += measure_overhead(candidates, device, full_ops)
    return record


def merged(record: dict, earlier: dict) -> dict:
    """The record with the rows of an earlier one for what it did not measure itself.

    Raises ValueError unless both ran the same sources on the same kind of machine.
    """
    assert_mergeable(record, earlier)
    measured = {row_key(row) for row in record["cells"]}
    kept = [row for row in earlier["cells"] if row_key(row) not in measured]
    rows = sorted([*kept, *record["cells"]], key=lambda row: [*cells.OPS, "overhead"].index(row["op"]))
    return record | {"ceilings": record["ceilings"] or earlier["ceilings"], "cells": rows}


def assert_mergeable(record: dict, earlier: dict) -> None:
    for key in SAME_MACHINE:
        if record.get(key) != earlier.get(key):
            raise ValueError(f"cannot merge: {key} is {record.get(key)!r}, in the earlier record {earlier.get(key)!r}")


def row_key(row: dict) -> tuple:
    return report.cell_of(row), row.get("what")


def wrong_cells(record: dict) -> list[str]:
    ours = [row for row in record["cells"] if row["provider"] == report.OURS and "rel_err" in row]
    wrong = [row for row in ours if not row["rel_err"] < WRONG[row["dtype"]]]  # NaN is wrong too
    names = (f"{report.cell_of(row).name}{' deterministic' if row.get('deterministic') else ''}" for row in wrong)
    return [f"{name}: relative error {row['rel_err']}" for name, row in zip(names, wrong, strict=True)]


def missing_cells(record: dict) -> list[str]:
    """Cells that we did not run, though somebody did."""
    return [cell.name for cell, rows in report.by_cell(record["cells"]).items() if report.OURS not in rows]


def show(record: dict, previous: Path) -> None:
    rates = report.table(record) + report.packed_table(record) + report.window_table(record)
    rates += report.overhead_table(record) + report.deterministic_table(record)
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
    parser.add_argument("--ops", nargs="+", choices=cells.OPS, default=cells.OPS)
    parser.add_argument("--merge", type=Path, help="an earlier record whose rows go into this one")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--previous", type=Path, default=RECORD, help="the record to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=30)
    options = parser.parse_args(arguments)
    patterns = options.filter or (cells.QUICK if options.quick else ["*"])
    selected = [cell for cell in cells.select(cells.all_cells(), patterns) if cell.op in options.ops]
    if options.list or not selected:
        say("\n".join(cell.name for cell in selected) or f"no cell matches {' '.join(patterns)}")
        return 0 if options.list else 2
    if not torch.cuda.is_available():
        say("no CUDA device: the benchmarks need a GPU")
        return 2
    earlier = json.loads(options.merge.read_text()) if options.merge else None
    if earlier:
        assert_mergeable(machine("cuda"), earlier)
    full_ops = tuple(options.ops) if patterns == ["*"] else ()
    record = run(selected, "cuda", options.rounds, options.round_ms, full_ops)
    if earlier:
        record = merged(record, earlier)
    show(record, options.previous)
    path = options.out or (RECORD if set(full_ops) == set(cells.OPS) else None)
    if path:
        write(record, path)
    return 1 if wrong_cells(record) or missing_cells(record) else 0


if __name__ == "__main__":
    sys.exit(main())
