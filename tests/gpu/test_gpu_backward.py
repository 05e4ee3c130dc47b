"""Backward kernels against the float64 formula over head dims, dtypes, masks, GQA ratios, tails and empty problems.

Every case runs both modes, where they are different kernels. Lengths lie around the tile sizes: 128, 80 and 64 queries,
128 and 64 keys where a CTA holds keys; 192 and 128 queries, 80 and 64 keys where it holds queries.
"""

import random

import harness
import pytest
import torch
from harness import (
    BETWEEN_DIMS,
    DTYPES,
    HEAD_DIMS,
    LENGTH_PAIRS,
    UNALIGNED_DIMS,
    attend,
    backward,
    check_gradients,
    equal,
    gradient_of_lse,
    inputs,
    modes,
    randn,
)

TAILS = (1, 2, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 161, 191, 192, 193, 255, 256, 257, 333)
FP16_TAILS = (1, 65, 129, 193, 320)
UNEQUAL_DIMS = (
    *((40, 64), (40, 80), (64, 128), (128, 64), (96, 200), (192, 64)),
    *((160, 128), (136, 104), (256, 64), (64, 256), (100, 33)),
)
SHARED_HEADS = ((2, 2), (4, 2), (3, 1), (6, 1), (8, 1), (14, 2), (24, 3))


def ids(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)


def test_table_has_every_tile_family():
    for dims in HEAD_DIMS:
        wanted = {"backward_keys", "backward_queries"} | ({"backward"} if max(dims) <= 128 else set())
        for dtype in ("bf16", "fp16"):
            found = {r["op"] for r in harness.table() if (r["head_dim"], r["head_dim_v"], r["dtype"]) == (*dims, dtype)}
            assert wanted <= found, (dims, dtype)


@both_masks
@all_dims
@pytest.mark.parametrize("seqlen", TAILS)
def test_tails(seqlen, dims, causal):
    # The limit is twice the largest error of the formula in 16 bits: of a few rows that may be small by chance.
    check_gradients(*inputs(2 if seqlen > 16 else 32, seqlen, seqlen, 2, 1, *dims), causal=causal)


@both_masks
@all_dims
@pytest.mark.parametrize("seqlen", FP16_TAILS)
def test_tails_fp16(seqlen, dims, causal):
    batch = 2 if seqlen > 16 else 32
    check_gradients(*inputs(batch, seqlen, seqlen, 2, 1, *dims, dtype=torch.float16), causal=causal)


@both_masks
@all_dims
@pytest.mark.parametrize("lengths", LENGTH_PAIRS, ids=ids)
def test_unequal_lengths(lengths, dims, causal):
    check_gradients(*inputs(2, *lengths, 3, 1, *dims), causal=causal)


@both_masks
@pytest.mark.parametrize("heads", SHARED_HEADS, ids=ids)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=ids)
def test_query_heads_share_kv_heads(dims, heads, causal):
    check_gradients(*inputs(2, 150, 210, *heads, *dims), causal=causal)


@both_masks
@pytest.mark.parametrize("dim", BETWEEN_DIMS + UNALIGNED_DIMS)
def test_head_dims_in_between(dim, causal):
    dtype = DTYPES[causal]
    check_gradients(*inputs(2, 130, 197, 2, 1, dim, dtype=dtype), causal=causal)


@both_masks
@pytest.mark.parametrize("dim", [160, 200, 208, 224])
def test_odd_head_dims_with_shared_heads(dim, causal):
    """flash-attention issue 2888: dV wrong for head dims between the tiles' with GQA."""
    check_gradients(*inputs(2, 300, 300, 8, 2, dim), causal=causal)


@both_masks
@pytest.mark.parametrize("dims", UNEQUAL_DIMS, ids=ids)
def test_value_head_dim_differs(dims, causal):
    check_gradients(*inputs(2, 193, 130, 4, 2, *dims), causal=causal)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=ids)
def test_softmax_scale(dims, scale):
    check_gradients(*inputs(1, 200, 300, 2, 2, *dims), causal=True, scale=scale)


