"""Checks of the arguments of attention. Each error names the argument, what came and what would work.

Errors are ValueError, or NotImplementedError for what has no backend, never TypeError. Only metadata is looked at: no
check reads a tensor's values, but for that of `check_seqlens`, which is off by default.
"""

import math
import operator
import os

import torch
from torch import Tensor

from flash_attn3 import portable

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
WIDE = (torch.float32, torch.float64)
Lengths = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k


def tensor(name: str, x) -> None:
    """x is a plain dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {x!r}; it must be a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} is a {kind} tensor; it must be a dense one, of layout torch.strided")


def inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sink: Tensor | None,
    lengths: Lengths | None,
    wide: bool,
    function: str,
) -> None:
    """Shapes, dtypes and devices. `lengths`: the batch is packed and these say how; None: it is dense.

    `wide` allows fp32 and fp64; `function` is the caller's name for the messages.
    """
    dims, layout = (4, "batch, seqlen") if lengths is None else (3, "tokens")
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor(name, x)
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {function} takes ({layout}, heads, head_dim)")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; all tensors must be on one device")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q {q.dtype}; q, k and v must have one dtype")
    if q.dtype in WIDE and not wide:
        raise ValueError(
            f"q has dtype {q.dtype}; {function} takes float16, bfloat16 and float8_e4m3fn. "
            f"flash_attn3.attention{'' if lengths is None else '_varlen'} takes {q.dtype} on the portable backend"
        )
    if q.dtype not in HALF and q.dtype != FP8 and q.dtype not in WIDE:
        raise ValueError(f"q has dtype {q.dtype}; supported are float16, bfloat16 and float8_e4m3fn")
    if lengths is None:
        batch = q.shape[0]
        if k.shape[0] != batch or v.shape[0] != batch:
            raise ValueError(f"q, k and v have batch sizes {batch}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    else:
        batch = _packed(lengths, q.device)
    heads, head_dim = q.shape[-2:]
    seqlen_k, kv_heads, head_dim_v = v.shape[-3:]
    if k.shape[-3] != seqlen_k:
        raise ValueError(f"k has {k.shape[-3]} keys and v {seqlen_k} values; they must be equal")
    if k.shape[-2] != kv_heads:
        raise ValueError(f"k has {k.shape[-2]} heads and v {kv_heads}; they must be equal")
    if k.shape[-1] != head_dim:
        raise ValueError(f"q has head dim {head_dim} and k {k.shape[-1]}; they must be equal")
    if head_dim < 1 or head_dim_v < 1:
        raise ValueError(f"q and v have head dims {head_dim} and {head_dim_v}; they must be at least 1")
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; q's heads must be a multiple of k's")
    if qv is not None:
        if q.dtype == FP8:
            raise NotImplementedError("qv: not with float8_e4m3fn inputs; 16-bit q, k, v and qv work")
        same("qv", qv, (*q.shape[:-1], head_dim_v), q.dtype, q.device)
    for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None:
            continue
        if q.dtype != FP8:
            raise ValueError(f"{name} is only for float8_e4m3fn inputs; q has dtype {q.dtype}")
        same(name, x, (batch, kv_heads), torch.float32, q.device)
    if sink is not None:
        same("sink", sink, (heads,), torch.float64 if q.dtype == torch.float64 else torch.float32, q.device)
    if lengths is not None and _reads_lengths and not torch.compiler.is_compiling():
        _well_formed(lengths, q.shape[0], seqlen_k)


def same(name: str, x, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    """x is a tensor of exactly this kind."""
    tensor(name, x)
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, dtype {x.dtype}, device {x.device}; "
            f"it must be {shape}, {dtype}, {device}"
        )


def _packed(lengths: Lengths, device: torch.device) -> int:
    """The number of sequences; only the metadata of the lengths is looked at."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    tensor("cu_seqlens_q", lengths[0])
    batch = lengths[0].shape[0] - 1 if lengths[0].dim() == 1 else -1
    if batch < 0:
        raise ValueError(f"cu_seqlens_q has shape {tuple(lengths[0].shape)}; it must be (sequences + 1,)")
    for name, x in zip(names, lengths, strict=True):
        if x is not None or name.startswith("cu"):
            same(name, x, (batch + name.startswith("cu"),), torch.int32, device)
    return batch


def max_seqlen(name: str, value) -> None:
    """An int >= 0 or a 0-dim tensor of integers, whose value is not read: it is a bound that nothing depends on."""
    if isinstance(value, Tensor):
        if value.dim() == 0 and not value.is_floating_point() and not value.is_complex():
            return
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, dtype {value.dtype}; as a tensor it must be 0-dim, int"
        )
    if (value if isinstance(value, int) else integer(name, value)) < 0:
        raise ValueError(f"{name} is {value}; it must be >= 0")


_reads_lengths = os.environ.get("FLASH_ATTN3_CHECK_SEQLENS", "0") not in ("", "0")


def check_seqlens(enabled: bool = True) -> None:
    """From now on check the lengths of every packed batch, or no longer: a switch for debugging.

    Without it cu_seqlens and seqused are never looked at on the host: sequences whose lengths contradict each other get
    NaN, and nothing outside the tensors is touched. With it such a call raises ValueError that names the first of them.
    To read them, each call waits for the GPU, so this excludes CUDA graph capture. Calls that torch.compile traces are
    not checked. The environment variable FLASH_ATTN3_CHECK_SEQLENS=1 turns it on from the start.
    """
    global _reads_lengths
    _reads_lengths = bool(enabled)


def _well_formed(lengths: Lengths, total_q: int, total_k: int) -> None:
    for b, sequence in enumerate(portable.sequences(*lengths, total_q, total_k)):
        if sequence.error:
            raise ValueError(f"sequence {b}: {sequence.error}")


def packed_heads(qkv: Tensor, num_heads_q: int | None, varlen: bool) -> int | None:
    """num_heads_q as a plain int. qkv is (.., 3, H, D), or with num_heads_q (.., num_heads_q + 2 * Hkv, D)."""
    tensor("qkv", qkv)
    dims, layout = (3, "tokens") if varlen else (4, "batch, seqlen")
    if qkv.dim() == dims + 1 and qkv.shape[-3] == 3:
        return None
    if qkv.dim() != dims or num_heads_q is None:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must be ({layout}, 3, heads, head_dim), or "
            f"({layout}, heads_q + 2 * heads_kv, head_dim) with num_heads_q"
        )
    num_heads_q, heads = integer("num_heads_q", num_heads_q), qkv.shape[-2]
    if num_heads_q < 1 or heads - num_heads_q < 2 or (heads - num_heads_q) % 2 != 0:
        raise ValueError(f"num_heads_q is {num_heads_q}; qkv has {heads} heads, which must be num_heads_q + 2 * Hkv")
    return num_heads_q


def slices(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of a qkv that `packed_heads` has accepted."""
    if num_heads_q is None:
        return qkv.unbind(-3)
    kv_heads = (qkv.shape[-2] - num_heads_q) // 2
    return qkv.split((num_heads_q, kv_heads, kv_heads), -2)


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
    for name, x in (("dout", dout), ("out", out)):
        same(name, x, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    same("softmax_lse", lse, (*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32, q.device)
