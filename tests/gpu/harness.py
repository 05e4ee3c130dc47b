"""What the GPU tests share: inputs, the kernel row that has to run, poisoned memory, comparison with the oracle.

Every call goes through `attend` or `ran`, which compare the launch counters of the extension before and after: a result
that another row or the portable backend computed is a failure, however right it is.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import oracle
import pytest
import torch
from torch import Tensor

import flash_attn3
from flash_attn3 import ops

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))  # one tile family each

# LSE is fp32 from the scores on: WGMMA sums in fp32 with truncation, ex2.approx errs by 1e-7. The error of large scores
# is relative, hence the second part.
LSE_FLOOR, LSE_RELATIVE = 1e-4, 2e-6


def why_not() -> str:
    """The reason why no GPU test can run here, or "" if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}, the kernels need 9.0"
    return "" if ops.loaded else ops.load_error


@cache
def table() -> list[dict]:
    """Rows of the compiled kernel table."""
    return ops.kernel_table()


def expected_row(head_dim: int, head_dim_v: int, seqlen_q: int, seqlen_k: int, causal: bool, dtype: torch.dtype) -> str:
    """Name of the row that a forward of this problem has to launch: the extension's choice, checked to be the smallest
    tile family of the right dtype that holds both head dims. Skips where a build of a subset has no such row."""
    row_id = torch.ops.flash_attn3.select_kernel(
        head_dim, head_dim_v, seqlen_q, seqlen_k, causal, dtype == torch.bfloat16
    )
    if row_id < 0:
        pytest.skip(f"this build has no {dtype} kernel for head dims {head_dim}, {head_dim_v}")
    row = table()[row_id]
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    holding = [
        (r["head_dim"], r["head_dim_v"])
        for r in table()
        if r["op"] == "forward" and r["dtype"] == name and r["head_dim"] >= head_dim and r["head_dim_v"] >= head_dim_v
    ]
    assert row["dtype"] == name and (row["head_dim"], row["head_dim_v"]) == min(holding), row
    return row["name"]


def row_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    return expected_row(q.shape[3], v.shape[3], q.shape[1], k.shape[1], causal, q.dtype)


@contextmanager
def ran(row: str, *times: int) -> Iterator[None]:
    """Asserts that inside, `row` is launched one of `times` times (once if not given) and no other row is."""
    before = torch.ops.flash_attn3.launch_counts()
    yield
    difference = (torch.ops.flash_attn3.launch_counts() - before).tolist()
    launched = {table()[i]["name"]: n for i, n in enumerate(difference) if n}
    assert launched.keys() <= {row}, f"launched {launched}, expected {row}"
    assert launched.get(row, 0) in (times or (1,)), f"{row} launched {launched.get(row, 0)} times"


def generator(*key: object) -> torch.Generator:
    """A generator seeded by the case itself, so that a case has the same inputs alone and in the whole run."""
    return torch.Generator(DEVICE).manual_seed(zlib.crc32(json.dumps([str(part) for part in key]).encode()))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, key: object = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator(shape, dtype, key))


def inputs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    key: object = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous q (B, Sq, H, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv), N(0, 1)."""
    return (
        randn(batch, seqlen_q, heads, head_dim, dtype=dtype, key=(key, "q")),
        randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, key=(key, "k")),
        randn(batch, seqlen_k, kv_heads, head_dim_v or head_dim, dtype=dtype, key=(key, "v")),
    )


def poison(*sizes: int) -> None:
    """Fills memory that the caching allocator will hand out next with 0xFF: NaN in every float, -1 in every integer.
    `sizes` in bytes; the small sizes that a call's workspace may have are always included."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (*sizes, 4, 512, 1024, 4096, 65536)]
    for block in blocks:
        block.fill_(255)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, times: tuple[int, ...] = (1,)
) -> tuple[Tensor, Tensor]:
    """flash_attn_func over poisoned memory, asserted to have run the expected kernel; (out, lse) of checked shapes."""
    batch, seqlen_q, heads, _ = q.shape
    shape = (batch, seqlen_q, heads, v.shape[3])
    poison(2 * batch * seqlen_q * heads * v.shape[3], 4 * batch * seqlen_q * heads)
    with torch.no_grad(), ran(row_of(q, k, v, causal), *times):
        out, lse = flash_attn3.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    assert out.shape == shape and out.dtype == q.dtype and out.device == q.device
    assert lse.shape == (batch, heads, seqlen_q) and lse.dtype == torch.float32 and lse.is_contiguous()
    return out, lse


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    result: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel (or takes its `result`) and compares out and lse with the float64 formula; returns them."""
    out, lse = result or attend(q, k, v, causal, scale)
    ref, ref_lse = oracle.attention(q, k, v, scale=scale, causal=causal)
    base, _ = oracle.attention(q, k, v, scale=scale, causal=causal, dtype=q.dtype)
    oracle.assert_close("out", out, ref, base, 1e-5)
    check_lse(lse, ref_lse)
    return out, lse


def check_lse(lse: Tensor, ref: Tensor) -> None:
    """LSE against the float64 one: -inf in the same places, elsewhere within the error of fp32 scores."""
    empty = ref == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf exactly where a row has no key"
    error = (lse.double() - ref).masked_fill(empty, 0.0).abs()
    worst = (error - LSE_RELATIVE * ref.masked_fill(empty, 0.0).abs()).max().item() if error.numel() else 0.0
    assert worst <= LSE_FLOOR, f"lse errs by {error.max().item():.2e}"  # NaN fails too


def equal(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    """Whether out and lse are bitwise equal (no NaN expected in either)."""
    return torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
