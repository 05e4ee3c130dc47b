"""Builds flash_attn3/_C.so and flash_attn3/_build.json: the driver that setup.py and developers call.

Units are compiled in parallel by ninja, as many at once as cores and free memory allow (4 GB each; MAX_JOBS
overrides), with a line for each finished unit and a summary at the end. Objects are kept in build/ and in a cache that
all builds of the checkout share (build/cache; FLASH_ATTN3_CACHE_DIR overrides).

usage: python -m buildtools.build [--kernels PATTERNS] [--compile-only]
  PATTERNS: comma-separated shell patterns over kernel names, e.g. 'forward_bf16_d128*' (default: FLASH_ATTN3_KERNELS)
  --compile-only compiles and judges the selected kernels and links nothing
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from buildtools import ROOT, plan, report
from buildtools.digest import source_digest
from buildtools.toolchain import ToolchainError, find_toolchain

GIGABYTES_PER_JOB = 4
CACHE_LIMIT_BYTES = 2 << 30
OUTPUTS = ("_C.so", "_build.json")


class BuildError(RuntimeError):
    """A unit did not compile, was refused, or the link failed; the reason has been printed."""


def build_extension(destination: Path, version: str, patterns: str | None = None, compile_only: bool = False) -> None:
    """Builds the kernels that `patterns` selects (None: FLASH_ATTN3_KERNELS, else all) and writes OUTPUTS into
    `destination`. Raises ToolchainError if a tool is missing, ValueError if a pattern matches nothing, BuildError."""
    began = time.monotonic()
    patterns = os.environ.get("FLASH_ATTN3_KERNELS", "") if patterns is None else patterns
    tools = find_toolchain()
    build = ROOT / "build"
    cache = Path(os.environ.get("FLASH_ATTN3_CACHE_DIR") or build / "cache").resolve()
    with _exclusive(build):
        digest = source_digest()
        units = plan.generate(patterns, build)
        ninja_file = plan.write_ninja(units, tools, build, cache)
        kernels = [row.name for row in plan.load_table().select(patterns)]
        targets = [f"build/objects/{name}.o" for name in kernels] if compile_only else ["build/_C.so"]
        jobs = job_limit()
        print(f"{tools.describe()}; parallel jobs: {jobs}", flush=True)
        _run_ninja([str(tools.ninja), "-f", str(ninja_file), "-j", str(jobs), "-k", "0", *targets])
        prune_cache(cache, CACHE_LIMIT_BYTES)
        if compile_only:
            return
        extension = build / "_C.so"
        description = {
            "version": version,
            "digest": digest,
            "nvcc": tools.nvcc_version,
            "torch": tools.torch_version,
            "cutlass": tools.cutlass_version,
            "kernels": kernels,
            "extension_sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
        }
        destination.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a process may have the old file mapped.
        shutil.copyfile(extension, destination / "_C.so.new")
        os.replace(destination / "_C.so.new", destination / "_C.so")
        (destination / "_build.json").write_text(json.dumps(description, indent=1) + "\n")
    print(report.summary([unit.name for unit in units], extension))
    print(f"built {destination / '_C.so'} in {time.monotonic() - began:.0f} s", flush=True)


def job_limit(cores: int | None = None, available: float | None = None) -> int:
    """How many units to compile at once: MAX_JOBS, else what the cores and the available memory (in bytes) allow."""
    if wanted := os.environ.get("MAX_JOBS"):
        return max(1, int(wanted))
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    available = available_memory() if available is None else available
    return max(1, min(cores, int(available / (GIGABYTES_PER_JOB << 30))))


def available_memory() -> float:
    """Bytes that can be taken without swapping, by the machine's account and by that of the container."""
    amounts = [float("inf")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        amounts.append(1024.0 * int(re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text()).group(1)))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            amounts.append(float(Path(limit).read_text()) - float(Path(used).read_text()))
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
    return min(amounts)


def prune_cache(cache: Path, limit: int) -> None:
    """Removes the entries that were not used for longest until the cache holds at most `limit` bytes."""
    entries = sorted(cache.glob("*/*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    held = 0
    for entry in entries:
        parts = [p for p in (entry, entry.with_suffix(".o"), entry.with_suffix(".d")) if p.exists()]
        held += sum(p.stat().st_size for p in parts)
        if held > limit:
            for part in parts:
                part.unlink()


def project_version() -> str:
    """The version in flash_attn3/version.py, which this build cannot import without importing torch."""
    text = (ROOT / "flash_attn3" / "version.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.M).group(1)


def _run_ninja(command: list[str]) -> None:
    # A finished unit is ninja's status line followed by compile_unit's line of measures: print them as one.
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    pending = ""
    for line in process.stdout:
        line = line.rstrip("\n")
        if re.match(r"\[\d+/\d+\] ", line):
            if pending:
                print(pending, flush=True)
            pending = line
        elif re.match(r" *\d+\.\d s  ", line):
            print(f"{pending:<48} {line}", flush=True)
            pending = ""
        elif not re.match(r"ninja: (no work|build stopped)|FAILED:|\S+ -m buildtools\.compile_unit ", line):
            print(line, flush=True)
    if pending:
        print(pending, flush=True)
    if process.wait():
        raise BuildError("the extension was not built; what failed is printed above")


@contextmanager
def _exclusive(build: Path):
    build.mkdir(exist_ok=True)
    with open(build / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build of this checkout", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Build flash_attn3/_C.so in place.")
    parser.add_argument("--kernels", help="comma-separated shell patterns over kernel names")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels, link nothing")
    arguments = parser.parse_args()
    try:
        build_extension(ROOT / "flash_attn3", project_version(), arguments.kernels, arguments.compile_only)
    except (ToolchainError, BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
