"""Runs a small set of shapes under compute-sanitizer: memcheck, racecheck, synccheck; adds the counts to the record.

One shape and more for each kernel row: tails of rows, keys and head dims, empty rows, more tiles than SMs. Inputs are
made and results compared on the CPU, so that nearly every kernel under the tool is ours. PyTorch's caching allocator is
off, so that memcheck sees the bounds of each tensor.

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
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error")
DONE = "all shapes right:"

SHAPES = (  # batch, seqlen_q, seqlen_k, heads, kv_heads, less than the row's head dim, causal
    (1, 65, 130, 2, 1, 0, True),
    (2, 200, 81, 2, 2, 0, False),
    (1, 1, 257, 1, 1, 8, False),
    (1, 130, 66, 1, 1, 3, True),
)
MORE_TILES_THAN_SMS = (5, 70, 40, 30, 10, 0, True)
WITHOUT_KEYS = (1, 70, 0, 1, 1, 0, False)
MANY_KEYS = (1, 65, 8200, 1, 1, 0, True)


def compute() -> int:
    """What runs under the tools."""
    sys.path.append(str(record.ROOT / "tests"))
    import oracle
    import torch

    from flash_attn3 import ops

    generator = torch.Generator().manual_seed(0)
    table = ops.kernel_table()
    shapes = 0
    for row in table:
        dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float16
        short = (row["head_dim"], row["head_dim_v"], 65, 130, True, dtype == torch.bfloat16)
        if torch.ops.flash_attn3.select_kernel(*short) != row["id"]:
            selected = (MANY_KEYS,)  # a row for long sequences only
        else:
            selected = (*SHAPES, MORE_TILES_THAN_SMS, WITHOUT_KEYS) if dtype == torch.bfloat16 else SHAPES[:2]
        for shape in selected:
            batch, seqlen_q, seqlen_k, heads, kv_heads, less, causal = shape
            dim, dim_v = row["head_dim"] - less, row["head_dim_v"] - less
            sizes = ((seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, dim_v))
            q, k, v = (torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)
            arguments = (q.cuda(), k.cuda(), v.cuda(), dim**-0.5, causal)
            out, lse = (x.cpu() for x in torch.ops.flash_attn3.forward(*arguments))
            strided = torch.empty(batch, heads, seqlen_q, dim_v, dtype=dtype, device="cuda").transpose(1, 2)
            torch.ops.flash_attn3.forward_out(*arguments[:3], strided, *arguments[3:])
            ref, ref_lse = oracle.attention(q, k, v, causal=causal)
            assert (out.double() - ref).abs().max() < 0.05 and torch.equal(strided.cpu(), out), (row["name"], shape)
            assert torch.allclose(lse.double(), ref_lse, atol=1e-3), (row["name"], shape)
            shapes += 1
    counts = torch.ops.flash_attn3.launch_counts().tolist()
    idle = [row["name"] for row, count in zip(table, counts, strict=True) if not count]
    assert not idle, f"never launched: {idle}"
    print(f"{DONE} {shapes} shapes, {len(table)} kernels")
    return 0


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
    program = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    command = [sanitizer, "--tool", tool, "--print-limit", "20", "--target-processes", "all", *program]
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return compute()

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
    record.write_record(options.out, fresh | {"sanitizer": fresh.get("sanitizer", {}) | errors})
    return 0 if errors and not any(errors.values()) and len(errors) == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
