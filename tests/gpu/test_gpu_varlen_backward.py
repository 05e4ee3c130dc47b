"""Backward of packed batches: ragged and empty sequences, gaps, malformed lengths, the caller's gradients, invariance.

Every case runs both modes, where they are different kernels, against the float64 formula of each sequence.
"""

import random
from dataclasses import replace

import harness
import packed
import pytest
import torch
from harness import DEVICE, HEAD_DIMS, equal, randn
from packed import Batch, attend, backward, check_gradients, counted, gradient_of_lse, gradient_of_out, make, modes
from test_gpu_varlen import LAYOUTS, malformed, malformed_batches, random_batch

GUARD = 7.0


def ids(value: object) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)


@both_masks
@all_dims
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dims, causal):
    batch = make(*LAYOUTS[layout], dims=dims)
    check_gradients(batch, dlse=gradient_of_lse(batch), causal=causal)


@all_dims
def test_fp16_windows_chunks_and_softcap(dims):
    batch = make(*LAYOUTS["ragged"], dims=dims, dtype=torch.float16)
    check_gradients(batch, causal=True)
    batch = make(*LAYOUTS["more keys"], (6, 2), dims)
    for mask in ({"window": (64, 10)}, {"window": (100, -1)}, {"chunk": 70}, {"softcap": 5.0}):
        check_gradients(batch, **mask)
        check_gradients(batch, causal=True, **mask)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_batches(first):
    for seed in range(first, first + 20):
        batch, options = random_batch(seed)
        dlse = gradient_of_lse(batch) if seed % 2 else None
        try:
            check_gradients(batch, dlse=dlse, times=(0, 1), **options)
        except AssertionError as error:
            lengths = f"{batch.cu_q}, {batch.cu_k}, used {batch.used_q}, {batch.used_k}"
            raise AssertionError(f"seed {seed}, {tuple(batch.q.shape)}, {lengths}, {options}: {error}") from error


@all_dims
def test_many_tiles_a_cta(dims):
    check_gradients(make([777, 333, 500, 80, 640, 1], heads=(16, 16), dims=dims), causal=True)
    check_gradients(make([100 + 7 * i for i in range(40)], heads=(6, 3), dims=dims))


@all_dims
def test_thousands_of_short_sequences(dims):
    pick = random.Random(0)
    check_gradients(make(*([pick.randint(0, 9) for _ in range(3000)] for _ in range(2)), (2, 1), dims), causal=True)


# Empty sequences and rows that no sequence owns


def test_two_empty_sequences_before_a_long_one():
    """A backward that never returned: no query in the first two, no key in the first."""
    batch = make([0, 0, 1023], [0, 1, 2045], (32, 32), (128, 128))
    for causal in (False, True):
        _, dk, dv = check_gradients(batch, causal=causal)
        assert (dk[0] == 0).all() and (dv[0] == 0).all()


@both_masks
@pytest.mark.parametrize("dims", [(256, 256), (128, 128)], ids=ids)
@pytest.mark.parametrize("exchanged", [False, True], ids=["no queries", "no keys"])
def test_sequences_without_queries_or_keys_among_long_ones(exchanged, dims, causal):
    few, many = [0, 1208, 840, 0], [2538, 1742, 840, 3072]
    batch = make(many, few, (4, 1), dims) if exchanged else make(few, many, (4, 1), dims)
    dq, dk, dv = check_gradients(batch, causal=causal)
    for grad in (dq,) if exchanged else (dk, dv):
        assert (grad[:2538] == 0).all() and (grad[5120:] == 0).all()


@all_dims
@pytest.mark.parametrize("total", [(256, 0), (0, 256), (0, 0)], ids=str)
def test_no_query_or_no_key_in_the_whole_batch(total, dims):
    batch = make(*([100 * (n > 0), 156 * (n > 0)] for n in total), (8, 2), dims)
    for mode in (False, True):
        grads = backward(batch, gradient_of_out(batch), gradient_of_lse(batch), True, None, mode, times=(0, 1))
        assert all((grad == 0).all() for grad in grads)


