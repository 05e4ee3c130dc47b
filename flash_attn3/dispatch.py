"""Which backend runs a problem: the sm_90a kernels, or the portable backend with every reason why.

A `Problem` is plain numbers, so the choice can be asked and tested for devices that are not there. Nothing falls
through silently: `reasons_not_supported` is empty exactly when the kernels run, and `explain` shows it to the user.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3 import checks, ops

CAPABILITY = (9, 0)
MAX_HEAD_DIM = 256


class Problem(NamedTuple):
    """One call of dense attention. The window is normalised (see `normalize_window`): causal is (-1, 0)."""

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
    has_descale: bool = False


_hopper: dict[int, bool] = {}  # per CUDA device index; a GPU's capability does not change


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


def normalize_window(window_size: tuple[int, int], causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) where a bound that reaches past every key is -1; causal forces right to 0."""
    left, right = window_size
    if causal:
        right = 0
    elif right > 0 and right >= seqlen_q - 1:
        right = -1
    return (-1 if left >= seqlen_k - 1 else left), right


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
    if problem.dtype not in checks.HALF:
        reasons.append(("dtype {}: the kernels take float16 and bfloat16", problem.dtype))
    if problem.head_dim > MAX_HEAD_DIM or problem.head_dim_v > MAX_HEAD_DIM:
        dims = problem.head_dim, problem.head_dim_v
        reasons.append(("head dims {} and {}: the kernels go to {}", *dims, MAX_HEAD_DIM))
    if not 0 < problem.softmax_scale < math.inf:
        reasons.append(("softmax_scale {}: the kernels need it positive", problem.softmax_scale))
    if problem.window != (-1, -1) and problem.window != (-1, 0):
        reasons.append(("window_size {}: the kernels do causal and unbounded attention", problem.window))
    if problem.attention_chunk > 0:
        reasons.append(("attention_chunk {}: the kernels do not", problem.attention_chunk))
    if problem.softcap > 0:
        reasons.append(("softcap {}: the kernels do not", problem.softcap))
    if problem.has_qv:
        reasons.append(("qv: the kernels do not",))
    if problem.has_descale:
        reasons.append(("q_descale, k_descale, v_descale: the kernels do not",))
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


@dataclass(frozen=True)
class Explanation:
    """How a call would run. `str()` of it is meant for reading."""

    backend: str  # "kernel" or "portable"
    kernel: str | None  # the row of the kernel table that would be launched
    reasons: tuple[str, ...]  # why not the kernels
    backward: str

    def __str__(self) -> str:
        lines = [f"forward:  {self.backend}" + (f", {self.kernel}" if self.kernel else "")]
        lines += [f"          not the kernels: {reason}" for reason in self.reasons]
        return "\n".join([*lines, f"backward: {self.backward}"])


def explain_problem(problem: Problem) -> Explanation:
    """The backend, kernel row and reasons for a problem."""
    reasons = reasons_not_supported(problem)
    kernel = None
    if not reasons:
        causal, bf16 = problem.window[1] == 0, problem.dtype == torch.bfloat16
        row = torch.ops.flash_attn3.select_kernel(
            problem.head_dim, problem.head_dim_v, problem.seqlen_q, problem.seqlen_k, causal, bf16
        )
        if row < 0:
            reasons = ["this build lacks the kernel for it (FLASH_ATTN3_KERNELS chose a subset): the call would raise"]
        else:
            kernel = next(entry["name"] for entry in ops.kernel_table() if entry["id"] == row)
    backward = "portable (blockwise PyTorch on the tensors' device)"
    if problem.dtype == checks.FP8:
        backward = "none (float8_e4m3fn)"
    return Explanation("kernel" if kernel else "portable", kernel, tuple(reasons), backward)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    has_qv: bool,
    has_descale: bool,
) -> Problem:
    """The problem of checked tensors and a normalised window."""
    return Problem(
        q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3],
        softmax_scale, window, attention_chunk, softcap, has_qv, has_descale,
    )  # fmt: skip
