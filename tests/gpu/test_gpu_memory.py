"""Where the kernels read and write: strides, a caller's out, guard bands, poisoned surroundings, offsets past 2^31.

Strided inputs give bitwise what contiguous copies give: the arithmetic is the same, only the addresses differ.
"""

import math

import harness
import oracle
import pytest
import torch
from harness import DEVICE, attend, bounds, check_lse, equal, inputs, ran, randn, row_of
from torch import Tensor
from views import VIEWS, WRITABLE_VIEWS, far_apart, name_of

BATCH, SEQLEN, HEADS, KV_HEADS = 2, 200, 4, 2
GUARD = 7.0
DIMS = [64, 72, 128, 256]


def check_against_copies(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> None:
    before = [x.clone() for x in (q, k, v)]
    got = attend(q, k, v, causal)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "an input was modified"
    assert equal(got, attend(*(x.contiguous() for x in before), causal))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("view", VIEWS, ids=name_of)
def test_all_inputs_are_views(view, dim):
    q = view(BATCH, SEQLEN, HEADS, dim, "q")
    k, v = (view(BATCH, SEQLEN, KV_HEADS, dim, name) for name in "kv")
    check_against_copies(q, k, v)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("view", VIEWS, ids=name_of)
def test_one_input_is_a_view(view, which):
    """Each tensor is read through its own strides (FlagGems issue 5896: those of k were used for v)."""
    tensors = list(inputs(BATCH, SEQLEN, SEQLEN, HEADS, KV_HEADS, 64))
    tensors[which] = view(BATCH, SEQLEN, HEADS if which == 0 else KV_HEADS, 64, "view")
    check_against_copies(*tensors)


@pytest.mark.parametrize("dim", DIMS)
def test_slices_of_a_packed_tensor(dim):
    check_against_copies(*randn(BATCH, SEQLEN, 3, HEADS, dim).unbind(2))
    check_against_copies(*randn(BATCH, SEQLEN, HEADS + 2 * KV_HEADS, dim).split([HEADS, KV_HEADS, KV_HEADS], dim=2))


@pytest.mark.parametrize("stride", [0, 1, 7, 2**40])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "rows", "heads"])
def test_stride_of_a_dim_of_size_one(dim, stride):
    """Means nothing, whatever it is (flashinfer issue 2232: invalid descriptor)."""
    shape = [2, 100, 2, 64]
    shape[dim] = 1
    for which in range(3):
        tensors = list(inputs(shape[0], shape[1], shape[1], shape[2], shape[2], 64))
        strides = list(tensors[which].stride())
        strides[dim] = stride
        tensors[which] = tensors[which].as_strided(tensors[which].shape, strides)
        check_against_copies(*tensors)


@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128, 192])
@pytest.mark.parametrize("lengths", [(130, 130), (65, 200), (200, 65)], ids=str)
def test_surroundings_are_never_read(lengths, dim):
    """NaN in the columns, rows, heads and batches around the views that are passed."""
    seqlen_q, seqlen_k = lengths
    tensors = inputs(2, seqlen_q, seqlen_k, 2, 1, dim)
    embedded = []
    for x in tensors:
        around = torch.full([size + 16 for size in x.shape], torch.nan, dtype=x.dtype, device=DEVICE)
        inside = around[tuple(slice(8, 8 + size) for size in x.shape)]
        embedded.append(inside.copy_(x))
    for causal in (False, True):
        assert equal(attend(*embedded, causal), attend(*tensors, causal))


def call_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool) -> Tensor:
    harness.poison(2 * out.numel(), 4 * math.prod(q.shape[:3]))
    with ran(row_of(q, k, v)):
        return torch.ops.flash_attn3.forward_out(q, k, v, None, out, q.shape[3] ** -0.5, *bounds(causal))


@pytest.mark.parametrize("lengths", [(200, 200), (70, 150), (150, 70), (1, 64)], ids=str)
@pytest.mark.parametrize("view", WRITABLE_VIEWS, ids=name_of)
def test_out_is_a_view(view, lengths):
    """The caller's out is written through its strides, and nothing beside it is."""
    seqlen_q, seqlen_k = lengths
    for dim in (64, 72, 128):
        q, k, v = inputs(BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS, dim)
        out = view(BATCH, seqlen_q, HEADS, dim, "out")
        storage = out.new_empty(0).set_(out.untyped_storage())
        storage.fill_(GUARD)
        lse = call_out(q, k, v, out, True)
        assert equal((out, lse), attend(q, k, v, True))
        out.fill_(GUARD)
        assert (storage == GUARD).all(), "written outside of out"