@both_masks
@all_dims
def test_many_tiles_a_cta(dims, causal):
    """More tiles than SMs, and not a multiple of them: persistent loops, barriers' phases, the tile orders."""
    check_gradients(*inputs(3, 520, 520, 16, 16, *dims), causal=causal)
    check_gradients(*inputs(5, 333, 333, 30, 15, *dims, dtype=torch.float16), causal=causal)


@both_masks
@all_dims
@pytest.mark.parametrize("lengths", [(300, 8191), (5000, 200)], ids=ids)
def test_long_rows_and_columns(lengths, dims, causal):
    check_gradients(*inputs(1, *lengths, 2, 1, *dims), causal=causal)


@all_dims
def test_every_alignment_of_the_diagonal(dims):
    """Sk - Sq shifts the diagonal through key and query blocks, so that some blocks are masked whole for some rows."""
    for shift in range(-70, 140, 11):
        seqlen_q = 75
        check_gradients(*inputs(1, seqlen_q, max(1, seqlen_q + shift), 2, 1, *dims, key=shift), causal=True)


@pytest.mark.parametrize("first", range(0, 160, 20))
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
        dout = harness.gradient_of_out(q, v)
        if pick.random() < 0.4:  # stored as (B, H, S, D)
            q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        dlse = gradient_of_lse(q) if pick.random() < 0.4 else None
        causal, scale = pick.random() < 0.5, pick.choice([None, None, 0.2])
        try:
            check_gradients(q, k, v, dout, dlse, causal, scale)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: (B, Sq, Sk, H, Hkv, D, Dv) = {shape}, causal {causal}") from error


# Gradients through the LSE


@both_masks
@all_dims
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_gradient_of_the_lse_too(dtype, dims, causal):
    """flash-attention issues 1137, 889: dropped silently. Alone, beside dout, and through strides of its own."""
    q, k, v = inputs(2, 200, 250, 4, 2, *dims, dtype=dtype)
    dout, dlse = harness.gradient_of_out(q, v), gradient_of_lse(q)
    check_gradients(q, k, v, dout, dlse, causal)
    check_gradients(q, k, v, torch.zeros_like(dout), dlse, causal)
    want = backward(q, k, v, dout, dlse, causal, deterministic=True)
    one = torch.full((), 0.25, device=q.device)
    views = (dlse.transpose(1, 2).contiguous().transpose(1, 2), dlse.repeat_interleave(2, 2)[..., ::2])
    for view in views:
        assert not view.is_contiguous() and equal(backward(q, k, v, dout, view, causal, deterministic=True), want)
    expanded = backward(q, k, v, dout, one.expand(dlse.shape), causal, deterministic=True)
    assert equal(expanded, backward(q, k, v, dout, torch.full_like(dlse, 0.25), causal, deterministic=True))


@all_dims
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_gradient_of_the_lse_where_it_is_minus_infinity(dims, bad):
    """lse.square().sum() has -inf for a gradient at rows without keys: it takes no part, for their lse is constant."""
    q, k, v = inputs(1, 200, 120, 2, 1, *dims)
    dout, dlse = harness.gradient_of_out(q, v), gradient_of_lse(q)
    dlse[..., :80] = bad
    grads = check_gradients(q, k, v, dout, dlse, True)
    assert (grads[0][:, :80] == 0).all()


# Rows and keys that take no part


@both_masks
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("heads", [(6, 6), (6, 1)], ids=ids)
def test_queries_outnumber_keys(heads, dtype, causal):
    """flash-attention issue 1272: dQ off by hundreds; here on every mode, ten times."""
    q, k, v = inputs(4, 640, 128, *heads, 128, dtype=dtype)
    dout = harness.gradient_of_out(q, v)
    saved = attend(q, k, v, causal)
    refs, bases = harness.reference_gradients(q, k, v, dout, causal=causal)
    for mode in modes(q, k, v, causal):
        for _ in range(10):
            grads = backward(q, k, v, dout, None, causal, None, mode, saved)
            harness.assert_close_gradients(grads, refs, bases)
            assert not causal or (grads[0][:, :512] == 0).all()


