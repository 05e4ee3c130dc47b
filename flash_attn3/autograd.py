"""The differentiable call: forward and backward by the kernels or in PyTorch, gradients of both out and lse.

Saved for the backward: q, k, v (and qv, sink, lengths), out and lse, nothing of size Sq x Sk. Second derivatives are
refused. Throughout, `lengths` are cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k of a packed batch, or None if the
batch is dense, and `mask` is what every operator ends with: softmax_scale, window_left, window_right (normalised),
attention_chunk, softcap. `kernel` is the choice of dispatch.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn3 import checks, dispatch

_operators = torch.ops.flash_attn3
_kernel_forward = _operators.forward.default
_kernel_forward_fp8 = _operators.forward_fp8.default
_kernel_forward_out = _operators.forward_out.default
_kernel_forward_varlen = _operators.forward_varlen.default
_kernel_forward_varlen_out = _operators.forward_varlen_out.default
_kernel_backward = _operators.backward.default
_kernel_backward_out = _operators.backward_out.default
_kernel_backward_varlen = _operators.backward_varlen.default
_kernel_backward_varlen_out = _operators.backward_varlen_out.default
_portable_forward = _operators.portable_forward.default
_portable_forward_varlen = _operators.portable_forward_varlen.default
_portable_backward = _operators.portable_backward.default
_portable_backward_varlen = _operators.portable_backward_varlen.default
_OTHERWISE = "torch.nn.functional.scaled_dot_product_attention can do that with SDPBackend.MATH"
_NOTHING = (None,) * 4


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


def forward(q, k, v, qv, descales, sink, lengths, mask, kernel):
    """out and lse, not differentiable."""
    if kernel:
        if q.dtype == checks.FP8:
            return _kernel_forward_fp8(q, k, v, *descales, sink, *mask)
        if lengths is None:
            return _kernel_forward(q, k, v, sink, *mask)
        return _kernel_forward_varlen(q, k, v, *lengths, sink, *mask)
    if lengths is None:
        return _portable_forward(q, k, v, qv, *descales, sink, *mask)
    return _portable_forward_varlen(q, k, v, qv, *descales, *lengths, sink, *mask)


def forward_into(out, q, k, v, qv, descales, sink, lengths, mask, kernel):
    """lse; out is written through its strides."""
    if kernel and q.dtype != checks.FP8:
        if lengths is None:
            return _kernel_forward_out(q, k, v, sink, out, *mask)
        return _kernel_forward_varlen_out(q, k, v, *lengths, sink, out, *mask)
    result, lse = forward(q, k, v, qv, descales, sink, lengths, mask, kernel)
    out.copy_(result)
    return lse


def backward(dout, dlse, q, k, v, qv, out, lse, sink, lengths, mask, kernel, deterministic):
    """dq, dk, dv, dqv, dsink, not differentiable; None for what is None. `kernel`: the forward ran on the kernels."""
    if kernel:
        deterministic = dispatch.must_be_deterministic(deterministic, mask[4])
        if dispatch.runs_backward(q.dtype, q.shape[-1], v.shape[-1], sink is not None, deterministic):
            if lengths is None:
                dq, dk, dv, dsink = _kernel_backward(dout, dlse, q, k, v, out, lse, sink, *mask, deterministic)
            else:
                dq, dk, dv, dsink = _kernel_backward_varlen(
                    dout, dlse, q, k, v, out, lse, *lengths, sink, *mask, deterministic
                )
            return dq, dk, dv, None, (None if sink is None else dsink)
    if lengths is None:
        dq, dk, dv, dqv, dsink = _portable_backward(dout, dlse, q, k, v, qv, out, lse, sink, *mask)
    else:
        dq, dk, dv, dqv, dsink = _portable_backward_varlen(dout, dlse, q, k, v, qv, out, lse, *lengths, sink, *mask)
    return dq, dk, dv, (None if qv is None else dqv), (None if sink is None else dsink)


def backward_into(grads, dout, dlse, q, k, v, out, lse, lengths, mask, kernel, deterministic) -> None:
    """Writes dq, dk, dv, of any strides, that `grads` are."""
    if kernel:
        deterministic = dispatch.must_be_deterministic(deterministic, mask[4])
        if dispatch.runs_backward(q.dtype, q.shape[-1], v.shape[-1], False, deterministic):
            if lengths is None:
                _kernel_backward_out(dout, dlse, q, k, v, out, lse, None, *grads, *mask, deterministic)
            else:
                _kernel_backward_varlen_out(dout, dlse, q, k, v, out, lse, *lengths, None, *grads, *mask, deterministic)
            return
    results = backward(dout, dlse, q, k, v, None, out, lse, None, lengths, mask, False, False)
    for grad, result in zip(grads, results[:3], strict=True):
        grad.copy_(result)


def backward_packed_heads(dout, dlse, qkv, num_heads_q, out, lse, *options):
    """The gradient of qkv (see `checks.slices`), of which dq, dk and dv are slices too."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    slices = checks.slices(qkv, num_heads_q)
    backward_into(checks.slices(dqkv, num_heads_q), dout, dlse, *slices, out, lse, *options)
    return dqkv


