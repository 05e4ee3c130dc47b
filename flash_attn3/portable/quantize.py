"""flash_attn3.quantize in plain PyTorch, in fp32, a block of tokens at a time.

It takes the checked arguments as flash_attn3.quantization.Problem and does what its kernel does, in the same order, so
that without a Hadamard transform the results are the same bits.
"""

import functools
import random

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
NEGLIGIBLE = 2.0**-100  # maxima below it count as zero: 448 / maximum would overflow at 2**-119
TOKENS = 512  # of a step where one scale covers the sequence: the fp32 copies stay small


def quantize(problem, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """(values, descale) as of flash_attn3.quantize. Another dtype, for tests, is not rounded to e4m3."""
    seqlen = problem.x.shape[1]
    values, descale = problem.outputs(dtype)
    values[:, seqlen:] = 0  # the padding of a transposed result
    step = problem.block or TOKENS
    if problem.block is None:
        amax = torch.zeros_like(descale)
        for start in range(0, seqlen, step):
            amax = torch.maximum(amax, _amax(problem, _values(problem, start, start + step)))
        descale.copy_(_descale(amax))
    for index, start in enumerate(range(0, seqlen, step)):
        y = _values(problem, start, start + step)
        if problem.block is not None:
            amax = _amax(problem, y)
            descale[..., index] = _descale(amax)
        # Tensor by tensor: torch computes a number / tensor as reciprocal times number, which rounds twice.
        scale = amax.new_full((), LARGEST) / amax
        scale = torch.where(amax < NEGLIGIBLE, 0.0, scale).repeat_interleave(problem.group, 1)
        y = torch.where(y.abs() < float("inf"), y * scale[:, None, :, None], float("nan"))
        values[:, start : min(start + step, seqlen)] = y.to(dtype)
    return values[:, :seqlen], descale


def _values(problem, start: int, stop: int) -> Tensor:
    """What is to be rounded of tokens [start, stop): (B, tokens, H, D) fp32."""
    y = problem.x[:, start:stop].float()
    if problem.mean is not None:
        y = y - problem.mean[:, None]
    if problem.cos is not None:
        half = problem.cos.shape[1]
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if not problem.interleaved:
            pairs = (slice(0, half), slice(half, 2 * half))
        c, s = (t[start : min(stop, problem.x.shape[1]), None].float() for t in (problem.cos, problem.sin))
        a, b = (y[..., columns].clone() for columns in pairs)
        y[..., pairs[0]] = a * c - b * s
        y[..., pairs[1]] = b * c + a * s
    if problem.hadamard is not None:
        head_dim = y.shape[-1]
        y = y @ transform(head_dim, head_dim, problem.hadamard, torch.float32, y.device) * problem.norm
    return y


def _amax(problem, y: Tensor) -> Tensor:
    """(B, kv_heads): the largest finite magnitude."""
    size = y.abs()
    size = torch.where(size < float("inf"), size, 0.0)
    return size.unflatten(2, (problem.kv_heads, problem.group)).amax((1, 3, 4))


def _descale(amax: Tensor) -> Tensor:
    return torch.where(amax < NEGLIGIBLE, 1.0, amax / LARGEST)


def transform_size(head_dim: int) -> int:
    """The largest power of two that divides head_dim."""
    return head_dim & -head_dim


@functools.lru_cache(maxsize=64)
def transform(head_dim: int, size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size): diag(signs) times the Hadamard blocks, entries 1, -1 and, beyond head_dim and off the blocks, 0."""
    block = torch.ones(1, 1)
    while block.shape[0] < transform_size(head_dim):
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    bits = random.Random(seed).getrandbits(head_dim)
    signs = torch.tensor([1.0 - 2.0 * (bits >> column & 1) for column in range(head_dim)])
    matrix = torch.zeros(size, size)
    whole = torch.block_diag(*[block] * (head_dim // block.shape[0]))
    matrix[:head_dim, :head_dim] = signs[:, None] * whole
    return matrix.to(device, dtype)
