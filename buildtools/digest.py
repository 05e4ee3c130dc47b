"""Digest of the sources that a binary or a record of measurements belongs to.

sha256 over setup.py and every C++, CUDA and Python file of csrc/, flash_attn3/ and hopper/, in byte order of their
paths: path, NUL, content, NUL. The first 16 hex digits are written into _build.json by the build, and into
tests/records and benchmarks/results by the runs on a GPU; CI compares them.

usage: python -m buildtools.digest [ROOT]     prints the digest, and which committed records are stale
"""

import hashlib
import json
import sys
from pathlib import Path

from buildtools import ROOT

FOLDERS = ("csrc", "flash_attn3", "hopper")
SUFFIXES = (".py", ".h", ".hpp", ".cuh", ".cu", ".cpp")
RECORDS = ("tests/records/h200.json", "benchmarks/results/h200.json")


def source_digest(root: Path = ROOT) -> str:
    """The digest of the sources under `root`: 16 hex digits."""
    found = {"setup.py"} if (root / "setup.py").is_file() else set()
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            relative = path.relative_to(root)
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in relative.parts:
                found.add(relative.as_posix())
    digest = hashlib.sha256()
    for name in sorted(found, key=str.encode):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def record_states(root: Path = ROOT) -> list[str]:
    """One line for each committed record: fresh, stale or absent. A stale record is no error, it is to be measured
    again with the change that made it stale."""
    current = source_digest(root)
    lines = []
    for name in RECORDS:
        path = root / name
        if not path.is_file():
            lines.append(f"{name}: absent")
            continue
        recorded = json.loads(path.read_text()).get("source_digest")
        lines.append(f"{name}: " + ("fresh" if recorded == current else f"stale (digest {recorded})"))
    return lines


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    print("\n".join([f"source digest {source_digest(where)}", *record_states(where)]))