@all_dims
@pytest.mark.parametrize("lengths", [(2048, 1024), (257, 1), (321, 128), (193, 192), (130, 66)], ids=ids)
def test_rows_before_the_first_key(lengths, dims):
    """Causal with more queries than keys: the first Sq - Sk rows see nothing (flash-attention issues 1778, 2199)."""
    seqlen_q, seqlen_k = lengths
    q, k, v = inputs(1, seqlen_q, seqlen_k, 2, 2, *dims)
    for mode in modes(q, k, v, True):
        dq, _, _ = check_gradients(q, k, v, causal=True, deterministic=mode)
        assert (dq[:, : seqlen_q - seqlen_k] == 0).all()


@all_dims
def test_what_rows_without_keys_hold_does_not_matter(dims):
    """Their out, dout and q change no bit of dk and dv, nor of other rows' dq."""
    q, k, v = inputs(2, 300, 170, 4, 2, *dims)
    dout, (out, lse) = harness.gradient_of_out(q, v), attend(q, k, v, True)
    want = backward(q, k, v, dout, None, True, deterministic=True, saved=(out, lse))
    q, out, dout = q.clone(), out.clone(), dout.clone()
    q[:, :130], out[:, :130], dout[:, :130] = 1e3, -1e3, 1e3
    got = backward(q, k, v, dout, None, True, deterministic=True, saved=(out, lse))
    assert equal(got, want)


@both_masks
@all_dims
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 0, 0), (0, 0, 0)], ids=ids)
def test_no_queries_or_no_batch(sizes, dims, causal):
    q, k, v = inputs(*sizes, 4, 2, *dims)
    for mode in (False, True):
        grads = backward(q, k, v, harness.gradient_of_out(q, v), gradient_of_lse(q), causal, None, mode, times=(0, 1))
        assert all((grad == 0).all() for grad in grads)


@both_masks
@all_dims
@pytest.mark.parametrize("sizes", [(2, 64, 8, 2), (1, 1, 1, 1), (3, 257, 6, 3)], ids=ids)
def test_no_keys_at_all(sizes, dims, causal):
    """flash-attention issue 2470."""
    batch, seqlen_q, heads, kv_heads = sizes
    q, k, v = inputs(batch, seqlen_q, 0, heads, kv_heads, *dims)
    for mode in (False, True):
        grads = backward(q, k, v, harness.gradient_of_out(q, v), gradient_of_lse(q), causal, None, mode, times=(0, 1))
        assert (grads[0] == 0).all()


def test_no_keys_and_a_head_dim_that_is_filled_up():
    q, k, v = inputs(1, 70, 0, 2, 1, 36, 20)
    assert (backward(q, k, v, harness.gradient_of_out(q, v), times=(0, 1))[0] == 0).all()


# Large and very negative scores


@both_masks
@all_dims
@pytest.mark.parametrize("factor", [5, 30, 100])
def test_large_logits(factor, dims, causal):
    """Scores up to 30, 5e3 and 5e4: rows that are one-hot, gradients of it that are nearly 0."""
    q, k, v = inputs(1, 150, 333, 2, 1, *dims)
    grads = check_gradients(factor * q, factor * k, v, causal=causal)
    assert all(grad.isfinite().all() for grad in grads)


@both_masks
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)], ids=ids)
def test_large_logits_fp16(dims, causal):
    q, k, v = inputs(1, 150, 333, 2, 1, *dims, dtype=torch.float16)
    check_gradients(20 * q, 20 * k, v, causal=causal)


@both_masks
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=ids)
def test_large_fp16_inputs(dims, causal):
    """flash-attention issue 1052: NaN in the gradients of 3 randn, fp16, S 1024, D 128, causal."""
    check_gradients(*(3 * x for x in inputs(1, 1024, 1024, 1, 1, *dims, dtype=torch.float16)), causal=causal)


def very_negative(seqlen_q: int, seqlen_k: int, heads: int, dim: int, dtype: torch.dtype):
    """Scores of about -120: every LSE is below log of the smallest float32."""
    q, k, v = (0.1 * x for x in inputs(1, seqlen_q, seqlen_k, heads, heads, dim, dtype=dtype))
    q[..., 0], k[..., 0] = 1.0, -120 * dim**0.5
    return q, k, v


