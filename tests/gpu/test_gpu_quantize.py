"""quantize's Triton kernel against its PyTorch path on the CPU, which tests/test_quantize.py compares with the formula.

Each set of options is a kernel of its own that Triton compiles, about a second: so few combinations, not all.
Without a Hadamard transform all arithmetic is the same, and so are the bits; with it sums differ in their order.
"""

import importlib

import pytest
import torch
from harness import DEVICE, poison, randn

pytest.importorskip("triton", reason="triton is not installed")

from flash_attn3.portable import quantize as portable

module = importlib.import_module("flash_attn3.quantization")
quantize = module.quantize
BLOCKS = (None, 64)
WAYS = ((torch.bfloat16, None), (torch.float16, 64), (torch.bfloat16, 128))
LENGTHS = (1, 63, 65, 129, 176, 700)
# The sums' error can reach a tie, and then the next number. fp32 rounding does so once in 2**19 of them, the two bf16
# parts of turned or centred x, which err by 2**-18, once in 2**13.
MOVED = 0.01
all_blocks = pytest.mark.parametrize("block", BLOCKS, ids=str)
all_ways = pytest.mark.parametrize("dtype, block", WAYS, ids=str)


def angles(seqlen: int, rotary_dim: int, dtype: torch.dtype) -> dict:
    at = torch.arange(seqlen, device=DEVICE)[:, None] * 0.3 ** torch.arange(rotary_dim // 2, device=DEVICE)
    return {"rotary_cos": at.cos().to(dtype), "rotary_sin": at.sin().to(dtype)}


def codes(values: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers in their order as integers, NaN beyond 126."""
    bits = values.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def check(x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Every element against the CPU's; the memory of the results held NaN before."""
    poison(x.numel() + 16 * x.shape[0] * x.shape[2] * x.shape[3])
    got = values, descale = quantize(x, **options)
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    wanted, wanted_descale = quantize(x.cpu(), **on_cpu)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and values.stride() == wanted.stride()
    values, descale = values.cpu(), descale.cpu()
    nan = wanted.float().isnan()
    assert torch.equal(values.float().isnan(), nan)
    distance = torch.where(nan, 0, (codes(values) - codes(wanted)).abs())
    if options.get("hadamard") is None:
        assert distance.max() == 0 and torch.equal(descale, wanted_descale)
    else:
        torch.testing.assert_close(descale, wanted_descale, rtol=1e-5, atol=0)
        # One step also next to zero, where steps are 2**-9: the parts err by at most 2**-18 of 448.
        assert distance.max() <= 1 and (distance > 0).float().mean() < MOVED
    return got


@all_ways
def test_lengths_and_head_dims(dtype, block):
    for head_dim in (16, 80, 128, 256):
        check(randn(2, 200, 3, head_dim, dtype=dtype), block=block)
    for seqlen in LENGTHS:
        check(randn(2, seqlen, 3, 128, dtype=dtype), block=block)


@all_ways
def test_hadamard(dtype, block):
    for head_dim in (16, 96, 128, 256):
        check(randn(2, 200, 2, head_dim, dtype=dtype), block=block, hadamard=head_dim)
    check(randn(2, 200, 4, 128, dtype=dtype), block=block, hadamard=5, kv_heads=2)


@all_ways
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary(interleaved, dtype, block):
    for head_dim, rotary_dim in ((96, 48), (256, 256)):
        x = 3 * randn(2, 200, 4, head_dim, dtype=dtype)
        options = {"block": block, "rotary_interleaved": interleaved, **angles(333, rotary_dim, dtype)}
        check(x, **options)
        check(x, **options, hadamard=1, kv_heads=2, transpose=True)


@all_blocks
def test_mean(block):
    for head_dim in (80, 256):
        x = randn(2, 200, 4, head_dim) + 5 * randn(2, 1, 4, head_dim, key=1)
        mean = x.mean(1, dtype=torch.float32)
        values, descale = check(x, block=block, mean=mean)
        check(x, block=block, mean=mean, hadamard=2)
        same = quantize(x, block=block, mean=True)
        assert torch.equal(codes(same[0]), codes(values)) and torch.equal(same[1], descale)


@all_blocks
def test_groups(block):
    for heads, kv_heads in ((6, 2), (64, 8)):
        x = randn(2, 300, heads, 128) * randn(heads, 1, key=1).exp()
        _, descale = check(x, block=block, kv_heads=kv_heads)
        assert descale.shape[:2] == (2, kv_heads)


@all_blocks
def test_transpose_and_its_padding(block):
    for seqlen in LENGTHS:
        x = randn(2, seqlen, 3, 96)
        values, _ = check(x, block=block, transpose=True)
        check(x, block=block, transpose=True, hadamard=4)
        padded = -(-seqlen // 16) * 16
        whole = values.as_strided((2, 3, 96, padded), (3 * 96 * padded, 96 * padded, padded, 1)).view(torch.uint8)
        assert values.stride(1) == 1 and whole[..., seqlen:].count_nonzero() == 0


@all_blocks
def test_strides(block):
    for view in (
        randn(2, 200, 9, 128)[:, :, 3:6],
        randn(2, 3, 200, 128).transpose(1, 2),
        randn(2, 201, 3, 133)[:, 1:, :, 3:67],
        randn(1, 200, 3, 64).expand(2, -1, -1, -1),
    ):
        check(view, block=block)
        check(view, block=block, hadamard=1, transpose=True)


@all_blocks
def test_zeros_nan_and_infinity(block):
    x = randn(2, 200, 4, 64)
    x[0, 3, 0, 5], x[0, 4, 0, 6], x[1, 5, 1, 7] = float("nan"), float("inf"), -float("inf")
    x[:, 64:128, 1] = 0
    x[:, :, 2] = 0
    x[:, :, 3] *= 1e-33
    for options in ({}, {"hadamard": 1}, {"transpose": True}, {"kv_heads": 2}, angles(200, 32, x.dtype)):
        _, descale = check(x, block=block, **options)
        if "kv_heads" not in options:
            assert (descale[:, 2:] == 1).all()


def test_more_elements_than_an_int32_counts():
    """The last tokens of 2**31 elements and a little more, in blocks that start at a multiple of 128."""
    seqlen, rest = (1 << 18) + 70, 128 + 70
    x = torch.zeros(1, seqlen, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    x[:, -rest:] = randn(1, rest, 64, 128)
    for transpose in (False, True):
        values, descale = quantize(x, block=128, transpose=transpose)
        wanted, wanted_descale = quantize(x[:, -rest:].cpu(), block=128)
        assert torch.equal(codes(values[:, -rest:]).cpu(), codes(wanted))
        assert torch.equal(descale[..., -2:].cpu(), wanted_descale) and (descale[..., :-2] == 1).all()
        del values


def test_the_kernel_runs_and_can_be_captured(monkeypatch):
    monkeypatch.setattr(portable, "quantize", None)  # a call of it fails
    x = randn(2, 300, 4, 128)
    for options in ({"block": 64, "hadamard": 1}, {"kv_heads": 2}):
        quantize(x, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values, descale = quantize(x, **options)
        for key in range(3):
            x.copy_(randn(2, 300, 4, 128, key=key))
            graph.replay()
            wanted = quantize(x, **options)
            assert torch.equal(codes(values), codes(wanted[0])) and torch.equal(descale, wanted[1])


def test_repeats_are_bitwise_equal():
    """The maxima of a whole sequence come together by atomics, whose order does not matter to a maximum."""
    x = randn(2, 4000, 8, 128)
    first = quantize(x, kv_heads=2, hadamard=1)
    for _ in range(20):
        again = quantize(x, kv_heads=2, hadamard=1)
        assert torch.equal(codes(again[0]), codes(first[0])) and torch.equal(again[1], first[1])
