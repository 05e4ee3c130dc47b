"""Which backend runs a problem: the sm_90a kernels, or the portable backend with every reason why.

A `Problem` is plain numbers, so the choice can be asked and tested for devices that are not there. Nothing falls
through silently: `reasons_not_supported` is empty exactly when the kernels run, and `explain` shows it to the user.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_attn3 import checks, ops

CAPABILITY = (9, 0)
MAX_HEAD_DIM = 256
# softmax_scale is a normal float32 in the kernels, also times log2(e).
MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**127
MAX_LENGTH = 2**31 - 1


class Problem(NamedTuple):
    """One call. The window is normalised (see `normalize_window`): causal is (-1, 0). Lengths of a packed batch are its
    mean ones; the true ones are not known on the host."""

    device: torch.device
    dtype: torch.dtype
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    window: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    has_qv: bool = False
    has_sink: bool = False
    varlen: bool = False


def mask_of(problem: Problem) -> tuple[float, int, int, int, float]:
    """softmax_scale, window_left, window_right, attention_chunk, softcap, with which every operator ends."""
    return (problem.softmax_scale, *problem.window, problem.attention_chunk, problem.softcap)


_hopper: dict[int, bool] = {}  # per CUDA device index; a GPU's capability does not change


def forward_rows(table: list[dict]) -> dict[torch.dtype, list[tuple[int, int]]]:
    """(head_dim, head_dim_v) up to which a kernel table has the forward of each dtype.

    A kernel runs every smaller head dim too. A build may be a subset of the kernels (FLASH_ATTN3_KERNELS).
    """
    return {dtype: _largest(_dims(table, "forward", name)) for name, dtype in _TABLE_DTYPES}


def fp8_rows(table: list[dict]) -> list[tuple[int, int]]:
    """The same of the forward for float8_e4m3fn, which needs a kernel before it."""
    complete = any(row["op"] == "fp8_transpose" for row in table)
    return _largest(_dims(table, "fp8_forward", "e4m3")) if complete else []


def backward_rows(table: list[dict]) -> dict[tuple[torch.dtype, bool], list[tuple[int, int]]]:
    """The same of the backward, by dtype and `deterministic`: every kernel that it launches has to be there.

    These are backward_prepare, then backward_keys and backward_queries, or, unless it must be deterministic, "backward"
    and backward_finish.
    """
    largest = {}
    for name, dtype in _TABLE_DTYPES:
        keys, queries, fused, prepare, finish = (
            _dims(table, op, name)
            for op in ("backward_keys", "backward_queries", "backward", "backward_prepare", "backward_finish")
        )
        apart = {(min(k[0], q[0]), min(k[1], q[1])) for k in keys for q in queries} if prepare else set()
        largest[dtype, True] = _largest(apart)
        largest[dtype, False] = _largest(apart | fused if prepare and finish else apart)
    return largest


def _dims(table: list[dict], op: str, dtype: str) -> set[tuple[int, int]]:
    return {(row["head_dim"], row["head_dim_v"]) for row in table if row["op"] == op and row["dtype"] == dtype}


def _largest(dims: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that another one covers."""
    return [x for x in dims if not any(x != y and x[0] <= y[0] and x[1] <= y[1] for y in dims)]


_SUBSET = "FLASH_ATTN3_KERNELS chose a subset"
_TABLE_DTYPES = (("bf16", torch.bfloat16), ("fp16", torch.float16))
_rows = forward_rows(ops.kernel_table())
_fp8_rows = fp8_rows(ops.kernel_table())
_backward_rows = backward_rows(ops.kernel_table())
_ops = {row["op"] for row in ops.kernel_table()}


def capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


def is_hopper(index: int) -> bool:
    """Whether this CUDA device has the compute capability of the kernels; asked once a device."""
    known = _hopper.get(index)
    if known is None:
        known = _hopper[index] = tuple(capability(index)) == CAPABILITY
    return known


def has_kernels(index: int) -> bool:
    """Whether the extension is loaded and its kernels run on this CUDA device."""
    return ops.loaded and is_hopper(index)


