"""The portable backend against the oracle: every option of the signature, edges, hidden NaN, and O(N) memory."""

import random

import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn3
from flash_attn3 import portable
from flash_attn3.portable import blocks

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other


def make(seed, b, sq, sk, h, hkv, d, dv, dtype):
    torch.manual_seed(seed)
    shapes = ((b, sq, h, d), (b, sk, hkv, d), (b, sk, hkv, dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def compare(q, k, v, qv=None, sink=None, grads=True, **options):
    """out, lse, and gradients of both (against those of the formula) for options in the oracle's words."""
    names = {"scale": "softmax_scale", "window": "window_size", "chunk": "attention_chunk"}
    arguments = {names.get(name, name): value for name, value in options.items()}
    leaves = [None if x is None else x.detach().clone().requires_grad_(grads) for x in (q, k, v, qv, sink)]
    *tensors, given, logits = leaves
    leaves = [x for x in leaves if x is not None]
    out, lse = flash_attn3.attention(*tensors, qv=given, sink=logits, backend="portable", return_lse=True, **arguments)
    options.update(qv=qv, sink=sink)
    ref, ref_lse = oracle.attention(q, k, v, **options)
    base, base_lse = oracle.attention(q, k, v, dtype=q.dtype, **options)
    oracle.assert_close("out", out, ref, base)
    oracle.assert_close("lse", lse, ref_lse, base_lse)
    if not grads:
        return out, lse
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    want = oracle.gradients(q, k, v, dout, dlse, **options)
    base = oracle.gradients(q, k, v, dout, dlse, dtype=q.dtype, **options)
    names = ["dq", "dk", "dv"] + ["dqv"] * (qv is not None) + ["dsink"] * (sink is not None)
    for name, *values in zip(names, got, want, base, strict=True):
        floor = oracle.sink_floor(sink, dout, ref, ref_lse, q.dtype) if name == "dsink" else 1e-4
        oracle.assert_close(name, *values, floor=floor)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", [(1, 1), (1, 77), (77, 1), (64, 64), (65, 129), (129, 65)])
def test_dtypes_and_lengths(dtype, causal, sq, sk):
    out, lse = compare(*make(1, 2, sq, sk, 4, 2, 32, 32, dtype), causal=causal)
    assert out.dtype == dtype and out.is_contiguous() and lse.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (0, 5), (-1, 3), (3, -1), (17, 40), (500, 500)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", [(70, 70), (40, 100), (100, 40)])
def test_windows(window, causal, sq, sk):
    compare(*make(2, 1, sq, sk, 2, 1, 16, 16, torch.float32), window=window, causal=causal)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"softcap": 30.0, "causal": True},
        {"chunk": 16},
        {"chunk": 13, "causal": True},
        {"chunk": 32, "window": (7, 3), "softcap": 2.0},
        {"scale": 0.31},
        {"scale": -0.2, "causal": True},
        {"scale": 0.0},
    ],
)
@pytest.mark.parametrize("sq, sk", [(50, 50), (33, 90), (90, 33)])
def test_scores_and_chunks(options, sq, sk):
    compare(*make(3, 2, sq, sk, 2, 2, 24, 24, torch.float32), **options)


@pytest.mark.parametrize("h, hkv", [(6, 6), (6, 1), (6, 2), (14, 2), (5, 5), (64, 1)])
def test_grouped_heads(h, hkv):
    compare(*make(4, 2, 37, 41, h, hkv, 16, 16, torch.bfloat16), causal=True)


