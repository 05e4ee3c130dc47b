"""What the GPU tests share: inputs, the kernel row that has to run, poisoned memory, comparison with the oracle.

Every call goes through `attend`, `backward` or `ran`, which compare the launch counters of the extension before and
after: a result that other rows or the portable backend computed is a failure, however right it is.
"""

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import oracle
import pytest
import torch
from torch import Tensor

import flash_attn3
from flash_attn3 import ops

DEVICE = "cuda"
SLEEP_CYCLES = 400_000_000  # of torch.cuda._sleep: about 0.2 s at 2 GHz
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))  # one tile family each

# Query and key lengths around the edges of tiles; head dims between those of the table, and those that no TMA box has.
LENGTH_PAIRS = (
    (1, 80),
    (1, 1000),
    (65, 1),
    (64, 300),
    (129, 64),
    (192, 1025),
    (200, 513),
    (257, 81),
    (300, 100),
    (513, 200),
    (1000, 3),
)
BETWEEN_DIMS = (8, 16, 24, 32, 40, 56, 72, 80, 88, 104, 112, 136, 160, 176, 184, 200, 208, 224, 240, 248)
UNALIGNED_DIMS = (1, 5, 33, 67, 100, 129, 190, 250)

# LSE is fp32 from the scores on: WGMMA sums in fp32 with truncation, ex2.approx errs by 1e-7. The error of large scores
# is relative, hence the second part.
LSE_FLOOR, LSE_RELATIVE = 1e-4, 2e-6
GRADIENT_FLOOR = 1e-4
MAX_FUSED_HEAD_DIM = 128  # above it two kernels share the gradients, in either mode

Gradients = tuple[Tensor, ...]  # dq, dk, dv, and dsink where there is a sink
NAMES = ("dq", "dk", "dv", "dsink")
OPTION_NAMES = {"window": "window_size", "chunk": "attention_chunk", "softcap": "softcap"}  # of the public functions


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


def bounds(causal: bool, window: tuple[int, int] = (-1, -1), chunk: int = 0, softcap: float = 0.0) -> tuple:
    """The mask as operators take it: window_left, window_right, attention_chunk, softcap."""
    return window[0], 0 if causal else window[1], chunk, softcap


