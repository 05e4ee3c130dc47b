"""Packed ("varlen") batches: sequences of any lengths, one after the other in (T, H, D) tensors.

Each sequence is attention as in flash_attn3.interface, with its own lengths: it reads nothing outside its rows, and its
out and lse are bitwise the same whatever else is in the batch. The kernels read cu_seqlens and seqused on the device.
The portable backend reads them on the host, which waits for a GPU if they are there.

KV caches and merging of partial results have their signatures only: no backend runs them in this version, and each
raises NotImplementedError that says what to call instead. They exist because libraries import all of these names at
once and probe their parameters.
"""

import torch
from torch import Tensor

from flash_attn3 import autograd, checks, dispatch


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """Exact attention of sequences packed one after the other; differentiable in q, k, v (and qv).

    Arguments:
        q: (Tq, H, D), float16, bfloat16 or float8_e4m3fn, any strides.
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv), q's dtype; H a multiple of Hkv.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device; sequence b has rows cu_seqlens[b] to
            cu_seqlens[b + 1]. May be one tensor. Any length may be 0.
        max_seqlen_q, max_seqlen_k: int >= 0 or 0-dim integer tensor, bounds of the lengths. Nothing depends on them,
            and the value of a tensor is never read.
        seqused_q, seqused_k: (B,) int32; only so many of each sequence's rows count, which is then its length.
        qv: (Tq, H, Dv), 16-bit. q_descale, k_descale, v_descale: (B, Hkv) float32.
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin: as
            in flash_attn_func, for each sequence with its own lengths: row i of n queries stands at i + keys - n.
        return_attn_probs: return (out, lse).

    Returns out (Tq, H, Dv), contiguous, in q's dtype (bfloat16 for float8_e4m3fn); with return_attn_probs also lse
    (H, Tq) float32, itself differentiable. Rows without a visible key, and rows that no sequence owns (before the
    first, behind the last, past seqused), have out 0, lse -inf and zero gradients; what the latter hold in q, k and v,
    NaN included, influences nothing. A sequence with impossible lengths (negative, decreasing, beyond the tensor,
    seqused above the length) gets NaN in its rows of out, lse and the gradients, and leaves the others right: see
    flash_attn3.check_seqlens for an error instead.

    Raises ValueError or RuntimeError for tensors and numbers that do not fit, NotImplementedError for what no backend
    does; all name the argument. `flash_attn3.explain_varlen` takes the same arguments and says which backend runs them.
    """
    checks.max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.max_seqlen("max_seqlen_k", max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, None, lengths, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin,
        wide=False, function="flash_attn_varlen_func",
    )  # fmt: skip
    tensors = (q, k, v, qv, None)
    out, lse = autograd.attend(problem, tensors, descales, lengths, None, deterministic, return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    seqused: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """`flash_attn_varlen_func` of q, k, v that are slices of one tensor. Nothing is copied, the gradient is one tensor.

    qkv is (T, 3, H, D), or with num_heads_q (T, num_heads_q + 2 * Hkv, D): the query heads, then the key heads, then
    the value heads. cu_seqlens, max_seqlen and seqused are those of queries and keys alike. The other arguments, the
    result and the errors are those of flash_attn_varlen_func.
    """
    num_heads_q = checks.packed_heads(qkv, num_heads_q, varlen=True)
    q, k, v = checks.slices(qkv, num_heads_q)
    descales, lengths = (q_descale, k_descale, v_descale), (cu_seqlens, cu_seqlens, seqused, seqused)
    checks.max_seqlen("max_seqlen", max_seqlen)
    problem = dispatch.checked_problem(
        q, k, v, None, descales, None, lengths, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin,
        wide=False, function="flash_attn_varlen_qkvpacked_func",
    )  # fmt: skip
    if qkv.requires_grad and torch.is_grad_enabled() and qkv.dtype != checks.FP8 and not autograd.transformed():
        return autograd.attend_packed_heads(
            problem, qkv, num_heads_q, cu_seqlens, seqused, deterministic, return_attn_probs
        )
    tensors = (q, k, v, None, None)
    out, lse = autograd.attend(problem, tensors, descales, lengths, None, deterministic, return_attn_probs)
    return (out, lse) if return_attn_probs else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    sink: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
):
    """`flash_attn_varlen_func` with what `attention` adds: sinks, fp32 and fp64, and a choice of backend.

    Arguments that those functions have too mean the same. Rows that no sequence owns have lse -inf with a sink too.
    """
    checks.max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.max_seqlen("max_seqlen_k", max_seqlen_k)
    descales = (q_descale, k_descale, v_descale)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, sink, lengths, softmax_scale, causal, window_size, attention_chunk, softcap, 0,
        wide=True, function="attention_varlen",
    )  # fmt: skip
    out, lse = autograd.attend(problem, (q, k, v, qv, sink), descales, lengths, backend, deterministic, return_lse)
    return (out, lse) if return_lse else out


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> dispatch.Explanation:
    """How flash_attn_varlen_func (or attention_varlen) would run with these arguments; see `explain`. Runs nothing."""
    checks.max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.max_seqlen("max_seqlen_k", max_seqlen_k)
    problem = dispatch.checked_problem(
        q, k, v, qv, (q_descale, k_descale, v_descale), None, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin, wide=True, function="explain_varlen",
    )  # fmt: skip
    return dispatch.explain_problem(problem, deterministic)


def _missing(function: str, feature: str, instead: str):
    return NotImplementedError(f"{function}: {feature} not implemented in this version; {instead}")


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention over a (paged) KV cache, with append and rotary. Raises NotImplementedError in this version."""
    instead = "flash_attn_func over the valid keys, k_cache[:, :length], with causal=True gives the same"
    raise _missing("flash_attn_with_kvcache", "k_cache, v_cache: KV caches are", instead)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges partial results of splits by their LSE. Raises NotImplementedError in this version."""
    instead = "with lse = logsumexp(lse_partial, 0) it is (out_partial * exp(lse_partial - lse)[..., None]).sum(0)"
    raise _missing("flash_attn_combine", "out_partial, lse_partial: merging partial results is", instead)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """Scheduling data for flash_attn_with_kvcache. Raises NotImplementedError in this version."""
    instead = "scheduler_metadata may be left out everywhere"
    raise _missing("get_scheduler_metadata", "batch_size: scheduler metadata is", instead)


def maybe_contiguous(x):
    """x, or a copy of it if its last stride is not 1; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x
