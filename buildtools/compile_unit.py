"""Runs one compiler, through a cache of objects, measures it, and judges what ptxas says; ninja calls it for each unit.

Cached beside the object are its dependency file, the compiler's log and the measures. An entry is valid for the same
command and compiler as long as the content of every file that the compiler read is the same; time stamps and the
place of the checkout's build folder do not matter. A unit that is refused stays cached: the verdict is
passed again on every use, so that a changed allow-list needs no compilation.

usage: python -m buildtools.compile_unit UNIT.json        (written by buildtools.plan)
"""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from buildtools import ptxas


def main(argv: list[str]) -> int:
    unit = json.loads(Path(argv[0]).read_text())
    cache = Path(unit["cache"]) / cache_key(unit["command"], unit["identity"])
    cached = find_entry(cache)
    entry = cached or _compile(unit, cache)
    if entry is None:
        return 1
    os.utime(entry)
    result = json.loads(entry.read_text())
    report = ptxas.parse(result["log"])
    summary = {
        "unit": unit["name"],
        "seconds": result["seconds"],
        "cpu_seconds": result["cpu_seconds"],
        "peak_mb": result["peak_mb"],
        "cached": cached is not None,
        **report.to_json(),
    }
    Path(unit["report"]).write_text(json.dumps(summary, indent=1))
    print(describe(summary))
    if refused := report.refused(tuple(unit["allow"])):
        for name, lines in refused.items():
            print(f"  refused ({name}): " + "\n    ".join(lines))
        print("  such a kernel is slow: change it, or allow the finding in its row of csrc/instances.py")
        return 1
    if warnings := _warnings(result["log"]):
        print(warnings)
    shutil.copyfile(entry.with_suffix(".d"), unit["depfile"])
    shutil.copyfile(entry.with_suffix(".o"), unit["object"])
    return 0


def cache_key(command: list[str], identity: str) -> str:
    """Name of the cache folder of a command run by the compilers that `identity` names."""
    return hashlib.sha256(json.dumps([command, identity]).encode()).hexdigest()[:24]


def find_entry(cache: Path) -> Path | None:
    """The entry of a cache folder whose dependencies have their recorded content, newest first; None if there is none.

    An entry is NAME.json with NAME.o and NAME.d beside it.
    """
    known: dict[str, str | None] = {}
    for entry in sorted(cache.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        dependencies = json.loads(entry.read_text())["dependencies"]
        for path in dependencies:
            if path not in known:
                known[path] = file_hash(path)
        if all(known[path] == digest for path, digest in dependencies.items()):
            return entry
    return None


def file_hash(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def read_depfile(text: str) -> list[str]:
    """The prerequisites in a make dependency file."""
    prerequisites = text.replace("\\\n", " ").split(":", 1)[1]
    return sorted({p.replace("\\ ", " ") for p in re.findall(r"(?:\\ |\S)+", prerequisites)})


def describe(summary: dict) -> str:
    """One line on a unit: '31.2 s  2.1 GB  168 regs  0 spills'."""
    parts = [f"{summary['seconds']:5.1f} s  {summary['peak_mb'] / 1024:.1f} GB"]
    if summary["kernels"]:
        parts.append(f"{max(k['registers'] for k in summary['kernels'])} regs")
        parts.append(f"{sum(k['spill_stores'] + k['spill_loads'] for k in summary['kernels'])} spills")
    if summary["cached"]:
        parts.append("(cached)")
    return "  ".join(parts)


def _compile(unit: dict, cache: Path) -> Path | None:
    cache.mkdir(parents=True, exist_ok=True)
    began, began_at = time.monotonic(), time.time()
    done = subprocess.run(unit["command"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - began
    # The peak is that of the largest process below this one: the compiler's passes run one after the other.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(f"{seconds:5.1f} s  failed\n{' '.join(unit['command'])}\n{done.stdout}")
        return None
    dependencies = {path: file_hash(path) for path in read_depfile(Path(unit["depfile"]).read_text())}
    if changed := [path for path in dependencies if os.path.exists(path) and os.path.getmtime(path) > began_at]:
        print(f"{seconds:5.1f} s  failed\n  changed while it was compiled: {', '.join(changed)}; build again")
        return None
    result = {
        "unit": unit["name"],
        "dependencies": dependencies,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
        "log": done.stdout,
    }
    # The .json makes the entry valid, so it comes last and in one step.
    name = hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()[:24]
    entry = cache / f"{name}.json"
    shutil.copyfile(unit["object"], entry.with_suffix(".o"))
    shutil.copyfile(unit["depfile"], entry.with_suffix(".d"))
    with tempfile.NamedTemporaryFile("w", dir=cache, suffix=".part", delete=False) as part:
        json.dump(result, part)
    os.replace(part.name, entry)
    return entry


def _warnings(log: str) -> str:
    """What the compiler said besides ptxas' accounts."""
    accounts = re.compile(r"^(ptxas info|\s+\d+ bytes stack frame|\s*$)")
    return "\n".join(line for line in log.splitlines() if not accounts.match(line))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
