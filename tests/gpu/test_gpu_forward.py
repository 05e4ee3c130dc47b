"""Forward kernels against the float64 formula over head dims, dtypes, masks, GQA ratios, tails and empty problems.

Lengths lie around the tile sizes: 64 rows a warpgroup, tiles of 128 and 192 rows, key blocks of 64 to 128.
"""

import random

import pytest
import torch
from harness import (
    BETWEEN_DIMS,
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    LENGTH_PAIRS,
    UNALIGNED_DIMS,
    attend,
    check,
    equal,
    inputs,
    ran,
    row_of,
)

import flash_attn3

TAILS = (1, 63, 64, 65, 79, 80, 81, 95, 97, 127, 128, 129, 176, 191, 192, 193, 255, 256, 257)
UNEQUAL_DIMS = (
    *((40, 80), (64, 128), (128, 64), (96, 200), (192, 64)),
    *((160, 128), (136, 104), (256, 64), (64, 256), (100, 33)),
)
SPEED_ARGUMENTS = (
    *({}, {"num_splits": 0}, {"pack_gqa": True}, {"pack_gqa": False}),
    *({"sm_margin": 8}, {"deterministic": True}, {"window_size": (-1, 0)}),
)


def ids(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=ids)


@both_masks
@all_dtypes
@all_dims
@pytest.mark.parametrize("seqlen", TAILS)
def test_tails(seqlen, dims, dtype, causal):
    check(*inputs(2, seqlen, seqlen, 2, 1, *dims, dtype=dtype), causal)


@both_masks
@all_dims
@pytest.mark.parametrize("lengths", LENGTH_PAIRS, ids=ids)
def test_unequal_lengths(lengths, dims, causal):
    check(*inputs(2, *lengths, 3, 1, *dims), causal)


@both_masks
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (6, 2), (7, 1), (8, 1), (14, 2), (16, 2), (24, 3)], ids=ids)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=ids)
def test_query_heads_share_kv_heads(dims, heads, causal):
    check(*inputs(2, 150, 210, *heads, *dims), causal)


@both_masks
@all_dtypes
@pytest.mark.parametrize("dim", BETWEEN_DIMS + UNALIGNED_DIMS)
def test_head_dims_in_between(dim, dtype, causal):
    check(*inputs(2, 130, 197, 2, 1, dim, dtype=dtype), causal)


@both_masks
@pytest.mark.parametrize("dims", UNEQUAL_DIMS, ids=ids)
def test_value_head_dim_differs(dims, causal):
    check(*inputs(2, 193, 130, 4, 2, *dims), causal)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0, 4.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=ids)
def test_softmax_scale(dims, scale):
    check(*inputs(1, 200, 300, 2, 2, *dims), True, scale)


@both_masks
@all_dtypes
@all_dims
def test_many_tiles_a_cta(dims, dtype, causal):
    """More tiles than SMs, and not a multiple of them: the persistent loop, its barriers' phases, the tile order."""
    check(*inputs(5, 777, 777, 12, 4, *dims, dtype=dtype), causal)


@both_masks
@all_dims
def test_long_rows(dims, causal):
    check(*inputs(1, 300, 8191, 2, 1, *dims), causal)


@both_masks
def test_head_count_of_a_failed_descriptor(causal):
    """(1, 257, 40, 128): a shape for which another library's descriptor failed to encode (SoulX-FlashTalk issue 9)."""
    check(*inputs(1, 257, 257, 40, 40, 128), causal)


