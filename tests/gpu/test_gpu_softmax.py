"""Inputs made to break a softmax that keeps an old row maximum as its reference and checks only for overflow.

Logits are prescribed: with scale 1, q = (1, 0, ...) and k = (logit, 0, ...) every score is exact, so the result is
known to the rounding of P and of out alone, and the bounds here are far tighter than those of a comparison with a
16-bit formula, whose own logits would be off by whole units at these magnitudes. Keys are walked from the last to the
first.
"""

import harness
import oracle
import pytest
import torch
from harness import DEVICE, DTYPES, HEAD_DIMS, attend, check, check_lse, equal, inputs, randn, row_of
from torch import Tensor

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place, relative
ROWS_OF_A_WARPGROUP = 64  # rows of one warpgroup may take the exact step together; beyond them nothing is shared


def assert_exact_logits(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> None:
    """P and out are rounded once each, so out errs by 2 roundoffs of the largest value (a bit more for fp16's subnormal
    P); a logit of magnitude s carries fp32 errors of a few 2^-24 s into its weight."""
    ref, ref_lse = oracle.attention(q, k, v, scale=scale, causal=causal)
    largest = v.abs().max().item()
    logit = ref_lse[ref_lse.isfinite()].abs().max().item() if ref_lse.isfinite().any() else 0.0
    bound = largest * (2.25 * ROUNDOFF[q.dtype] + 2.0**-21 * logit)
    assert not out.isnan().any(), "NaN in out"
    error = (out.double() - ref).abs().max().item()
    assert error <= bound, f"out errs by {error:.2e}, allowed {bound:.2e}"
    check_lse(lse, ref_lse)


def patterns(keys: int) -> dict[str, Tensor]:
    """Logits along the keys, by name."""
    index = torch.arange(keys, dtype=torch.float64, device=DEVICE)
    noise = torch.randn(keys, dtype=torch.float64, device=DEVICE, generator=harness.generator(keys))
    zero = torch.zeros_like(index)

    def spikes(base: Tensor, height: float, *rows: int) -> Tensor:
        logits = base.clone()
        logits[[row % keys for row in rows]] = height
        return logits

    return {
        "all equal": zero,
        "all large": zero + 1e4,
        "all very negative": zero - 1e4,
        "ascending": index * 40,
        "descending": -index * 40,
        "ascending slowly": index * 0.05,
        "descending slowly": -index * 0.05,
        "ascending below the threshold a block": index * 0.02,
        "first key": spikes(zero, 1e3, 0),
        "last key": spikes(zero, 1e3, -1),
        "first and last key": spikes(zero, 1e4, 0, -1),
        "first key over very negative ones": spikes(zero - 1e4, 1e4, 0),
        "last key over noise": spikes(noise, 1e4, -1),
        "first key over noise": spikes(noise, 1e4, 0),
        "edges of blocks": spikes(noise, 2e3, *range(0, keys, 80), *range(63, keys, 64), *range(0, keys, 128)),
        "one visible among very negative ones": spikes(zero - 3e4, 0.0, keys // 2),
        "blocks up and down": torch.where(index // 80 % 2 == 0, 1e3, -1e3),
        "keys up and down": torch.where(index % 2 == 0, 1e3, -1e3),
        "at the limit of the headroom": -(index // 64).floor() * 5.5,  # log(2^8) = 5.545
        "just past the headroom": -(index // 64).floor() * 5.6,
        "wide noise": noise * 1e3,
        "narrow noise": noise * 5,
    }


def prescribed(
    logits: Tensor, queries: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of which even rows see `logits` and odd rows their negative: neighbours in a warp disagree."""
    keys = logits.numel()
    q = torch.zeros(1, queries, 2, dims[0], dtype=dtype, device=DEVICE)
    k = torch.zeros(1, keys, 1, dims[0], dtype=dtype, device=DEVICE)
    q[:, ::2, :, 0], q[:, 1::2, :, 0] = 1, -1
    k[0, :, 0, 0] = logits.to(dtype)
    return q, k, randn(1, keys, 1, dims[1], dtype=dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_prescribed_logits(dims, dtype, causal):
    for queries, keys in ((200, 1000), (200, 200), (130, 129)):
        for name, logits in patterns(keys).items():
            q, k, v = prescribed(logits, queries, dims, dtype)
            try:
                assert_exact_logits(*attend(q, k, v, causal, 1.0), q, k, v, causal, 1.0)
            except AssertionError as error:
                raise AssertionError(f"{name}, {queries} queries, {keys} keys: {error}") from error


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("logit", [-3e4, -200.0, 0.0, 3e4])
def test_first_blocks_masked_whole(logit, dims):
    """Causal: for the upper rows of a tile the first blocks that it walks hold no key at all, and the first key that
    they do see may be far from any initial reference."""
    for queries, keys in ((192, 192), (192, 200), (192, 130), (320, 320), (256, 77), (75, 300)):
        q, k, v = prescribed(torch.full((keys,), logit, device=DEVICE), queries, dims, torch.bfloat16)
        assert_exact_logits(*attend(q, k, v, True, 1.0), q, k, v, True, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("seqlen", [64, 192, 320, 704, 832])
def test_very_negative_lse(seqlen, dim, dtype):
    """pytorch issue 196678: padded keys of a partial tile scored 0 and overflowed against an LSE below -88."""
    q, k, v = (x * 0.1 for x in inputs(1, seqlen, seqlen, 1, 1, dim, dtype=dtype))
    q[..., 0], k[..., 0] = 1.0, -120 * dim**0.5
    for causal in (False, True):
        _, lse = check(q, k, v, causal)
        assert (lse < -88.7).all()


def test_one_query_with_very_negative_scores():
    """cudnn-frontend issue 1072."""
    q, k, v = (x * 0.1 for x in inputs(1, 1, 128, 2, 2, 64))
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0
    check(q, k, v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large_fp16_inputs(causal):
    """flash-attention issue 1052."""
    check(*(3 * x for x in inputs(1, 1024, 1024, 1, 1, 128, dtype=torch.float16)), causal)


@pytest.mark.parametrize("magnitude", [1e3, 1e4, 3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_scores_beyond_the_precision_of_their_exponent(dims, dtype, magnitude):
    """Scores of 1e6 to 1e9, whose rounding alone is more than a power of two: where one key wins, the row is its v."""
    q, k, v = inputs(1, 130, 300, 2, 2, *dims, dtype=dtype)
    rows = torch.arange(31, device=DEVICE)
    winner = rows * 9 + 17
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = magnitude
    k[..., 0] = torch.linspace(0.1, 0.5, 300, device=DEVICE).to(dtype)[None, :, None] * magnitude
    q[:, rows, :, 1 + rows] = magnitude
    k[:, winner, :, 1 + rows] = magnitude
    ref, ref_lse = oracle.attention(q, k, v)
    out, lse = attend(q, k, v)
    assert torch.isfinite(lse).all() and ((lse - ref_lse).abs() <= 1e-6 * ref_lse.abs() + 1e-4).all()
    assert torch.equal(ref[:, rows], v[:, winner].double())
    assert torch.equal(out[:, rows], v[:, winner])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_outliers(dims, dtype):
    """N(0, 1) + N(0, 100) Bernoulli(0.001): the accuracy input of the FlashAttention-3 paper."""
    tensors = []
    for index, x in enumerate(inputs(1, 500, 900, 2, 1, *dims, dtype=dtype)):
        rare = torch.rand(x.shape, device=DEVICE, generator=harness.generator(dims, index)) < 1e-3
        tensors.append(x + 10 * rare * randn(*x.shape, dtype=dtype, key=index))
    check(*tensors)


# NaN, Inf and neighbours. A warpgroup's rows are not touched by what only other rows see.


def rows_apart(row: int, seqlen: int) -> Tensor:
    """Rows that lie in another group of 64 than `row`."""
    index = torch.arange(seqlen, device=DEVICE)
    return index // ROWS_OF_A_WARPGROUP != row // ROWS_OF_A_WARPGROUP


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_bad_query_row_stays_alone(dims, bad):
    for causal in (False, True):
        q, k, v = inputs(2, 300, 400, 4, 2, *dims)
        out, lse = attend(q, k, v, causal)
        q[1, 77, 2] = bad
        got, got_lse = attend(q, k, v, causal)
        assert got[1, 77, 2].isnan().all()
        got[1, 77, 2], got_lse[1, 2, 77] = out[1, 77, 2], lse[1, 2, 77]
        assert (got.float() - out.float()).abs().max() <= 2.0**-7 * v.abs().max(), "rows of the same warpgroup"
        apart = rows_apart(77, 300)
        got[1, ~apart, 2], got_lse[1, 2, ~apart] = out[1, ~apart, 2], lse[1, 2, ~apart]
        assert equal((got, got_lse), (out, lse))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_bad_key_that_a_row_does_not_see(dims, bad):
    """A masked score is replaced, not multiplied: nothing of a masked key reaches a row, in any block."""
    for seqlen_k in (300, 340):
        q, k, v = inputs(2, 300, seqlen_k, 2, 1, *dims)
        out, lse = attend(q, k, v, True)
        first = 150 + seqlen_k - 300  # rows from 150 on see it
        k[:, first] = bad
        got, got_lse = attend(q, k, v, True)
        assert got[:, :150].isfinite().all()
        assert (got[:, :150].float() - out[:, :150].float()).abs().max() <= 2.0**-7 * v.abs().max()
        assert equal((got[:, :128], got_lse[..., :128]), (out[:, :128], lse[..., :128]))
        if bad != 1e30:
            assert got[:, 150:].isnan().any(-1).all()


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_bad_value_that_a_row_does_not_see(dims):
    """A warpgroup whose rows all lie before the bad value's block never reads it."""
    q, k, v = inputs(2, 600, 600, 2, 1, *dims)
    out, lse = attend(q, k, v, True)
    v[:, 500:] = torch.nan
    got, got_lse = attend(q, k, v, True)
    assert equal((got[:, :320], got_lse[..., :320]), (out[:, :320], lse[..., :320]))
    assert got[:, 500:].isnan().all()
    assert torch.equal(got_lse, lse)


@pytest.mark.xfail(strict=False, reason="inside a key block that the warpgroup multiplies, 0 x NaN is NaN in P V")
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_bad_value_in_the_block_of_the_diagonal(dims):
    q, k, v = inputs(1, 300, 300, 2, 1, *dims)
    v[:, 150] = torch.nan
    assert attend(q, k, v, True)[0][:, :150].isfinite().all()


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_neighbours_do_not_matter(dims):
    """Rows, heads and batches that are replaced, by numbers that trigger other branches, change no bit elsewhere."""
    q, k, v = inputs(3, 320, 320, 4, 2, *dims)
    wanted = attend(q, k, v, True)
    other = [x.clone() for x in (q, k, v)]
    other[0][:, 128:] *= 100  # later query rows
    other[1][:, 192:] *= -100  # keys that rows before 192 do not see
    other[2][:, 192:] *= 1000
    got = attend(*other, True)
    assert equal((got[0][:, :128], got[1][..., :128]), (wanted[0][:, :128], wanted[1][..., :128]))

    other = [x.clone() for x in (q, k, v)]
    for x in other:
        x[[0, 2]] *= 100  # other batches
    got = attend(*other, True)
    assert equal((got[0][1], got[1][1]), (wanted[0][1], wanted[1][1]))

    other = [q.clone(), k.clone(), v]
    other[0][:, :, [0, 1, 3]] *= 100  # other heads, also of the same KV head
    other[1][:, :, 0] *= 100
    got = attend(*other, True)
    assert equal((got[0][:, :, 2], got[1][:, 2]), (wanted[0][:, :, 2], wanted[1][:, 2]))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_batch_and_head_invariance(dims, causal):
    """A problem gives the same bits alone and among others."""
    q, k, v = inputs(4, 250, 333, 6, 3, *dims)
    out, lse = attend(q, k, v, causal)
    for batch in range(4):
        one = slice(batch, batch + 1)
        assert equal(attend(q[one], k[one], v[one], causal), (out[one], lse[one]))
    for head in range(3):
        two, one = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        assert equal(attend(q[:, :, two], k[:, :, one], v[:, :, one], causal), (out[:, :, two], lse[:, two]))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_rows_behind_the_sequence_take_no_part(dims):
    """A length that ends inside a tile gives, for its whole groups of 64 rows, the bits of a longer one."""
    q, k, v = inputs(2, 384, 500, 2, 1, *dims)
    q *= 30  # scores of magnitude 30: the exact step is taken often
    out, lse = attend(q, k, v)
    for rows in (64, 100, 130, 191, 255):
        got, got_lse = check(q[:, :rows], k, v)
        whole = rows // ROWS_OF_A_WARPGROUP * ROWS_OF_A_WARPGROUP
        if row_of(q[:, :rows], k, v) == row_of(q, k, v):
            assert equal((got[:, :whole], got_lse[..., :whole]), (out[:, :whole], lse[..., :whole]))
