"""The forward of float8_e4m3fn inputs: out and LSE against the float64 formula of the same inputs.

Two things round that do not in 16-bit kernels. Probabilities are e4m3, with 3 bits behind the point: the baseline,
whose error is the unit, rounds them the same way. And WGMMA adds e4m3 products with about 13 bits behind the point of
the largest: see `lse_slack`.
"""

import harness
import oracle
import pytest
import torch
from harness import DEVICE, LENGTH_PAIRS, equal, ran, randn

import flash_attn3

FP8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 128, 256)
BETWEEN_DIMS = (16, 32, 48, 80, 96, 112, 160, 192, 240)
UNALIGNED_DIMS = (1, 8, 33, 100, 250)
SHIFT = 5  # probabilities are times 2^5 before they round

both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v=None, key=0):
    tensors = harness.inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v, key=key)
    return tuple(x.to(FP8) for x in tensors)


def rows_of(q, k, v) -> tuple[str, ...]:
    """The rows that have to run: the smallest tile that holds both head dims, and the transposition before it."""
    row_id = torch.ops.flash_attn3.select_fp8(q.shape[3], v.shape[3], q.shape[1], k.shape[1])
    if row_id < 0 or not harness.rows_of_op("fp8_transpose"):
        pytest.skip(f"this build has no float8_e4m3fn kernel for head dims {q.shape[3]}, {v.shape[3]}")
    row = harness.table()[row_id]
    tiles = [(r["head_dim"], r["head_dim_v"]) for r in harness.table() if r["op"] == "fp8_forward"]
    holding = [dims for dims in tiles if dims[0] >= q.shape[3] and dims[1] >= v.shape[3]]
    assert (row["head_dim"], row["head_dim_v"]) == min(holding) and row["dtype"] == "e4m3", row
    return (row["name"],) if k.shape[1] == 0 else ("fp8_transpose", row["name"])


def attend(q, k, v, **options):
    """The public call over poisoned memory, asserted to have run the kernels; (out, lse) of checked shapes."""
    batch, seqlen_q, heads, _ = q.shape
    elements = batch * seqlen_q * heads * v.shape[3]
    harness.poison(2 * elements, 4 * batch * seqlen_q * heads, v.numel(), 2 * v.numel())
    with torch.no_grad(), ran(rows_of(q, k, v)):
        out, lse = flash_attn3.attention(q, k, v, return_lse=True, **options)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (batch, heads, seqlen_q) and lse.dtype == torch.float32 and lse.is_contiguous()
    return out, lse


def formula(q, k, v, **options) -> dict:
    """The public call's options as the oracle names them."""
    names = {"softmax_scale": "scale", "window_size": "window", "attention_chunk": "chunk"}
    return {names.get(name, name): value for name, value in options.items()}