def expected_row(
    head_dim: int, head_dim_v: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype, varlen: bool = False
) -> str:
    """Name of the row that a forward of this problem has to launch: the extension's choice, checked to be the smallest
    tile family of the right dtype that holds both head dims. Skips where a build of a subset has no such row."""
    row_id = torch.ops.flash_attn3.select_kernel(
        head_dim, head_dim_v, seqlen_q, seqlen_k, varlen, dtype == torch.bfloat16
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


def row_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    return expected_row(q.shape[3], v.shape[3], q.shape[1], k.shape[1], q.dtype)


def rows_of_op(op: str) -> tuple[str, ...]:
    """Names of the rows of an op that serves every dtype; there is one."""
    return tuple(row["name"] for row in table() if row["op"] == op)


def expected_backward(
    head_dim: int,
    head_dim_v: int,
    seqlen_q: int,
    seqlen_k: int,
    mask: tuple,
    dtype: torch.dtype,
    deterministic: bool,
    varlen: bool = False,
) -> tuple[str, ...]:
    """Names of the rows that a backward of this problem has to launch: the extension's choice, checked to be one of the
    two sequences, of the right dtype, and of the smallest tile family that holds both head dims. Skips where this build
    has no such rows. `mask` is that of `bounds`; lengths of a packed batch are its mean ones."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    deterministic = deterministic or mask[3] > 0  # the fused kernel knows no softcap
    chosen = torch.ops.flash_attn3.select_backward(
        head_dim, head_dim_v, seqlen_q, seqlen_k, *mask[:3], varlen, name == "bf16", deterministic
    )
    if not chosen or min(chosen) < 0:
        pytest.skip(f"this build has no {dtype} backward for head dims {head_dim}, {head_dim_v}")
    rows = [table()[i] for i in chosen]
    ops_run = [row["op"] for row in rows]
    apart = ["backward_prepare", "backward_keys", "backward_queries"]
    fused = ["backward_prepare", "backward", "backward_finish"]
    assert ops_run == apart or (ops_run == fused and not deterministic), ops_run
    assert ops_run == apart or max(head_dim, head_dim_v) <= MAX_FUSED_HEAD_DIM, ops_run
    for row in rows:
        assert row["dtype"] == name, row
        if row["op"] in ("backward", "backward_keys", "backward_queries"):
            family = [(r["head_dim"], r["head_dim_v"]) for r in table() if (r["op"], r["dtype"]) == (row["op"], name)]
            holding = [dims for dims in family if dims[0] >= head_dim and dims[1] >= head_dim_v]
            assert (row["head_dim"], row["head_dim_v"]) == min(holding), row
    return tuple(row["name"] for row in rows)


def backward_rows(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, sink: Tensor | None = None, **mask
) -> tuple[str, ...]:
    dims = (q.shape[3], v.shape[3], q.shape[1], k.shape[1])
    rows = expected_backward(*dims, bounds(causal, **mask), q.dtype, deterministic)
    return rows if sink is None else (*rows, *rows_of_op("backward_sink"))


# Short sequences would take the two separate kernels in both modes; here the default mode is the fused kernel wherever
# there is one, and `deterministic` the other path. test_separate_kernels_at_short_lengths has the library's own choice.
os.environ["FLASH_ATTN3_BACKWARD"] = "fused"


def modes(q: Tensor, k: Tensor, v: Tensor, causal: bool, **mask) -> list[bool]:
    """The values of `deterministic` that run different kernels."""
    same = backward_rows(q, k, v, causal, False, **mask) == backward_rows(q, k, v, causal, True, **mask)
    return [True] if same else [False, True]


@contextmanager
def ran(rows: str | Sequence[str], *times: int) -> Iterator[None]:
    """Asserts that inside, each of `rows` is launched one of `times` times (once if not given) and no other row is."""
    rows = (rows,) if isinstance(rows, str) else rows
    before = torch.ops.flash_attn3.launch_counts()
    yield
    difference = (torch.ops.flash_attn3.launch_counts() - before).tolist()
    launched = {table()[i]["name"]: n for i, n in enumerate(difference) if n}
    assert launched.keys() <= set(rows), f"launched {launched}, expected {rows}"
    for row in rows:
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


# Below, `mask` stands for the oracle's options window, chunk and softcap.


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    times: tuple[int, ...] = (1,),
    sink: Tensor | None = None,
    **mask,
) -> tuple[Tensor, Tensor]:
    """The public call over poisoned memory, asserted to have run the expected kernel; (out, lse) of checked shapes."""
    batch, seqlen_q, heads, _ = q.shape
    shape = (batch, seqlen_q, heads, v.shape[3])
    poison(2 * batch * seqlen_q * heads * v.shape[3], 4 * batch * seqlen_q * heads)
    options = {OPTION_NAMES[name]: value for name, value in mask.items()}
    with torch.no_grad(), ran(row_of(q, k, v), *times):
        if sink is None:
            out, lse = flash_attn3.flash_attn_func(
                q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True, **options
            )
        else:
            out, lse = flash_attn3.attention(
                q, k, v, softmax_scale=scale, causal=causal, return_lse=True, sink=sink, **options
            )
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
    **options,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel (or takes its `result`) and compares out and lse with the float64 formula; returns them.

    `options`: the mask, and sink.
    """
    out, lse = result or attend(q, k, v, causal, scale, **options)
    ref, ref_lse = oracle.attention(q, k, v, scale=scale, causal=causal, **options)
    base, _ = oracle.attention(q, k, v, scale=scale, causal=causal, dtype=q.dtype, **options)
    oracle.assert_close("out", out, ref, base, 1e-5)
    check_lse(lse, ref_lse)
    return out, lse


def check_lse(lse: Tensor, ref: Tensor) -> None:
    """LSE against the float64 one: -inf and NaN in the same places, elsewhere within the error of fp32 scores."""
    empty, finite = ref == -torch.inf, ref.isfinite()
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf exactly where a row has no key"
    assert torch.equal(lse.isnan(), ref.isnan()), "lse is NaN in other places"
    error = (lse.double() - ref)[finite].abs()
    worst = (error - LSE_RELATIVE * ref[finite].abs()).max().item() if error.numel() else 0.0
    assert worst <= LSE_FLOOR, f"lse errs by {error.max().item():.2e}"  # NaN fails too


def equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether out and lse, or gradients, are bitwise equal (no NaN expected in any)."""
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def gradient_of_out(q: Tensor, v: Tensor, key: object = "dout") -> Tensor:
    """dout for these inputs, N(0, 1)."""
    return randn(*q.shape[:3], v.shape[3], dtype=q.dtype, key=key)


def gradient_of_lse(q: Tensor, key: object = "dlse") -> Tensor:
    """dlse for this q, N(0, 1), fp32."""
    return randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, key=key)


def poison_for_backward(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Poisons what the gradients and the workspace will lie in: fp32 sums of dq, padded, and two fp32 a row."""
    rows = q.shape[0] * q.shape[2] * (q.shape[1] + 256)
    columns = max(64, q.shape[3], v.shape[3])
    poison(4 * rows * columns, 4 * rows, 8 * rows, *(2 * x.numel() for x in (q, k, v)))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    saved: tuple[Tensor, Tensor] | None = None,
    times: tuple[int, ...] = (1,),
    sink: Tensor | None = None,
    **mask,
) -> Gradients:
    """dq, dk, dv (and dsink) of the operator over poisoned memory, asserted to have run the expected rows, with checked
    shapes.

    `saved` are out and lse; the forward kernel makes them where they are not given.
    """
    out, lse = saved or attend(q, k, v, causal, scale, times=times, sink=sink, **mask)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    poison_for_backward(q, k, v)
    with torch.no_grad(), ran(backward_rows(q, k, v, causal, deterministic, sink, **mask), *times):
        *grads, dsink = torch.ops.flash_attn3.backward(
            dout, dlse, q, k, v, out, lse, sink, scale, *bounds(causal, **mask), deterministic
        )
    return checked_gradients((q, k, v, sink), (*grads, dsink))


