"""Runs the GPU tests and writes tests/records/h200.json: what passed, on which machine, for which sources and binary.

The tests run in a process of their own that notes every result as it comes, so that a hang or a crash still leaves a
record, with the test it happened in counted as failed. This script is started by its path and never puts the checkout
first on sys.path: the installed wheel is what is tested. Arguments that are not listed go to pytest; such a partial run
writes a record only where --out says so.

usage: python tests/gpu/record.py [--out PATH] [--timeout SECONDS] [PYTEST ARGUMENTS]
"""

import argparse
import datetime
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = ROOT / "tests" / "records" / "h200.json"
MAX_FAILURES = 50  # after a sticky CUDA error every further test fails


class Collector:
    """pytest plugin that writes one JSON line when a test starts and one when its outcome is known."""

    def __init__(self, path: Path):
        self.file = path.open("a")

    def write(self, **line: object) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            expected = getattr(report, "wasxfail", None)
            reason = f"expected failure: {expected}" if expected is not None else str(report.longrepr[2])
            self.write(end=report.nodeid, outcome="skipped", reason=reason.removeprefix("Skipped: "))
        elif report.failed or report.when == "call":
            self.write(end=report.nodeid, outcome=report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(end=report.nodeid, outcome="failed")


def environment() -> dict:
    """The machine and the binary under test."""
    import torch

    try:
        from flash_attn3 import ops
    except ImportError:
        raise SystemExit(f"nothing to record: flash_attn3 is not installed for {sys.executable}") from None
    if not torch.cuda.is_available() or not ops.loaded:
        raise SystemExit(f"nothing to record: {ops.load_error or 'no CUDA device'}")
    extension = Path(ops.EXTENSION)
    build = extension.with_name("_build.json")
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "extension": str(extension),
        "extension_sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
        "build_digest": json.loads(build.read_text()).get("digest") if build.exists() else None,
    }


def work(results: Path, arguments: list[str]) -> int:
    """The worker: notes the environment, then runs pytest in this process."""
    collector = Collector(results)
    collector.write(environment=environment())
    options = ["-q", "-p", "no:cacheprovider", "--durations=15", f"--maxfail={MAX_FAILURES}"]
    return pytest.main([*options, *(arguments or [str(HERE)])], plugins=[collector])


def checkout_digest() -> str:
    """Digest of the sources in this checkout, by the build's own function."""
    sys.path.append(str(ROOT))
    from buildtools.digest import source_digest

    return source_digest(ROOT)


def digest_that_ran(machine: dict) -> str:
    """Digest of the sources that the installed binary came from; a warning if the checkout has moved on."""
    current, built = checkout_digest(), machine["build_digest"]
    if built and built != current:
        print(f"WARNING: {machine['extension']} was built from sources {built}, this checkout is {current}")
    return built or current


def summarize(lines: list[dict]) -> tuple[dict, list[str]]:
    """Counts for the record, and the names of the tests that failed or never ended."""
    outcomes, reasons, failed, running = Counter(), Counter(), [], None
    for line in lines:
        if "start" in line:
            running = line["start"]
        elif "end" in line:
            running = None if line["end"] == running else running
            outcomes[line["outcome"]] += 1
            if line["outcome"] == "skipped":
                reasons[line["reason"]] += 1
            if line["outcome"] == "failed":
                failed.append(line["end"])
    if running:
        outcomes["failed"] += 1
        failed.append(f"{running} (never ended)")
    counts = {key: outcomes[key] for key in ("passed", "failed", "skipped")}
    return counts | {"skipped_reasons": dict(reasons)}, failed


def previous_sanitizer(path: Path, digest: str) -> dict:
    """The sanitizer's results in an earlier record of the same sources."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    return earlier.get("sanitizer", {}) if earlier.get("source_digest") == digest else {}


def write_record(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"where the record goes (default: {RECORD.relative_to(ROOT)})")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for the whole run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.worker:
        return work(options.worker, arguments)

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(results), *arguments]
        try:
            code = subprocess.run(command, timeout=options.timeout).returncode
        except subprocess.TimeoutExpired:
            code = -1
            print(f"stopped after {options.timeout:.0f} s")
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    seconds = round(time.monotonic() - begin, 1)
    machine = next((line["environment"] for line in lines if "environment" in line), None)
    if machine is None:
        print("the tests did not start")
        return 2
    counts, failed = summarize(lines)
    digest = digest_that_ran(machine)
    path = options.out or RECORD
    record = {
        **{key: machine[key] for key in ("device", "torch", "python", "cuda")},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "source_digest": digest,
        "extension_sha256": machine["extension_sha256"],
        **counts,
        "seconds": seconds,
        "sanitizer": previous_sanitizer(path, digest),
    }
    for name in failed:
        print(f"FAILED {name}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if not arguments or options.out:
        write_record(path, record)
    return 0 if code == 0 and not counts["failed"] and counts["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