def test_no_sequence():
    for rows in (130, 0):
        batch = make([], [], before=(rows, rows))
        for mode in (False, True):
            grads = backward(batch, gradient_of_out(batch), None, True, None, mode, times=(0, 1))
            assert all((grad == 0).all() for grad in grads)


def fill_outside(batch: Batch, which: int, x: torch.Tensor, value: float) -> None:
    """Writes `value` to the rows of x that no sequence counts."""
    outside = torch.ones(len(x), dtype=torch.bool, device=DEVICE)
    for pair in batch.sequences:
        outside[counted(pair[which])] = False
    x[outside] = value


@both_masks
@all_dims
@pytest.mark.parametrize("value", [torch.nan, 1e4], ids=str)
def test_rows_outside_of_all_sequences(value, dims, causal):
    """Before the first, behind the last, and behind seqused: gradients 0; what they hold reaches nobody."""
    used = {"used_q": [70, 0, 64, 130, 1], "used_k": [100, 50, 0, 65, 200]}
    batch = make([90, 64, 64, 192, 10], [100, 64, 90, 190, 222], (4, 2), dims, before=(33, 70), after=(150, 5), **used)
    dout, dlse = gradient_of_out(batch), gradient_of_lse(batch)
    want = check_gradients(batch, dout, dlse, causal)
    out, lse = attend(batch, causal)
    for which, x in ((0, batch.q), (1, batch.k), (1, batch.v), (0, dout), (0, dlse.T), (0, out), (0, lse.T)):
        fill_outside(batch, which, x, value)
    for mode in modes(batch, causal):
        got = backward(batch, dout, dlse, causal, None, mode, (out, lse))
        assert_alike(got, want, mode)


def assert_alike(got, want, deterministic: bool) -> None:
    """Bitwise equal, in the default mode but for the order of the sums of dq; dk and dv of another kernel are close."""
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) or (not deterministic and (x - y).abs().max() <= 2.0**-6 * y.abs().max())


def test_padding_between_sequences():
    """Each sequence is followed by one row that does not count, with large numbers in it."""
    batch = make([3, 4, 2], heads=(2, 2), used_q=[2, 3, 1], used_k=[2, 3, 1])
    for x in (batch.q, batch.k, batch.v):
        x[[2, 6, 8]] = 1e4
    dout = gradient_of_out(batch)
    for causal in (False, True):
        out, _ = packed.check(batch, causal)
        grads = check_gradients(batch, dout, causal=causal)
        assert all((x[[2, 6, 8]] == 0).all() for x in (out, *grads))


def test_a_long_tail_behind_the_last_sequence():
    batch = make([2000, 1000], heads=(8, 8), after=(30_000, 30_000))
    grads = check_gradients(batch, causal=True)
    assert all((x[3000:] == 0).all() for x in grads)


# Lengths that contradict each other


@pytest.mark.parametrize("name", malformed_batches())
def test_malformed_lengths(name):
    """Gradients of the sequence in question are NaN; all others are right, and nothing else is touched."""
    for dims in ((64, 64), (128, 128), (256, 256)):
        batch = malformed(name, dims)
        dout, dlse = gradient_of_out(batch), gradient_of_lse(batch)
        check_gradients(batch, dout, dlse, True)
        refs = packed.reference_gradients(batch, dout, dlse, True, None, torch.float64)
        bases = packed.reference_gradients(batch, dout, dlse, True, None, batch.q.dtype)
        for mode in modes(batch, True):
            arounds, grads = guarded(batch)
            backward(batch, dout, dlse, True, None, mode, grads=grads)
            harness.assert_close_gradients(grads, refs, bases)
            assert_untouched(arounds, grads)


