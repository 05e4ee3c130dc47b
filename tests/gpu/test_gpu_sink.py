"""Sinks: a logit a head that joins the softmax without a value. Dense and packed, out, LSE, and every gradient.

out = sum exp(s) v / (sum exp(s) + exp(sink)); lse = log(sum exp(s) + exp(sink)).
"""

import harness
import oracle
import packed
import pytest
import torch
from harness import DEVICE, DTYPES, HEAD_DIMS, equal, gradient_of_lse, gradient_of_out, inputs, randn
from packed import make

import flash_attn3


def ids(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)


def sinks(heads: int, key: object = "sink") -> torch.Tensor:
    """Around the LSE of short rows of N(0, 1) scores."""
    return 3 + 2 * randn(heads, dtype=torch.float32, key=key)


def assert_is_sink(lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Up to the rounding of a change of base."""
    assert torch.allclose(lse, sink[:, None].expand_as(lse), rtol=1e-6, atol=1e-6)


def check_all(tensors, causal: bool = False, **options) -> tuple:
    q, k, v = tensors
    return harness.check_gradients(q, k, v, gradient_of_out(q, v), gradient_of_lse(q), causal, **options)


@both_masks
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@all_dims
def test_out_and_gradients(dims, dtype, causal):
    for lengths in ((200, 200), (130, 333), (333, 130), (1, 64)):
        check_all(inputs(4, *lengths, 4, 2, *dims, dtype=dtype), causal, sink=sinks(4))


@all_dims
def test_with_windows_chunks_and_softcap(dims):
    tensors, sink = inputs(2, 200, 260, 6, 2, *dims), sinks(6)
    check_all(tensors, True, sink=sink, window=(127, 0))
    check_all(tensors, sink=sink, window=(20, 50), softcap=10.0)
    check_all(tensors, sink=sink, chunk=90)


@pytest.mark.parametrize("window", [(127, 0), (-1, -1)], ids=str)
def test_a_layer_of_sixty_four_heads_on_eight(window):
    """S 4096, head dim 64: rows at the end against the formula, and dsink of them alone."""
    q, k, v = inputs(1, 4096, 4096, 64, 8, 64)
    sink, rows = sinks(64), 64
    out, lse = harness.attend(q, k, v, True, sink=sink, window=window)
    last = (q[:, -rows:], k, v)
    result = (out[:, -rows:], lse[..., -rows:])
    harness.check(*last, True, result=result, sink=sink, window=window)
    dout = gradient_of_out(q, v)
    dout[:, :-rows] = 0
    refs, bases = harness.reference_gradients(*last, dout[:, -rows:], None, True, sink=sink, window=window)
    for mode in harness.modes(q, k, v, True, window=window):
        dq, *grads = harness.backward(q, k, v, dout, None, True, None, mode, (out, lse), sink=sink, window=window)
        harness.assert_close_gradients((dq[:, -rows:], *grads), refs, bases)


@all_dims
def test_odd_head_dims_and_many_tiles(dims):
    check_all(inputs(2, 130, 197, 2, 1, dims[0] - 3, dims[1] - 3), True, sink=sinks(2))
    check_all(inputs(3, 520, 520, 16, 8, *dims), True, sink=sinks(16))


@both_masks
@all_dims
def test_minus_infinity_is_no_sink(dims, causal):
    q, k, v = inputs(2, 200, 150, 4, 2, *dims)
    sink, dout, dlse = torch.full((4,), -torch.inf, device=DEVICE), gradient_of_out(q, v), gradient_of_lse(q)
    plain, with_sink = harness.attend(q, k, v, causal), harness.attend(q, k, v, causal, sink=sink)
    assert equal(with_sink, plain)
    want = harness.backward(q, k, v, dout, dlse, causal, deterministic=True, saved=plain)
    *got, dsink = harness.backward(q, k, v, dout, dlse, causal, deterministic=True, saved=plain, sink=sink)
    assert equal(got, want) and (dsink == 0).all()


@both_masks
@all_dims
def test_very_large_and_very_negative_sinks(dims, causal):
    """Sinks that take all the weight or none, beside ordinary ones and -inf."""
    q, k, v = inputs(2, 150, 200, 8, 2, *dims)
    sink = torch.tensor([0.0, 1e4, -1e4, 88.0, -88.0, 1e30, -1e30, -torch.inf], device=DEVICE)
    out, _ = harness.check(q, k, v, causal, sink=sink)
    assert (out[:, :, [1, 3, 5]].abs() < 1e-30).all()
    sink = torch.tensor([0.0, 1e3, -1e4, 88.0, -88.0, 20.0, -1e30, -torch.inf], device=DEVICE)
    grads = check_all((q, k, v), causal, sink=sink)
    assert all(x.isfinite().all() for x in grads)


def test_weights_are_exact():
    """Equal scores: n keys and a sink of log(m) leave n / (n + m) of the weight to the keys."""
    q, k, v = inputs(1, 1, 100, 2, 2, 64)
    sink = torch.tensor([100.0, 300.0], device=DEVICE).log()
    out, lse = harness.attend(q, torch.zeros_like(k), torch.ones_like(v), sink=sink)
    assert (out[0, 0, :, 0] - torch.tensor([0.5, 0.25], device=DEVICE)).abs().max() <= 2.0**-9
    assert (lse[0, :, 0] - torch.tensor([200.0, 400.0], device=DEVICE).log()).abs().max() < 1e-5


@all_dims
def test_rows_and_batches_without_keys(dims):
    """out 0, lse the sink; the gradient of that lse goes to the sink alone."""
    q, k, v = inputs(2, 200, 120, 4, 2, *dims)
    sink, dout, dlse = sinks(4), gradient_of_out(q, v), gradient_of_lse(q)
    grads = check_all((q, k, v), True, sink=sink)
    assert (grads[0][:, :80] == 0).all()
    _, lse = harness.attend(q, k, v, True, sink=sink)
    assert_is_sink(lse[..., :80], sink)
    none = (q, k[:, :0], v[:, :0])
    out, lse = harness.attend(*none, sink=sink, times=(0, 1))
    assert (out == 0).all()
    assert_is_sink(lse, sink)
    for mode in (False, True):
        saved = (out, lse)
        dq, _, _, dsink = harness.backward(*none, dout, dlse, False, None, mode, saved, (0, 1), sink=sink)
        assert (dq == 0).all() and torch.allclose(dsink, dlse.sum((0, 2)), rtol=1e-5, atol=1e-3)


@both_masks
@all_dims
def test_packed(dims, causal):
    """With empty sequences, gaps and a malformed one: rows that nobody owns have lse -inf, and no part in dsink."""
    lengths, sink = ([100, 0, 65, 30, 193, 7], [100, 50, 65, 0, 250, 3]), sinks(4)
    for options in (
        {},
        {"used_q": [90, 0, 65, 20, 100, 7], "used_k": [70, 50, 0, 0, 250, 2]},
        {"used_k": [100, 50, 66, 0, 250, 3]},
    ):
        batch = make(*lengths, dims=dims, before=(5, 0), after=(9, 70), **options)
        dlse = packed.gradient_of_lse(batch)
        for mask in ({}, {"window": (127, 0)}):
            packed.check(batch, causal, sink=sink, **mask)
            packed.check_gradients(batch, None, dlse, causal, sink=sink, **mask)


def test_no_key_in_the_whole_packed_batch():
    batch, sink = make([100, 156], [0, 0], (8, 2)), sinks(8)
    out, lse = packed.attend(batch, sink=sink, times=(0, 1))
    assert (out == 0).all()
    assert_is_sink(lse, sink)
    dlse = packed.gradient_of_lse(batch)
    for mode in (False, True):
        dout, saved = packed.gradient_of_out(batch), (out, lse)
        dq, _, _, dsink = packed.backward(batch, dout, dlse, False, None, mode, saved, (0, 1), sink=sink)
        assert (dq == 0).all() and torch.allclose(dsink, dlse.sum(1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=ids)
def test_dsink_is_bitwise_repeatable(dims):
    """Dense and packed, in both modes: the sum over rows has one order."""
    q, k, v = inputs(3, 700, 700, 8, 2, *dims)
    sink, dout = sinks(8), gradient_of_out(q, v)
    saved = harness.attend(q, k, v, True, sink=sink)
    batch = packed.Batch(*(x.flatten(0, 1) for x in (q, k, v)), (0, 300, 300, 2100), (0, 300, 300, 2100))
    flat, flat_saved = dout.flatten(0, 1), packed.attend(batch, True, sink=sink)
    for mode in harness.modes(q, k, v, True):
        results = [
            (
                harness.backward(q, k, v, dout, None, True, None, mode, saved, sink=sink)[3],
                packed.backward(batch, flat, None, True, None, mode, flat_saved, sink=sink)[3],
            )
            for _ in range(50)
        ]
        assert all(equal(result, results[0]) for result in results)


def test_through_autograd():
    """Leaves that are q, k, v and the sink, the sink alone, and a packed batch."""
    q, k, v = inputs(2, 150, 200, 4, 2, 64)
    dout, dlse = gradient_of_out(q, v), gradient_of_lse(q)
    refs, bases = harness.reference_gradients(q, k, v, dout, dlse, True, sink=sinks(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks(4))]
    rows = harness.row_of(q, k, v), *harness.backward_rows(q, k, v, True, False, leaves[3])
    with harness.ran(rows):
        out, lse = flash_attn3.attention(*leaves[:3], causal=True, sink=leaves[3], return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    harness.assert_close_gradients(grads, refs, bases)
    out = flash_attn3.attention(q, k, v, causal=True, sink=leaves[3])
    (dsink,) = torch.autograd.grad(out, leaves[3:], dout)
    alone, base = (x[3] for x in harness.reference_gradients(q, k, v, dout, None, True, sink=sinks(4)))
    oracle.assert_close("dsink", dsink, alone, base, harness.GRADIENT_FLOOR)

    batch = make([100, 0, 65], [100, 20, 90])
    dout = packed.gradient_of_out(batch)
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v, sinks(4))]
    lengths = batch.lengths
    with harness.ran(packed.forward_rows(batch) + packed.backward_rows(batch, True, False, leaves[3]), 1, 2):
        out = flash_attn3.attention_varlen(*leaves[:3], *lengths[:2], 100, 100, causal=True, sink=leaves[3])
        grads = torch.autograd.grad(out, leaves, dout)
    refs, bases = (
        packed.reference_gradients(batch, dout, None, True, None, dtype, leaves[3])
        for dtype in (torch.float64, batch.q.dtype)
    )
    harness.assert_close_gradients(grads, refs, bases)
