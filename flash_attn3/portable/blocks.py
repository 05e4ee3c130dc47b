"""Shared by the portable forward and backward: the keys a block of rows sees, the cut of the work, masked products.

A row i stands at position p = i + Sk - Sq among the keys and sees keys lo(p) .. hi(p). Both bounds never fall as p
grows, so a block of rows needs the keys lo(first) .. hi(last), and sees all of lo(last) .. hi(first) without a mask.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class BlockSize(NamedTuple):
    """How the work is cut. The query heads of one key head are stacked and share `rows`."""

    rows: int
    keys: int
    scores: int  # of one block, over all heads that are worked on at once


CPU = BlockSize(256, 512, 1 << 20)  # 4 MiB of fp32 scores stay in the cache: 10-20 % faster than 512 rows and 8 MiB
GPU = BlockSize(1024, 1024, 1 << 25)  # few and large launches


def block_size(device: torch.device) -> BlockSize:
    return CPU if device.type == "cpu" else GPU


@dataclass(frozen=True)
class Band:
    """The visible keys of each row: inclusive window bounds (-1 is unbounded) and an attention chunk (0 is none)."""

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    chunk: int

    def keys(self, row: int) -> tuple[int, int]:
        """The visible keys of a row as a half-open range; empty ranges may come with begin > end."""
        position = row + self.seqlen_k - self.seqlen_q
        begin, end = 0, self.seqlen_k
        if self.left >= 0:
            begin = max(begin, position - self.left)
        if self.right >= 0:
            end = min(end, position + self.right + 1)
        if self.chunk > 0:
            chunk_begin = position // self.chunk * self.chunk
            begin, end = max(begin, chunk_begin), min(end, chunk_begin + self.chunk)
        return begin, end

    def key_blocks(self, row_begin: int, row_end: int, keys: int) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, needs a mask) of each block of `keys` keys of which rows row_begin .. row_end - 1 see any."""
        needed_begin, full_end = self.keys(row_begin)
        full_begin, needed_end = self.keys(row_end - 1)
        for begin in range(needed_begin, needed_end, keys):
            end = min(begin + keys, needed_end)
            yield begin, end, begin < full_begin or end > full_end

    @property
    def bounded(self) -> bool:
        """Whether any row may not see some key."""
        return self.left >= 0 or self.right >= 0 or self.chunk > 0

    def hidden(self, row_begin: int, row_end: int, key_begin: int, key_end: int, device: torch.device) -> Tensor:
        """The mask of one block of a bounded band, bool (rows, keys), true where the row does not see the key."""
        shift = self.seqlen_k - self.seqlen_q
        position = torch.arange(row_begin + shift, row_end + shift, device=device)[:, None]
        key = torch.arange(key_begin, key_end, device=device)
        hidden = []
        if self.left >= 0:
            hidden.append(key < position - self.left)
        if self.right >= 0:
            hidden.append(key > position + self.right)
        if self.chunk > 0:
            hidden.append(position.div(self.chunk, rounding_mode="floor") != key.div(self.chunk, rounding_mode="floor"))
        return functools.reduce(torch.logical_or, hidden)


def rows_of_a_block(q: Tensor, k: Tensor) -> int:
    group = q.shape[2] // k.shape[2]
    return min(q.shape[1], max(64, block_size(q.device).rows // group))


def row_blocks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    """(begin, end) of the blocks of query rows."""
    seqlen_q, rows = q.shape[1], rows_of_a_block(q, k)
    for begin in range(0, seqlen_q, max(1, rows)):
        yield begin, min(begin + rows, seqlen_q)


def head_slices(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """(batches, key heads) that are worked on at once, so that a block of scores stays within its budget."""
    batch, kv_heads, size = q.shape[0], k.shape[2], block_size(q.device)
    scores = rows_of_a_block(q, k) * (q.shape[2] // kv_heads) * min(k.shape[1], size.keys)
    count = max(1, size.scores // max(1, scores))
    batches, key_heads = (min(batch, count // kv_heads), kv_heads) if count >= kv_heads else (1, count)
    for b in range(0, batch, max(1, batches)):
        for h in range(0, kv_heads, key_heads):
            yield slice(b, b + batches), slice(h, h + key_heads)


def stack_rows(x: Tensor, heads: slice, kv_heads: int) -> Tensor:
    """(b, rows, H, D) -> a view (b, h, G, rows, D): the query heads of key heads `heads`."""
    return x.unflatten(2, (kv_heads, x.shape[2] // kv_heads))[:, :, heads].permute(0, 2, 3, 1, 4)


def stack_keys(x: Tensor, batches: slice, heads: slice, dtype: torch.dtype) -> Tensor:
    """(B, Sk, Hkv, D) -> (b * h, Sk, D) in the arithmetic's dtype."""
    return x[batches, :, heads].transpose(1, 2).to(dtype).flatten(0, 1)


def stack_sinks(sink: Tensor, heads: slice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """(H,) -> a view of the `shape` (b, h, G, rows): the sink of each row."""
    kv_heads = sink.shape[0] // shape[2]
    return sink.to(dtype).unflatten(0, (kv_heads, shape[2]))[heads][None, :, :, None].expand(shape)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device):
    """Autocast would turn the fp32 products below an operator into 16-bit ones."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def product(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """weights (N, m, n) @ values (N, n, d), where a pair that `hidden` (m, n) hides adds nothing, whatever its value.

    `weights` are 0 where hidden, but 0 * NaN is NaN. So the plain product counts only where a row sees a value that is
    not finite; elsewhere such values are taken as 0. Only a CPU looks first whether there are any: on a GPU that would
    be a sync.
    """
    if hidden is None or (values.device.type == "cpu" and bool(values.isfinite().all())):
        return torch.bmm(weights, values)
    # A count of which only "none or some" is read, so a 16-bit type will do; x - x is NaN where x is not finite.
    dtype = torch.float32 if values.device.type == "cpu" else torch.bfloat16
    visible = (~hidden).to(dtype).expand(values.shape[0], -1, -1)
    count = torch.bmm(visible, (values - values).isnan().to(dtype))
    return torch.where(count > 0, torch.bmm(weights, values), torch.bmm(weights, values.nan_to_num(0, 0, 0)))