@pytest.mark.parametrize("d, dv", [(192, 128), (64, 512), (17, 5), (1, 1), (300, 33), (80, 80)])
def test_head_dims(d, dv):
    compare(*make(5, 1, 35, 40, 2, 1, d, dv, torch.bfloat16), causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_qv(dtype):
    q, k, v = make(6, 2, 30, 45, 4, 2, 16, 64, dtype)
    qv = torch.randn(2, 30, 4, 64).to(dtype)
    compare(q, k, v, qv=qv, causal=True)
    compare(q, k, v, qv=qv, window=(5, 5), softcap=3.0, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sq, sk", [(30, 45), (45, 30), (1, 40), (20, 0)])
def test_sinks_c47(dtype, sq, sk):
    """One more logit a head, far below, among and far above the scores; lse includes it."""
    q, k, v = make(19, 2, sq, sk, 8, 2, 16, 12, dtype)
    sink = torch.tensor([-1e4, -30.0, -1.0, 0.0, 1.0, 3.0, 9.0, 80.0]).to(torch.promote_types(dtype, torch.float32))
    for options in ({}, {"causal": True}, {"window": (7, 2), "softcap": 2.0, "scale": 0.3}, {"chunk": 9}):
        out, lse = compare(q, k, v, sink=sink, **options)
        if sk == 0 or (options.get("causal") and sq > sk):
            assert (out[:, 0] == 0).all() and torch.equal(lse[..., 0], sink.expand(2, -1))


def test_a_sink_of_minus_infinity_is_none():
    for sk in (40, 0):
        q, k, v = (x.requires_grad_() for x in make(20, 1, 50, sk, 4, 2, 16, 16, torch.float32))
        sink = torch.full((4,), -torch.inf, requires_grad=True)
        out, lse = flash_attn3.attention(q, k, v, causal=True, sink=sink, return_lse=True)
        want = flash_attn3.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        grads = torch.autograd.grad([out, lse], (q, k, v, sink), [torch.ones_like(out), lse])
        wanted = torch.autograd.grad(want, (q, k, v), [torch.ones_like(out), lse])
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=False)) and (grads[3] == 0).all()


def test_several_blocks_of_rows_keys_and_heads(monkeypatch):
    """Cuts in every dimension, at sizes that do not divide the lengths."""
    monkeypatch.setattr(blocks, "CPU", blocks.BlockSize(64, 48, 1))
    for options in ({}, {"causal": True}, {"window": (30, 20)}, {"chunk": 37}, {"causal": True, "softcap": 1.0}):
        compare(*make(7, 2, 150, 201, 4, 2, 16, 24, torch.float32), **options)
        compare(*make(7, 2, 150, 201, 4, 2, 16, 24, torch.float32), sink=torch.randn(4), **options)
    monkeypatch.setattr(blocks, "CPU", blocks.BlockSize(64, 48, 3 * 128 * 48))  # a few heads at once, not dividing them
    compare(*make(8, 3, 100, 100, 10, 5, 8, 8, torch.float32), causal=True)


@pytest.mark.parametrize("seed", range(200))
def test_random_problem(seed):
    r = random.Random(seed)
    hkv = r.choice([1, 2, 3])
    dtype = r.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    d, dv = r.randint(1, 72), r.randint(1, 72)
    q, k, v = make(seed, r.randint(1, 2), r.randint(1, 99), r.randint(1, 99), hkv * r.randint(1, 3), hkv, d, dv, dtype)
    compare(
        q,
        k,
        v,
        qv=torch.randn(*q.shape[:3], dv).to(dtype) if r.random() < 0.2 else None,
        causal=r.random() < 0.5,
        window=r.choice([(-1, -1), (-1, -1), (r.randint(0, 99), r.randint(-1, 99)), (-1, r.randint(0, 20))]),
        softcap=r.choice([0.0, 0.0, 1.5, 20.0]),
        sink=torch.randn(q.shape[2]).to(torch.promote_types(dtype, torch.float32)) if r.random() < 0.3 else None,
        chunk=r.choice([0, 0, 0, r.randint(1, 80)]),
    )