@pytest.mark.parametrize("dims", harness.HEAD_DIMS, ids=str)
def test_guard_bands_around_out(dims):
    """Rows, heads, batches and columns around out survive, also with head dims that do not fill the tile."""
    for head_dim_v in {dims[1], dims[1] - 8, dims[1] - 24, dims[1] - 3}:
        q, k, v = inputs(2, 131, 97, 3, 1, dims[0], head_dim_v)
        around = torch.full((4, 131 + 128, 5, head_dim_v + 64), GUARD, dtype=q.dtype, device=DEVICE)
        out = around[1:3, 64 : 64 + 131, 1:4, 32 : 32 + head_dim_v]
        lse = call_out(q, k, v, out, False)
        assert equal((out, lse), attend(q, k, v))
        out.fill_(GUARD)
        assert (around == GUARD).all(), f"written outside of out, value head dim {head_dim_v}"


@pytest.mark.parametrize("stride", [0, 1, 7, 2**40])
def test_out_with_an_odd_stride_of_size_one(stride):
    q, k, v = inputs(1, 100, 100, 1, 1, 64)
    out = torch.empty_like(q).as_strided(q.shape, (stride, 64, stride, 1))
    assert equal((out, call_out(q, k, v, out, True)), attend(q, k, v, True))


def test_out_that_overlaps_itself_is_refused():
    q, k, v = inputs(2, 50, 50, 2, 1, 64)
    with pytest.raises(RuntimeError, match="out has stride 0"):
        out = q.new_empty(1, 50, 2, 64).expand(2, -1, -1, -1)
        torch.ops.flash_attn3.forward_out(q, k, v, None, out, 0.125, *bounds(False))


def test_out_without_rows_or_keys():
    q, k, v = inputs(2, 50, 0, 2, 1, 64)
    out = torch.full_like(q, torch.nan)
    lse = torch.ops.flash_attn3.forward_out(q, k, v, None, out, 0.125, *bounds(False))
    assert (out == 0).all() and (lse == -torch.inf).all()
    out = torch.empty(2, 0, 2, 64, dtype=q.dtype, device=DEVICE)
    lse = torch.ops.flash_attn3.forward_out(q[:, :0], k, v, None, out, 0.125, *bounds(False))
    assert lse.shape == (2, 2, 0)


# Huge tensors. 2^31 elements are 4.3 GB; the shapes below keep the arithmetic small.


def test_rows_past_two_to_the_31_elements():
    seqlen = 192 * 87_400  # more than 2^31 / 128, and a multiple of both tile heights
    q = randn(1, seqlen, 1, 128)
    _, k, v = inputs(1, 1, 65, 1, 1, 128)
    assert q.numel() > 2**31
    out, lse = attend(q, k, v)
    for rows in (slice(0, 384), slice(seqlen - 384, seqlen)):
        assert equal((out[:, rows], lse[..., rows]), attend(q[:, rows], k, v))


def test_keys_past_two_to_the_31_elements():
    """Three keys take part, the first, one past the boundary and the last; all others have weight 0."""
    seqlen = 2**24 + 999
    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(1, seqlen, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    v = torch.ones_like(k)
    assert k.numel() > 2**31
    q[..., 0] = 1.0
    k[..., 0] = -1000.0
    for row, value in ((0, -2.0), (2**24 + 5, 5.0), (seqlen - 1, 3.0)):
        k[:, row, :, 0] = 0.0
        v[:, row] = value
    out, lse = attend(q, k, v, scale=1.0)
    assert (out == 2.0).all()
    assert (lse.double() - math.log(3)).abs().max() < 1e-5


def test_batches_past_two_to_the_31_elements():
    batch = 66_000  # more than 65535, the limit of a grid's second and third dimension
    q, k, v = inputs(batch, 256, 256, 1, 1, 128)
    assert q.numel() > 2**31
    out, lse = attend(q, k, v, True)
    for at in (0, 65_535, 65_536, batch - 1):
        one = slice(at, at + 1)
        assert equal((out[one], lse[one]), attend(q[one], k[one], v[one], True))


@pytest.mark.parametrize("dim", ["batch", "rows", "heads"])
def test_strides_past_two_to_the_31_elements(dim):
    """Views whose last element lies more than 2^31 elements behind their first, for q, k, v and out."""
    view = far_apart(dim)
    q, k, v = inputs(2, 130, 130, 2, 2, 64)
    wanted = attend(q, k, v, True)
    for which, x in enumerate((q, k, v)):
        tensors = [q, k, v]
        tensors[which] = view.copy_(x)
        assert equal(attend(*tensors, True), wanted)
    view.fill_(torch.nan)
    assert equal((view, call_out(q, k, v, view, True)), wanted)


def test_a_million_tokens_causal():
    """Its last rows against the formula: causal is bottom-right, so they are a problem of their own."""
    q, k, v = inputs(1, 2**20, 2**20, 1, 1, 64)
    out, lse = attend(q, k, v, True)
    q, out, lse = q[:, -96:], out[:, -96:], lse[..., -96:]
    ref, ref_lse = oracle.attention(q, k, v, scale=None, causal=True)
    base, _ = oracle.attention(q, k, v, scale=None, causal=True, dtype=q.dtype)
    oracle.assert_close("out", out, ref, base, 1e-5)
    check_lse(lse, ref_lse)
