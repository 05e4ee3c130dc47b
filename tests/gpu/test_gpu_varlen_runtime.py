"""How packed batches live with torch: the public functions, no host sync, graphs, streams, repeats, time.

The lengths stay on the GPU: nothing waits for them, and a graph replays with whatever cu_seqlens holds by then.
"""

import random

import harness
import oracle
import packed
import pytest
import torch
from harness import DEVICE, HEAD_DIMS, equal, ran, randn
from packed import Batch, attend, backward, gradient_of_out, ints, make

import flash_attn3

DIMS = [(64, 64), (128, 128), (256, 256)]
LENGTHS = ([100, 0, 65, 400, 7], [100, 30, 0, 500, 7])
STRANGE = (-(2**31), -7, -1, 2**31 - 1, 2**30)


def everything(batch: Batch, causal: bool, deterministic: bool, sink=None) -> tuple[str, ...]:
    return *packed.forward_rows(batch), *packed.backward_rows(batch, causal, deterministic, sink)


# What "packed_schedule" finds out


def any_lengths(pick: random.Random, size: int) -> tuple[list[int], list[int] | None, int]:
    """cu_seqlens, seqused and the rows of a tensor; half of them are malformed somewhere."""
    lengths = [int(2 ** pick.uniform(0, 10)) * (pick.random() < 0.8) for _ in range(size)]
    cu = packed.prefix_sums(lengths, pick.choice([0, 0, 17]))
    total = cu[-1] + pick.choice([0, 0, 50])
    used = [pick.randint(0, n) for n in lengths] if pick.random() < 0.4 else None
    for _ in range(pick.choice([0, 0, 1, 3])):
        cu[pick.randint(0, size)] = pick.choice([*STRANGE, pick.randint(0, total + 1)])
        if used:
            used[pick.randrange(size)] = pick.choice([*STRANGE, 10_000])
    return cu, used, total


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_layout_of_the_device_is_that_of_the_host(first):
    """Sequences, their order, blocks and gaps, of random batches, well-formed and not."""
    for seed in range(first, first + 50):
        pick = random.Random(f"layout {seed}")
        size = pick.choice([1, 2, 5, 31, 32, 33, 200, 1023, 1025, 3000]) if seed else 0
        (cu_q, used_q, total_q), (cu_k, used_k, total_k) = (any_lengths(pick, size or 1) for _ in range(2))
        cu_q, cu_k = cu_q[: size + 1], cu_k[: size + 1]
        used_q, used_k = (None if used is None else used[:size] for used in (used_q, used_k))
        lengths = [ints(x) for x in (cu_q, cu_k, used_q, used_k)]
        on_host = [None if x is None else x.cpu() for x in lengths]
        for block, of_keys in ((pick.choice([64, 80, 128, 192]), False), (pick.choice([64, 128]), True)):
            arguments = (total_q, total_k, block, of_keys)
            harness.poison(16 * size, 12 * size)
            wanted = torch.ops.flash_attn3.varlen_layout(*on_host, *arguments)
            got = torch.ops.flash_attn3.varlen_layout(*lengths, *arguments)
            for name, x, y in zip(("sequences", "order", "blocks", "gaps", "key gaps"), got, wanted, strict=True):
                assert torch.equal(x.cpu(), y), f"seed {seed}, {size} sequences, {name}"
        rows = [packed.rows_of(*x) for x in ((cu_q, used_q, total_q), (cu_k, used_k, total_k))]
        for (q, k), found in zip(zip(*rows, strict=True), wanted[0].tolist(), strict=True):
            bad = q.malformed or k.malformed
            assert found[1::2] == ([0, -1] if bad else [q.length, k.length])
            assert found[::2] == [q.begin, k.begin]


