"""The kernels under autograd, torch.compile, opcheck and the drop-in for F.scaled_dot_product_attention.

The backward is portable PyTorch on the GPU, from the out and LSE that the kernel saved.
"""

import oracle
import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, HEAD_DIMS, equal, generator, inputs, ran, randn, row_of

import flash_attn3

GRADIENT_SHAPES = (  # B, Sq, Sk, H, Hkv, D, Dv
    (2, 100, 100, 4, 4, 64, 64),
    (1, 129, 200, 6, 2, 128, 128),
    (1, 200, 129, 4, 1, 96, 96),
    (2, 65, 65, 2, 2, 40, 40),
    (1, 80, 100, 2, 1, 192, 128),
    (1, 70, 70, 2, 2, 256, 256),
    (1, 50, 60, 3, 3, 33, 33),
)


def check_gradients(q, k, v, causal, dout, dlse=None, scale=None):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with ran(row_of(q, k, v, causal)):
        out, lse = flash_attn3.flash_attn_func(*leaves, softmax_scale=scale, causal=causal, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.zeros_like(lse) if dlse is None else dlse))
    options = {"scale": scale, "causal": causal}
    refs = oracle.gradients(q, k, v, dout, dlse, **options)
    bases = oracle.gradients(q, k, v, dout, dlse, dtype=q.dtype, **options)
    for name, x, got, ref, base in zip(("dq", "dk", "dv"), (q, k, v), grads, refs, bases, strict=True):
        assert got.dtype == x.dtype and got.shape == x.shape
        oracle.assert_close(name, got, ref, base, 1e-4)
    return grads


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradients(shape, dtype, causal):
    q, k, v = inputs(*shape, dtype=dtype)
    check_gradients(q, k, v, causal, randn(*q.shape[:3], v.shape[3], dtype=dtype, key="dout"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradient_through_the_lse(causal):
    """flash-attention issues 1137, 889: the second gradient was dropped silently."""
    q, k, v = inputs(2, 300, 300, 4, 4, 64)
    dlse = torch.randn(2, 4, 300, device=q.device, generator=generator("dlse"))
    check_gradients(q, k, v, causal, randn(*q.shape, key="dout"), dlse)


def test_gradients_of_rows_without_keys():
    """More queries than keys, causal: no gradient where there is no key, and no NaN anywhere (flash-attention 1778)."""
    q, k, v = inputs(1, 2048, 1024, 2, 2, 64)
    dq, _, _ = check_gradients(q, k, v, True, randn(*q.shape, key="dout"))
    assert (dq[:, :1024] == 0).all()


@pytest.mark.parametrize("heads", [(6, 6), (6, 1)], ids=str)
def test_gradients_when_queries_outnumber_keys(heads):
    """flash-attention issue 1272: dQ off by hundreds."""
    q, k, v = inputs(4, 640, 128, *heads, 128)
    for causal in (False, True):
        dq, _, _ = check_gradients(q, k, v, causal, randn(*q.shape, key="dout"))
        assert not causal or (dq[:, :512] == 0).all()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_gradients_with_very_negative_lse(dim):
    """pytorch issue 196678: NaN in dQ from the padded half of the last key tile."""
    for seqlen in (64, 192, 320):
        q, k, v = (0.1 * x for x in inputs(1, seqlen, seqlen, 1, 1, dim))
        q[..., 0], k[..., 0] = 1.0, -120 * dim**0.5
        check_gradients(q, k, v, True, randn(*q.shape, key="dout"))


def test_gradients_of_large_fp16_inputs():
    """flash-attention issue 1052."""
    q, k, v = (3 * x for x in inputs(1, 1024, 1024, 1, 1, 128, dtype=torch.float16))
    check_gradients(q, k, v, True, randn(*q.shape, dtype=torch.float16, key="dout"))


def test_gradients_of_views():
    """Inputs and dout that are transposed or strided views, and q whose last stride is not 1 (issues 355, 2777)."""
    q = randn(2, 200, 64, 4, key="q").transpose(2, 3)
    k = randn(2, 4, 200, 64, key="k").transpose(1, 2)
    v = randn(2, 400, 4, 64, key="v")[:, ::2]
    dout = randn(2, 4, 200, 64, key="dout").transpose(1, 2)
    got = check_gradients(q, k, v, True, dout)
    copies = check_gradients(*(x.contiguous() for x in (q, k, v)), True, dout.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(got, copies, strict=True))


@pytest.mark.parametrize("op", ["forward", "forward_out"])
@pytest.mark.parametrize("shape", [(2, 100, 150, 4, 2, 64), (1, 70, 70, 2, 1, 100, 33)], ids=str)
def test_opcheck(op, shape):
    q, k, v = inputs(*shape)
    arguments = (q, k, v) + ((q.new_empty(*q.shape[:3], v.shape[3]),) if op == "forward_out" else ()) + (0.125, True)
    torch.library.opcheck(getattr(torch.ops.flash_attn3, op).default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forward_is_one_graph(backend):
    """Contiguous and transposed inputs, lengths off the tile sizes (ComfyUI issue 15044, MagiAttention issue 137)."""

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(q, k, v):
        out, lse = flash_attn3.flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True)
        return out + 0, lse, out.transpose(1, 2).reshape(out.shape[0], -1)

    for seqlen in (196, 257):
        q, k, v = inputs(2, seqlen, seqlen, 8, 8, 64)
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        for tensors in ((q, k, v), views):
            with torch.no_grad(), ran(row_of(q, k, v, True)):
                out, lse, flat = compiled(*tensors)
            wanted = flash_attn3.flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True)
            assert equal((out, lse), wanted)
            assert torch.equal(flat, wanted[0].transpose(1, 2).reshape(2, -1))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("stored", ["BHSD", "BSHD"])
def test_sdpa_drop_in(stored, dims):
    """Top-left causal, GQA, scale; out has the query's order of dims in memory, as torch's own has."""
    for lengths in ((200, 200), (130, 200)):
        for is_causal in (False, True):
            q, k, v = inputs(2, *lengths, 6, 2, *dims)
            if stored == "BHSD":
                q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            else:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            seen = k[:, :, : lengths[0]] if is_causal else k  # top-left: later keys are seen by nobody
            row = row_of(q.transpose(1, 2), seen.transpose(1, 2), v.transpose(1, 2), is_causal)
            with ran(row):
                out = flash_attn3.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
            assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == q.dtype
            assert (out.stride(1) < out.stride(2)) == (q.stride(1) < q.stride(2))
            if dims[0] == dims[1]:
                assert out.stride() == torch.empty_like(q).stride()
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                ref = F.scaled_dot_product_attention(
                    *(x.double() for x in (q, k, v)), is_causal=is_causal, scale=0.3, enable_gqa=True
                )
            views = (x.transpose(1, 2) for x in (q, seen, v[:, :, : seen.shape[2]]))
            base, _ = oracle.attention(*views, scale=0.3, causal=is_causal, dtype=q.dtype)
            oracle.assert_close("out", out, ref, base.transpose(1, 2))


def test_sdpa_drop_in_elsewhere():
    """Masks, fp32 and causal with more queries than keys are torch's own affair, but right all the same."""
    q, k, v = (x.transpose(1, 2) for x in inputs(2, 150, 100, 4, 4, 64))
    mask = torch.rand(2, 1, 150, 100, device=q.device, generator=generator("mask")) < 0.5
    for tensors, options in (
        ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"is_causal": True}),
        ((q.float(), k.float(), v.float()), {"is_causal": True}),
    ):
        out = flash_attn3.scaled_dot_product_attention(*tensors, **options)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            ref = F.scaled_dot_product_attention(*(x.double() for x in tensors), **options)
        assert (out.double() - ref).abs().max() <= 2.0**-7 * v.abs().max()


def test_sdpa_drop_in_gradients():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs(2, 150, 150, 4, 4, 64))
    dout = randn(2, 4, 150, 64, key="dout")
    grads = torch.autograd.grad(flash_attn3.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dout)
    views = [x.detach().transpose(1, 2) for x in (q, k, v)]
    refs = oracle.gradients(*views, dout.transpose(1, 2), causal=True)
    bases = oracle.gradients(*views, dout.transpose(1, 2), causal=True, dtype=q.dtype)
    for name, got, ref, base in zip(("dq", "dk", "dv"), grads, refs, bases, strict=True):
        oracle.assert_close(name, got.transpose(1, 2), ref, base, 1e-4)
