"""What FlashAttention-3's users reach below its Python functions: the operators `torch.ops.flash_attn_3.*`, and the two
functions `_flash_attn_forward` and `_flash_attn_backward` that libraries call from autograd Functions of their own.

Names, argument orders and schemas are those of FlashAttention-3. Importing this module registers the operators;
`import flash_attn3` alone does not. Two sets: the raw `fwd` and `bwd`, whose schemas return an alias of an argument and
so cannot be traced, and the operators `_flash_attn_*`, which have fakes and declare what they write.
Dense and packed batches; KV-cache arguments raise NotImplementedError. None of them is differentiable.
"""

import torch
from torch import Tensor

from flash_attn3 import autograd, checks, dispatch
from flash_attn3.portable import empty_outputs

_library = torch.library.Library("flash_attn_3", "DEF")
_OPTIONS = "float? softmax_scale, bool causal, int window_size_left, int window_size_right"
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
_FORWARD = (
    "Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{_LENGTHS}, {_OPTIONS}, int attention_chunk, float softcap"
)
_TRACEABLE = (
    f"_flash_attn_forward({_FORWARD}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"_flash_attn_forward_out({_FORWARD}, Tensor(a!) out) -> (Tensor, Tensor, Tensor)",
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, {_LENGTHS}, {_OPTIONS}, float softcap, bool deterministic) "
    "-> Tensor",
)
_RAW = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor",
)
for _schema in _TRACEABLE:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
for _schema in _RAW:
    _library.define(_schema)


def _refuse(function: str, **arguments) -> None:
    """Raise for every argument that has no backend yet and is not at its default."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"{function}: {', '.join(given)}: KV caches are not implemented in this version; "
            "dense (batch, seqlen, heads, head_dim) and packed (tokens, heads, head_dim) tensors work"
        )


def _lengths(
    function, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, used="seqused"
) -> tuple[Tensor | None, ...]:
    """The four lengths of a packed batch, or four times None; any other combination belongs to a KV cache."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        _refuse(
            f"{function} without cu_seqlens_q and cu_seqlens_k",
            **{
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                f"{used}_q": seqused_q,
                f"{used}_k": seqused_k,
            },
        )
        return (None, None, None, None)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None:
            checks.max_seqlen(name, value)
    return cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k


def _forward(
    q, k, v, qv, descales, lengths, softmax_scale, causal, window, attention_chunk, softcap, sm_margin, out, function
):
    """out and lse by the backend that dispatch chooses, into the caller's `out` if there is one."""
    lengths = autograd.packed(lengths)
    problem = dispatch.checked_problem(
        q, k, v, qv, descales, None, lengths, softmax_scale, causal, window, attention_chunk, softcap, sm_margin,
        wide=False, function=function,
    )  # fmt: skip
    arguments = (q, k, v, qv, descales, None, lengths, dispatch.mask_of(problem), dispatch.use_kernel(problem, None))
    if out is None:
        return autograd.forward(*arguments)
    dtype = torch.bfloat16 if q.dtype == checks.FP8 else q.dtype
    checks.same("out", out, (*q.shape[:-1], v.shape[-1]), dtype, q.device)
    return out, autograd.forward_into(out, *arguments)


def _backward(
    dout, q, k, v, out, lse, lengths, softmax_scale, causal, window, softcap, deterministic, sm_margin, grads, function
):
    """dq, dk, dv by the backend that dispatch chooses, written into those of `grads` that are not None."""
    lengths = autograd.packed(lengths)
    problem = dispatch.checked_problem(
        q, k, v, None, (None, None, None), None, lengths, softmax_scale, causal, window, 0, softcap, sm_margin,
        wide=False, function=function,
    )  # fmt: skip
    checks.gradients(dout, q, v, out, lse)
    for name, x, grad in zip(("dq", "dk", "dv"), (q, k, v), grads, strict=True):
        if grad is not None:
            checks.same(name, grad, tuple(x.shape), x.dtype, x.device)
    grads = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if grad is None else grad
        for x, grad in zip((q, k, v), grads, strict=True)
    ]
    kernel = dispatch.use_kernel(problem, None)
    autograd.backward_into(
        grads, dout, None, q, k, v, out, lse, lengths, dispatch.mask_of(problem), kernel, deterministic
    )
    return grads


def _no_partials(q: Tensor) -> Tensor:
    """Partial results of splits stay inside: their places in the outputs hold an empty fp32 tensor."""
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _traceable_forward(
    q, k, v, qv, q_descale, k_descale, v_descale, cu_q, cu_k, used_q, used_k, scale, causal, left, right, chunk, softcap
):  # fmt: skip
    out, lse = _forward(
        q, k, v, qv, (q_descale, k_descale, v_descale), (cu_q, cu_k, used_q, used_k), scale, causal, (left, right),
        chunk, softcap, 0, None, "_flash_attn_forward",
    )  # fmt: skip
    return out, lse, _no_partials(q), _no_partials(q)


