"""Windows, chunks and softcap, alone and together: forward, LSE and gradients against the float64 formula.

Every case runs the forward and both backward modes, where these are different kernels, with a gradient of the LSE too.
Bounds lie on, beside and between the edges of tiles: 64 to 128 keys, 64 to 192 queries.
"""

import random

import harness
import pytest
import torch
from harness import (
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    attend,
    backward,
    check,
    check_gradients,
    equal,
    gradient_of_lse,
    gradient_of_out,
    inputs,
    modes,
    randn,
)

LENGTHS = ((200, 200), (130, 333), (333, 130))
WINDOWS = ((0, 0), (5, -1), (100, -1), (-1, 7), (-1, 90), (64, 0), (0, 63), (127, 0), (100, 30), (30, 200), (999, 999))
CHUNKS = (7, 16, 64, 80, 100, 128, 192, 1000)
ODD_DIMS = ((40, 40), (72, 72), (100, 100), (33, 33), (160, 160), (200, 200), (136, 104), (64, 128), (128, 64))
SHARED_HEADS = ((2, 2), (6, 2), (8, 1), (14, 2))


def ids(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=ids)
all_lengths = pytest.mark.parametrize("lengths", LENGTHS, ids=ids)


def check_all(tensors, causal: bool = False, scale: float | None = None, **options):
    """Forward and gradients, those of the LSE among them; says which options failed."""
    q, k, v = tensors
    try:
        return check_gradients(q, k, v, gradient_of_out(q, v), gradient_of_lse(q), causal, scale, **options)
    except AssertionError as error:
        raise AssertionError(f"causal {causal}, {options}: {error}") from error


@all_lengths
@all_dims
def test_windows(dims, lengths):
    tensors = inputs(2, *lengths, 2, 1, *dims)
    for window in WINDOWS:
        check_all(tensors, window=window)


@all_lengths
@all_dims
def test_causal_windows(dims, lengths):
    """Causal forces the right bound to 0, whatever the window says."""
    tensors = inputs(2, *lengths, 2, 1, *dims)
    for window in ((0, 0), (5, -1), (63, 100), (64, 0), (128, 5), (500, 0)):
        check_all(tensors, True, window=window)


@all_lengths
@all_dims
def test_chunks(dims, lengths):
    tensors = inputs(2, *lengths, 2, 1, *dims)
    for chunk in CHUNKS:
        check_all(tensors, chunk=chunk)
        check_all(tensors, True, chunk=chunk)


@both_masks
@all_dims
def test_softcap(dims, causal):
    """Caps far above, around and far below the scores."""
    for factor, softcap in ((1, 50.0), (1, 1.0), (4, 15.0), (10, 30.0), (10, 2.0)):
        q, k, v = inputs(2, 150, 210, 2, 1, *dims)
        check_all((factor * q, k, v), causal, softcap=softcap)


@all_dims
def test_softcap_of_saturated_scores(dims):
    """Scores far beyond the cap: P is nearly uniform over those of each sign, dS is nearly 0; nothing is NaN."""
    q, k, v = inputs(1, 150, 200, 2, 2, *dims)
    for softcap in (0.5, 20.0):
        grads = check_all((100 * q, 100 * k, v), softcap=softcap)
        assert all(grad.isfinite().all() for grad in grads)


@all_dtypes
@all_dims
def test_all_together(dims, dtype):
    tensors = inputs(2, 222, 301, 4, 2, *dims, dtype=dtype)
    check_all(tensors, window=(70, 20), chunk=90, softcap=10.0)
    check_all(tensors, True, window=(70, 20), chunk=90, softcap=10.0)
    check_all(tensors, True, window=(100, -1), softcap=10.0)
    check_all(tensors, chunk=128, softcap=10.0)


@all_dims
def test_fp16(dims):
    tensors = inputs(2, 200, 250, 2, 1, *dims, dtype=torch.float16)
    check_all(tensors, window=(64, 10))
    check_all(tensors, True, window=(100, 0))
    check_all(tensors, chunk=100)
    check_all(tensors, softcap=5.0)


@pytest.mark.parametrize("dims", ODD_DIMS, ids=ids)
def test_head_dims_in_between(dims):
    tensors = inputs(2, 130, 197, 2, 1, *dims)
    check_all(tensors, window=(50, 20))
    check_all(tensors, True, chunk=70, softcap=10.0)


