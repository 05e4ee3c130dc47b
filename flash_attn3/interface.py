"""Dense attention for model code: `flash_attn_func` and `flash_attn_qkvpacked_func` with the signatures that
FlashAttention-3's users know, and `attention`, which also takes fp32 and fp64 and names its backend.

All of them are one computation. With scale = softmax_scale, row i at position p = i + Sk - Sq and key j:

    s_ij = scale * q_i . k_j [+ scale * qv_i . v_j];  with softcap c > 0: s -> c * tanh(s / c)
    visible: causal j <= p;  window p - left <= j <= p + right (inclusive, -1 unbounded);  chunk j // c == p // c
    lse_i = log sum_j exp(s_ij);  out_i = sum_j exp(s_ij - lse_i) v_j;  without a visible key out 0 and lse -inf

`attention` also takes a sink, one more summand exp(sink) of every row. Packed batches are in flash_attn3.varlen.
"""

import torch
from torch import Tensor

from flash_attn3 import autograd, checks, dispatch

_forward, _differentiable = torch.ops.flash_attn3.forward.default, autograd.Attention.apply
_has_kernels, _has_row, _transformed = dispatch.has_kernels, dispatch.has_row, autograd.transformed
_MIN_SCALE, _MAX_SCALE = dispatch.MIN_SCALE, dispatch.MAX_SCALE


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Exact attention of dense tensors; differentiable in q, k, v (and qv).

    Arguments:
        q: (B, Sq, H, D), float16, bfloat16 or float8_e4m3fn, any strides.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), q's dtype; H a multiple of Hkv, query head h reads h // (H / Hkv).
        softmax_scale: multiplies the scores; None is D ** -0.5, with qv (D + Dv) ** -0.5.
        causal: row i sees keys j <= i + Sk - Sq (bottom-right), whatever the window's right bound says.
        qv: (B, Sq, H, Dv), 16-bit: the scores are q.k + qv.v.
        q_descale, k_descale, v_descale: (B, Hkv) float32, factors of float8_e4m3fn inputs; None is 1.
        window_size: (left, right), inclusive bounds around i + Sk - Sq, -1 unbounded: the last W tokens are (W - 1, 0).
        attention_chunk: c > 0 lets row i see only keys with j // c == (i + Sk - Sq) // c.
        softcap: c > 0 replaces scores s by c * tanh(s / c).
        num_splits, pack_gqa, sm_margin: change speed only.
        deterministic: gradients are bitwise repeatable. They are too, whatever it says, while
            torch.are_deterministic_algorithms_enabled(). Otherwise the kernels may add up dq by atomics.
        return_attn_probs: return (out, lse).

    Returns out (B, Sq, H, Dv), contiguous, in q's dtype (bfloat16 for float8_e4m3fn); with return_attn_probs also lse
    (B, H, Sq) float32, the natural log of the sum of exp of the visible scores, itself differentiable. A row without a
    visible key has out 0, lse -inf and zero gradients.

    Raises ValueError or RuntimeError for tensors and numbers that do not fit, NotImplementedError for what no backend
    does; all name the argument. `flash_attn3.explain` takes the same arguments and says which backend runs them.
    """
    # The common call: every option at its default, on a Hopper GPU. The operator checks the shapes.
    if (
        qv is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and attention_chunk == 0
        and softcap == 0
        and sm_margin == 0
        and window_size == (-1, -1)
        and isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.is_cuda
        and q.dim() == v.dim() == 4
        and _has_kernels(q.get_device())
        and _has_row(q.dtype, q.shape[3], v.shape[3])
        and (softmax_scale is None or (isinstance(softmax_scale, float) and _MIN_SCALE <= softmax_scale <= _MAX_SCALE))
        and not _transformed()
    ):
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        if not ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()):
            out, lse = _forward(q, k, v, None, scale, -1, 0 if causal else -1, 0, 0.0)
            return (out, lse) if return_attn_probs else out
        if q is not k and q is not v and k is not v:
            return _differentiable(
                q, k, v, None, None, None, None, None, None, scale, -1, 0 if causal else -1, 0, 0.0,
                True, bool(deterministic), bool(return_attn_probs),
            )  # fmt: skip
    descales = (q_descale, k_descale, v_descale)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, None, None, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin,
        wide=False, function="flash_attn_func",
    )  # fmt: skip
    tensors = (q, k, v, qv, None)
    out, lse = autograd.attend(problem, tensors, descales, None, None, deterministic, return_attn_probs)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """`flash_attn_func` of q, k, v that are slices of one tensor. Nothing is copied, and the gradient is one tensor.

    qkv is (B, S, 3, H, D), or with num_heads_q (B, S, num_heads_q + 2 * Hkv, D): the query heads, then the key heads,
    then the value heads. The other arguments, the result and the errors are those of flash_attn_func.
    """
    num_heads_q = checks.packed_heads(qkv, num_heads_q, varlen=False)
    q, k, v = checks.slices(qkv, num_heads_q)
    if qkv.requires_grad and torch.is_grad_enabled() and qkv.dtype != checks.FP8 and not _transformed():
        problem = dispatch.checked_problem(
            q, k, v, None, (q_descale, k_descale, v_descale), None, None, softmax_scale, causal, window_size,
            attention_chunk, softcap, sm_margin, wide=False, function="flash_attn_qkvpacked_func",
        )  # fmt: skip
        return autograd.attend_packed_heads(problem, qkv, num_heads_q, None, None, deterministic, return_attn_probs)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    """flash_attn_func with sinks, fp32 and fp64 as further dtypes (on the portable backend), and a choice of backend.

    Arguments that flash_attn_func has too mean the same. For float64 inputs lse is float64.
        sink: (H,) float32 (float64 for float64 inputs), differentiable: a logit of every row of its query head that
            joins the softmax without a value. It is neither scaled nor capped, and lse includes it: out is
            sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij)). A row without a visible key has out 0 and lse = sink.
        return_lse: return (out, lse).
        backend: None chooses; "kernel" raises NotImplementedError with the reasons where the kernels cannot run the
            call; "portable" never uses them.
    """
    descales = (q_descale, k_descale, v_descale)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, sink, None, softmax_scale, causal, window_size, attention_chunk, softcap, 0,
        wide=True, function="attention",
    )  # fmt: skip
    out, lse = autograd.attend(problem, (q, k, v, qv, sink), descales, None, backend, deterministic, return_lse)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """How flash_attn_func (or attention, for fp32 and fp64) would run with these arguments; runs nothing.

    Returns an Explanation: `backend` ("kernel" or "portable"), `kernel` (the row of the kernel table, or None),
    `reasons` (why not the kernels), and the same of the backward as `backward` and `backward_reasons`; print it to read
    it. Arguments that do not fit raise as in the call.
    """
    descales = (q_descale, k_descale, v_descale)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, None, None, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin,
        wide=True, function="explain",
    )  # fmt: skip
    return dispatch.explain_problem(problem, deterministic)