def packed(lengths):
    """The lengths, or None for those of a dense batch in arguments that are flat."""
    return None if lengths[0] is None else lengths


def differentiable(gradient, *arguments):
    """`gradient(*arguments)`; where it is recorded for a second derivative, asking for that is an error."""
    return Gradients.apply(gradient, *arguments) if torch.is_grad_enabled() else gradient(*arguments)


class Attention(torch.autograd.Function):
    """`forward` above, with its gradient. Returns out, with `with_lse` out and lse.

    `deterministic` is the caller's wish; torch's global switch counts when the gradient is computed. Without a rule for
    transforms, which would cost each call more than everything else here: see TransformableAttention.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, qv, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, window_left,
        window_right, attention_chunk, softcap, kernel, deterministic, with_lse,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        mask = (softmax_scale, window_left, window_right, attention_chunk, softcap)
        out, lse = forward(q, k, v, qv, (None, None, None), sink, packed(lengths), mask, kernel)
        ctx.save_for_backward(q, k, v, qv, out, lse, sink, *lengths)
        ctx.options = (mask, kernel, deterministic)
        if not with_lse:
            return out
        if not torch.compiler.is_compiling():  # the compiler has no rule for this
            ctx.set_materialize_grads(False)  # None instead of zeros for the one that takes no part
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None = None):
        q, k, v, qv, out, lse, sink, *lengths = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        inputs = (q, k, v, qv, out, lse, sink, packed(lengths))
        return *differentiable(backward, dout, dlse, *inputs, *ctx.options), *_NOTHING, *_NOTHING, *_NOTHING


class PackedHeadsAttention(torch.autograd.Function):
    """Attention of q, k, v that are slices of one tensor qkv, whose gradient is written as one tensor too."""

    @staticmethod
    def forward(
        ctx, qkv, num_heads_q, cu_seqlens, seqused, softmax_scale, window_left, window_right, attention_chunk, softcap,
        kernel, deterministic, with_lse,
    ):  # fmt: skip
        mask = (softmax_scale, window_left, window_right, attention_chunk, softcap)
        lengths = packed((cu_seqlens, cu_seqlens, seqused, seqused))
        slices = checks.slices(qkv, num_heads_q)
        out, lse = forward(*slices, None, (None, None, None), None, lengths, mask, kernel)
        ctx.save_for_backward(qkv, out, lse, cu_seqlens, seqused)
        ctx.options = (mask, kernel, deterministic)
        ctx.num_heads_q = num_heads_q
        if not with_lse:
            return out
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None = None):
        qkv, out, lse, cu_seqlens, seqused = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        lengths = packed((cu_seqlens, cu_seqlens, seqused, seqused))
        inputs = (qkv, ctx.num_heads_q, out, lse, lengths)
        dqkv = differentiable(backward_packed_heads, dout, dlse, *inputs, *ctx.options)
        return dqkv, None, None, None, *_NOTHING, *_NOTHING


class TransformableAttention(torch.autograd.Function):
    """The same for torch.func transforms. Returns out and lse; `with_lse`: lse has a gradient too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q, k, v, qv, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, window_left, window_right,
        attention_chunk, softcap, kernel, deterministic, with_lse,
    ):  # fmt: skip
        lengths = packed((cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        mask = (softmax_scale, window_left, window_right, attention_chunk, softcap)
        return forward(q, k, v, qv, (None, None, None), sink, lengths, mask, kernel)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, qv, sink, *rest = inputs
        lengths, mask, (*ctx.choice, ctx.with_lse) = rest[:4], rest[4:9], rest[9:]
        ctx.save_for_backward(q, k, v, qv, *output, sink, *lengths)
        ctx.mask = mask

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):
        *inputs, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = ctx.saved_tensors
        lengths = packed((cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        dlse = dlse if ctx.with_lse else None
        grads = differentiable(backward, dout, dlse, *inputs, sink, lengths, ctx.mask, *ctx.choice)
        return *grads, *_NOTHING, *_NOTHING, *_NOTHING


class Gradients(torch.autograd.Function):
    """The backward as a node of the graph that cannot be differentiated.

    torch's once_differentiable is no substitute: it cuts the graph, so that torch.autograd.grad of a sum with other
    terms (a gradient penalty) silently lacks this one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient, *arguments):
        return gradient(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"attention of flash_attn3 cannot be differentiated twice; {_OTHERWISE}")


def attend(
    problem: dispatch.Problem,
    tensors: tuple[Tensor | None, ...],
    descales: tuple[Tensor | None, ...],
    lengths: checks.Lengths | None,
    backend: str | None,
    deterministic: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a call with checked arguments, differentiable in `tensors`, which are q, k, v, qv, sink.

    lse may be missing unless `with_lse`.
    """
    q, k, v, qv, sink = tensors
    mask = dispatch.mask_of(problem)
    kernel = dispatch.use_kernel(problem, backend)
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    needs_grad = needs_grad or (qv is not None and qv.requires_grad) or (sink is not None and sink.requires_grad)
    needs_grad = needs_grad and torch.is_grad_enabled()
    if q.dtype == checks.FP8 and needs_grad:
        raise NotImplementedError("q, k, v: float8_e4m3fn has no gradient; use torch.no_grad() or 16-bit inputs")
    in_transform = transformed()
    if q.dtype == checks.FP8 and in_transform and not torch.compiler.is_compiling():
        refuse_tangents(sink=sink)
    if q.dtype == checks.FP8 or not (needs_grad or in_transform):
        return forward(q, k, v, qv, descales, sink, lengths, mask, kernel)
    compiling = torch.compiler.is_compiling()
    options = (*mask, kernel, bool(deterministic), bool(with_lse))
    if in_transform:
        if compiling:
            if torch.is_grad_enabled():
                refuse_compiled_transform()
            return forward(q, k, v, qv, descales, sink, lengths, mask, kernel)
        refuse_tangents(q=q, k=k, v=v, qv=qv, sink=sink)
        return TransformableAttention.apply(*tensors, *(lengths or _NOTHING), *options)
    lengths = _NOTHING if lengths is None else distinct(lengths) if compiling else lengths
    result = Attention.apply(*distinct((q, k, v, qv)), sink, *lengths, *options)
    return result if with_lse else (result, None)


def attend_packed_heads(
    problem: dispatch.Problem,
    qkv: Tensor,
    num_heads_q: int | None,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    deterministic: bool,
    with_lse: bool,
):
    """out, or (out, lse), of q, k, v that are slices of qkv, with one gradient; not inside transforms."""
    options = (*dispatch.mask_of(problem), dispatch.use_kernel(problem, None), bool(deterministic), bool(with_lse))
    return PackedHeadsAttention.apply(qkv, num_heads_q, cu_seqlens, seqused, *options)


def distinct(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """torch.compile refuses one tensor in two places of an autograd.Function.

    Differentiable ones become views in eager mode too: gradients are added up in the same order then.
    """
    found = []
    for x in tensors:
        found.append(x.view_as(x) if x is not None and any([x is y for y in found]) else x)  # noqa: C419
    return found


class HeadsFirstAttention(torch.autograd.Function):
    """`kernel_heads_first` with its gradient. The transposes are inside, where they are no nodes of the graph."""

    @staticmethod
    def forward(ctx, query, key, value, softmax_scale, window_right):
        out, lse = kernel_heads_first(query, key, value, softmax_scale, window_right)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = ((softmax_scale, -1, window_right, 0, 0.0), True, False)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, query, key, value, out))
        dq, dk, dv, *_ = differentiable(backward, dout, None, q, k, v, None, out, lse, None, None, *ctx.options)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


def attention_heads_first(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, window_right: int) -> Tensor:
    """The kernel on (B, H, S, D) tensors; out (B, H, Sq, Dv) in memory ordered like query's; differentiable."""
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled():
        return HeadsFirstAttention.apply(query, key, value, softmax_scale, window_right)
    return kernel_heads_first(query, key, value, softmax_scale, window_right)[0]


def kernel_heads_first(query, key, value, softmax_scale, window_right) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel, not differentiable."""
    out = empty_like_query(query, value)  # no view: torch lets nobody write into one that a Function returns
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return out, _kernel_forward_out(q, k, v, None, out.transpose(1, 2), softmax_scale, -1, window_right, 0, 0.0)


def empty_like_query(query: Tensor, value: Tensor) -> Tensor:
    """Memory for out (B, H, Sq, Dv) with query's order of dims in memory."""
    if value.shape[3] == query.shape[3]:
        return torch.empty_like(query)
    order = sorted(range(4), key=lambda dim: (-query.stride(dim), dim))
    return torch.empty_permuted((*query.shape[:3], value.shape[3]), order, dtype=query.dtype, device=query.device)