@pytest.mark.parametrize("b, sq, sk", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(b, sq, sk, causal):
    leaves = [x.requires_grad_() for x in make(9, b, sq, sk, 4, 2, 16, 8, torch.bfloat16)]
    out, lse = flash_attn3.flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
    assert out.shape == (b, sq, 4, 8) and lse.shape == (b, 4, sq)
    assert (out == 0).all() and torch.isneginf(lse).all()
    (out.sum() + lse.sum()).backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in leaves)


def test_rows_without_a_key_c06():
    q, k, v = make(10, 1, 2048, 1024, 1, 1, 64, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert (out[:, :1024] == 0).all() and torch.isneginf(lse[..., :1024]).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[..., 1024:]).all()
    (out.float().square().sum() + lse[..., 1024:].square().mean()).backward()
    assert (q.grad[:, :1024] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
    compare(*make(10, 1, 300, 150, 2, 1, 64, 64, torch.bfloat16), causal=True)

    q, k, v = make(11, 1, 129, 64, 2, 2, 32, 32, torch.float32)
    out, lse = compare(q, k, v, window=(32, 64))
    empty = torch.isneginf(lse[0, 0])
    assert empty.tolist() == [True] + [False] * 128
    assert (out[:, 0] == 0).all()


def test_lse_gradient_at_rows_without_a_key_is_ignored():
    """lse is the constant -inf there, whatever arrives from above; (-inf) ** 2 sends -inf or NaN down."""
    leaves = [x.requires_grad_() for x in make(12, 1, 8, 4, 2, 2, 8, 8, torch.float32)]
    _, lse = flash_attn3.attention(*leaves, causal=True, return_lse=True)
    lse.square().mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
    assert (leaves[0].grad[:, :4] == 0).all() and (leaves[0].grad[:, 5:] != 0).any()


def test_windows_are_inclusive_c07():
    q, k = torch.randn(1, 64, 1, 64), torch.zeros(1, 64, 1, 64)
    v = torch.eye(64).view(1, 64, 1, 64)
    out = flash_attn3.attention(q, k, v, causal=True, window_size=(3, 0))
    want = torch.zeros(64)
    want[7:11] = 0.25
    assert torch.equal(out[0, 10, 0], want)
    assert "(W - 1, 0)" in flash_attn3.flash_attn_func.__doc__


def test_e4m3_with_descales():
    torch.manual_seed(13)
    q, k, v = (torch.randn(2, s, h, 64).to(torch.float8_e4m3fn) for s, h in ((40, 4), (50, 2), (50, 2)))
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    expanded = torch.tensor(0.7).expand(2, 2)  # stride 0, as clients pass it
    for q_descale, k_descale, v_descale in ((None, None, None), descales, (expanded, expanded, expanded)):
        factors = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out, lse = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **factors)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        ref, ref_lse = oracle.attention(q, k, v, causal=True, **factors)
        oracle.assert_close("out", out, ref, ref.bfloat16())
        oracle.assert_close("lse", lse, ref_lse, ref_lse.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, 4)}, {"attention_chunk": 16}])
def test_hidden_values_do_not_matter(value, options):
    """NaN and infinities in keys and values that a row does not see leave it bitwise alone, also within its block."""
    q, k, v = make(14, 2, 64, 64, 4, 2, 16, 16, torch.bfloat16)
    key = 40
    band = {"causal": options.get("causal", False), "window": options.get("window_size", (-1, -1))}
    sees = oracle.visible(64, 64, **band, chunk=options.get("attention_chunk", 0))[:, key]
    assert sees.any() and not sees.all()

    def run(k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn3.flash_attn_func(*leaves, return_attn_probs=True, **options)
        weight = torch.where(sees, 0.0, 1.0)[None, :, None, None]
        grads = torch.autograd.grad(out, leaves, weight * torch.ones_like(out))
        return out, lse, grads

    clean = run(k, v)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, key], bad_v[:, key] = value, value
    out, lse, grads = run(bad_k, bad_v)
    assert torch.equal(out[:, ~sees], clean[0][:, ~sees]) and torch.equal(lse[..., ~sees], clean[1][..., ~sees])
    assert torch.equal(grads[0][:, ~sees], clean[2][0][:, ~sees])
    out, _, _ = run(k, bad_v)
    expected = torch.full_like(out[:, sees], value)
    assert torch.equal(out[:, sees].nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))


