"""The report of the last build: what each unit cost and what ptxas made of it.

usage: python -m buildtools.report     a table of all units of the kernel table, and the size of flash_attn3/_C.so
"""

import json
import sys
from pathlib import Path

from buildtools import ROOT
from buildtools.plan import load_table

# Budget of one unit. Exceeding it is reported, not refused, because it depends on the machine; the processor's seconds
# are compared, because the clock's depend on what else runs.
MAX_CPU_SECONDS = 60
MAX_GIGABYTES = 4

_COLUMNS = "{:<44} {:>8} {:>8} {:>8} {:>6} {:>7} {:>6}"


def load(names: list[str], build: Path = ROOT / "build") -> list[dict]:
    """The measures of the named units, in that order; a unit that was not built is left out."""
    paths = [build / "objects" / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def table(units: list[dict]) -> str:
    """One line a unit: seconds by the clock and the processor, peak memory, registers, spilled and stack bytes."""
    lines = [_COLUMNS.format("unit", "seconds", "cpu s", "peak MB", "regs", "spills", "stack")]
    for unit in units:
        kernels = unit["kernels"]
        accounts = ("", "", "")
        if kernels:
            spills = sum(k["spill_stores"] + k["spill_loads"] for k in kernels)
            accounts = (max(k["registers"] for k in kernels), spills, max(k["stack"] for k in kernels))
        measures = (f"{unit['seconds']:.1f}", f"{unit['cpu_seconds']:.1f}", unit["peak_mb"])
        lines.append(_COLUMNS.format(unit["unit"], *measures, *accounts).rstrip())
    return "\n".join(lines)


def summary(names: list[str], extension: Path) -> str:
    """Totals of a build, and the units over their budget."""
    units = load(names)
    seconds = sum(unit["seconds"] for unit in units)
    peak = max((unit["peak_mb"] for unit in units), default=0)
    lines = [
        f"{len(units)} units, {seconds:.0f} s of compilation in all, peak {peak} MB; "
        f"_C.so {extension.stat().st_size / 1e6:.1f} MB"
    ]
    for unit in units:
        if unit["cpu_seconds"] > MAX_CPU_SECONDS or unit["peak_mb"] > 1024 * MAX_GIGABYTES:
            lines.append(f"over the budget of {MAX_CPU_SECONDS} s and {MAX_GIGABYTES} GB a unit: {unit['unit']}")
    return "\n".join(lines)


def main() -> int:
    description = ROOT / "flash_attn3" / "_build.json"
    if not description.is_file():
        print("no extension is built in this checkout (flash_attn3/_build.json is absent)")
        return 1
    built = json.loads(description.read_text())
    units = {path.stem for path in (ROOT / "build" / "units").glob("*.json")}
    others = sorted(units - {row.name for row in load_table().rows()})
    names = built["kernels"] + others
    print(f"nvcc {built['nvcc']}, CUTLASS {built['cutlass']}, torch {built['torch']} headers, digest {built['digest']}")
    print(table(load(names)))
    print(summary(names, ROOT / "flash_attn3" / "_C.so"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
