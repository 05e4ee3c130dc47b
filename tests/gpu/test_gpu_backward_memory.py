"""Where the backward kernels read and write: strides, a caller's dq, dk, dv, guard bands, offsets past 2^31, memory.

Strided tensors give bitwise, in the deterministic mode, what contiguous copies give.
"""

import math

import harness
import oracle
import pytest
import torch
from harness import (
    DEVICE,
    attend,
    backward,
    backward_rows,
    bounds,
    equal,
    gradient_of_lse,
    gradient_of_out,
    inputs,
    ran,
    randn,
)
from torch import Tensor
from views import VIEWS, WRITABLE_VIEWS, far_apart, name_of

BATCH, SEQLEN, HEADS, KV_HEADS = 2, 200, 4, 2
GUARD = 7.0
NAMES = ("q", "k", "v", "dout", "out")


def check_against_copies(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool = True) -> None:
    """Bitwise what copies give, and no input changes."""
    saved = attend(q, k, v, causal)
    before = [x.clone() for x in (q, k, v, dout, *saved)]
    got = backward(q, k, v, dout, None, causal, deterministic=True, saved=saved)
    for x, y in zip((q, k, v, dout, *saved), before, strict=True):
        assert torch.equal(x, y), "an input was modified"
    copies = [x.contiguous() for x in before[:4]]
    assert equal(got, backward(*copies, None, causal, deterministic=True, saved=saved))
    for mode in set(harness.modes(q, k, v, causal)) - {True}:
        fused = backward(q, k, v, dout, None, causal, deterministic=mode, saved=saved)
        for x, y in zip(fused, got, strict=True):
            # Of equal keys the true dq is 0 and what is left is rounding, of terms around 1.
            least = 1.0 if k.stride(1) == 0 else 0.0
            assert (x.float() - y.float()).abs().max() <= 2.0**-6 * y.abs().max().clamp(min=least)


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("view", VIEWS, ids=name_of)
def test_all_inputs_are_views(view, dim):
    q, dout = (view(BATCH, SEQLEN, HEADS, dim, name) for name in ("q", "dout"))
    k, v = (view(BATCH, SEQLEN, KV_HEADS, dim, name) for name in "kv")
    check_against_copies(q, k, v, dout)


@pytest.mark.parametrize("which", range(5), ids=NAMES)
@pytest.mark.parametrize("view", VIEWS, ids=name_of)
def test_one_input_is_a_view(view, which):
    """Each tensor is read through its own strides (FlashAttention issues 355, 2777; FlagGems issue 5896)."""
    q, k, v = inputs(BATCH, SEQLEN, SEQLEN, HEADS, KV_HEADS, 64)
    tensors = [q, k, v, gradient_of_out(q, v)]
    x = view(BATCH, SEQLEN, KV_HEADS if NAMES[which] in "kv" else HEADS, 64, "view")
    if which < 4:
        tensors[which] = x
        check_against_copies(*tensors)
        return
    if "expanded" in view.__name__:
        return
    out, lse = attend(q, k, v, True)
    want = backward(*tensors, None, True, deterministic=True, saved=(out, lse))
    assert equal(backward(*tensors, None, True, deterministic=True, saved=(x.copy_(out), lse)), want)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_slices_of_a_packed_tensor(dim):
    dout = randn(BATCH, SEQLEN, HEADS, dim, key="dout")
    check_against_copies(*randn(BATCH, SEQLEN, 3, HEADS, dim).unbind(2), dout)
    check_against_copies(*randn(BATCH, SEQLEN, HEADS + 2 * KV_HEADS, dim).split([HEADS, KV_HEADS, KV_HEADS], 2), dout)


def test_lse_that_is_not_contiguous():
    q, k, v = inputs(2, 200, 200, 4, 2, 64)
    dout, (out, lse) = gradient_of_out(q, v), attend(q, k, v, True)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    want = backward(q, k, v, dout, None, True, deterministic=True, saved=(out, lse))
    assert equal(backward(q, k, v, dout, None, True, deterministic=True, saved=(out, strided)), want)


@pytest.mark.parametrize("stride", [0, 1, 7, 2**40])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "rows", "heads"])
def test_stride_of_a_dim_of_size_one(dim, stride):
    """Means nothing, whatever it is (flashinfer issue 2232)."""
    shape = [2, 100, 2, 64]
    shape[dim] = 1
    for which in range(4):
        tensors = list(inputs(shape[0], shape[1], shape[1], shape[2], shape[2], 64))
        tensors.append(gradient_of_out(tensors[0], tensors[2]))
        strides = list(tensors[which].stride())
        strides[dim] = stride
        tensors[which] = tensors[which].as_strided(tensors[which].shape, strides)
        check_against_copies(*tensors)