def has_row(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether this build has a kernel for these head dims; select_kernel would not return -1."""
    for largest, largest_v in _rows.get(dtype, ()):  # noqa: SIM110, any() takes twice the time of this hot line
        if 0 < head_dim <= largest and 0 < head_dim_v <= largest_v:
            return True
    return False


def has_fp8_row(head_dim: int, head_dim_v: int) -> bool:
    """The same for float8_e4m3fn inputs, with the kernel before it."""
    return any(0 < head_dim <= largest and 0 < head_dim_v <= largest_v for largest, largest_v in _fp8_rows)


def has_backward(dtype: torch.dtype, head_dim: int, head_dim_v: int, deterministic: bool) -> bool:
    """Whether this build has the backward kernels for these head dims; select_backward would not return -1."""
    for largest, largest_v in _backward_rows.get((dtype, deterministic), ()):
        if 0 < head_dim <= largest and 0 < head_dim_v <= largest_v:
            return True
    return False


def has_op(op: str) -> bool:
    """Whether this build has that kernel, one that serves every dtype and head dim."""
    return op in _ops


def normalize_window(window_size: tuple[int, int], causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) where a bound that reaches past every key is -1; causal forces right to 0."""
    left, right = window_size
    if causal:
        right = 0
    elif right > 0 and right >= seqlen_q - 1:
        right = -1
    return (-1 if left >= seqlen_k - 1 else left), right


def normalize_chunk(attention_chunk: int, seqlen_q: int, seqlen_k: int) -> int:
    """0 if all keys and queries are in one chunk anyway."""
    if attention_chunk >= max(1, seqlen_q, seqlen_k):
        return 0 if seqlen_q <= seqlen_k else seqlen_q  # more queries than keys: the first ones are in chunk -1
    return attention_chunk


def normalize_packed(window_size: tuple[int, int], causal: bool, attention_chunk: int) -> tuple[tuple[int, int], int]:
    """Window and chunk for sequences of any length: what does not fit into int32 reaches past every key."""
    left, right = [-1 if bound > MAX_LENGTH else bound for bound in window_size]
    return (left, 0 if causal else right), min(attention_chunk, MAX_LENGTH)


def _reasons(problem: Problem) -> list[tuple]:
    """Why the kernels cannot run this problem, each a format string and its values.

    Unformatted, for torch.compile with dynamic shapes traces this with symbols in place of the numbers.
    """
    reasons = []
    device = problem.device
    if not ops.loaded:
        reasons.append(("{}", ops.load_error))
    if device.type != "cuda":
        reasons.append(("device {}: the kernels need a CUDA GPU of compute capability 9.0 (H100, H200)", device))
    elif not is_hopper(device.index):
        reasons.append(
            ("device {} has compute capability {}.{}; the kernels need 9.0", device, *capability(device.index))
        )
    known = problem.dtype in checks.HALF or problem.dtype == checks.FP8
    if not known:
        reasons.append(("dtype {}: the kernels take float16, bfloat16 and float8_e4m3fn", problem.dtype))
    elif problem.dtype == checks.FP8 and problem.varlen:
        reasons.append(("cu_seqlens_q, cu_seqlens_k: the kernels for {} take dense batches only", problem.dtype))
    if problem.head_dim > MAX_HEAD_DIM or problem.head_dim_v > MAX_HEAD_DIM:
        dims = problem.head_dim, problem.head_dim_v
        reasons.append(("head dims {} and {}: the kernels go to {}", *dims, MAX_HEAD_DIM))
    elif ops.loaded and known:
        dims = problem.head_dim, problem.head_dim_v
        if not (has_fp8_row(*dims) if problem.dtype == checks.FP8 else has_row(problem.dtype, *dims)):
            lacking = "head dims {} and {} in {}: this build lacks the kernel ({})"
            reasons.append((lacking, *dims, problem.dtype, _SUBSET))
    if not MIN_SCALE <= problem.softmax_scale <= MAX_SCALE:
        limits = "softmax_scale {}: the kernels need it from {} to {}"
        reasons.append((limits, problem.softmax_scale, MIN_SCALE, MAX_SCALE))
    if problem.softcap > 0:
        ratio = problem.softmax_scale / problem.softcap  # of which the kernels take the tanh
        if not (MIN_SCALE <= problem.softcap <= MAX_SCALE and MIN_SCALE <= ratio <= MAX_SCALE):
            limits = "softcap {}: the kernels need it, and softmax_scale / softcap, from {} to {}"
            reasons.append((limits, problem.softcap, MIN_SCALE, MAX_SCALE))
    if problem.varlen and ops.loaded and not has_op("packed_schedule"):
        reasons.append(("cu_seqlens_q, cu_seqlens_k: this build lacks the kernel packed_schedule ({})", _SUBSET))
    if problem.has_qv:
        reasons.append(("qv: the kernels do not",))
    return reasons


def reasons_not_supported(problem: Problem) -> list[str]:
    """Why the kernels cannot run this problem; empty if they can."""
    return [text.format(*values) for text, *values in _reasons(problem)]


def use_kernel(problem: Problem, backend: str | None) -> bool:
    """Whether the kernels run it. `backend`: None chooses, "portable" and "kernel" insist."""
    if backend == "portable":
        return False
    if backend not in (None, "kernel"):
        raise ValueError(f"backend is {backend!r}; it must be None, 'kernel' or 'portable'")
    supported = not _reasons(problem)
    if backend == "kernel" and not supported:
        reasons = "; ".join(reasons_not_supported(problem))
        raise NotImplementedError(f"backend 'kernel' cannot run this: {reasons}. backend 'portable' can")
    return supported


def backward_reasons_not_supported(problem: Problem, deterministic: bool) -> list[str]:
    """Why the kernels cannot run the backward of this problem; empty if they can.

    They need what the forward needs: the backward of a portable forward is portable.
    """
    reasons = reasons_not_supported(problem)
    if problem.dtype == checks.FP8:
        reasons.append(f"dtype {problem.dtype} has no gradient")
    elif not reasons and not has_backward(problem.dtype, problem.head_dim, problem.head_dim_v, deterministic):
        kind = "deterministic backward" if deterministic else "backward"
        dims = f"head dims {problem.head_dim} and {problem.head_dim_v} in {problem.dtype}"
        reasons.append(f"{dims}: this build lacks a kernel of the {kind} ({_SUBSET})")
    elif not reasons and problem.has_sink and not has_op("backward_sink"):
        reasons.append(f"sink: this build lacks the kernel backward_sink ({_SUBSET})")
    return reasons


def runs_backward(dtype: torch.dtype, head_dim: int, head_dim_v: int, has_sink: bool, deterministic: bool) -> bool:
    """Whether the kernels run the backward of a forward that they ran."""
    return has_backward(dtype, head_dim, head_dim_v, deterministic) and (not has_sink or has_op("backward_sink"))


def must_be_deterministic(deterministic: bool, softcap: float = 0.0) -> bool:
    """Whether the backward runs on the deterministic kernels: the caller asked for it, torch's global switch is on, or
    the scores are capped, which the other kernel does not do."""
    return bool(deterministic) or softcap > 0 or torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Explanation:
    """How a call would run. `str()` of it is meant for reading."""

    backend: str  # "kernel" or "portable"
    kernel: str | None  # the rows of the kernel table that would be launched
    reasons: tuple[str, ...]  # why not the kernels
    backward: str  # the rows that would be launched, in this order; or the portable backend
    backward_reasons: tuple[str, ...]  # why not the kernels in the backward, those of the forward among them

    def __str__(self) -> str:
        lines = [f"forward:  {self.backend}" + (f", {self.kernel}" if self.kernel else "")]
        lines += [f"          not the kernels: {reason}" for reason in self.reasons]
        lines += [f"backward: {self.backward}"]
        lines += [f"          not the kernels: {x}" for x in self.backward_reasons if x not in self.reasons]
        return "\n".join(lines)


def explain_problem(problem: Problem, deterministic: bool = False) -> Explanation:
    """The backend, kernel rows and reasons for a problem."""
    deterministic = must_be_deterministic(deterministic, problem.softcap)
    reasons = reasons_not_supported(problem)
    backward_reasons = backward_reasons_not_supported(problem, deterministic)
    dims = (problem.head_dim, problem.head_dim_v, problem.seqlen_q, problem.seqlen_k)
    kind = (problem.varlen, problem.dtype == torch.bfloat16)
    kernel, backward = None, "portable (blockwise PyTorch on the tensors' device)"
    if not reasons and problem.dtype == checks.FP8:
        before = [row["id"] for row in ops.kernel_table() if row["op"] == "fp8_transpose" and problem.seqlen_k > 0]
        kernel = _names([*before, torch.ops.flash_attn3.select_fp8(*dims)])
    elif not reasons:
        kernel = _names([torch.ops.flash_attn3.select_kernel(*dims, *kind)])
    if problem.dtype == checks.FP8:
        backward = "none (float8_e4m3fn)"
    elif not backward_reasons:
        bounds = (*problem.window, problem.attention_chunk)
        backward = "kernel, " + _names(torch.ops.flash_attn3.select_backward(*dims, *bounds, *kind, deterministic))
    return Explanation("kernel" if kernel else "portable", kernel, tuple(reasons), backward, tuple(backward_reasons))


def _names(rows) -> str:
    names = {row["id"]: row["name"] for row in ops.kernel_table()}
    return ", ".join(names[row] for row in rows)


def checked_problem(
    q, k, v, qv, descales, sink, lengths, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin, *,
    wide, function,
) -> Problem:  # fmt: skip
    """The problem of a call, its arguments checked (see flash_attn3.checks for `lengths`, `wide` and `function`)."""
    checks.inputs(q, k, v, qv, *descales, sink, lengths, wide, function)
    seqlen_q, seqlen_k, head_dim, head_dim_v = q.shape[-3], k.shape[-3], q.shape[-1], v.shape[-1]
    if softmax_scale is None:
        softmax_scale = float((head_dim + (0 if qv is None else head_dim_v)) ** -0.5)
    softmax_scale, window_size, attention_chunk, softcap = checks.options(
        softmax_scale, window_size, attention_chunk, softcap, sm_margin
    )
    if lengths is None:
        window = normalize_window(window_size, causal, seqlen_q, seqlen_k)
        attention_chunk = normalize_chunk(attention_chunk, seqlen_q, seqlen_k)
    else:
        batch = max(1, lengths[0].shape[0] - 1)
        seqlen_q, seqlen_k = seqlen_q // batch, seqlen_k // batch
        window, attention_chunk = normalize_packed(window_size, causal, attention_chunk)
    return Problem(
        q.device, q.dtype, seqlen_q, seqlen_k, head_dim, head_dim_v, softmax_scale, window, attention_chunk, softcap,
        qv is not None, sink is not None, lengths is not None,
    )  # fmt: skip