@pytest.mark.parametrize("heads", SHARED_HEADS, ids=ids)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=ids)
def test_query_heads_share_kv_heads(dims, heads):
    tensors = inputs(2, 150, 210, *heads, *dims)
    check_all(tensors, True, window=(80, 0))
    check_all(tensors, window=(20, 100), softcap=10.0)
    check_all(tensors, chunk=64)


@all_dims
def test_every_alignment_of_a_window(dims):
    """Sk - Sq shifts both edges of the window through blocks of keys and rows."""
    for shift in range(-70, 140, 7):
        seqlen_q = 75
        tensors = inputs(1, seqlen_q, max(1, seqlen_q + shift), 2, 1, *dims, key=shift)
        check_all(tensors, window=(33, 0))
        if shift % 2:
            check_all(tensors, window=(10, 70))


@all_dims
def test_many_tiles_a_cta(dims):
    """More tiles than SMs, tiles of different lengths and some without any work."""
    check_all(inputs(3, 520, 520, 16, 16, *dims), True, window=(100, 0))
    check_all(inputs(5, 333, 200, 15, 15, *dims, dtype=torch.float16), window=(20, 20))
    check_all(inputs(2, 700, 700, 16, 8, *dims), chunk=250)


@all_dims
def test_long_rows_and_columns(dims):
    check_all(inputs(1, 300, 8191, 2, 1, *dims), True, window=(1000, 0))
    check_all(inputs(1, 5000, 200, 2, 1, *dims), window=(-1, 64))
    check_all(inputs(1, 2100, 2100, 2, 1, *dims), chunk=1024)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_masks(first):
    for seed in range(first, first + 20):
        pick = random.Random(f"mask {seed}")
        kv_heads = pick.choice([1, 2])
        head_dim = pick.choice([64, 64, 96, 128, 128, 192, 256, pick.randint(1, 256)])
        head_dim_v = head_dim if pick.random() < 0.8 else pick.randrange(8, 257, 8)
        lengths = [int(2 ** pick.uniform(3, 9.5)) for _ in range(2)]
        shape = (pick.choice([1, 2]), *lengths, kv_heads * pick.choice([1, 2, 3]), kv_heads, head_dim, head_dim_v)
        bound = [-1, 0, 1, pick.randint(0, 200), pick.randint(0, 1000)]
        options = {
            "window": (pick.choice(bound), pick.choice(bound)),
            "chunk": pick.choice([0, 0, pick.randint(1, 300)]),
            "softcap": pick.choice([0.0, 0.0, pick.uniform(1, 30)]),
        }
        try:
            check_all(inputs(*shape, dtype=pick.choice(DTYPES), key=seed), pick.random() < 0.3, **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: (B, Sq, Sk, H, Hkv, D, Dv) = {shape}") from error


# Exactly what is visible


@all_dims
def test_bounds_are_inclusive(dims):
    """All keys score the same and values are unit vectors, so that out shows the weights: W tokens are (W - 1, 0)."""
    seqlen = 64
    q, k, _ = inputs(1, seqlen, seqlen, 1, 1, *dims)
    v = torch.zeros(1, seqlen, 1, dims[1], dtype=q.dtype, device=DEVICE)
    v[0, :, 0, :seqlen] = torch.eye(seqlen, dtype=q.dtype, device=DEVICE)
    out, lse = attend(q, torch.zeros_like(k), v, True, window=(3, 0))
    wanted = torch.zeros(dims[1], dtype=q.dtype, device=DEVICE)
    wanted[7:11] = 0.25
    assert torch.equal(out[0, 10, 0], wanted)
    assert (lse[0, 0, 3:] - torch.tensor(4.0).log()).abs().max() < 1e-5
    out, _ = attend(q, torch.zeros_like(k), v, window=(1, 2))
    wanted.zero_()[9:13] = 0.25
    assert torch.equal(out[0, 10, 0], wanted)
    out, _ = attend(q, torch.zeros_like(k), v, chunk=4)
    wanted.zero_()[8:12] = 0.25
    assert torch.equal(out[0, 10, 0], wanted)


@all_dims
def test_a_bound_that_reaches_past_every_key_is_none(dims):
    q, k, v = inputs(1, 200, 333, 2, 1, *dims)
    wanted, causal = attend(q, k, v), attend(q, k, v, True)
    for window in ((332, 199), (2**31 - 1, 2**31 - 1), (2**40, 2**40)):
        assert equal(attend(q, k, v, window=window), wanted)
        assert equal(attend(q, k, v, True, window=window), causal)
    for chunk in (333, 2**31 - 1, 2**40):
        assert equal(attend(q, k, v, chunk=chunk), wanted)


@all_dims
@pytest.mark.parametrize(
    "lengths, window, chunk, empty",
    [
        ((129, 64), (32, 64), 0, [0]),  # exactly row 0 sees no key
        ((300, 100), (-1, 0), 0, range(200)),
        ((300, 100), (10, 20), 0, range(180)),
        ((300, 100), (-1, -1), 64, range(200)),  # positions before the first key lie in no chunk
        ((300, 100), (-1, 50), 64, range(200)),
        ((200, 130), (0, 0), 0, range(70)),
    ],
    ids=str,
)
def test_rows_without_keys(lengths, window, chunk, empty, dims):
    """out 0, lse -inf, no gradient; all others have keys."""
    q, k, v = inputs(2, *lengths, 4, 2, *dims)
    empty = torch.tensor(list(empty), device=DEVICE)
    dout, dlse = gradient_of_out(q, v), gradient_of_lse(q)
    dlse[..., empty] = torch.nan  # takes no part
    out, lse = check(q, k, v, window=window, chunk=chunk)
    without = (lse == -torch.inf).nonzero()[:, 2]
    assert torch.equal(without.unique(), empty) and len(without) == 8 * len(empty)
    assert (out[:, empty] == 0).all()
    for mode in modes(q, k, v, False, window=window, chunk=chunk):
        grads = check_gradients(q, k, v, dout, dlse, deterministic=mode, window=window, chunk=chunk)
        assert (grads[0][:, empty] == 0).all() and all(x.isfinite().all() for x in grads)


@all_dims
def test_keys_that_no_row_sees(dims):
    """Their gradients are 0, whatever they hold."""
    q, k, v = inputs(1, 70, 500, 2, 1, *dims)
    hidden = slice(0, 400)  # row 0 stands at 430 and sees keys from 400 on
    for which in (k, v):
        which[:, hidden] *= 1000
    for mode in modes(q, k, v, True, window=(30, 0)):
        grads = check_gradients(q, k, v, causal=True, deterministic=mode, window=(30, 0))
        assert all((x[:, hidden] == 0).all() and (x[:, hidden.stop :] != 0).any() for x in grads[1:])


# Keys outside of the window, in blocks that nobody walks and in those that are masked


@all_dims
def test_bad_keys_outside_of_the_window_are_not_read(dims):
    """NaN in blocks that a row's tile does not walk reaches neither out nor any gradient of the others."""
    window, seqlen, first = (100, 0), 1000, 576
    q, k, v = inputs(2, seqlen, seqlen, 2, 1, *dims)
    dout = gradient_of_out(q, v)
    saved = attend(q, k, v, True, window=window)
    want = backward(q, k, v, dout, None, True, deterministic=True, saved=saved, window=window)
    k[:, :128], v[:, :128] = torch.nan, torch.nan
    out, lse = attend(q, k, v, True, window=window)
    assert out[:, :128].isnan().all()
    assert equal((out[:, first:], lse[..., first:]), (saved[0][:, first:], saved[1][..., first:]))
    got = backward(q, k, v, dout, None, True, deterministic=True, saved=(out, lse), window=window)
    assert equal([x[:, first:] for x in got], [x[:, first:] for x in want])


@all_dims
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
def test_bad_key_that_a_row_does_not_see(dims, bad):
    """A masked score is replaced, not multiplied: nothing of a masked key reaches a row, in any block."""
    q, k, v = inputs(2, 300, 300, 2, 1, *dims)
    for options, seeing in (({"window": (40, 10)}, slice(140, 191)), ({"chunk": 50}, slice(150, 200))):
        out, _ = attend(q, k, v, **options)
        other = k.clone()
        other[:, 150] = bad
        got, _ = attend(q, other, v, **options)
        got[:, seeing] = out[:, seeing]
        assert (got.float() - out.float()).abs().max() <= 2.0**-7 * v.abs().max(), options


def test_what_lies_outside_of_a_long_window_changes_no_bit():
    """Prefill of grouped heads: all keys and values outside of the windows of a warpgroup's rows are replaced."""
    window, rows = (4095, 0), slice(8128, 8192)
    q, k, v = inputs(1, 8192, 8192, 24, 2, 128)
    out, lse = attend(q, k, v, True, window=window)
    other = [k.clone(), v.clone()]
    for x in other:
        x[:, : rows.start - window[0]] = randn(*x[:, : rows.start - window[0]].shape, key="other") * 5
    got, got_lse = attend(q, *other, True, window=window)
    assert equal((got[:, rows], got_lse[..., rows]), (out[:, rows], lse[..., rows]))
    last = q[:, rows]  # bottom-right: the last rows are a problem of their own
    check(last, k, v, True, result=(out[:, rows], lse[..., rows]), window=window)


# Blocks outside of the mask are skipped


def walked(row: dict, seqlen: int, left: int, right: int, chunk: int) -> float:
    """Share of all blocks that a kernel walks, by the schedule that it runs."""
    holds_keys = row["op"] in ("backward", "backward_keys")
    function = torch.ops.flash_attn3.schedule_backward if holds_keys else torch.ops.flash_attn3.schedule
    lines = function(row["id"], 1, 1, 1, seqlen, seqlen, left, right, chunk, 132)
    columns = (2, 5, 6) if holds_keys else (3, 6, 7)  # a block of keys, or the first of 64 rows; begin and end
    blocks = {of: max(0, end - begin) for of, begin, end in lines[:, columns].tolist()}
    whole = -(-seqlen // row["block_m" if holds_keys else "block_n"])
    return sum(blocks.values()) / (whole * len(blocks))


@pytest.mark.parametrize("window, chunk", [((100, 0), 0), ((50, 50), 0), ((-1, -1), 128)], ids=str)
def test_blocks_outside_of_the_mask_are_skipped(window, chunk):
    """At most the blocks that 100 keys and the tile's own rows span, of 8192."""
    for row in harness.table():
        if row["op"] in ("forward", "backward", "backward_keys", "backward_queries"):
            span = 101 + 2 * row["block_n"] + 2 * row["block_m"]
            share = walked(row, 8192, *window, chunk)
            assert 0 < share <= span / 8192, f"{row['name']} walks {share:.1%} of the blocks"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=ids)
def test_a_short_window_takes_a_fraction_of_the_time(dims, deterministic):
    """S 8192, window 100: a tile walks about a tenth of the mean blocks of a causal one."""
    q, k, v = inputs(1, 8192, 8192, 16, 16, *dims)
    dout = gradient_of_out(q, v)

    def milliseconds(window) -> tuple[float, float]:
        saved = attend(q, k, v, True, window=window)
        calls = (
            lambda: torch.ops.flash_attn3.forward(q, k, v, None, 0.1, *harness.bounds(True, window)),
            lambda: torch.ops.flash_attn3.backward(
                dout, None, q, k, v, *saved, None, 0.1, *harness.bounds(True, window), deterministic
            ),
        )
        return tuple(harness.least_milliseconds(call) for call in calls)

    for short, causal in zip(milliseconds((100, 0)), milliseconds((-1, -1)), strict=True):
        assert short < causal / 3, f"{short:.3f} ms with a window, {causal:.3f} ms without"


@all_dims
def test_repeats_are_bitwise_equal(dims):
    q, k, v = inputs(2, 500, 600, 6, 2, *dims)
    dout = gradient_of_out(q, v)
    different = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for options in ({"window": (100, 20)}, {"chunk": 150, "softcap": 10.0}):
        saved = attend(q, k, v, **options)
        wanted = backward(q, k, v, dout, deterministic=True, saved=saved, **options)
        for _ in range(30):
            again = attend(q, k, v, **options)
            grads = backward(q, k, v, dout, deterministic=True, saved=again, **options)
            for x, y in zip((*again, *grads), (*saved, *wanted), strict=True):
                different |= (x != y).any()
    assert not different.item()