def guarded(batch: Batch) -> tuple[list, list]:
    """dq, dk, dv with GUARD in the rows, heads and columns around them; the whole and the gradients in it."""
    arounds, grads = [], []
    for x in (batch.q, batch.k, batch.v):
        rows, heads, dim = x.shape
        arounds.append(torch.full((rows + 512, heads + 2, dim + 64), GUARD, dtype=x.dtype, device=DEVICE))
        grads.append(arounds[-1][256 : 256 + rows, 1 : 1 + heads, 32 : 32 + dim])
    return arounds, grads


def assert_untouched(arounds, grads) -> None:
    for around, grad in zip(arounds, grads, strict=True):
        grad.fill_(GUARD)
        assert (around == GUARD).all(), "written outside of the gradient"


# Memory


@all_dims
def test_guard_bands_around_gradients(dims):
    for less in (0, 8, 3):
        lengths, narrower = ([100, 0, 65, 131], [97, 50, 0, 200]), (dims[0] - less, dims[1] - less)
        batch = make(*lengths, (4, 2), narrower, before=(5, 2), after=(3, 70))
        dout, saved = gradient_of_out(batch), attend(batch)
        want = backward(batch, dout, deterministic=True, saved=saved)
        for mode in modes(batch, False):
            arounds, grads = guarded(batch)
            backward(batch, dout, deterministic=mode, saved=saved, grads=grads)
            assert_alike(grads, want, mode)
            assert_untouched(arounds, grads)


def test_strided_tensors():
    """Inputs, dout, dlse, out, lse and gradients that are views: bitwise what copies give."""
    batch = make([100, 0, 65, 130], [100, 30, 65, 200], heads=(4, 4))
    dout, dlse, saved = gradient_of_out(batch), gradient_of_lse(batch), attend(batch, True)
    want = backward(batch, dout, dlse, True, deterministic=True, saved=saved)

    def views(x):
        wide = torch.full((2 * len(x), *x.shape[1:-1], 2 * x.shape[-1]), GUARD, dtype=x.dtype, device=DEVICE)
        yield wide[::2, ..., : x.shape[-1]].copy_(x)
        yield wide[: len(x), ..., ::2].copy_(x)
        yield torch.empty(x.shape[::-1], dtype=x.dtype, device=DEVICE).permute(*range(x.dim())[::-1]).copy_(x)
        yield x.transpose(0, 1).contiguous().transpose(0, 1)

    tensors = {"q": batch.q, "k": batch.k, "v": batch.v, "dout": dout, "dlse": dlse, "out": saved[0], "lse": saved[1]}
    for name, x in tensors.items():
        for index, view in enumerate(views(x)):
            now = tensors | {name: view}
            one = replace(batch, **{n: now[n] for n in "qkv"})
            got = backward(one, now["dout"], now["dlse"], True, deterministic=True, saved=(now["out"], now["lse"]))
            assert equal(got, want), (name, index)
    for index in range(4):
        grads = [list(views(x))[index].fill_(torch.nan) for x in (batch.q, batch.k, batch.v)]
        backward(batch, dout, dlse, True, deterministic=True, saved=saved, grads=grads)
        assert equal(grads, want), index


def test_gradients_in_one_packed_tensor():
    total = 300
    qkv = randn(total, 3, 4, 128)
    batch = Batch(*qkv.unbind(1), (0, 100, 100, 300), (0, 100, 100, 300))
    dout, saved = gradient_of_out(batch), attend(batch, True)
    want = backward(batch, dout, None, True, deterministic=True, saved=saved)
    grads = torch.full_like(qkv, GUARD).unbind(1)
    assert equal(backward(batch, dout, None, True, deterministic=True, saved=saved, grads=grads), want)


