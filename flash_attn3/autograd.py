"""The differentiable call: kernel or portable forward, portable backward, gradients of both out and lse.

Saved for the backward: q, k, v (and qv), out and lse, nothing of size Sq x Sk. Second derivatives are refused.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

_OTHERWISE = "torch.nn.functional.scaled_dot_product_attention can do that with SDPBackend.MATH"


def transformed() -> bool:
    """Whether torch.func transforms or forward-mode derivatives may be on.

    Then `requires_grad` does not tell who wants a derivative, and an operator without a rule drops it silently. There
    is no public question that is cheap enough for every call.
    """
    if torch.compiler.is_compiling():  # the questions below would become nodes of the graph
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_tangents(**tensors: Tensor | None) -> None:
    """Raise for inputs with a forward-mode derivative."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a forward-mode derivative, attention has none; {_OTHERWISE}")


def forward(q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window, attention_chunk, softcap, kernel):
    """out and lse, not differentiable. `window` is normalised; `kernel` is dispatch's choice."""
    if kernel:
        return torch.ops.flash_attn3.forward.default(q, k, v, softmax_scale, window[1] == 0)
    return torch.ops.flash_attn3.portable_forward.default(
        q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window[0], window[1], attention_chunk, softcap
    )


class Attention(torch.autograd.Function):
    """`forward` above, with its gradient.

    `with_lse`: lse has a gradient too; `like_query`: out by `kernel_like_query`, which needs `kernel`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, qv, softmax_scale, window, attention_chunk, softcap, kernel, with_lse, like_query):
        if like_query:
            return kernel_like_query(q, k, v, softmax_scale, window[1] == 0)
        return forward(q, k, v, qv, None, None, None, softmax_scale, window, attention_chunk, softcap, kernel)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, qv, softmax_scale, window, attention_chunk, softcap, _, ctx.with_lse, _ = inputs
        ctx.save_for_backward(q, k, v, qv, *output)
        ctx.options = (softmax_scale, window[0], window[1], attention_chunk, softcap)

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):
        q, k, v, qv, out, lse = ctx.saved_tensors
        dq, dk, dv, dqv = gradients(dout, dlse if ctx.with_lse else None, q, k, v, qv, out, lse, ctx.options)
        return dq, dk, dv, (None if qv is None else dqv), None, None, None, None, None, None, None


def gradients(dout, dlse, q, k, v, qv, out, lse, options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv; where they are recorded for a second derivative, asking for it is an error."""
    if torch.is_grad_enabled():
        return Gradients.apply(dout, dlse, q, k, v, qv, out, lse, options)
    return torch.ops.flash_attn3.portable_backward.default(dout, dlse, q, k, v, qv, out, lse, *options)


class Gradients(torch.autograd.Function):
    """The backward as a node of the graph that cannot be differentiated.

    torch's once_differentiable is no substitute: it cuts the graph, so that torch.autograd.grad of a sum with other
    terms (a gradient penalty) silently lacks this one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(dout, dlse, q, k, v, qv, out, lse, options):
        return torch.ops.flash_attn3.portable_backward.default(dout, dlse, q, k, v, qv, out, lse, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"attention of flash_attn3 cannot be differentiated twice; {_OTHERWISE}")


def attention_like_query(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """The kernel's out (B, Sq, H, Dv) in memory ordered like q's; differentiable."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        window = (-1, 0 if causal else -1)
        return Attention.apply(q, k, v, None, softmax_scale, window, 0, 0.0, True, False, True)[0]
    return kernel_like_query(q, k, v, softmax_scale, causal)[0]


def kernel_like_query(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel, not differentiable, out in memory ordered like q."""
    out = empty_like_query(q, v)
    return out, torch.ops.flash_attn3.forward_out.default(q, k, v, out, softmax_scale, causal)


def empty_like_query(q: Tensor, v: Tensor) -> Tensor:
    """Memory for out (B, Sq, H, Dv) with q's order of dims in memory."""
    if v.shape[3] == q.shape[3]:
        return torch.empty_like(q)
    order = sorted(range(4), key=lambda dim: (-q.stride(dim), dim))
    return torch.empty_permuted((*q.shape[:3], v.shape[3]), order, dtype=q.dtype, device=q.device)