@both_masks
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_very_negative_lse(dim, dtype, causal):
    """pytorch issue 196678: the padded half of the last key tile scored 0 and overflowed: NaN in dQ."""
    for seqlen in (64, 192, 320, 704, 832):
        q, k, v = very_negative(seqlen, seqlen, 1, dim, dtype)
        grads = check_gradients(q, k, v, causal=causal)
        assert all(grad.isfinite().all() for grad in grads)


def test_one_query_with_very_negative_scores():
    """cudnn-frontend issue 1072: NaN in all of dK and dV."""
    q, k, v = very_negative(1, 128, 2, 64, torch.bfloat16)
    dout = harness.gradient_of_out(q, v)
    _, _, dv = check_gradients(q, k, v, dout)
    rounding = 2.0**-8 * dv.double().abs().sum(1)  # of each bf16 summand, and of P
    assert ((dv.double().sum(1) - dout[:, 0].double()).abs() <= rounding + 1e-4).all()


@both_masks
@all_dims
def test_scores_all_equal_and_very_negative_or_large(dims, causal):
    """q = (1, 0, ...), k = (logit, 0, ...): P is uniform whatever the logit, so dv does not depend on it.

    Only the rounding of the LSE does: in fp32, 1e4 carries 5e-4, and times log2(e) the exponent errs by as much again.
    """
    q, k, v = inputs(1, 130, 200, 2, 1, *dims)
    dout, dv = harness.gradient_of_out(q, v), None
    for logit in (0.0, -3e4, 3e4, -300.0):
        q.zero_(), k.zero_()
        q[..., 0], k[..., 0] = 1.0, logit
        for mode in modes(q, k, v, causal):
            grads = backward(q, k, v, dout, None, causal, 1.0, mode)
            assert all(grad.isfinite().all() for grad in grads)
            dv = grads[2].float() if dv is None else dv
            error = (grads[2].float() - dv).abs().max()
            assert error <= (2.0**-7 + 3e-7 * abs(logit)) * dv.abs().max(), f"logit {logit}: dv errs by {error:.2e}"


# NaN, Inf and neighbours


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@all_dims
def test_bad_rows_stay_in_their_head(dims, bad):
    """A bad row of q or dout reaches its own dq, and dk and dv of the keys of its head; nothing else."""
    q, k, v = inputs(2, 300, 400, 4, 2, *dims)
    dout = harness.gradient_of_out(q, v)
    saved = attend(q, k, v)
    want = backward(q, k, v, dout, deterministic=True, saved=saved)
    # out and lse of a bad row of q are NaN. The others' are those of the good q: beside a bad row the forward takes its
    # exact step, which rounds differently.
    out, lse = (x.clone() for x in saved)
    out[1, 77, 2], lse[1, 2, 77] = torch.nan, torch.nan
    for which in range(2):
        tensors = [q.clone(), dout.clone()]
        tensors[which][1, 77, 2] = bad
        results = saved if which else (out, lse)
        dq, dk, dv = backward(tensors[0], k, v, tensors[1], deterministic=True, saved=results)
        assert dq[1, 77, 2].isnan().any()
        dq[1, 77, 2] = want[0][1, 77, 2]
        dk[1, :, 1], dv[1, :, 1] = want[1][1, :, 1], want[2][1, :, 1]
        assert equal((dq, dk, dv), want), ("q", "dout")[which]


@all_dims
def test_bad_keys_that_a_row_does_not_see(dims):
    """Query rows whose blocks all lie before the bad keys' blocks never read them."""
    q, k, v = inputs(2, 600, 600, 2, 1, *dims)
    dout = harness.gradient_of_out(q, v)
    want = backward(q, k, v, dout, None, True, deterministic=True)
    for which in range(2):
        tensors = [k.clone(), v.clone()]
        tensors[which][:, 500:] = torch.nan
        dq, _, _ = backward(q, *tensors, dout, None, True, deterministic=True)
        assert torch.equal(dq[:, :320], want[0][:, :320])
        assert dq[:, 500:].isnan().all()