def _traceable_forward_out(
    q, k, v, qv, q_descale, k_descale, v_descale, cu_q, cu_k, used_q, used_k, scale, causal, left, right, chunk,
    softcap, out,
):  # fmt: skip
    _, lse = _forward(
        q, k, v, qv, (q_descale, k_descale, v_descale), (cu_q, cu_k, used_q, used_k), scale, causal, (left, right),
        chunk, softcap, 0, out, "_flash_attn_forward",
    )  # fmt: skip
    return lse, _no_partials(q), _no_partials(q)


def _traceable_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_q, cu_k, used_q, used_k, scale, causal, left, right, softcap,
    deterministic,
):  # fmt: skip
    _backward(
        dout, q, k, v, out, softmax_lse, (cu_q, cu_k, used_q, used_k), scale, causal, (left, right), softcap,
        deterministic, 0, (dq, dk, dv), "_flash_attn_backward",
    )  # fmt: skip
    return (dout.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()


_library.impl("_flash_attn_forward", _traceable_forward, "CompositeExplicitAutograd")
_library.impl("_flash_attn_forward_out", _traceable_forward_out, "CompositeExplicitAutograd")
_library.impl("_flash_attn_backward", _traceable_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("flash_attn_3::_flash_attn_forward", lib=_library)
def _(q, k, v, *_options):
    return (*empty_outputs(q, v), _no_partials(q), _no_partials(q))


@torch.library.register_fake("flash_attn_3::_flash_attn_forward_out", lib=_library)
def _(q, k, v, *_options):
    return empty_outputs(q, v)[1], _no_partials(q), _no_partials(q)


@torch.library.register_fake("flash_attn_3::_flash_attn_backward", lib=_library)
def _(dout, q, *_options):
    return empty_outputs(q, q)[1]


def _fwd(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    _refuse(
        "flash_attn_3.fwd", k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
    )  # fmt: skip
    lengths = _lengths("flash_attn_3.fwd", cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    if softmax_scale is None and q_v is not None:  # unlike the Python functions, which count v's head dim too
        softmax_scale = max(1, q.shape[-1:].numel()) ** -0.5
    out, lse = _forward(
        q, k, v, q_v, (q_descale, k_descale, v_descale), lengths, softmax_scale, is_causal,
        (window_size_left, window_size_right), attention_chunk, softcap, sm_margin, out, "flash_attn_3.fwd",
    )  # fmt: skip
    return out, lse, _no_partials(q), _no_partials(q)


def _bwd(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    lengths = _lengths("flash_attn_3.bwd", cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    results = _backward(
        dout, q, k, v, out, softmax_lse, lengths, softmax_scale, is_causal, (window_size_left, window_size_right),
        softcap, deterministic, sm_margin, (dq, dk, dv), "flash_attn_3.bwd",
    )  # fmt: skip
    # Gradients that the caller owns are not returned: the schema has no alias there.
    grads = [x if given is None else _no_partials(q) for x, given in zip(results, (dq, dk, dv), strict=True)]
    return (*grads, _no_partials(q), _no_partials(q))


def _fwd_combine(out_partial, lse_partial, out=None, out_dtype=None):
    raise NotImplementedError("flash_attn_3.fwd_combine: merging partial results is not implemented in this version")


def _get_scheduler_metadata(*_arguments, **_options):
    raise NotImplementedError(
        "flash_attn_3.get_scheduler_metadata: no call takes scheduler metadata in this version; leave it out"
    )


_library.impl("fwd", _fwd, "CompositeExplicitAutograd")
_library.impl("bwd", _bwd, "CompositeExplicitAutograd")
_library.impl("fwd_combine", _fwd_combine, "CompositeExplicitAutograd")
_library.impl("get_scheduler_metadata", _get_scheduler_metadata, "CompositeExplicitAutograd")


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """(out, softmax_lse, out_accum, softmax_lse_accum), not differentiable.

    Arguments as in flash_attn_func, or with cu_seqlens_q and cu_seqlens_k as in flash_attn_varlen_func. out_, shaped
    like out and of any strides, is written and returned as out. The last two are empty fp32 tensors of shape (0,).
    KV-cache arguments raise NotImplementedError.
    """
    _refuse(
        "_flash_attn_forward", k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
    )  # fmt: skip
    lengths = _lengths(
        "_flash_attn_forward", cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    )
    arguments = (
        q, k, v, qv, q_descale, k_descale, v_descale, *lengths, softmax_scale, causal, window_size_left,
        window_size_right, attention_chunk, softcap,
    )  # fmt: skip
    if out_ is None:
        return torch.ops.flash_attn_3._flash_attn_forward.default(*arguments)
    return (out_, *torch.ops.flash_attn_3._flash_attn_forward_out.default(*arguments, out_))


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Writes the gradients of attention into dq, dk, dv (any strides), from the out and softmax_lse passed in.

    Arguments as in flash_attn_func or flash_attn_varlen_func; rows that no sequence owns get 0. Returns softmax_d fp32,
    shaped like softmax_lse, the row sums of dout * out.
    """
    lengths = _lengths(
        "_flash_attn_backward", cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "sequed"
    )
    for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
        if grad is None:
            raise ValueError(f"{name} is None; _flash_attn_backward writes into tensors that the caller allocates")
    return torch.ops.flash_attn_3._flash_attn_backward.default(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, deterministic,
    )  # fmt: skip
