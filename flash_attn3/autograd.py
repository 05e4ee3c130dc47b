"""The differentiable call: kernel or portable forward, portable backward, gradients of both out and lse.

Saved for the backward: q, k, v (and qv), out and lse, nothing of size Sq x Sk. Second derivatives are refused.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def forward(q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window, attention_chunk, softcap, kernel):
    """out and lse, not differentiable. `window` is normalised; `kernel` is dispatch's choice."""
    if kernel:
        return torch.ops.flash_attn3.forward.default(q, k, v, softmax_scale, window[1] == 0)
    return torch.ops.flash_attn3.portable_forward.default(
        q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window[0], window[1], attention_chunk, softcap
    )


class Attention(torch.autograd.Function):
    """`forward` above, with its gradient."""

    @staticmethod
    def forward(ctx, q, k, v, qv, softmax_scale, window, attention_chunk, softcap, kernel):
        out, lse = forward(q, k, v, qv, None, None, None, softmax_scale, window, attention_chunk, softcap, kernel)
        ctx.save_for_backward(q, k, v, qv, out, lse)
        ctx.options = (softmax_scale, window[0], window[1], attention_chunk, softcap)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, dlse: Tensor):
        q, k, v, qv, out, lse = ctx.saved_tensors
        dq, dk, dv, dqv = torch.ops.flash_attn3.portable_backward.default(
            dout, dlse, q, k, v, qv, out, lse, *ctx.options
        )
        return dq, dk, dv, (None if qv is None else dqv), None, None, None, None, None


def attention_into(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """The kernel's out (B, Sq, H, Dv) in memory ordered like q's; differentiable."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return AttentionInto.apply(q, k, v, softmax_scale, causal)
    out = empty_like_query(q, v)
    torch.ops.flash_attn3.forward_out.default(q, k, v, out, softmax_scale, causal)
    return out


class AttentionInto(torch.autograd.Function):
    """`attention_into`, with its gradient."""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        out = empty_like_query(q, v)
        lse = torch.ops.flash_attn3.forward_out.default(q, k, v, out, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = (softmax_scale, -1, 0 if causal else -1, 0, 0.0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, _ = torch.ops.flash_attn3.portable_backward.default(
            dout, None, q, k, v, None, out, lse, *ctx.options
        )
        return dq, dk, dv, None, None


def empty_like_query(q: Tensor, v: Tensor) -> Tensor:
    """Memory for out (B, Sq, H, Dv) with q's order of dims in memory."""
    if v.shape[3] == q.shape[3]:
        return torch.empty_like(q)
    order = sorted(range(4), key=lambda dim: (-q.stride(dim), dim))
    return torch.empty_permuted((*q.shape[:3], v.shape[3]), order, dtype=q.dtype, device=q.device)
