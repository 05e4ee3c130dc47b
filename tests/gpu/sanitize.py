"""Runs a small set of shapes under compute-sanitizer: memcheck, racecheck, synccheck; adds the counts to the record.

The shapes are in sanitized.py. PyTorch's caching allocator is off, so that memcheck sees the bounds of each tensor.

usage: python tests/gpu/sanitize.py [--out PATH] [--timeout SECONDS a tool] [--tools memcheck,racecheck,synccheck]
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import record

TOOLS = ("memcheck", "racecheck", "synccheck")
# Kernels that a tool leaves out, as a part of their name. In those that hold keys all lanes of a warp read statistics
# that TMA has written, and one lane gives their buffer back after __syncwarp; racecheck does not count that as an order
# between the other lanes' reads and the next copy, and reports every one of them.
EXCLUDED = {"racecheck": "keys_kernel"}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error")
DONE = "all shapes right:"


def find_tool() -> str | None:
    """compute-sanitizer on PATH or in a toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.path.join(home, sub) for home in filter(None, homes) for sub in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def count_errors(output: str) -> int | None:
    """Errors that the tool summed up at its end; None if it never got there or the program under it did not finish."""
    counts = [int(errors or races) for errors, races in SUMMARY.findall(output)]
    return max(counts) if counts and (DONE in output or max(counts)) else None


def run(sanitizer: str, tool: str, timeout: float) -> tuple[int | None, str]:
    """(errors, the tool's output) of one tool over all shapes."""
    program = [sys.executable, str(Path(__file__).resolve().with_name("sanitized.py"))]
    command = [sanitizer, "--tool", tool, "--print-limit", "20", "--target-processes", "all"]
    if tool in EXCLUDED:
        command += ["--kernel-name-exclude", f"kns={EXCLUDED[tool]}"]
    command += program
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        return None, (output.decode(errors="replace") if isinstance(output, bytes) else output) + "\nout of time"
    return count_errors(done.stdout), done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RECORD, help="the record that gets the counts")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each tool")
    parser.add_argument("--tools", default=",".join(TOOLS))
    options = parser.parse_args()

    sanitizer = find_tool()
    if sanitizer is None:
        print("compute-sanitizer was not found on PATH or in CUDA_HOME; it comes with the CUDA toolkit")
        return 2
    machine = record.environment()
    digest = record.digest_that_ran(machine)
    errors, lines = {}, []
    for tool in options.tools.split(","):
        begin = time.monotonic()
        count, output = run(sanitizer, tool, options.timeout)
        if count is not None:
            errors[tool] = count
        if count != 0:
            print(f"---- {tool}\n{output[-6000:]}")
        result = "did not finish" if count is None else f"{count} errors"
        lines.append(f"{tool:<12} {result:<16} {time.monotonic() - begin:6.1f} s")
    print("\n".join(["tool         result             time", *lines]))

    earlier = json.loads(options.out.read_text()) if options.out.exists() else {}
    fresh = earlier if earlier.get("source_digest") == digest else {"source_digest": digest}
    excluded = {f"{tool}_excluded": EXCLUDED[tool] for tool in errors if tool in EXCLUDED}
    record.write_record(options.out, fresh | {"sanitizer": fresh.get("sanitizer", {}) | errors} | excluded)
    return 0 if errors and not any(errors.values()) and len(errors) == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