def test_rows_and_keys_past_two_to_the_31_elements():
    """Short sequences at both ends; in between one without keys, or without queries."""
    for lengths_q, lengths_k in (([300, 2**24 + 1000, 280], [200, 0, 150]), ([200, 0, 150], [300, 2**24 + 1000, 280])):
        batch = make(lengths_q, lengths_k, (1, 1), (128, 128))
        dout, saved = gradient_of_out(batch), attend(batch)
        for mode in modes(batch, False):
            got = backward(batch, dout, None, deterministic=mode, saved=saved)
            for which in (0, 2):
                rows, keys = (counted(x) for x in batch.sequences[which])
                want = backward(batch.part(which), dout[rows], deterministic=True)
                assert_alike([got[0][rows], got[1][keys], got[2][keys]], want, mode)
            long_q, long_k = (counted(x) for x in batch.sequences[1])
            assert not got[0][long_q].any() and not got[1][long_k].any() and not got[2][long_k].any()
            del got


@pytest.mark.parametrize("strides", [(2**24 + 512, 64), (64, 2**31 + 4096)], ids=["rows", "heads"])
def test_strides_past_two_to_the_31_elements(strides):
    batch = make([70, 0, 65], heads=(2, 2))
    dout, saved = gradient_of_out(batch), attend(batch, True)
    want = backward(batch, dout, None, True, deterministic=True, saved=saved)
    span = 134 * strides[0] + strides[1] + 64
    view = torch.empty(span, dtype=batch.q.dtype, device=DEVICE).as_strided((135, 2, 64), (*strides, 1))
    tensors = {"q": batch.q, "k": batch.k, "v": batch.v, "dout": dout, "out": saved[0]}
    for mode in modes(batch, True):
        for name, x in tensors.items():
            now = tensors | {name: view.copy_(x)}
            far = replace(batch, **{n: now[n] for n in "qkv"})
            assert_alike(backward(far, now["dout"], None, True, None, mode, (now["out"], saved[1])), want, mode)
        for which in range(3):
            grads = [torch.empty_like(x) for x in (batch.q, batch.k, batch.v)]
            grads[which] = view.fill_(torch.nan)
            assert_alike(backward(batch, dout, None, True, None, mode, saved, grads=grads), want, mode)


# A sequence has the same gradients whatever else is in the batch


@both_masks
@all_dims
def test_neighbours_change_no_bit(dims, causal):
    """In the deterministic mode: alone, in another order, at another offset."""
    batch = make([64, 1, 300, 128, 90], [64, 500, 300, 200, 40], dims=dims)
    dout, dlse = gradient_of_out(batch), gradient_of_lse(batch)
    want = backward(batch, dout, dlse, causal, deterministic=True)
    for which in range(5):
        rows, keys = (counted(x) for x in batch.sequences[which])
        part = (batch.part(which), dout[rows], dlse[:, rows])
        assert equal(backward(*part, causal, deterministic=True), (want[0][rows], want[1][keys], want[2][keys]))
    order = (3, 0, 4, 2, 1)
    rows, keys = (
        torch.cat([torch.arange(len(x))[counted(batch.sequences[i][w])] for i in order]).to(DEVICE)
        for w, x in ((0, batch.q), (1, batch.k))
    )
    turned = backward(batch.part(*order), dout[rows], dlse[:, rows], causal, deterministic=True)
    assert equal(turned, (want[0][rows], want[1][keys], want[2][keys]))


@both_masks
@all_dims
def test_equal_lengths_are_close_to_the_dense_call(dims, causal):
    q, k, v = harness.inputs(3, 200, 333, 4, 2, *dims)
    batch = Batch(*(x.flatten(0, 1) for x in (q, k, v)), (0, 200, 400, 600), (0, 333, 666, 999))
    dout = gradient_of_out(batch)
    got = backward(batch, dout, None, causal, deterministic=True)
    dense = harness.backward(q, k, v, dout.view(3, 200, 4, -1), None, causal, deterministic=True)
    for x, y in zip(got, dense, strict=True):
        assert (x - y.flatten(0, 1)).abs().max() <= 2.0**-6 * y.abs().max()