def checked_gradients(inputs: tuple[Tensor | None, ...], grads: Sequence[Tensor]) -> Gradients:
    """The gradients of q, k, v and sink, with the shapes and dtypes of these; without a sink the first three."""
    *_, sink = inputs
    assert sink is not None or (grads[3].shape == (0,) and grads[3].dtype == torch.float32)
    grads = tuple(grads[: 3 if sink is None else 4])
    for name, x, grad in zip(NAMES, inputs, grads, strict=False):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.device == x.device, name
        assert grad.is_contiguous(), name
    return grads


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool | None = None,
    **options,
) -> Gradients:
    """Compares the kernels' gradients with those of the float64 formula; returns them.

    dout None is random. deterministic None checks both modes, where they run different kernels, and returns the
    gradients of the deterministic one. `options`: the mask, and sink; with any, out and lse are compared too.
    """
    dout = gradient_of_out(q, v) if dout is None else dout
    saved = (check if options else attend)(q, k, v, causal, scale, **options)
    refs, bases = reference_gradients(q, k, v, dout, dlse, causal, scale, **options)
    for mode in modes(q, k, v, causal, **options) if deterministic is None else [deterministic]:
        grads = backward(q, k, v, dout, dlse, causal, scale, mode, saved, **options)
        assert_close_gradients(grads, refs, bases, "deterministic " if mode else "")
    return grads


def reference_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    **options,
) -> tuple[Gradients, Gradients]:
    """dq, dk, dv (and dsink) by the formula in float64, and in the inputs' dtype: the unit of the error."""
    refs = oracle.gradients(q, k, v, dout, dlse, scale=scale, causal=causal, **options)
    return refs, oracle.gradients(q, k, v, dout, dlse, scale=scale, causal=causal, dtype=q.dtype, **options)


def assert_close_gradients(got: Sequence[Tensor], refs: Gradients, bases: Gradients, what: str = "") -> None:
    assert len(got) == len(refs) == len(bases)
    for name, *values in zip(NAMES, got, refs, bases, strict=False):
        oracle.assert_close(what + name, *values, GRADIENT_FLOOR)


def assert_nothing_waits(calls: Callable[[], None], limit: float) -> None:
    """Runs `calls` behind a busy GPU: none of them may synchronise, or take `limit` seconds because it waits."""
    calls()  # loads the kernels and fills the caching allocator, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        begin = time.perf_counter()
        calls()
        took = time.perf_counter() - begin
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert took < limit, f"the calls took {took:.3f} s while the GPU was kept busy: something waited for it"


def least_milliseconds(call: Callable[[], object], calls: int = 10, rounds: int = 5) -> float:
    """GPU time of a call, the least of a few rounds of several calls each."""
    times = []
    for _ in range(rounds + 1):  # the first warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return min(times[1:])
