"""Views by how they lie in memory: every maker of VIEWS takes (batch, seqlen, heads, dim, key) and is random.

The expanded ones overlap themselves, so they can be read only.
"""

import torch
from harness import DEVICE, randn
from torch import Tensor


def transposed(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, heads, seqlen, dim, key=key).transpose(1, 2)


def sequence_first(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(seqlen, batch, heads, dim, key=key).transpose(0, 1)


def every_second_row(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, 2 * seqlen, heads, dim, key=key)[:, ::2]


def every_second_head(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, seqlen, 2 * heads, dim, key=key)[:, :, 1::2]


def expanded_batch(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(1, seqlen, heads, dim, key=key).expand(batch, -1, -1, -1)


def expanded_heads(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, seqlen, 1, dim, key=key).expand(-1, -1, heads, -1)


def expanded_rows(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, 1, heads, dim, key=key).expand(-1, seqlen, -1, -1)


def head_dim_not_last(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, seqlen, dim, heads, key=key).transpose(2, 3)


def every_second_column(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, seqlen, heads, 2 * dim, key=key)[..., ::2]


def two_bytes_off(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch * seqlen * heads * dim + 1, key=key)[1:].view(batch, seqlen, heads, dim)


def rows_of_odd_length(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    return randn(batch, seqlen, heads, dim + 4, key=key)[..., :dim]


def odd_batch_stride(batch: int, seqlen: int, heads: int, dim: int, key: object) -> Tensor:
    size = seqlen * heads * dim
    return randn(batch * (size + 3), key=key).as_strided((batch, seqlen, heads, dim), (size + 3, heads * dim, dim, 1))


VIEWS = (
    transposed,
    sequence_first,
    every_second_row,
    every_second_head,
    expanded_batch,
    expanded_heads,
    expanded_rows,
    head_dim_not_last,
    every_second_column,
    two_bytes_off,
    rows_of_odd_length,
    odd_batch_stride,
)
WRITABLE_VIEWS = tuple(view for view in VIEWS if not view.__name__.startswith("expanded"))


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


def far_apart(dim: str) -> Tensor:
    """(2, 130, 2, 64) whose last element lies more than 2^31 elements behind its first, along batch, rows or heads."""
    shape = (2, 130, 2, 64)
    strides = {
        "batch": (2**31 + 4096, 128, 64, 1),
        "rows": (64 * 200 + 2**31, 2**24 + 512, 64, 1),
        "heads": (64 * 200, 64, 2**31 + 64 * 1000, 1),
    }[dim]
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return torch.empty(span, dtype=torch.bfloat16, device=DEVICE).as_strided(shape, strides)