@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128, 192])
@pytest.mark.parametrize("lengths", [(130, 130), (65, 200), (200, 65)], ids=str)
def test_surroundings_are_never_read(lengths, dim):
    """NaN in the columns, rows, heads and batches around the views that are passed, also around out, lse and dlse."""
    q, k, v = inputs(2, *lengths, 2, 1, dim)
    for causal in (False, True):
        tensors = (gradient_of_out(q, v), gradient_of_lse(q), q, k, v, *attend(q, k, v, causal))
        embedded = []
        for x in tensors:
            around = torch.full([size + 16 for size in x.shape], torch.nan, dtype=x.dtype, device=DEVICE)
            embedded.append(around[tuple(slice(8, 8 + size) for size in x.shape)].copy_(x))
        for mode in (False, True):
            results = []
            for dout, dlse, *qkv, out, lse in (tensors, embedded):
                results.append(backward(*qkv, dout, dlse, causal, None, mode, (out, lse)))
            for x, y in zip(*results, strict=True):
                assert torch.equal(x, y) or (not mode and (x - y).abs().max() <= 2.0**-6 * y.abs().max())


# The caller's dq, dk, dv


def backward_out(q, k, v, dout, saved, grads, causal, deterministic, dlse=None) -> None:
    harness.poison_for_backward(q, k, v)
    with torch.no_grad(), ran(backward_rows(q, k, v, causal, deterministic)):
        dsink = torch.ops.flash_attn3.backward_out(
            dout, dlse, q, k, v, *saved, None, *grads, q.shape[3] ** -0.5, *bounds(causal), deterministic
        )
    assert dsink.shape == (0,)


def filled_storage(x: Tensor) -> Tensor:
    """The whole memory under a view, filled with GUARD."""
    return x.new_empty(0).set_(x.untyped_storage()).fill_(GUARD)


def assert_as_wanted(grads, wanted, deterministic: bool) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        close = torch.equal(x, y) or (not deterministic and (x - y).abs().max() <= 2.0**-6 * y.abs().max())
        assert close, name


@pytest.mark.parametrize("lengths", [(200, 200), (70, 150), (150, 70), (1, 64)], ids=str)
@pytest.mark.parametrize("view", WRITABLE_VIEWS, ids=name_of)
def test_gradients_are_views(view, lengths):
    """The caller's dq, dk, dv are written through their strides, each of its own, and nothing beside them is."""
    for dim in (64, 72, 128, 200):
        q, k, v = inputs(BATCH, *lengths, HEADS, KV_HEADS, dim)
        dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
        want = backward(q, k, v, dout, None, True, deterministic=True, saved=saved)
        for deterministic in harness.modes(q, k, v, True):
            grads = [view(*x.shape, name) for x, name in zip((q, k, v), ("dq", "dk", "dv"), strict=True)]
            storages = [filled_storage(x) for x in grads]
            backward_out(q, k, v, dout, saved, grads, True, deterministic)
            assert_as_wanted(grads, want, deterministic)
            for x, storage in zip(grads, storages, strict=True):
                x.fill_(GUARD)
                assert (storage == GUARD).all(), "written outside of the gradient"


@pytest.mark.parametrize("dims", harness.HEAD_DIMS, ids=str)
def test_guard_bands_around_gradients(dims):
    """Rows, heads, batches and columns around dq, dk, dv survive, also with head dims that do not fill the tile.

    flash-attention issue 2888: columns behind the head dim in an over-wide buffer.
    """
    for less in (0, 8, 24, 3):
        q, k, v = inputs(2, 131, 97, 4, 2, dims[0] - less, dims[1] - less)
        dout, saved = gradient_of_out(q, v), attend(q, k, v)
        want = backward(q, k, v, dout, deterministic=True, saved=saved)
        for deterministic in harness.modes(q, k, v, False):
            arounds, grads = [], []
            for x in (q, k, v):
                batch, seqlen, heads, dim = x.shape
                shape = (batch + 2, seqlen + 256, heads + 2, dim + 64)
                arounds.append(torch.full(shape, GUARD, dtype=x.dtype, device=DEVICE))
                grads.append(arounds[-1][1 : 1 + batch, 128 : 128 + seqlen, 1 : 1 + heads, 32 : 32 + dim])
            backward_out(q, k, v, dout, saved, grads, False, deterministic)
            assert_as_wanted(grads, want, deterministic)
            for x, around in zip(grads, arounds, strict=True):
                x.fill_(GUARD)
                assert (around == GUARD).all(), f"written outside of the gradient, head dims {dims} less {less}"