def test_nan_query_stays_in_its_row():
    q, k, v = make(15, 1, 20, 20, 2, 2, 16, 16, torch.float32)
    clean = flash_attn3.attention(q, k, v, causal=True)
    q[:, 7] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn3.attention(*leaves, causal=True)
    assert out[:, 7].isnan().all()
    rows = [i for i in range(20) if i != 7]
    assert torch.equal(out[:, rows], clean[:, rows])
    out.sum().backward()
    assert torch.isfinite(q.grad[:, rows]).all()
    assert torch.isfinite(k.grad[:, 8:]).all() and torch.isfinite(v.grad[:, 8:]).all()  # keys that row 7 does not see


@pytest.mark.parametrize("order", ["late", "ascending", "descending"])
def test_huge_scores(order):
    """Scores far beyond exp's range, the largest anywhere in the row."""
    q, k, v = make(16, 1, 70, 1500, 2, 1, 32, 32, torch.float32)
    size = {
        "late": torch.cat([torch.ones(1499), torch.full((1,), 300.0)]),
        "ascending": torch.linspace(0, 100, 1500),
        "descending": torch.linspace(100, 0, 1500),
    }[order]
    compare(q, k * size[None, :, None, None], v)


def test_gradients_are_exact_in_float64():
    leaves = [x.requires_grad_() for x in make(17, 1, 4, 5, 2, 1, 3, 2, torch.float64)]
    qv = torch.randn(1, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"causal": True}, {"window_size": (2, 1), "softcap": 1.3}, {"attention_chunk": 2}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, qv, options=options: flash_attn3.attention(q, k, v, qv=qv, return_lse=True, **options)[0],
            (*leaves, qv),
        )
    assert torch.autograd.gradcheck(lambda *x: flash_attn3.attention(*x, return_lse=True), leaves)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_memory_is_linear():
    """No operation of forward or backward makes a tensor beyond a few times the inputs, at any length."""
    for s in (1024, 4096):
        q, k, v = make(18, 1, s, s, 1, 1, 8, 8, torch.float32)
        sink, options = torch.zeros(1), (0.3, 700, 0, 0, 0.0)
        with Largest() as largest:
            out, lse = portable.forward(q, k, v, None, None, None, None, sink, *options)
            portable.backward(out, None, q, k, v, None, out, lse, sink, *options)
        bound = max(8 * q.numel(), blocks.CPU.rows * blocks.CPU.keys)
        assert q.numel() <= largest.elements <= bound < s * s


def test_key_blocks_cover_what_is_visible_and_nothing_else():
    """Every visible pair is in exactly one block, and blocks without a mask are wholly visible."""
    r = random.Random(0)
    for _ in range(300):
        sq, sk = r.randint(1, 90), r.randint(1, 90)
        window = (r.choice([-1, r.randint(0, 60)]), r.choice([-1, r.randint(0, 60)]))
        chunk = r.choice([0, r.randint(1, 40)])
        band = blocks.Band(sq, sk, *window, chunk)
        want = oracle.visible(sq, sk, window=window, chunk=chunk)
        seen = torch.zeros(sq, sk, dtype=torch.int32)
        rows = r.randint(1, 40)
        for begin in range(0, sq, rows):
            end = min(begin + rows, sq)
            for first, last, masked in band.key_blocks(begin, end, r.choice([7, 20, 64])):
                block = torch.ones(end - begin, last - first, dtype=torch.bool)
                if band.bounded:
                    block = ~band.hidden(begin, end, first, last, torch.device("cpu"))
                assert masked or block.all()
                seen[begin:end, first:last] += block
        assert torch.equal(seen, want.int())
