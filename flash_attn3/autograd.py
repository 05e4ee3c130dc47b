"""The differentiable call: forward and backward by the kernels or in PyTorch, gradients of both out and lse.

Saved for the backward: q, k, v (and qv), out and lse, nothing of size Sq x Sk. Second derivatives are refused.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn3 import dispatch

_kernel_forward = torch.ops.flash_attn3.forward.default
_kernel_forward_out = torch.ops.flash_attn3.forward_out.default
_kernel_backward = torch.ops.flash_attn3.backward.default
_portable_forward = torch.ops.flash_attn3.portable_forward.default
_portable_backward = torch.ops.flash_attn3.portable_backward.default
_OTHERWISE = "torch.nn.functional.scaled_dot_product_attention can do that with SDPBackend.MATH"


def transformed() -> bool:
    """Whether torch.func transforms or forward-mode derivatives may be on.

    Then `requires_grad` does not tell who wants a derivative, and an operator without a rule drops it silently. There
    is no public question that is cheap enough for every call.
    """
    if torch.compiler.is_compiling():
        return _traced_in_transform()
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _traced_in_transform() -> bool:
    return torch._C._are_functorch_transforms_active()


# torch.compiler.assume_constant_result, without the import of torch._dynamo: the compiler asks once, as it traces the
# call inside its transforms, and the question becomes no node of the graph.
_traced_in_transform._dynamo_marked_constant = True


def refuse_tangents(**tensors: Tensor | None) -> None:
    """Raise for inputs with a forward-mode derivative."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a forward-mode derivative, attention has none; {_OTHERWISE}")


def refuse_compiled_transform() -> None:
    """Raise where torch.compile traces a torch.func transform that may want a gradient.

    It would take the forward of an autograd Function alone and silently lose the gradient. With fullgraph=True this is
    the user's error; otherwise the compiler gives up the frame and runs it eagerly, which is right.
    """
    raise NotImplementedError(
        "torch.compile cannot trace gradients of attention inside torch.func transforms (grad, vjp, vmap, ..): use "
        "torch.autograd or torch.no_grad there, or compile without fullgraph=True"
    )


def forward(q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window, attention_chunk, softcap, kernel):
    """out and lse, not differentiable. `window` is normalised; `kernel` is dispatch's choice."""
    if kernel:
        return _kernel_forward(q, k, v, softmax_scale, window[1] == 0)
    return _portable_forward(
        q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window[0], window[1], attention_chunk, softcap
    )


def backward(dout, dlse, q, k, v, qv, out, lse, softmax_scale, window, attention_chunk, softcap, kernel, deterministic):
    """dq, dk, dv, dqv, not differentiable; dqv is None without qv. `kernel`: the forward ran on the kernels."""
    if kernel:
        deterministic = dispatch.must_be_deterministic(deterministic)
        if dispatch.has_backward(q.dtype, q.shape[3], v.shape[3], deterministic):
            causal = window[1] == 0
            return *_kernel_backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, deterministic), None
    dq, dk, dv, dqv = _portable_backward(
        dout, dlse, q, k, v, qv, out, lse, softmax_scale, window[0], window[1], attention_chunk, softcap
    )
    return dq, dk, dv, (None if qv is None else dqv)


def differentiable_backward(dout, *arguments):
    """`backward`; where it is recorded for a second derivative, asking for that is an error."""
    return Gradients.apply(dout, *arguments) if torch.is_grad_enabled() else backward(dout, *arguments)


class Attention(torch.autograd.Function):
    """`forward` above, with its gradient. Returns out, with `with_lse` out and lse.

    `deterministic` is the caller's wish; torch's global switch counts when the gradient is computed. Without a rule for
    transforms, which would cost each call more than everything else here: see TransformableAttention.
    """

    @staticmethod
    def forward(ctx, q, k, v, qv, softmax_scale, window, attention_chunk, softcap, kernel, deterministic, with_lse):
        out, lse = forward(q, k, v, qv, None, None, None, softmax_scale, window, attention_chunk, softcap, kernel)
        ctx.save_for_backward(q, k, v, qv, out, lse)
        ctx.options = (softmax_scale, window, attention_chunk, softcap, kernel, deterministic)
        if not with_lse:
            return out
        if not torch.compiler.is_compiling():  # the compiler has no rule for this
            ctx.set_materialize_grads(False)  # None instead of zeros for the one that takes no part
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None = None):
        q, k, v, qv, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = differentiable_backward(dout, dlse, q, k, v, qv, out, lse, *ctx.options)
        return *grads, None, None, None, None, None, None, None


class TransformableAttention(torch.autograd.Function):
    """The same for torch.func transforms. Returns out and lse; `with_lse`: lse has a gradient too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, qv, softmax_scale, window, attention_chunk, softcap, kernel, deterministic, with_lse):
        return forward(q, k, v, qv, None, None, None, softmax_scale, window, attention_chunk, softcap, kernel)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, qv, *options, ctx.with_lse = inputs
        ctx.save_for_backward(q, k, v, qv, *output)
        ctx.options = options

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):
        saved = ctx.saved_tensors
        grads = differentiable_backward(dout, dlse if ctx.with_lse else None, *saved, *ctx.options)
        return *grads, None, None, None, None, None, None, None


class Gradients(torch.autograd.Function):
    """The backward as a node of the graph that cannot be differentiated.

    torch's once_differentiable is no substitute: it cuts the graph, so that torch.autograd.grad of a sum with other
    terms (a gradient penalty) silently lacks this one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"attention of flash_attn3 cannot be differentiated twice; {_OTHERWISE}")


class HeadsFirstAttention(torch.autograd.Function):
    """`kernel_heads_first` with its gradient. The transposes are inside, where they are no nodes of the graph."""

    @staticmethod
    def forward(ctx, query, key, value, softmax_scale, causal):
        out, lse = kernel_heads_first(query, key, value, softmax_scale, causal)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = (softmax_scale, (-1, 0 if causal else -1), 0, 0.0, True, False)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, query, key, value, out))
        dq, dk, dv, _ = differentiable_backward(dout, None, q, k, v, None, out, lse, *ctx.options)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


def attention_heads_first(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """The kernel on (B, H, S, D) tensors; out (B, H, Sq, Dv) in memory ordered like query's; differentiable."""
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled():
        return HeadsFirstAttention.apply(query, key, value, softmax_scale, causal)
    return kernel_heads_first(query, key, value, softmax_scale, causal)[0]


def kernel_heads_first(query, key, value, softmax_scale, causal) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel, not differentiable."""
    out = empty_like_query(query, value)  # no view: torch lets nobody write into one that a Function returns
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return out, _kernel_forward_out(q, k, v, out.transpose(1, 2), softmax_scale, causal)


def empty_like_query(query: Tensor, value: Tensor) -> Tensor:
    """Memory for out (B, H, Sq, Dv) with query's order of dims in memory."""
    if value.shape[3] == query.shape[3]:
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda dim: (-query.stride(dim), dim))
    return torch.empty_permuted((*query.shape[:3], value.shape[3]), order, dtype=query.dtype, device=query.device)
