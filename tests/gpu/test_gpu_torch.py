"""The forward kernels under torch.compile, opcheck and the drop-in for F.scaled_dot_product_attention."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from harness import HEAD_DIMS, bounds, equal, generator, inputs, ran, row_of

import flash_attn3


@pytest.mark.parametrize("op", ["forward", "forward_out"])
@pytest.mark.parametrize("shape", [(2, 100, 150, 4, 2, 64), (1, 70, 70, 2, 1, 100, 33)], ids=str)
def test_opcheck(op, shape):
    q, k, v = inputs(*shape)
    out = (q.new_empty(*q.shape[:3], v.shape[3]),) if op == "forward_out" else ()
    arguments = (q, k, v, None, *out, 0.125, *bounds(True))
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
            with torch.no_grad(), ran(row_of(q, k, v)):
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
            row = row_of(q.transpose(1, 2), seen.transpose(1, 2), v.transpose(1, 2))
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