# The public functions


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_public_functions(causal, dims):
    """Values, LSE and gradients are those of the operators; max_seqlen is a number that nothing depends on."""
    batch = make(*LENGTHS, dims=dims, used_q=[90, 0, 60, 400, 7], used_k=[100, 30, 0, 450, 0])
    cu_q, cu_k, used_q, used_k = batch.lengths
    dout, dlse = gradient_of_out(batch), packed.gradient_of_lse(batch)
    saved = attend(batch, causal)
    want = backward(batch, dout, dlse, causal, deterministic=True, saved=saved)
    one = torch.tensor(500, dtype=torch.int32, device=DEVICE)
    for bounds in ((400, 500), (10**6, 2**31 - 1), (1, 1), (one, one)):
        leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
        with ran(everything(batch, causal, True), 1, 2):
            out, lse = flash_attn3.flash_attn_varlen_func(
                *leaves, cu_q, cu_k, *bounds, seqused_q=used_q, seqused_k=used_k, causal=causal, deterministic=True,
                return_attn_probs=True,
            )  # fmt: skip
            grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        assert equal((out, lse), saved) and equal(grads, want)
    out = flash_attn3.attention_varlen(
        batch.q, batch.k, batch.v, cu_q, cu_k, 400, 500, seqused_q=used_q, seqused_k=used_k, causal=causal
    )
    assert torch.equal(out, saved[0])


def test_windows_chunks_and_softcap_through_the_public_function():
    batch = make(*LENGTHS, (6, 2))
    for mask in ({"window": (50, 10)}, {"chunk": 64}, {"softcap": 5.0}, {"window": (100, 0), "softcap": 5.0}):
        options = {harness.OPTION_NAMES[name]: value for name, value in mask.items()}
        arguments = (batch.q, batch.k, batch.v, *batch.lengths[:2], 400, 500)
        with ran(packed.forward_rows(batch)):
            got = flash_attn3.flash_attn_varlen_func(*arguments, return_attn_probs=True, **options)
        assert equal(got, attend(batch, **mask))


def test_one_cu_seqlens_for_both():
    """The same tensor twice, and one tensor for q, k and v."""
    x, cu = randn(300, 4, 64).requires_grad_(), ints([0, 100, 300])
    out = flash_attn3.flash_attn_varlen_func(x, x, x, cu, cu, 200, 200, causal=True, deterministic=True)
    (dx,) = torch.autograd.grad(out.float().sum(), x)
    batch = Batch(*[x.detach()] * 3, (0, 100, 300), (0, 100, 300))
    refs, bases = (
        sum(packed.reference_gradients(batch, torch.ones_like(out), None, True, None, dtype))
        for dtype in (torch.float64, x.dtype)
    )
    oracle.assert_close("dx", dx, refs, bases, harness.GRADIENT_FLOOR)


@pytest.mark.parametrize("packing", ["qkv", "heads"])
def test_packed_qkv_function(packing):
    """Slices of one tensor; its gradient is one tensor too."""
    kv_heads = 4 if packing == "qkv" else 2
    shape = (300, 3, 4, 64) if packing == "qkv" else (300, 4 + 2 * kv_heads, 64)
    leaf, cu = randn(*shape).requires_grad_(), (0, 100, 100, 300)
    parts = leaf.detach().unbind(1) if packing == "qkv" else leaf.detach().split([4, kv_heads, kv_heads], 1)
    batch = Batch(*parts, cu, cu)
    dout, options = gradient_of_out(batch), {} if packing == "qkv" else {"num_heads_q": 4}
    with ran(everything(batch, True, True), 1, 2):
        out = flash_attn3.flash_attn_varlen_qkvpacked_func(
            leaf, ints(cu), 200, causal=True, deterministic=True, **options
        )
        (grad,) = torch.autograd.grad(out, leaf, dout)
    assert torch.equal(out, attend(batch, True)[0])
    want = backward(batch, dout, None, True, deterministic=True)
    assert torch.equal(grad, torch.stack(want, 1) if packing == "qkv" else torch.cat(want, 1))


def test_gradient_through_the_lse():
    """The mean square of the LSE of a packed batch; rows without keys have none."""
    batch = make([100, 60, 30], [100, 40, 0])
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    cu_q, cu_k = batch.lengths[:2]
    out, lse = flash_attn3.flash_attn_varlen_func(*leaves, cu_q, cu_k, 100, 100, causal=True, return_attn_probs=True)
    weight, finite = gradient_of_out(batch), lse.isfinite()
    loss = (out * weight).sum() + torch.where(finite, lse, 0).square().sum() / finite.sum()
    grads = torch.autograd.grad(loss, leaves)
    _, exact = packed.reference(batch, True, None, torch.float64)
    dlse = torch.where(exact.isfinite(), 2 * exact / finite.sum(), 0)
    refs, bases = (
        packed.reference_gradients(batch, weight, dlse, True, None, dtype) for dtype in (torch.float64, batch.q.dtype)
    )
    harness.assert_close_gradients(grads, refs, bases)