def test_gradients_in_one_packed_tensor():
    q, k, v = randn(2, 150, 3, 4, 128).unbind(2)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    want = backward(q, k, v, dout, None, True, deterministic=True, saved=saved)
    packed = torch.full((2, 150, 3, 4, 128), GUARD, dtype=q.dtype, device=DEVICE)
    backward_out(q, k, v, dout, saved, packed.unbind(2), True, True)
    assert equal(packed.unbind(2), want)


@pytest.mark.parametrize("lengths", [(70, 0), (0, 70), (0, 0)], ids=str)
def test_caller_s_gradients_without_rows_or_keys(lengths):
    q, k, v = inputs(2, *lengths, 2, 1, 64)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    out, lse = torch.zeros_like(q), torch.full(lse_shape(q), -torch.inf, device=DEVICE)
    dout = torch.zeros_like(q)
    torch.ops.flash_attn3.backward_out(dout, None, q, k, v, out, lse, None, *grads, 0.125, *bounds(False), False)
    assert all((x == 0).all() for x in grads)


def lse_shape(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def test_gradients_that_overlap_themselves_are_refused():
    q, k, v = inputs(2, 50, 50, 2, 1, 64)
    given, grads = (gradient_of_out(q, v), None, q, k, v, *attend(q, k, v)), [torch.empty_like(x) for x in (q, k, v)]
    for which, name in enumerate(("dq", "dk", "dv")):
        bad = list(grads)
        bad[which] = bad[which][:1].expand(2, -1, -1, -1)
        with pytest.raises(RuntimeError, match=name):
            torch.ops.flash_attn3.backward_out(*given, None, *bad, 0.125, *bounds(False), False)


# Huge tensors. 2^31 elements are 4.3 GB; the shapes below keep the arithmetic small.


def test_rows_past_two_to_the_31_elements():
    """Rows of both ends have a dout, all others have none: the gradients are those of these rows alone."""
    seqlen = 192 * 87_400
    q = randn(1, seqlen, 1, 128)
    _, k, v = inputs(1, 1, 65, 1, 1, 128)
    dout = torch.zeros_like(q)
    assert q.numel() > 2**31
    ends = torch.cat([torch.arange(300, device=DEVICE), torch.arange(seqlen - 300, seqlen, device=DEVICE)])
    dout[:, ends] = randn(1, 600, 1, 128, key="dout")
    saved = attend(q, k, v)
    refs, bases = harness.reference_gradients(q[:, ends], k, v, dout[:, ends])
    for deterministic in (False, True):
        dq, dk, dv = backward(q, k, v, dout, deterministic=deterministic, saved=saved)
        assert not dq[:, 300:1000].any() and not dq[:, -1000:-300].any()
        harness.assert_close_gradients((dq[:, ends], dk, dv), refs, bases)
        del dq


def test_keys_past_two_to_the_31_elements():
    """Three keys take part, the first, one past the boundary and the last; all others have weight 0."""
    seqlen = 2**24 + 999
    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(1, seqlen, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    v = torch.ones_like(k)
    assert k.numel() > 2**31
    q[..., 0] = 1.0
    k[..., 0] = -1000.0
    rows = torch.tensor([0, 2**24 + 5, seqlen - 1], device=DEVICE)
    k[:, rows] = randn(1, 3, 1, 128, key="k")
    v[:, rows] = randn(1, 3, 1, 128, key="v")
    dout, saved = gradient_of_out(q, v), attend(q, k, v, scale=1.0)
    refs, bases = harness.reference_gradients(q, k[:, rows], v[:, rows], dout, scale=1.0)
    for deterministic in (False, True):
        dq, dk, dv = backward(q, k, v, dout, None, False, 1.0, deterministic, saved)
        harness.assert_close_gradients((dq, dk[:, rows], dv[:, rows]), refs, bases)
        for x in (dk, dv):
            x[:, rows] = 0
            assert not x.any(), "a key of weight 0 has a gradient"
        del dk, dv, x


def test_batches_past_two_to_the_31_elements():
    batch = 66_000  # more than 65535, the limit of a grid's second and third dimension
    q, k, v = inputs(batch, 256, 256, 1, 1, 128)
    assert q.numel() > 2**31
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    wanted = {}
    for at in (0, 65_535, 65_536, batch - 1):
        part = [x[at : at + 1].clone() for x in (q, k, v, dout)]
        wanted[at] = backward(*part, None, True, deterministic=True)
    for deterministic in (True, False):
        grads = backward(q, k, v, dout, None, True, None, deterministic, saved)
        for at, want in wanted.items():
            assert_as_wanted([x[at : at + 1] for x in grads], want, deterministic)
        del grads


@pytest.mark.parametrize("dim", ["batch", "rows", "heads"])
def test_strides_past_two_to_the_31_elements(dim):
    """Views whose last element lies more than 2^31 elements behind their first, for every input and gradient."""
    view = far_apart(dim)
    q, k, v = inputs(2, 130, 130, 2, 2, 64)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    want = backward(q, k, v, dout, None, True, deterministic=True, saved=saved)
    for which in range(5):
        tensors = [q, k, v, dout, saved[0]]
        tensors[which] = view.copy_(tensors[which])
        *tensors, out = tensors
        for deterministic in (False, True):
            got = backward(*tensors, None, True, None, deterministic, (out, saved[1]))
            assert_as_wanted(got, want, deterministic)
    for which in range(3):
        for deterministic in (False, True):
            grads = [torch.empty_like(x) for x in (q, k, v)]
            grads[which] = view.fill_(torch.nan)
            backward_out(q, k, v, dout, saved, grads, True, deterministic)
            assert_as_wanted(grads, want, deterministic)


def test_dout_that_spans_four_billion_elements():
    """flash-attention issue 2611: dout is a slice of a concatenation, its offsets pass 2^32 bytes and 2^31 elements."""
    batch, seqlen, heads, dim, stride = 4109, 100, 16, 96, 9728
    around = torch.empty(batch * seqlen * stride, dtype=torch.bfloat16, device=DEVICE)
    dout = around.as_strided((batch, seqlen, heads, dim), (seqlen * stride, stride, dim, 1))
    assert around.numel() > 3.9e9
    dout.copy_(randn(batch, seqlen, heads, dim, key="dout"))
    q, k, v = inputs(batch, seqlen, seqlen, heads, heads, dim)
    saved = attend(q, k, v, True)
    got = backward(q, k, v, dout, None, True, deterministic=True, saved=saved)
    assert equal(got, backward(q, k, v, dout.contiguous(), None, True, deterministic=True, saved=saved))
    last = [x[-1:] for x in (q, k, v, dout)]
    refs, bases = harness.reference_gradients(*last, causal=True)
    harness.assert_close_gradients([x[-1:] for x in got], refs, bases)


def test_a_long_sequence_causal():
    """Only its last rows have a dout: causal is bottom-right, so they are a problem of their own for the formula."""
    seqlen, rows = 2**17, 96
    q, k, v = inputs(1, seqlen, seqlen, 1, 1, 64)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    dout[:, :-rows] = 0
    for deterministic in (False, True):
        dq, dk, dv = backward(q, k, v, dout, None, True, None, deterministic, saved)
        assert not dq[:, :-rows].any()
        refs = oracle.gradients(q[:, -rows:], k, v, dout[:, -rows:], causal=True)
        bases = oracle.gradients(q[:, -rows:], k, v, dout[:, -rows:], causal=True, dtype=q.dtype)
        harness.assert_close_gradients((dq[:, -rows:], dk, dv), refs, bases)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_peak_memory(dims, deterministic):
    """Nothing of size Sq x Sk: the gradients, two numbers a row, and where sums of dq are kept, those in fp32."""
    heads, seqlen = 8, 8192
    q, k, v = inputs(1, seqlen, seqlen, heads, heads, *dims)
    dout, (out, lse) = gradient_of_out(q, v), attend(q, k, v, True)
    fused = len(harness.modes(q, k, v, True)) == 2 and not deterministic

    def run() -> tuple[Tensor, ...]:
        return torch.ops.flash_attn3.backward(dout, None, q, k, v, out, lse, None, 0.1, *bounds(True), deterministic)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = run()
    results = 2 * sum(x.numel() for x in grads)
    rows = heads * (seqlen + 256)
    allowed = results + 8 * rows + (4 * rows * dims[0] if fused else 0) + 2**20
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= allowed, f"{peak} bytes, allowed {allowed}"
    assert math.prod((heads, seqlen, seqlen)) > 2 * allowed
