"""Reads what `nvcc -Xptxas -v` prints about each kernel and judges it.

A finding is a reason to refuse the kernel: "spills" (registers stored to local memory), "stack" (local memory in use),
a code C75xx (WGMMA serialised, or waits that ptxas had to insert) or "setmaxnreg" (register hand-over ignored). Each
costs a kernel of this kind a large share of its speed and none shows in its results, so each fails the build unless the
row of the kernel table allows it by that name.
"""

import re
from dataclasses import asdict, dataclass

_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_WGMMA = re.compile(r"\((C75(?:10|12|14|15|17|19))\)")
_SETMAXNREG = re.compile(r"setmaxnreg.*ignored")


@dataclass
class Kernel:
    """What ptxas says of one entry function; sizes in bytes."""

    symbol: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass
class Report:
    kernels: list[Kernel]
    findings: dict[str, list[str]]  # name of the finding -> the lines that say so

    def refused(self, allow: tuple[str, ...] = ()) -> dict[str, list[str]]:
        """The findings that `allow` does not name."""
        return {name: lines for name, lines in self.findings.items() if name not in allow}

    def to_json(self) -> dict:
        return asdict(self)


def parse(log: str) -> Report:
    """The report in a compiler log. The frame of a device function that was not inlined counts for the entry that was
    being compiled."""
    report = Report([], {})
    for line in log.splitlines():
        line = line.strip()
        if match := _ENTRY.search(line):
            report.kernels.append(Kernel(match.group(1)))
        elif (match := _FRAME.search(line)) and report.kernels:
            kernel = report.kernels[-1]
            stack, stores, loads = map(int, match.groups())
            kernel.stack = max(kernel.stack, stack)
            kernel.spill_stores += stores
            kernel.spill_loads += loads
            if stores or loads:
                report.findings.setdefault("spills", []).append(f"{kernel.symbol}: {line}")
            elif stack:
                report.findings.setdefault("stack", []).append(f"{kernel.symbol}: {line}")
        elif (match := _USED.search(line)) and report.kernels:
            report.kernels[-1].registers = int(match.group(1))
        if match := _WGMMA.search(line):
            report.findings.setdefault(match.group(1), []).append(line)
        if _SETMAXNREG.search(line):
            report.findings.setdefault("setmaxnreg", []).append(line)
    return report