@both_masks
def test_one_query_of_very_many_heads(causal):
    check(*inputs(3, 1, 40, 700, 100, 64), causal)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_shapes(first):
    for seed in range(first, first + 20):
        pick = random.Random(seed)
        kv_heads = pick.choice([1, 2, 3])
        head_dim = pick.choice([pick.randrange(8, 257, 8), pick.randrange(8, 257, 8), pick.randint(1, 256)])
        head_dim_v = head_dim if pick.random() < 0.7 else pick.randrange(8, 257, 8)
        lengths = [int(2 ** pick.uniform(0, 9.5)) for _ in range(2)]
        heads = kv_heads * pick.choice([1, 2, 3, 5, 8])
        shape = (pick.choice([1, 2, 3]), *lengths, heads, kv_heads, head_dim, head_dim_v)
        q, k, v = inputs(*shape, dtype=pick.choice(DTYPES), key=seed)
        if pick.random() < 0.4:  # stored as (B, H, S, D)
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        causal, scale = pick.random() < 0.5, pick.choice([None, None, 0.2])
        try:
            check(q, k, v, causal, scale)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: (B, Sq, Sk, H, Hkv, D, Dv) = {shape}, causal {causal}") from error


@both_masks
@all_dims
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 0, 0), (0, 0, 0)], ids=ids)
def test_nothing_to_compute(sizes, dims, causal):
    q, k, v = inputs(*sizes, 4, 2, *dims)
    out, lse = attend(q, k, v, causal, times=(0,))
    assert out.numel() == lse.numel() == 0


@both_masks
@all_dims
@pytest.mark.parametrize("sizes", [(2, 64, 8, 2), (1, 1, 1, 1), (3, 257, 6, 3)], ids=ids)
def test_no_keys_at_all(sizes, dims, causal):
    """flash-attention issue 2470: an illegal instruction, or a division by zero when causal."""
    batch, seqlen_q, heads, kv_heads = sizes
    out, lse = attend(*inputs(batch, seqlen_q, 0, heads, kv_heads, *dims), causal, times=(0, 1))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_no_keys_and_a_head_dim_that_is_filled_up():
    out, lse = attend(*inputs(1, 70, 0, 2, 1, 36, 20), False, times=(1,))
    assert (out == 0).all() and (lse == -torch.inf).all()


@both_masks
@all_dims
def test_long_keys(dims, causal):
    """Lengths from which a head dim with two rows takes the one with the wider block of keys."""
    q, k, v = inputs(1, 200, 8300, 2, 1, *dims)
    first = check(q, k, v, causal)
    for _ in range(10):
        assert equal(attend(q, k, v, causal), first)


@all_dims
@pytest.mark.parametrize("lengths", [(2048, 1024), (257, 1), (321, 128), (193, 192), (130, 66)], ids=ids)
def test_rows_before_the_first_key(lengths, dims):
    """Causal with more queries than keys: the first Sq - Sk rows see nothing (flash-attention issues 1778, 2199)."""
    seqlen_q, seqlen_k = lengths
    out, lse = check(*inputs(1, seqlen_q, seqlen_k, 2, 2, *dims), True)
    empty = seqlen_q - seqlen_k
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -torch.inf).all()
    assert (lse[..., empty:] > -torch.inf).all()


@all_dims
def test_every_alignment_of_the_diagonal(dims):
    """Sk - Sq shifts the diagonal through key blocks and rows, so that first blocks are masked whole for some rows."""
    for shift in range(-70, 140, 7):
        seqlen_q = 75
        check(*inputs(1, seqlen_q, max(1, seqlen_q + shift), 2, 1, *dims, key=shift), True)


def test_packed_qkv_function():
    qkv = torch.randn(2, 100, 3, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = qkv.unbind(2)
    with ran(row_of(q, k, v)):
        out = flash_attn3.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, attend(q, k, v, True)[0])


def test_bare_tensor_and_speed_arguments():
    """Arguments that may change speed only do not change the result, and the default return is the bare tensor."""
    q, k, v = inputs(2, 200, 200, 4, 2, 128)
    wanted = attend(q, k, v, True)
    for extra in SPEED_ARGUMENTS:
        with ran(row_of(q, k, v)):
            out = flash_attn3.flash_attn_func(q, k, v, causal=True, **extra)
        assert torch.equal(out, wanted[0]), extra
