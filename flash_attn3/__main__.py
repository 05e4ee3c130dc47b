"""`python -m flash_attn3`: what is installed, whether it computes correctly, how fast it is beside torch's own.

The check compares forward, LSE and gradients with the formula in float64; the timings are a first impression, not a
benchmark. Works without a GPU. Exit status 1 if the check fails.
"""

import json
import os
import platform
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3 import attention, attention_varlen, explain, explain_varlen, flash_attn_func, ops
from flash_attn3.version import __version__

KINDS = ("full", "causal", "packed")


def describe(device: torch.device) -> None:
    """Versions, the device and the kernels."""
    print(f"flash_attn3 {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        print(f"device: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    else:
        print(f"device: cpu, {torch.get_num_threads()} threads (torch sees no CUDA GPU)")
    if not ops.loaded:
        print(f"kernels: none; {ops.load_error}")
        return
    path = os.path.join(os.path.dirname(ops.EXTENSION), "_build.json")
    build = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            build = json.load(file)
    print(f"extension: {ops.EXTENSION}, " + ", ".join(f"{x} {build.get(x, '?')}" for x in ("nvcc", "torch", "digest")))
    table = ops.kernel_table()
    print(f"kernels: {len(table)}")
    for row in table:
        print(f"    {row['name']}")


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, Dv) and lse (B, H, Sq) in `dtype`, by the whole matrix of scores; every row must see a key."""
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu(1 + s.shape[3] - s.shape[2])
        s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The batch as attention_varlen takes it, with the bounds of its sequences."""
    cu = [torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)]
    return *(x.flatten(0, 1) for x in (q, k, v)), *cu, q.shape[1], k.shape[1]


def check(device: torch.device, dtype: torch.dtype, head_dim: int, kind: str) -> bool:
    """Forward, LSE and gradients against float64: errors at most twice those of the formula in `dtype`.

    kind: "full", "causal", or "packed", which is causal too.
    """
    torch.manual_seed(0)
    causal = kind != "full"

    def ours(*x: Tensor) -> tuple[Tensor, Tensor]:
        if kind != "packed":
            return attention(*x, causal=causal, return_lse=True)
        out, lse = attention_varlen(*packed(*x), causal=causal, return_lse=True)
        return out.unflatten(0, x[0].shape[:2]), lse.unflatten(1, x[0].shape[:2]).transpose(0, 1)

    q, k, v, dout = (
        torch.randn(2, s, h, head_dim, device=device).to(dtype) for s, h in ((129, 4), (193, 2), (193, 2), (129, 4))
    )
    results = []
    for function in (
        ours,
        lambda *x: formula(*x, causal, torch.float64),
        lambda *x: formula(*x, causal, dtype),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves)
        grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        results.append([x.detach().double() for x in (out, lse, *grads)])
    worst, passed = 0.0, True
    for got, want, baseline, floor in zip(*results, (1e-5, 1e-5, 1e-4, 1e-4, 1e-4), strict=True):
        error, limit = (got - want).abs().max().item(), 2 * (baseline - want).abs().max().item() + floor
        worst, passed = max(worst, error / limit), passed and error <= limit  # NaN fails
    how = explain_varlen(*packed(q, k, v), causal=True) if kind == "packed" else explain(q, k, v, causal=causal)
    name = str(dtype).removeprefix("torch.")
    print(
        f"    {name:9} D {head_dim:3} {kind:6} {how.kernel or how.backend:40} "
        f"{'ok' if passed else 'FAIL'}, worst error {worst:.2f} of its limit"
    )
    return passed


def seconds(function, device: torch.device) -> float:
    """Best of five runs after a warm-up."""

    def run() -> float:
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    run()
    return min(run() for _ in range(5))


def timings(device: torch.device) -> None:
    """A few shapes beside F.scaled_dot_product_attention."""
    cuda = device.type == "cuda"
    print(f"forward, causal, ms ({'bfloat16' if cuda else 'float32'}):")
    print(f"    {'batch x seqlen x heads x head dim':36} {'flash_attn3':>12} {'torch sdpa':>12}")
    for shape in (
        ((4, 4096, 16, 128), (1, 16384, 16, 128), (4, 4096, 32, 64)) if cuda else ((4, 128, 8, 64), (1, 1024, 8, 64))
    ):
        dtype = torch.bfloat16 if cuda else torch.float32
        q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        ours = flash_attn_func if cuda else attention
        theirs = [x.transpose(1, 2) for x in (q, k, v)]
        with torch.no_grad():
            mine = seconds(lambda q=q, k=k, v=v, ours=ours: ours(q, k, v, causal=True), device)
            sdpa = seconds(lambda x=theirs: F.scaled_dot_product_attention(*x, is_causal=True), device)
        print(f"    {' x '.join(map(str, shape)):36} {1e3 * mine:12.3f} {1e3 * sdpa:12.3f}")


def main() -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    describe(device)
    print("self-check against float64:")
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    head_dims = (64, 128, 256) if device.type == "cuda" else (64, 128)
    cases = [(dtype, head_dim, kind) for dtype in dtypes for head_dim in head_dims for kind in KINDS]
    results = [check(device, *case) for case in cases]
    passed = all(results)
    timings(device)
    print("self-check passed" if passed else "self-check FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
