"""A drop-in for torch.nn.functional.scaled_dot_product_attention: the kernels where they apply, torch's own elsewhere.

The kernels take 16-bit (N, .., H, L, E) tensors on a Hopper GPU without attn_mask and dropout. torch's causal mask is
aligned top-left: row i sees keys j <= i. For L == S that is the kernels' bottom-right mask, for L < S it is that mask
after the keys from L on are dropped, and for L > S a window that reaches L - S keys to the right. Masks, dropout, fp32,
fp64 and other devices go to torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn3 import autograd, dispatch


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query key^T * scale) value, with the semantics of torch's function of the same name.

    query (N, .., H, L, E), key (N, .., Hkv, S, E), value (N, .., Hkv, S, Ev); Hkv == H, or with enable_gqa a divisor of
    it. scale None is E ** -0.5. Returns (N, .., H, L, Ev) with the dtype of query. What the kernels compute has query's
    order of dims in memory, for Ev == E the layout of empty_like(query), as from torch's flash backend; elsewhere torch
    chooses. Casts to the autocast dtype under autocast. Differentiable; bitwise repeatable under
    torch.use_deterministic_algorithms. Errors are torch's, and RuntimeError for
    attn_mask with is_causal.
    """
    if attn_mask is not None and is_causal:  # torch documents this error; some of its CPU paths go on
        raise RuntimeError("attn_mask must be None with is_causal=True; put the causal mask into attn_mask instead")
    if (
        attn_mask is None
        and dropout_p == 0.0
        and isinstance(query, Tensor)
        and query.is_cuda
        and dispatch.has_kernels(query.get_device())
    ):
        if torch.is_autocast_enabled("cuda"):
            query, key, value = _autocast(query, key, value)
        if _kernels_apply(query, key, value, is_causal, scale, enable_gqa):
            return _attend(query, key, value, is_causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """What autocast does to the arguments of torch's function: floating point, except fp64, to the lower precision."""
    dtype = torch.get_autocast_dtype("cuda")
    return [
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]


def _kernels_apply(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> bool:
    """Whether the tensors are plain, fit each other without broadcasting, and the kernels know the problem."""
    if not (isinstance(key, Tensor) and isinstance(value, Tensor) and query.dim() == key.dim() == value.dim() >= 3):
        return False
    if query.is_nested or key.is_nested or value.is_nested or autograd.transformed():
        return False
    shape, shape_k, shape_v, dtype = query.shape, key.shape, value.shape, query.dtype
    heads, kv_heads, head_dim = shape[-3], shape_k[-3], shape[-1]
    return (
        dtype == key.dtype == value.dtype
        and query.get_device() == key.get_device() == value.get_device()
        and shape[:-3] == shape_k[:-3]
        and shape_k[:-1] == shape_v[:-1]
        and head_dim == shape_k[-1]
        and (heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
        and (scale is None or dispatch.MIN_SCALE <= scale <= dispatch.MAX_SCALE)
        and dispatch.has_row(dtype, head_dim, shape_v[-1])
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """The kernel on (N, .., H, L, E) tensors that `_kernels_apply` accepted."""
    shape = query.shape
    scale = shape[-1] ** -0.5 if scale is None else scale
    window_right = -1
    if is_causal:
        window_right = 0
        if key.shape[-2] > shape[-2]:
            key, value = key[..., : shape[-2], :], value[..., : shape[-2], :]
        elif key.shape[-2] < shape[-2]:
            window_right = shape[-2] - key.shape[-2]
    lead = shape[:-3]
    if len(lead) == 1:
        return _heads_first(query, key, value, scale, window_right)
    if not lead:
        return _heads_first(query[None], key[None], value[None], scale, window_right)[0]
    return _heads_first(*(x.flatten(0, -4) for x in (query, key, value)), scale, window_right).unflatten(0, lead)


def _heads_first(query: Tensor, key: Tensor, value: Tensor, scale: float, window_right: int) -> Tensor:
    return autograd.attention_heads_first(*autograd.distinct((query, key, value)), scale, window_right)
