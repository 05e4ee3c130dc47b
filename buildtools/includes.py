"""Lint: includes and imports go one way.

    csrc/binding -> csrc/host -> (plain C++, the CUDA runtime)
    csrc/kernels/FAMILY -> csrc/kernels/common -> the headers that host and device share; fp8 -> forward besides
    hopper -> flash_attn3, and never back; tests/oracle.py -> nothing of ours

torch appears in csrc/binding alone, and there only its stable ABI.

usage: python -m buildtools.includes     prints each violation; the exit status is 1 if there is one
"""

import ast
import re
import sys
from pathlib import Path

from buildtools import ROOT

# Plain structs and integer functions that both sides use.
SHARED_HEADERS = ("host/params.h", "host/fp8_params.h", "host/geometry.h", "host/packed.h")
# Families that are another configuration of the same kernel.
BUILT_ON = {"kernels/fp8/": ("kernels/forward/",)}
OWN_FOLDERS = ("binding/", "host/", "kernels/")
TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
STABLE_TORCH = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
DEVICE_LIBRARIES = ("cutlass/", "cute/")
OLD_NAMES = ("flash_attn_interface", "flash_attn_config", "flash_attn_3")

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def refuse(source: str, included: str) -> str | None:
    """Why a file `source` (relative to csrc/) may not include `included`; None if it may."""
    if included.startswith(TORCH):
        if not source.startswith("binding/"):
            return "torch belongs in csrc/binding"
        if not included.startswith(STABLE_TORCH):
            return "only torch's stable ABI may be used"
    if source.startswith(("binding/", "host/")):
        if included.startswith(("kernels/", *DEVICE_LIBRARIES)):
            return "the host side knows kernels by their launch functions only"
        if source.startswith("host/") and included.startswith("binding/"):
            return "host lies below binding"
    if source.startswith("kernels/"):
        folder = "/".join(source.split("/")[:2]) + "/"
        allowed = ("kernels/common/", folder, *BUILT_ON.get(folder, ()), *SHARED_HEADERS)
        if included.startswith(OWN_FOLDERS) and not included.startswith(allowed):
            return f"{folder} may include {', '.join(allowed)}"
    return None


def native_violations(root: Path = ROOT) -> list[str]:
    """'file:line: reason' for every include in csrc/ that goes the wrong way."""
    violations = []
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in (".h", ".hpp", ".cuh", ".cu", ".cpp"):
            continue
        source = path.relative_to(root / "csrc").as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = _INCLUDE.match(line)
            if match and (reason := refuse(source, match.group(1))):
                violations.append(f"csrc/{source}:{number}: includes {match.group(1)}: {reason}")
    return violations


def python_violations(root: Path = ROOT) -> list[str]:
    """'file:line: reason' for every Python import that goes the wrong way."""
    rules = [(path, OLD_NAMES, "hopper lies above flash_attn3") for path in (root / "flash_attn3").rglob("*.py")]
    rules.append((root / "tests" / "oracle.py", ("flash_attn3", *OLD_NAMES), "the reference is independent"))
    violations = []
    for path, forbidden, reason in rules:
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                if module.split(".")[0] in forbidden:
                    where = f"{path.relative_to(root).as_posix()}:{node.lineno}"
                    violations.append(f"{where}: imports {module}: {reason}")
    return violations


def main() -> int:
    violations = native_violations() + python_violations()
    print("\n".join(violations) if violations else "includes and imports go one way")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
