"""Disassembles an extension and checks that its kernels use the instructions they were written for.

A row of the kernel table that compiled to something else (no WGMMA, no TMA, local memory) still computes the right
result, slowly; this is where it shows. Needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm) and c++filt.

usage: python -m buildtools.sass flash_attn3/_C.so     (_build.json beside it names the rows)
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from buildtools.plan import load_table
from buildtools.symbols import demangle
from buildtools.toolchain import pypi_cuda_roots

# By operation of the row: instructions that every kernel of it must contain.
_MATRIX_KERNEL = ("HGMMA", "UTMALDG", "UTMASTG")
REQUIRED = {
    "forward": _MATRIX_KERNEL,
    "fp8_forward": ("QGMMA", "UTMALDG", "UTMASTG"),
    "fp8_transpose": ("PRMT",),
    "backward": (*_MATRIX_KERNEL, "REDG"),
    "backward_keys": _MATRIX_KERNEL,
    "backward_queries": _MATRIX_KERNEL,
    "backward_prepare": (),
    "backward_finish": (),
    "backward_sink": (),
    "packed_schedule": (),
}
# Loads and stores of local memory, and the findings of ptxas (see ptxas.py) that permit them.
LOCAL_MEMORY = ("LDL", "STL")
_PERMITS = ("spills", "stack")

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")


def count_instructions(sass: str) -> dict[str, Counter]:
    """How often each function of a `cuobjdump -sass` listing uses each opcode (without its modifiers)."""
    functions: dict[str, Counter] = {}
    counts: Counter = Counter()
    for line in sass.splitlines():
        if match := _FUNCTION.match(line):
            counts = functions.setdefault(match.group(1), Counter())
        elif match := _INSTRUCTION.match(line):
            counts[match.group(1)] += 1
    return functions


def functions_of(row, functions: dict[str, Counter]) -> list[Counter]:
    """The counts of the functions that a row of the kernel table compiled to."""
    return [counts for name, counts in functions.items() if row.symbol in name.replace("flash_attn3::", "")]


def check(functions: dict[str, Counter], rows: list) -> list[str]:
    """One line for each row of the kernel table that has no function or whose function is not what it must be.
    `functions` goes by demangled name."""
    problems = []
    for row in rows:
        own = functions_of(row, functions)
        if not own:
            problems.append(f"{row.name}: no function with {row.symbol}")
        for counts in own:
            missing = [op for op in REQUIRED[row.op] if not counts[op]]
            local = {op: counts[op] for op in LOCAL_MEMORY if counts[op]}
            if missing:
                problems.append(f"{row.name}: lacks {', '.join(missing)}")
            if local and not set(row.allow) & set(_PERMITS):
                problems.append(f"{row.name}: local memory {local}")
    return problems


def disassemble(extension: Path) -> str:
    """The listing that cuobjdump prints. Raises FileNotFoundError if a tool is missing."""
    tools = [str(root / "bin") for root in pypi_cuda_roots()]
    path = os.pathsep.join([*tools, os.environ.get("PATH", "")])
    for tool in ("cuobjdump", "nvdisasm"):
        if not shutil.which(tool, path=path):
            raise FileNotFoundError(f"{tool} is missing: `pip install nvidia-cuda-{tool}`")
    program = shutil.which("cuobjdump", path=path)
    command = [program, "-sass", str(extension)]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True).stdout


def main(argv: list[str]) -> int:
    extension = Path(argv[0])
    if not extension.is_file():
        print(f"{extension} is not built")
        return 1
    built = json.loads((extension.parent / "_build.json").read_text())["kernels"]
    rows = [row for row in load_table().rows() if row.name in built]
    functions = count_instructions(disassemble(extension))
    functions = dict(zip(demangle(list(functions)), functions.values(), strict=True))
    if problems := check(functions, rows):
        print("\n".join(problems))
        return 1
    for row in rows:
        counts = functions_of(row, functions)[0]
        shown = ", ".join(f"{counts[op]} {op}" for op in (*REQUIRED[row.op], *LOCAL_MEMORY))
        print(f"{row.name:<44} {sum(counts.values())} instructions: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