@pytest.mark.parametrize("op", ["forward_varlen", "forward_varlen_out", "backward_varlen", "backward_varlen_out"])
def test_opcheck(op):
    batch = make([50, 0, 70], [60, 9, 70])
    sink = randn(4, dtype=torch.float32)
    options = (0.125, *harness.bounds(True))
    if op.startswith("forward"):
        out = (torch.empty_like(batch.q),) if op.endswith("out") else ()
        arguments = (batch.q, batch.k, batch.v, *batch.lengths, sink, *out, *options)
    else:
        saved = attend(batch, True, sink=sink)
        grads = tuple(torch.empty_like(x) for x in (batch.q, batch.k, batch.v)) if op.endswith("out") else ()
        given = (gradient_of_out(batch), packed.gradient_of_lse(batch), batch.q, batch.k, batch.v, *saved)
        arguments = (*given, *batch.lengths, sink, *grads, *options, True)
    torch.library.opcheck(getattr(torch.ops.flash_attn3, op).default, arguments)


def test_torchs_varlen_attention():
    """torch.nn.attention.varlen with this library registered as its implementation, both directions."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this torch cannot replace its flash attention")
    pytest.importorskip("flash_attn_interface")
    batch = make([100, 65, 400], heads=(4, 4), dims=(128, 128))
    dout, cu = gradient_of_out(batch), batch.lengths[0]
    attention.activate_flash_attention_impl("FA3")
    try:
        for window in ((-1, -1), (-1, 0), (100, 0)):
            leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
            options = window_arguments(varlen.varlen_attn, window)
            with ran(everything(batch, window == (-1, 0), False), 1, 2):
                out = varlen.varlen_attn(*leaves, cu, cu, 400, 400, **options)
                grads = torch.autograd.grad(out, leaves, dout)
            refs, bases = (
                packed.reference_gradients(batch, dout, None, False, None, dtype, window=window)
                for dtype in (torch.float64, batch.q.dtype)
            )
            assert torch.equal(out, attend(batch, window=window)[0])
            harness.assert_close_gradients(grads, refs, bases)
    finally:
        attention.restore_flash_attention_impl()


def window_arguments(function, window: tuple[int, int]) -> dict:
    """torch 2.11 has window_size; the releases before it is_causal."""
    import inspect

    if "window_size" in inspect.signature(function).parameters:
        return {"window_size": window}
    if window[0] >= 0:
        pytest.skip("this torch's varlen_attn has no windows")
    return {"is_causal": window == (-1, 0)}


# Streams, graphs, repeats


def test_nothing_waits_on_the_host():
    """Forward and backward through autograd, sinks and windows, lengths and bounds on the device."""
    batches = [make(*LENGTHS, dims=dims) for dims in (*DIMS, (100, 100))]
    problems = []
    for batch in batches:
        leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
        problems.append((leaves, batch.lengths, gradient_of_out(batch)))
    bound, sink = torch.tensor(500, dtype=torch.int32, device=DEVICE), randn(4, dtype=torch.float32).requires_grad_()

    def calls():
        for leaves, (cu_q, cu_k, _, _), dout in problems:
            for deterministic in (False, True):
                out, lse = flash_attn3.flash_attn_varlen_func(
                    *leaves, cu_q, cu_k, bound, bound, causal=True, deterministic=deterministic, return_attn_probs=True
                )
                torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
            out = flash_attn3.attention_varlen(*leaves, cu_q, cu_k, bound, bound, window_size=(50, 0), sink=sink)
            torch.autograd.grad(out, [*leaves, sink], dout)

    harness.assert_nothing_waits(calls, 0.1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_graph_replays_with_other_lengths(dims, deterministic):
    """Captured with short sequences and a small bound; replayed with empty, long, malformed and fewer ones."""
    total = 4100
    batch = make([total], dims=dims)
    q, k, v = (x.requires_grad_() for x in (batch.q, batch.k, batch.v))
    cu_q, cu_k = ints([0, 128, 256, 384, 512]), ints([0, 128, 256, 384, 512])
    dout = randn(total, 4, dims[1], key="dout")

    def step():
        out, lse = flash_attn3.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 4096, 4096, causal=True, deterministic=deterministic, return_attn_probs=True
        )
        return (out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse))))

    side = torch.cuda.Stream()  # autograd needs a call of its own outside of the capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths_q, lengths_k in (
        ([0, 4000, 4007, 4008, 4098], [0, 4000, 4007, 4008, 4098]),
        ([0, 0, 50, 50, 60], [0, 3000, 3000, 3100, 4100]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([100, 90, 4000, 9000, 2], [0, 128, 256, 384, 512]),
        ([0, 128, 256, 384, 512], [0, 128, 256, 384, 512]),
    ):
        cu_q.copy_(ints(lengths_q)), cu_k.copy_(ints(lengths_k))
        with torch.no_grad():
            dout.copy_(randn(*dout.shape, key=lengths_q))
        for x in captured:
            x.detach().fill_(7.0)
        graph.replay()
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), captured, step(), strict=True):
            # The sum of dq has no order in the default mode.
            close = (x.nan_to_num() - y.nan_to_num()).abs().max() <= 2.0**-6 * y.nan_to_num().abs().max()
            same = torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))
            assert torch.equal(x.isnan(), y.isnan()) and (same or (name == "dq" and not deterministic and close)), name


def test_streams_at_the_same_time():
    """Schedules and counters belong to a call: calls that run together share none."""
    batches = [make([700 + i, 30, 0, 500 - i], heads=(8, 2), dims=(128, 128), key=i) for i in range(3)]
    batches.append(make([10] * 500, heads=(4, 4)))
    douts = [gradient_of_out(batch) for batch in batches]

    def run(batch: Batch, dout):
        saved = attend(batch, True)
        return (*saved, *backward(batch, dout, None, True, deterministic=True, saved=saved))

    wanted = [run(*problem) for problem in zip(batches, douts, strict=True)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((index, run(batches[index], douts[index])))
    torch.cuda.synchronize()
    for index, result in results:
        assert equal(result, wanted[index])


def test_side_stream_is_used():
    """Tensors and lengths are written on the stream just before the call."""
    batch = make(*LENGTHS, dims=(128, 128))
    dout, saved = gradient_of_out(batch), attend(batch, True)
    wanted = backward(batch, dout, None, True, deterministic=True, saved=saved)
    tensors = [batch.q, batch.k, batch.v, *batch.lengths[:2]]
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(harness.SLEEP_CYCLES // 10)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        options = (128**-0.5, *harness.bounds(True))
        out, lse = torch.ops.flash_attn3.forward_varlen(*late, None, None, None, *options)
        *grads, _ = torch.ops.flash_attn3.backward_varlen(
            dout, None, *late[:3], out, lse, *late[3:], None, None, None, *options, True
        )
        results = [x.clone() for x in (out, lse, *grads)]
    stream.synchronize()
    assert equal(results, (*saved, *wanted))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_hundred_repeats_are_bitwise_equal(dims):
    """Forward and deterministic backward, with a matmul on another stream beside every second call."""
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    batch = make([333, 0, 777, 5, 64, 190], [300, 20, 777, 5, 0, 190], (6, 2), dims)
    dout, saved = gradient_of_out(batch), attend(batch, True)
    wanted = backward(batch, dout, None, True, deterministic=True, saved=saved)
    tensors, options = (batch.q, batch.k, batch.v), (dims[0] ** -0.5, *harness.bounds(True))
    lengths = batch.lengths
    other.wait_stream(torch.cuda.current_stream())
    different = torch.zeros((), dtype=torch.bool, device=DEVICE)
    with ran(everything(batch, True, True), 100, 200):
        for repeat in range(100):
            if repeat % 2:
                with torch.cuda.stream(other):
                    matrix = (matrix @ matrix).clamp_(-1, 1)
            out, lse = torch.ops.flash_attn3.forward_varlen(*tensors, *lengths, None, *options)
            *grads, _ = torch.ops.flash_attn3.backward_varlen(
                dout, None, *tensors, out, lse, *lengths, None, *options, True
            )
            for x, y in zip((out, lse, *grads), (*saved, *wanted), strict=True):
                different |= (x != y).any()
    torch.cuda.synchronize()
    assert not different.item()


@pytest.mark.parametrize(
    "change",
    [
        lambda given: {"cu_q": given["cu_q"].cpu()},
        lambda given: {"cu_k": given["cu_k"].long()},
        lambda given: {"cu_k": given["cu_k"][:-1]},
        lambda given: {"cu_q": given["cu_q"][:0], "cu_k": given["cu_k"][:0]},
        lambda given: {"cu_q": given["cu_q"][None]},
        lambda given: {"used_q": given["cu_q"]},
        lambda given: {"used_k": given["cu_q"][:2].long()},
        lambda given: {"sink": torch.zeros(3, device=DEVICE)},
        lambda given: {"sink": torch.zeros(4, device=DEVICE, dtype=torch.bfloat16)},
        lambda given: {"q": given["q"][None]},
        lambda given: {"k": given["k"][:5]},
    ],
    ids=["device", "int64", "sizes", "empty", "dims", "used", "used int64", "sink", "sink dtype", "dense", "keys"],
)
def test_operator_refuses_before_any_launch(change):
    """The raw operator checks everything itself: it is called without the Python functions around it."""
    batch = make([50, 70])
    given = dict(zip(("q", "k", "v", "cu_q", "cu_k", "used_q", "used_k", "sink"), (
        batch.q, batch.k, batch.v, *batch.lengths, None), strict=True))  # fmt: skip
    before = torch.ops.flash_attn3.launch_counts()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.ops.flash_attn3.forward_varlen(*(given | change(given)).values(), 0.125, *harness.bounds(True))
    assert len(str(caught.value)) > 20
    assert torch.equal(torch.ops.flash_attn3.launch_counts(), before)
    torch.cuda.synchronize()


# Time


def milliseconds(batch: Batch) -> float:
    tensors, lengths, options = (batch.q, batch.k, batch.v), batch.lengths, (0.1, *harness.bounds(True))
    return harness.least_milliseconds(
        lambda: torch.ops.flash_attn3.forward_varlen(*tensors, *lengths, None, *options), calls=5
    )


def test_one_prefill_among_decodes_costs_what_both_cost():
    """63 sequences of one query and one of 4096, all over 4096 keys."""
    queries = [1] * 40 + [4096] + [1] * 23
    whole = make(queries, [4096] * 64, (32, 8), (128, 128))
    decodes, prefill = whole.part(*range(40), *range(41, 64)), whole.part(40)
    apart = milliseconds(decodes) + milliseconds(prefill)
    together = milliseconds(whole)
    assert together <= 1.1 * apart, f"{together:.3f} ms, apart {apart:.3f} ms"


def test_very_many_short_sequences_cost_what_a_dense_batch_does():
    """8192 sequences of 34 tokens, forward and backward."""
    batch = make([34] * 8192, heads=(8, 8), dims=(256, 256))
    q, k, v = (x.view(8192, 34, 8, 256) for x in (batch.q, batch.k, batch.v))
    dout, lengths, options = gradient_of_out(batch), batch.lengths, (0.0625, *harness.bounds(False))
    tensors, operators = (batch.q, batch.k, batch.v), torch.ops.flash_attn3
    dense = operators.forward(q, k, v, None, *options)
    flat = operators.forward_varlen(*tensors, *lengths, None, *options)
    assert torch.equal(flat[0], dense[0].flatten(0, 1))
    calls = (
        (
            lambda: operators.forward_varlen(*tensors, *lengths, None, *options),
            lambda: operators.forward(q, k, v, None, *options),
        ),
        (
            lambda: operators.backward_varlen(dout, None, *tensors, *flat, *lengths, None, *options, True),
            lambda: operators.backward(dout.view_as(q), None, q, k, v, *dense, None, *options, True),
        ),
    )
    for name, (varlen, plain) in zip(("forward", "backward"), calls, strict=True):
        took, limit = harness.least_milliseconds(varlen, calls=3), 1.2 * harness.least_milliseconds(plain, calls=3)
        assert took <= limit, f"{name}: {took:.3f} ms, allowed {limit:.3f} ms"