@all_dims
def test_neighbours_do_not_matter(dims):
    """Batches and heads that are replaced change no bit elsewhere; a problem gives the same bits alone."""
    q, k, v = inputs(3, 320, 260, 4, 2, *dims)
    dout = harness.gradient_of_out(q, v)
    want = backward(q, k, v, dout, None, True, deterministic=True)
    one, two = slice(1, 2), slice(2, 4)
    alone = backward(q[one], k[one], v[one], dout[one], None, True, deterministic=True)
    assert equal(alone, [x[one] for x in want])
    head = (q[:, :, two], k[:, :, one], v[:, :, one], dout[:, :, two])
    alone = backward(*head, None, True, deterministic=True)
    assert equal(alone, (want[0][:, :, two], want[1][:, :, one], want[2][:, :, one]))
    others = [x.clone() for x in (q, k, v, dout)]
    for x in others:
        x[[0, 2]] *= 50
    got = backward(*others, None, True, deterministic=True)
    assert equal([x[1] for x in got], [x[1] for x in want])


@all_dims
@pytest.mark.parametrize("rows", [64, 100, 130, 191, 255])
def test_rows_behind_the_sequence_take_no_part(rows, dims):
    """dout = 0 for the rows behind a length gives the gradients of that length, to the rounding of their sum."""
    q, k, v = inputs(2, 384, 300, 2, 1, *dims)
    dout = harness.gradient_of_out(q, v)
    dout[:, rows:] = 0
    for mode in modes(q, k, v, False):
        got = backward(q, k, v, dout, deterministic=mode)
        cut = backward(q[:, :rows], k, v, dout[:, :rows], deterministic=mode)
        assert (got[0][:, rows:] == 0).all()
        for x, y in ((got[0][:, :rows], cut[0]), (got[1], cut[1]), (got[2], cut[2])):
            assert (x.float() - y.float()).abs().max() <= 2.0**-7 * y.abs().max()


@both_masks
@all_dims
def test_parts_of_the_keys_add_up(dims, causal):
    """Context parallel: the backward of each part of the keys, with out and lse of all, is a part of the whole."""
    q, k, v = inputs(2, 150, 340, 4, 2, *dims)
    dout = harness.gradient_of_out(q, v)
    saved = attend(q, k, v, causal)
    want = backward(q, k, v, dout, None, causal, deterministic=True, saved=saved)
    cut = 340 - 150  # every row sees all keys before it
    for mode in modes(q, k, v, causal):
        first = backward(q, k[:, :cut], v[:, :cut], dout, None, False, None, mode, saved)
        last = backward(q, k[:, cut:], v[:, cut:], dout, None, causal, None, mode, saved)
        dk, dv = (torch.cat([first[i], last[i]], 1) for i in (1, 2))
        parts = (first[0].float() + last[0].float(), dk, dv)
        for name, x, y in zip(("dq", "dk", "dv"), parts, want, strict=True):
            assert (x.float() - y.float()).abs().max() <= 2.0**-6 * y.abs().max(), name


def test_dout_of_a_sum():
    """out.sum().backward(): dout is one number with stride 0 everywhere."""
    for dims in HEAD_DIMS:
        q, k, v = inputs(2, 130, 200, 4, 2, *dims)
        ones = torch.ones((), dtype=q.dtype, device=q.device).expand(*q.shape[:3], v.shape[3])
        assert set(ones.stride()) == {0}
        check_gradients(q, k, v, ones, causal=True)


def test_out_of_another_kernel_is_used_as_it_is():
    """delta comes from the out and lse that are passed, not from recomputed ones."""
    q, k, v = inputs(1, 100, 100, 2, 2, 64)
    dout = harness.gradient_of_out(q, v)
    out, lse = attend(q, k, v)
    other = randn(*out.shape, key="other")
    _, _, dv = backward(q, k, v, dout, deterministic=True, saved=(other, lse))
    want = backward(q, k, v, dout, deterministic=True, saved=(out, lse))
    assert torch.equal(dv, want[2])  # dv does not depend on out
    shifted = backward(q, k, v, dout, gradient_of_lse(q), deterministic=True, saved=(out, lse))
    assert torch.equal(shifted[2], want[2]) and not torch.equal(shifted[0], want[0])
