"""flash_attn3.quantize against the formula in float64, and its Triton kernel under Triton's interpreter.

The interpreter has to be chosen before Triton is imported and holds for the process, so the tests of the kernel run in
one of their own. It does not round to e4m3 as a GPU does, and multiplies the bits of bf16 matrices as integers. So
unrounded values are compared, and Hadamard transforms are in fp16; tests/gpu has the rest.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attn3.portable import quantize as portable

module = importlib.import_module("flash_attn3.quantization")
quantize = module.quantize
FP8 = torch.float8_e4m3fn
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def randn(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(seqlen: int, rotary_dim: int, dtype=torch.bfloat16) -> dict:
    at = torch.arange(seqlen)[:, None] * 0.3 ** torch.arange(rotary_dim // 2)
    return {"rotary_cos": at.cos().to(dtype), "rotary_sin": at.sin().to(dtype)}


def turned(x, cos, sin, interleaved):
    """Pairs as complex numbers, times cos + i sin."""
    half = cos.shape[1]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    z = torch.complex(a, b) * torch.complex(cos, sin)[: x.shape[1], None]
    parts = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((parts, tail), -1)


def before_rounding(x, hadamard=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False, mean=None):
    """float64; the Hadamard matrix is of the library, its properties are tested below."""
    y = x.double()
    if mean is not None:
        y = y - (y.mean(1) if mean is True else mean.double())[:, None]
    if rotary_cos is not None:
        y = turned(y, rotary_cos.double(), rotary_sin.double(), rotary_interleaved)
    if hadamard is not None:
        head_dim = x.shape[3]
        matrix = portable.transform(head_dim, head_dim, hadamard, torch.float64, torch.device("cpu"))
        y = y @ matrix / portable.transform_size(head_dim) ** 0.5
    return y


def reference(x, block=None, kv_heads=None, transpose=False, **options):
    """(values before rounding, descale), float64; x has no NaN and no infinity."""
    y = before_rounding(x, **options)
    batch, seqlen, heads, _ = y.shape
    kv_heads = kv_heads or heads
    descales = []
    for tokens in y.split(block or seqlen, 1):
        grouped = tokens.abs().reshape(batch, tokens.shape[1], kv_heads, -1)
        amax = grouped.amax((1, 3))
        descales.append(torch.where(amax == 0, 1.0, amax / 448))
    descale = torch.stack(descales, -1)
    each = descale.repeat_interleave(heads // kv_heads, 1).repeat_interleave(block or seqlen, 2)[..., :seqlen]
    return y / each.transpose(1, 2)[..., None], descale if block else descale[..., 0]


def check(got, x, **options):
    """Descale and values up to fp32 rounding, which can put an e4m3 value on either side of a tie."""
    values, descale = got
    wanted, wanted_descale = reference(x, **options)
    assert values.shape == x.shape and descale.dtype == torch.float32 and descale.shape == wanted_descale.shape
    torch.testing.assert_close(descale.double(), wanted_descale, rtol=1e-5, atol=1e-30)
    # Of sums of fp32 products, which err by some 2**-20 of the largest, and of single ones.
    slack = 448 * (2.0**-18 if "hadamard" in options else 2.0**-20)
    if values.dtype == FP8:
        low, high = ((wanted + sign * slack).clamp(-448, 448).float().to(FP8).double() for sign in (-1, 1))
        values = values.double()
        assert ((values >= low) & (values <= high)).all()
    else:
        assert ((values.double() - wanted).abs() <= slack).all()


CASES = {
    "block 64": {"block": 64},
    "block 128": {"block": 128},
    "whole sequence": {},
    "groups": {"block": 64, "kv_heads": 2},
    "groups, whole sequence": {"kv_heads": 1},
    "hadamard": {"block": 64, "hadamard": 3},
    "rotary": {"block": 64, "rotary": 32},
    "rotary, interleaved": {"block": 64, "rotary": 32, "rotary_interleaved": True},
    "rotary of 16 of the columns, hadamard, groups": {"block": 128, "rotary": 16, "hadamard": 5, "kv_heads": 2},
    "mean": {"block": 64, "mean": True},
    "mean, hadamard, whole sequence": {"mean": True, "hadamard": 0},
    "transpose": {"block": 64, "transpose": True},
    "transpose, whole sequence, groups, hadamard": {"transpose": True, "hadamard": 1, "kv_heads": 2},
}
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def options_of(case: dict, seqlen: int, dtype) -> dict:
    options = dict(case)
    rotary = options.pop("rotary", None)
    return options if rotary is None else {**options, **angles(seqlen + 3, rotary, dtype)}


@all_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_formula(case, dtype):
    for seqlen, head_dim in ((1, 64), (130, 64), (128, 128), (77, 48), (600, 32)):
        x = 3 * randn(2, seqlen, 4, head_dim, dtype=dtype, seed=seqlen)
        options = options_of(case, seqlen, dtype)
        got = quantize(x, **options)
        assert got[0].dtype == FP8
        check(got, x, **options)


@pytest.mark.parametrize("block", [None, 64, 128], ids=str)
def test_rounds_as_torch_does(block):
    """Bit for bit: x times fp32 448 / amax, by torch's cast."""
    x = randn(1, 200, 2, 64) * randn(1, 200, 1, 1, seed=1).exp()
    values, descale = quantize(x, block=block)
    for h in range(2):
        for index, tokens in enumerate(x[0, :, h].float().split(block or 200)):
            amax, start = tokens.abs().max(), index * (block or 200)
            wanted = (tokens * (torch.tensor(448.0) / amax)).to(FP8)
            assert torch.equal(values[0, start : start + len(tokens), h].view(torch.uint8), wanted.view(torch.uint8))
            assert descale[0, h].reshape(-1)[index] == amax / 448


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_hadamard_is_orthogonal(head_dim):
    matrix = portable.transform(head_dim, head_dim, 7, torch.float64, torch.device("cpu"))
    size = portable.transform_size(head_dim)
    assert head_dim % size == 0 and (head_dim // size) % 2 == 1
    assert torch.equal(matrix @ matrix.mT, size * torch.eye(head_dim, dtype=torch.float64))
    other = portable.transform(head_dim, head_dim, 8, torch.float64, torch.device("cpu"))
    assert not torch.equal(matrix, other)
    padded = portable.transform(head_dim, 256, 7, torch.float64, torch.device("cpu"))
    assert torch.equal(padded[:head_dim, :head_dim], matrix) and padded.count_nonzero() == head_dim * size


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_hadamard_leaves_products(head_dim):
    q, k = randn(1, 64, 2, head_dim), randn(1, 64, 2, head_dim, seed=1)
    q[..., 5] *= 30
    exact = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    errors = []
    for seed_q, seed_k in ((11, 11), (11, 12)):
        (q8, q_scale), (k8, k_scale) = quantize(q, block=64, hadamard=seed_q), quantize(k, block=64, hadamard=seed_k)
        scores = torch.einsum("bqhd,bkhd->bhqk", q8.double(), k8.double()) * (q_scale * k_scale)[..., None]
        errors.append((scores - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    # Two roundings of at most 2**-4, uniform: 2**-4 / sqrt(3) * sqrt(2) = 0.05. Other seeds give other products.
    assert errors[0] < 0.05 and errors[1] > 0.5


def test_mean_leaves_the_softmax():
    q, k = randn(1, 8, 2, 64).double(), randn(1, 64, 2, 64, seed=1) + 4 * randn(1, 1, 2, 64, seed=2)
    values, descale = quantize(k, mean=True)
    smooth = values.double() * descale[:, None, :, None]
    want, got = (torch.einsum("bqhd,bkhd->bhqk", q, x.double() / 8).softmax(-1) for x in (k, smooth))
    assert (want - got).abs().max() < 0.05
    given = k.float().mean(1)
    assert torch.equal(quantize(k, mean=given)[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(quantize(k, mean=False)[1], quantize(k)[1])


@pytest.mark.parametrize("seqlen", [0, 1, 16, 65])
def test_transposed_layout(seqlen):
    x = randn(2, seqlen, 3, 32)
    for block in (None, 64):
        values, descale = quantize(x, block=block, transpose=True)
        plain, plain_descale = quantize(x, block=block)
        padded = -(-seqlen // 16) * 16
        if seqlen == 0:
            assert values.shape == x.shape and torch.equal(descale, plain_descale)
            continue
        assert values.stride() == (3 * 32 * padded, 1, 32 * padded, padded) and values.shape == x.shape
        assert torch.equal(values.view(torch.uint8), plain.view(torch.uint8)) and torch.equal(descale, plain_descale)
        whole = values.as_strided((2, 3, 32, padded), (3 * 32 * padded, 32 * padded, padded, 1)).view(torch.uint8)
        assert whole[..., seqlen:].count_nonzero() == 0


def test_layout_gradient_and_empty():
    x = randn(2, 70, 3, 32).requires_grad_()
    values, descale = quantize(x, block=64)
    assert values.is_contiguous() and not values.requires_grad and not descale.requires_grad
    assert descale.shape == (2, 3, 2)
    for batch, seqlen in ((0, 5), (2, 0)):
        values, descale = quantize(randn(batch, seqlen, 3, 32))
        assert values.shape == (batch, seqlen, 3, 32) and torch.equal(descale, torch.ones(batch, 3))
    assert quantize(randn(2, 0, 3, 32), block=64)[1].shape == (2, 3, 0)


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers in other strides, the rest NaN."""
    batch, seqlen, heads, head_dim = x.shape
    wide = torch.full((batch, seqlen + 1, 2 * heads, head_dim + 8), float("nan"), dtype=x.dtype)
    views = [wide[:, 1:, ::2, 4 : 4 + head_dim], torch.empty(batch, heads, seqlen, head_dim).to(x).transpose(1, 2)]
    return [view.copy_(x) for view in views]


def test_strides():
    x = randn(2, 130, 4, 32)
    for options in ({"block": 64}, {"kv_heads": 2}, {"block": 128, "mean": True, "hadamard": 1}):
        wanted = quantize(x, **options)
        for view in strided(x):
            assert same_bits(quantize(view, **options), wanted)


def same_bits(got, wanted) -> bool:
    return torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8)) and torch.equal(got[1], wanted[1])


def special(dtype=torch.bfloat16) -> torch.Tensor:
    """Block 0 has NaN and infinities, 1 is zero, 2 is tiny in head 0."""
    x = randn(1, 192, 2, 32, dtype=dtype)
    x[0, 3, 0, 5], x[0, 4, 0, 6], x[0, 5, 1, 7] = float("nan"), float("inf"), -float("inf")
    x[:, 64:128] = 0
    x[:, 128:, 0] *= 1e-33 if dtype == torch.bfloat16 else 0
    return x


def check_special(path):
    """Scales of the finite values, and not finite where x is not."""
    for dtype in (torch.bfloat16, torch.float16):
        x = special(dtype)
        clean = torch.where(x.isfinite(), x, 0)
        for options in ({"block": 64}, {}, {"block": 64, "transpose": True}):
            (values, descale), (want, want_descale) = path(x, **options), path(clean, **options)
            assert torch.equal(descale, want_descale)
            assert torch.equal(values.float().isnan(), ~x.isfinite())
            assert torch.equal(torch.where(x.isfinite(), values.float(), 0), want.float())
            if "block" in options:
                assert (descale[..., 1] == 1).all() and descale[0, 0, 2] == 1
                assert values[:, 64:128].float().count_nonzero() == 0 and (values[:, 128:, 0].float() == 0).all()
        if INTERPRETED and dtype == torch.bfloat16:
            continue
        values, _ = path(x, block=64, hadamard=1)
        rows = ~x.isfinite().all(-1, keepdim=True)
        assert torch.equal(values.float().isnan(), rows.expand_as(x))


def test_zeros_nan_and_infinity():
    check_special(quantize)


X, COS = (1, 20, 4, 64), (20, 16)
ERRORS = {
    "x is None; it must be": {"x": None},
    "x has shape (20, 4, 64)": {"x": randn(20, 4, 64)},
    "x has dtype torch.float32": {"x": torch.zeros(X)},
    "x has head dim 40": {"x": randn(1, 20, 4, 40)},
    "x has head dim 272": {"x": randn(1, 20, 4, 272)},
    "x has head dim 0": {"x": randn(1, 20, 4, 0)},
    "x has 0 heads": {"x": randn(1, 20, 0, 64)},
    "the last must be 1": {"x": randn(1, 20, 64, 4).mT},
    "block is 96": {"block": 96},
    "block is True": {"block": True},
    "block: '64' is not an integer": {"block": "64"},
    "hadamard is True": {"hadamard": True},
    "hadamard is -1": {"hadamard": -1},
    "hadamard: 1.5 is not": {"hadamard": 1.5},
    "kv_heads is 3 and x has 4": {"kv_heads": 3},
    "kv_heads is 0 and x has 4": {"kv_heads": 0},
    "kv_heads: tensor(2) is not an integer": {"kv_heads": torch.tensor(2)},
    "rotary_sin is None": {"rotary_sin": None},
    "rotary_cos is None": {"rotary_cos": None},
    "rotary_cos has shape (19, 16); it must be (at least 20": {"rotary_cos": randn(19, 16)},
    "rotary_cos has shape (20, 12)": {"rotary_cos": randn(20, 12)},
    "rotary_cos has shape (20, 40)": {"rotary_cos": randn(20, 40)},
    "rotary_cos has shape (1, 20, 16)": {"rotary_cos": randn(1, 20, 16)},
    "rotary_cos has shape (20, 16), dtype torch.float32": {"rotary_cos": torch.zeros(COS)},
    "rotary_sin has shape (20, 8)": {"rotary_sin": randn(20, 8)},
    "mean is given together with rotary_cos": {"mean": True},
    "mean has shape (4, 64)": {"mean": torch.zeros(4, 64), "rotary_cos": None, "rotary_sin": None},
    "mean has shape (1, 4, 64), dtype torch.bfloat16": {
        "mean": randn(1, 4, 64),
        "rotary_cos": None,
        "rotary_sin": None,
    },
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    arguments = {"x": randn(*X), "rotary_cos": randn(*COS), "rotary_sin": randn(*COS), **ERRORS[message]}
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(**arguments)


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    module._compiled.cache_clear()
    with pytest.raises(ImportError, match=r"quantize needs Triton on a GPU.*pip install triton"):
        by_triton(randn(*X))
    assert quantize(randn(*X))[0].dtype == FP8


def test_the_kernel_under_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if importlib.util.find_spec("numpy") is None:
        pytest.skip("numpy, which triton's interpreter needs, is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout + run.stderr


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_the_kernel_under_the_interpreter")


def problem(x, **options) -> module.Problem:
    names = ("block", "hadamard", "rotary_cos", "rotary_sin", "rotary_interleaved", "mean", "transpose", "kv_heads")
    return module._checked(x, *(options.get(name) for name in names))


def by_triton(x, **options):
    return module._by_triton(problem(x, **options), torch.float32, torch.float16)


def portably(x, **options):
    return portable.quantize(problem(x, **options), torch.float32)


@interpreted
@all_cases
def test_interpreted_kernel(case):
    for seqlen, head_dim, dtype in ((130, 64, torch.bfloat16), (77, 48, torch.float16), (1, 32, torch.bfloat16)):
        dtype = torch.float16 if "hadamard" in case else dtype
        x = 3 * randn(2, seqlen, 4, head_dim, dtype=dtype, seed=seqlen)
        options = options_of(case, seqlen, dtype)
        got = by_triton(x, **options)
        check(got, x, **options)
        if "hadamard" not in options:
            wanted = portably(x, **options)
            assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        assert got[0].stride() == quantize(x, **options)[0].stride()


@interpreted
def test_interpreted_kernel_with_head_dim_256():
    """A block of 128 tokens is two steps."""
    x = randn(1, 140, 2, 256, dtype=torch.float16)
    for options in ({"block": 128, "kv_heads": 1}, {"block": 128, "hadamard": 2}, {"kv_heads": 1, "mean": True}):
        check(by_triton(x, **options), x, **options)


@interpreted
def test_interpreted_kernel_with_strides():
    x = randn(2, 70, 4, 32)
    for view in strided(x):
        for options in ({"block": 64}, {"kv_heads": 2, "transpose": True}):
            assert torch.equal(by_triton(view, **options)[0], portably(x, **options)[0])


@interpreted
def test_interpreted_kernel_with_zeros_nan_and_infinity():
    check_special(by_triton)


@interpreted
def test_interpreted_kernel_pads_with_zeros_and_takes_nothing():
    values, _ = by_triton(randn(1, 70, 2, 32), block=64, mean=True, transpose=True)
    whole = values.as_strided((2, 32, 80), (32 * 80, 80, 1))
    assert (whole[..., 70:] == 0).all()
    values, descale = by_triton(randn(2, 0, 3, 32))
    assert values.shape == (2, 0, 3, 32) and torch.equal(descale, torch.ones(2, 3))
