"""Checks of the arguments of dense attention. Each error names the argument, what came and what would work.

Errors are ValueError, or NotImplementedError for what has no backend, never TypeError. Only metadata is looked at: no
check reads a tensor's values.
"""

import math
import operator

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
WIDE = (torch.float32, torch.float64)


def tensor(name: str, x) -> None:
    """x is a plain dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {x!r}; it must be a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} is a {kind} tensor; it must be a dense one, of layout torch.strided")


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    wide: bool,
    function: str,
) -> None:
    """Shapes, dtypes and devices. `wide` allows fp32 and fp64; `function` is the caller's name for the messages."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {function} takes (batch, seqlen, heads, head_dim)")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; all tensors must be on one device")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q {q.dtype}; q, k and v must have one dtype")
    if q.dtype in WIDE and not wide:
        raise ValueError(
            f"q has dtype {q.dtype}; {function} takes float16, bfloat16 and float8_e4m3fn. "
            f"flash_attn3.attention takes {q.dtype} on the portable backend"
        )
    if q.dtype not in HALF and q.dtype != FP8 and q.dtype not in WIDE:
        raise ValueError(f"q has dtype {q.dtype}; supported are float16, bfloat16 and float8_e4m3fn")
    batch, _, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, head_dim_v = v.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"q, k and v have batch sizes {batch}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    if k.shape[1] != seqlen_k:
        raise ValueError(f"k has {k.shape[1]} keys and v {seqlen_k} values (dim 1); they must be equal")
    if k.shape[2] != kv_heads:
        raise ValueError(f"k has {k.shape[2]} heads and v {kv_heads} (dim 2); they must be equal")
    if k.shape[3] != head_dim:
        raise ValueError(f"q has head dim {head_dim} and k {k.shape[3]} (dim 3); they must be equal")
    if head_dim < 1 or head_dim_v < 1:
        raise ValueError(f"q and v have head dims {head_dim} and {head_dim_v}; they must be at least 1")
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; q's heads must be a multiple of k's")
    if qv is not None:
        tensor("qv", qv)
        if q.dtype == FP8:
            raise NotImplementedError("qv: not with float8_e4m3fn inputs; 16-bit q, k, v and qv work")
        if tuple(qv.shape) != (*q.shape[:3], head_dim_v) or qv.dtype != q.dtype or qv.device != q.device:
            raise ValueError(
                f"qv has shape {tuple(qv.shape)}, dtype {qv.dtype}, device {qv.device}; "
                f"it must be {(*q.shape[:3], head_dim_v)}, {q.dtype}, {q.device} to go with q and v"
            )
    for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None:
            continue
        tensor(name, x)
        if q.dtype != FP8:
            raise ValueError(f"{name} is only for float8_e4m3fn inputs; q has dtype {q.dtype}")
        if tuple(x.shape) != (batch, kv_heads) or x.dtype != torch.float32 or x.device != q.device:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, dtype {x.dtype}, device {x.device}; "
                f"it must be (batch, kv_heads) = {(batch, kv_heads)}, float32, {q.device}"
            )


def options(
    softmax_scale, window_size, attention_chunk, softcap, sm_margin
) -> tuple[float, tuple[int, int], int, float]:
    """softmax_scale, window_size, attention_chunk and softcap as plain numbers, in their ranges."""
    softmax_scale, softcap = real("softmax_scale", softmax_scale), real("softcap", softcap)
    attention_chunk, sm_margin = integer("attention_chunk", attention_chunk), integer("sm_margin", sm_margin)
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be finite")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; it must be (left, right), each >= 0, or -1 for unbounded")
    left, right = integer("window_size", window_size[0]), integer("window_size", window_size[1])
    if left < -1 or right < -1:
        raise ValueError(f"window_size is {(left, right)}; it must be (left, right), each >= 0, or -1 for unbounded")
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk is {attention_chunk}; it must be >= 0 (0 is none)")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be finite and >= 0 (0 is none)")
    if sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin}; it must be >= 0")
    return softmax_scale, (left, right), attention_chunk, softcap


def real(name: str, value) -> float:
    """The number; a tensor is refused, for its gradient would be lost and a CUDA one would be read on the host."""
    try:
        if not isinstance(value, Tensor):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} is {value!r}; it must be a Python number")


def integer(name: str, value) -> int:
    try:
        if not isinstance(value, Tensor):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}: {value!r} is not an integer")


def gradients(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """The tensors that a backward takes beside checked q, k and v, under their names in the compatible functions."""
    if q.dtype == FP8:
        raise NotImplementedError("q has dtype float8_e4m3fn, which has no backward; 16-bit inputs have one")
    shape = (*q.shape[:3], v.shape[3])
    tensor("softmax_lse", lse)
    for name, x in (("dout", dout), ("out", out)):
        tensor(name, x)
        if tuple(x.shape) != shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, dtype {x.dtype}, device {x.device}; "
                f"it must be {shape}, {q.dtype}, {q.device}"
            )
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) != wanted or lse.dtype != torch.float32 or lse.device != q.device:
        raise ValueError(
            f"softmax_lse has shape {tuple(lse.shape)}, dtype {lse.dtype}, device {lse.device}; "
            f"it must be {wanted}, float32, {q.device}"
        )