def baseline(q, k, v, **options) -> torch.Tensor:
    """out with probabilities rounded to e4m3 against the row's maximum."""
    options = formula(q, k, v, **options)
    scale = options.pop("v_descale", None)
    eye = torch.eye(k.shape[1], device=DEVICE, dtype=torch.float64)[None, :, None].expand(*k.shape[:3], -1)
    p = oracle.attention(q, k, eye, **options)[0]  # (B, Sq, H, Sk)
    top = p.amax(-1, keepdim=True).clamp(min=1e-300)
    p = (p / top * 2.0**SHIFT).float().to(FP8).double() * top / 2.0**SHIFT
    values = v.double() if scale is None else v.double() * scale.double()[:, None, :, None]
    return torch.einsum("bqhk,bkhd->bqhd", p, values.repeat_interleave(q.shape[2] // k.shape[2], 2)).to(torch.bfloat16)


def assert_close_out(out, ref, q, k, v, slack, **options) -> None:
    """Each element within what its own row can lose, and all together as close as the baseline.

    A probability errs by 2^-4 of itself, as e4m3 rounds, and twice by the slack of its score, in itself and in the sum.
    Small ones err by up to 2^-10 of a sum of at least 2^5, in either direction. bf16 rounds by 2^-9.
    """
    weighed = oracle.attention(q, k, v.double().abs(), **formula(q, k, v, **options))[0]
    largest = v.double().abs().amax((1, 3)) * options.get("v_descale", torch.ones(1, device=DEVICE))
    largest = largest.repeat_interleave(q.shape[2] // k.shape[2], 1)[:, None, :, None] if k.shape[1] else 0
    bound = (2**-4 + 2 * slack) * weighed + 2**-9 * ref.abs() + 2 ** -(SHIFT + 10) * k.shape[1] ** 0.5 * largest
    worst = (
        ((out.double() - ref).abs() / bound.clamp(min=1e-30)).nan_to_num(torch.inf).amax().item() if ref.numel() else 0
    )
    assert worst <= 1, f"out errs by {worst:.2f} of what its row can lose"
    rms, unit = ((x.double() - ref).square().mean().sqrt().item() for x in (out, baseline(q, k, v, **options)))
    assert rms <= 1.2 * unit + 2 * slack * ref.square().mean().sqrt().item(), (
        f"out errs by {rms:.2e}, rounding {unit:.2e}"
    )


def lse_slack(q) -> float:
    """A score is a sum of D / 32 steps, each cut at 2^-13 of the largest partial sum, which is below 6 sqrt(D) for
    N(0, 1) inputs; the scale is 1 / sqrt(D)."""
    return max(1, q.shape[3] / 32) * 6 * 2**-13 + harness.LSE_FLOOR


def check(q, k, v, slack=None, **options):
    out, lse = attend(q, k, v, **options)
    ref, ref_lse = oracle.attention(q, k, v, **formula(q, k, v, **options))
    slack = slack or lse_slack(q)
    assert_close_out(out, ref, q, k, v, slack, **options)
    empty = ref_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    error = (lse.double() - ref_lse)[~empty].abs()
    assert not error.numel() or error.max().item() <= slack, f"lse errs by {error.max().item():.2e}"
    return out, lse


def descales(batch, kv_heads, key="scale"):
    return tuple(randn(batch, kv_heads, dtype=torch.float32, key=(key, i)).abs() + 0.25 for i in range(3))


@both_masks
@all_dims
def test_lengths_around_tiles(head_dim, causal):
    for lengths in LENGTH_PAIRS:
        check(*inputs(2, *lengths, 4, 2, head_dim), causal=causal)


@both_masks
@all_dims
def test_long(head_dim, causal):
    check(*inputs(1, 2100, 2100, 2, 1, head_dim), causal=causal)


@pytest.mark.parametrize("head_dim", BETWEEN_DIMS + UNALIGNED_DIMS)
def test_other_head_dims(head_dim):
    check(*inputs(2, 130, 200, 4, 2, head_dim), causal=True)
    check(*inputs(2, 130, 200, 4, 2, head_dim, 64))
    check(*inputs(2, 130, 200, 4, 2, 64, head_dim))


@both_masks
@all_dims
def test_descales(head_dim, causal):
    q, k, v = inputs(3, 150, 260, 6, 2, head_dim)
    scales = descales(3, 2)
    slack = 1.5 * lse_slack(q) * (scales[0] * scales[1]).max().item()
    names = ("q_descale", "k_descale", "v_descale")
    got = check(q, k, v, slack=slack, causal=causal, **dict(zip(names, scales, strict=True)))
    # Of any strides, and expanded.
    wide = torch.stack([torch.stack([x, x.neg()], -1) for x in scales])[..., 0]
    assert equal(attend(q, k, v, causal=causal, **dict(zip(names, wide, strict=True))), got)
    one = torch.full((1, 1), 0.5, device=DEVICE)
    expanded = attend(q, k, v, causal=causal, k_descale=one.expand(3, 2))
    assert equal(expanded, attend(q, k, v, causal=causal, k_descale=one.expand(3, 2).contiguous()))


@all_dims
def test_special_descales(head_dim):
    q, k, v = inputs(2, 70, 200, 2, 1, head_dim)
    ones = torch.ones(2, 1, device=DEVICE)
    out, lse = attend(q, k, v, causal=True, q_descale=0 * ones)
    keys = torch.arange(131, 201, device=DEVICE)
    assert torch.allclose(lse, keys.double().log().float().expand_as(lse), atol=1e-5)
    wanted = v.double().cumsum(1)[:, 130:] / keys[None, :, None, None]
    assert (out.double() - wanted).abs().max() < 8e-3
    out, lse = attend(q, k, v, v_descale=0 * ones)
    assert not out.any() and lse.isfinite().all()
    for bad in (torch.nan, -1.0):
        out, lse = attend(q, k, v, k_descale=torch.tensor([[bad], [1.0]], device=DEVICE))
        assert out[0].isnan().all() and lse[0].isnan().all(), "a scale that is none says so"
        assert out[1].isfinite().all() and lse[1].isfinite().all()


@all_dims
def test_masks_softcap_and_sinks(head_dim):
    q, k, v = inputs(2, 300, 400, 4, 2, head_dim)
    sink = 3 + 2 * randn(4, dtype=torch.float32, key="sink")
    check(q, k, v, window_size=(127, 0))
    check(q, k, v, window_size=(20, 50), sink=sink)
    check(q, k, v, attention_chunk=90)
    check(q, k, v, causal=True, sink=sink)
    check(q, k, v, causal=True, softcap=5.0)
    check(q, k, v, window_size=(64, 64), softcap=5.0, sink=sink, q_descale=torch.full((2, 2), 0.5, device=DEVICE))


@all_dims
def test_strides_and_tails(head_dim):
    """Views with gaps, and NaN in what lies around them."""
    q, k, v = inputs(2, 130, 200, 4, 2, head_dim)
    wanted = attend(q, k, v, causal=True)

    def inside(x):
        shape = (x.shape[0], x.shape[1] + 5, x.shape[2] + 1, x.shape[3] + 16)
        big = torch.full(shape, torch.nan, device=DEVICE).to(FP8)
        view = big[:, 2 : 2 + x.shape[1], 1:, 16:]
        view.copy_(x)
        return view

    assert equal(attend(inside(q), inside(k), inside(v), causal=True), wanted)


def test_no_keys_and_no_queries():
    q, k, v = inputs(2, 70, 0, 4, 2, 128)
    out, lse = attend(q, k, v)
    assert not out.any() and (lse == -torch.inf).all()
    with torch.no_grad():
        out = flash_attn3.flash_attn_func(*inputs(2, 0, 70, 4, 2, 128))
    assert out.shape == (2, 0, 4, 128) and out.dtype == torch.bfloat16


@all_dims
def test_nan_inputs(head_dim):
    """NaN in a row of Q spoils that row alone; in V, its column of the rows that see it. What else the row's warp
    computes may round otherwise, for it takes the exact step."""
    q, k, v = inputs(1, 200, 300, 2, 2, head_dim)
    clean, clean_lse = attend(q, k, v, causal=True)
    spoiled = q.float()
    spoiled[0, 77, 1, 3] = torch.nan
    out, lse = attend(spoiled.to(FP8), k, v, causal=True)
    assert out[0, 77, 1].isnan().all() and lse[0, 1, 77].isnan()
    out[0, 77, 1], lse[0, 1, 77] = clean[0, 77, 1], clean_lse[0, 1, 77]
    assert (out - clean).abs().max() < 0.1 and (lse - clean_lse).abs().max() < 1e-3
    assert equal((out[:, :64], out[:, 128:], out[:, :, 0]), (clean[:, :64], clean[:, 128:], clean[:, :, 0]))
    spoiled = v.float()
    spoiled[0, 250, 0, 5] = torch.nan
    out, lse = attend(q, k, spoiled.to(FP8), causal=True)
    assert out[0, 150:, 0, 5].isnan().all()
    out[0, 150:, 0, 5] = clean[0, 150:, 0, 5]
    # Rows before it see the key as masked: 0 times NaN in their own block is NaN, as in every attention.
    out[0, :, 0, 5] = clean[0, :, 0, 5]
    assert equal((out, lse), (clean, clean_lse))


@all_dims
def test_growing_scores_take_the_slow_path(head_dim):
    """Keys whose scores grow from right to left: every block exceeds the reference of the one before."""
    q, k, v = inputs(1, 256, 1024, 2, 1, head_dim)
    q = torch.ones_like(q, dtype=torch.float32).to(FP8)
    ramp = torch.linspace(4, -4, 1024, device=DEVICE)[None, :, None, None]
    k = (ramp + 0.1 * k.float()).to(FP8)
    check(q, k, v, slack=0.2)
    check(q, k, v, slack=0.2, causal=True)


@both_masks
@all_dims
def test_repeats_bitwise(head_dim, causal):
    q, k, v = inputs(2, 700, 900, 8, 4, head_dim)
    first = attend(q, k, v, causal=causal)
    for _ in range(100):
        assert equal(attend(q, k, v, causal=causal), first)


def test_a_sequence_does_not_depend_on_the_batch():
    q, k, v = inputs(6, 300, 500, 4, 2, 128)
    out, lse = attend(q, k, v, causal=True)
    for b in range(6):
        assert equal(attend(*(x[b : b + 1] for x in (q, k, v)), causal=True), (out[b : b + 1], lse[b : b + 1]))


def test_graph_replay_with_new_contents():
    q, k, v = inputs(2, 300, 300, 4, 2, 128)
    other = inputs(2, 300, 300, 4, 2, 128, key="other")
    wanted = attend(*other, causal=True)[0]
    with torch.no_grad():
        flash_attn3.flash_attn_func(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attn3.flash_attn_func(q, k, v, causal=True)
    for static, x in zip((q, k, v), other, strict=True):
        static.copy_(x)
    graph.replay()
    assert torch.equal(out, wanted)


def test_nothing_waits():
    q, k, v = inputs(2, 300, 300, 4, 2, 128)
    with torch.no_grad():
        harness.assert_nothing_waits(lambda: flash_attn3.flash_attn_func(q, k, v, causal=True), 0.1)
    torch.cuda.synchronize()
