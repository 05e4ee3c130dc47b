"""The backward kernels under autograd: what models do, and each time exactly the expected rows run.

Functions transforms, checkpointing, compilation, autocast, the LSE's gradient, the drop-in for torch's attention.
"""

import oracle
import pytest
import torch
import torch.nn.functional as F
from harness import (
    DTYPES,
    HEAD_DIMS,
    assert_close_gradients,
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
    reference_gradients,
    row_of,
)
from torch.utils.checkpoint import checkpoint

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
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def leaves_of(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def all_rows(q, k, v, causal, deterministic=False) -> tuple[str, ...]:
    return row_of(q, k, v), *backward_rows(q, k, v, causal, deterministic)


def gradients(q, k, v, causal, dout, dlse=None, scale=None, deterministic=False):
    """dq, dk, dv through flash_attn_func, asserted to have run the kernels."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with ran(all_rows(q, k, v, causal, deterministic)):
        out, lse = flash_attn3.flash_attn_func(
            *leaves, softmax_scale=scale, causal=causal, deterministic=deterministic, return_attn_probs=True
        )
        assert out.requires_grad and lse.requires_grad
        outputs = ((out, dout),) if dlse is None else ((out, dout), (lse, dlse))
        grads = torch.autograd.grad([x for x, _ in outputs], leaves, [x for _, x in outputs])
    return grads


@both_masks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradients(shape, dtype, causal):
    q, k, v = inputs(*shape, dtype=dtype)
    dout, dlse = gradient_of_out(q, v), gradient_of_lse(q)
    for extra in (None, dlse):
        refs = reference_gradients(q, k, v, dout, extra, causal)
        for deterministic in (False, True):
            grads = gradients(q, k, v, causal, dout, extra, None, deterministic)
            assert [(x.dtype, x.shape) for x in grads] == [(x.dtype, x.shape) for x in (q, k, v)]
            assert_close_gradients(grads, *refs)
        assert equal(grads, backward(q, k, v, dout, extra, causal, deterministic=True))


@both_masks
def test_loss_of_out_and_lse(causal):
    """flash-attention issues 1137, 889; the mean square of the LSE, also where it is -inf for rows without keys."""
    q, k, v = inputs(2, 300, 300, 4, 4, 64)
    weight = gradient_of_out(q, v)
    leaves = leaves_of(q, k, v)
    with ran(all_rows(q, k, v, causal)):
        out, lse = flash_attn3.attention(*leaves, causal=causal, return_lse=True)
        ((out * weight).sum() + lse.square().mean()).backward()
    _, exact = oracle.attention(q, k, v, causal=causal)
    refs = reference_gradients(q, k, v, weight, 2 * exact / exact.numel(), causal)
    assert_close_gradients([x.grad for x in leaves], *refs)


def test_loss_of_an_lse_of_minus_infinity():
    q, k, v = inputs(1, 100, 60, 2, 1, 64)
    leaves = leaves_of(q, k, v)
    out, lse = flash_attn3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert (lse[..., :40] == -torch.inf).all()
    (out.square().sum() + lse.square().sum()).backward()
    _, exact = oracle.attention(q, k, v, causal=True)
    refs = reference_gradients(q, k, v, 2 * out.detach(), 2 * exact, True)
    assert_close_gradients([x.grad for x in leaves], *refs)
    assert (leaves[0].grad[:, :40] == 0).all()


def test_the_lse_alone():
    q, k, v = inputs(2, 130, 200, 4, 2, 128)
    leaves = leaves_of(q, k, v)
    with ran(all_rows(q, k, v, True)):
        _, lse = flash_attn3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        lse.sum().backward()
    refs = reference_gradients(q, k, v, torch.zeros_like(q), torch.ones_like(lse), True)
    assert_close_gradients([x.grad for x in leaves], *refs)
    assert (leaves[2].grad == 0).all()


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_sum_of_out(dims):
    """dout is expanded, with stride 0."""
    q, k, v = inputs(2, 130, 200, 4, 2, *dims)
    leaves = leaves_of(q, k, v)
    with ran(all_rows(q, k, v, False)):
        flash_attn3.flash_attn_func(*leaves).sum().backward()
    refs = reference_gradients(q, k, v, torch.ones(*q.shape[:3], v.shape[3], device=q.device, dtype=q.dtype))
    assert_close_gradients([x.grad for x in leaves], *refs)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_some_inputs_need_a_gradient(needed, dims):
    q, k, v = inputs(2, 100, 130, 4, 2, *dims)
    dout = gradient_of_out(q, v)
    want = backward(q, k, v, dout, None, True, deterministic=True)
    tensors = [x.clone().requires_grad_(i in needed) for i, x in enumerate((q, k, v))]
    flash_attn3.flash_attn_func(*tensors, causal=True, deterministic=True).backward(dout)
    for i, (x, grad) in enumerate(zip(tensors, want, strict=True)):
        assert torch.equal(x.grad, grad) if i in needed else x.grad is None


def test_gradients_accumulate_and_inputs_stay():
    q, k, v = inputs(2, 200, 200, 4, 2, 128)
    leaves, douts = leaves_of(q, k, v), [gradient_of_out(q, v, i) for i in range(2)]
    wanted = [backward(q, k, v, dout, None, True, deterministic=True) for dout in douts]
    for dout in douts:
        copy = dout.clone()
        flash_attn3.flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
        assert torch.equal(dout, copy)
    for x, before, first, second in zip(leaves, (q, k, v), *wanted, strict=True):
        assert torch.equal(x, before) and torch.equal(x.grad, first + second)


def test_retained_graph_gives_the_same_twice():
    q, k, v = inputs(2, 200, 200, 4, 2, 96)
    leaves, dout = leaves_of(q, k, v), gradient_of_out(q, v)
    out = flash_attn3.flash_attn_func(*leaves, causal=True, deterministic=True)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert equal(torch.autograd.grad(out, leaves, dout), first)


def test_one_tensor_for_queries_keys_and_values():
    (x,) = leaves_of(randn(2, 150, 4, 64))
    flash_attn3.flash_attn_func(x, x, x, causal=True, deterministic=True).sum().backward()
    dout = torch.ones_like(x)
    refs, bases = (sum(grads) for grads in reference_gradients(x, x, x, dout, None, True))
    oracle.assert_close("dx", x.grad, refs, bases, 1e-4)


def test_views():
    """Inputs and dout that are transposed or strided views, and q whose last stride is not 1 (issues 355, 2777)."""
    q = randn(2, 200, 64, 4, key="q").transpose(2, 3)
    k = randn(2, 4, 200, 64, key="k").transpose(1, 2)
    v = randn(2, 400, 4, 64, key="v")[:, ::2]
    dout = randn(2, 4, 200, 64, key="dout").transpose(1, 2)
    got = gradients(q, k, v, True, dout, deterministic=True)
    copies = gradients(*(x.contiguous() for x in (q, k, v)), True, dout.contiguous(), deterministic=True)
    assert equal(got, copies)


@pytest.mark.parametrize("packing", ["qkv", "heads"])
def test_packed_qkv_function(packing):
    heads, kv_heads = 4, 4 if packing == "qkv" else 2
    packed = randn(2, 100, 3, heads, 64) if packing == "qkv" else randn(2, 100, heads + 2 * kv_heads, 64)
    parts = packed.unbind(2) if packing == "qkv" else packed.split([heads, kv_heads, kv_heads], 2)
    options = {} if packing == "qkv" else {"num_heads_q": heads}
    (leaf,) = leaves_of(packed)
    dout = randn(2, 100, heads, 64, key="dout")
    with ran(all_rows(*parts, True, True)):
        out = flash_attn3.flash_attn_qkvpacked_func(leaf, causal=True, deterministic=True, **options)
        out.backward(dout)
    want = backward(*parts, dout, None, True, deterministic=True)
    assert torch.equal(leaf.grad, torch.stack(want, 2) if packing == "qkv" else torch.cat(want, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    q, k, v = inputs(2, 200, 200, 4, 2, 128)
    leaves, dout = leaves_of(q, k, v), gradient_of_out(q, v)

    def layer(q, k, v):
        return flash_attn3.flash_attn_func(q * 2, k, v, causal=True, deterministic=True)

    wanted = torch.autograd.grad(layer(*leaves), leaves, dout)
    rows = all_rows(q, k, v, True, True)
    before = torch.ops.flash_attn3.launch_counts()
    checkpoint(layer, *leaves, use_reentrant=reentrant).backward(dout)
    launched = (torch.ops.flash_attn3.launch_counts() - before).tolist()
    assert sum(launched) == 1 + len(rows)  # the forward twice
    assert equal([x.grad for x in leaves], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast(dtype):
    """Projections in the lower precision around 16-bit attention; under it 16-bit inputs are as without it."""
    q, k, v = inputs(2, 150, 150, 4, 2, 64, dtype=dtype)
    dout = gradient_of_out(q, v)
    other = DTYPES[dtype == DTYPES[0]]
    wanted = gradients(q, k, v, True, dout, deterministic=True)
    with torch.autocast("cuda", dtype=other):
        assert equal(gradients(q, k, v, True, dout, deterministic=True), wanted)
    project = torch.nn.Linear(64, 3 * 64, device=q.device)
    x = torch.randn(2, 150, 64, device=q.device, requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        parts = [y.unflatten(-1, (4, 16)) for y in project(x).chunk(3, -1)]
        assert parts[0].dtype == dtype
        with ran(all_rows(*parts, True)):
            flash_attn3.flash_attn_func(*parts, causal=True).float().square().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all() and x.grad.any()


def test_function_transforms():
    """torch.func.grad is autograd, of one problem and of samples under vmap."""
    q, k, v = inputs(3, 100, 120, 4, 2, 64)
    weight = gradient_of_out(q, v)

    def loss(q, k, v, weight):
        out, lse = flash_attn3.attention(q, k, v, causal=True, return_lse=True)
        return (out * weight).float().sum() + lse.sum()

    leaves = leaves_of(q, k, v)
    loss(*leaves, weight).backward()
    with ran(all_rows(q, k, v, True)):
        got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v, weight)
    for x, y in zip(got, leaves, strict=True):
        assert (x - y.grad).abs().max() <= 2.0**-6 * y.grad.abs().max()
    samples = [x[:, None] for x in (q, k, v, weight)]
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*samples)
    for x, y in zip(got, leaves, strict=True):
        assert (x[:, 0] - y.grad).abs().max() <= 2.0**-6 * y.grad.abs().max()


def test_differentiating_twice_is_an_error():
    leaves = leaves_of(*inputs(1, 80, 80, 2, 2, 64))
    for loss in (torch.sum, lambda x: x.square().sum()):
        out = flash_attn3.flash_attn_func(*leaves)
        (dq,) = torch.autograd.grad(loss(out), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            dq.sum().backward()


def test_nothing_large_is_saved():
    leaves = leaves_of(*inputs(1, 640, 640, 2, 2, 64))
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = flash_attn3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (*leaves, out, lse)}


@pytest.mark.parametrize("op", ["backward", "backward_out"])
@pytest.mark.parametrize("shape", [(2, 100, 150, 4, 2, 64), (1, 70, 70, 2, 1, 100, 33)], ids=str)
def test_opcheck(op, shape):
    q, k, v = inputs(*shape)
    saved = attend(q, k, v, True, 0.125)
    grads = tuple(torch.empty_like(x) for x in (q, k, v)) if op == "backward_out" else ()
    arguments = (gradient_of_out(q, v), gradient_of_lse(q), q, k, v, *saved, None, *grads, 0.125, *bounds(True), True)
    torch.library.opcheck(getattr(torch.ops.flash_attn3, op).default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step_is_one_graph(backend):
    """Contiguous and transposed inputs, lengths off the tile sizes; the third length is a dynamic one."""

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(q, k, v):
        out, lse = flash_attn3.flash_attn_func(q * 2, k, v, causal=True, deterministic=True, return_attn_probs=True)
        return (out * 3).float().square().sum() + lse.sum()

    def eager(q, k, v):
        out, lse = flash_attn3.flash_attn_func(q * 2, k, v, causal=True, deterministic=True, return_attn_probs=True)
        return (out * 3).float().square().sum() + lse.sum()

    for seqlen in (196, 257, 300):
        q, k, v = inputs(2, seqlen, seqlen, 8, 4, 64)
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        for tensors in ((q, k, v), views) if seqlen == 257 else ((q, k, v),):
            leaves = [x.detach().requires_grad_() for x in tensors]
            with ran(all_rows(q, k, v, True, True)):
                got = torch.autograd.grad(compiled(*leaves), leaves)
            want = torch.autograd.grad(eager(*leaves), leaves)
            for x, y in zip(got, want, strict=True):  # the loss's own arithmetic may be fused
                assert x.shape == y.shape and (x.float() - y.float()).abs().max() <= 2.0**-6 * y.abs().max()


# Under the names of others


@pytest.mark.parametrize("deterministic", [False, True])
def test_explain_names_the_rows(deterministic):
    for dims in HEAD_DIMS:
        q, k, v = inputs(1, 100, 100, 2, 2, *dims)
        how = flash_attn3.explain(q, k, v, causal=True, deterministic=deterministic)
        assert how.kernel == row_of(q, k, v) and not how.backward_reasons
        assert how.backward == "kernel, " + ", ".join(backward_rows(q, k, v, True, deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_compatible_operators(deterministic):
    """Those of FlashAttention-3: gradients of their own, and the caller's."""
    import flash_attn3.compat  # noqa: F401, registers them

    q, k, v = inputs(2, 150, 200, 4, 2, 128)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    refs = reference_gradients(q, k, v, dout, None, True)
    rows = backward_rows(q, k, v, True, deterministic)
    options, lengths = {"is_causal": True, "deterministic": deterministic}, (None,) * 4
    with ran(rows):
        grads = torch.ops.flash_attn_3.bwd(dout, q, k, v, *saved, **options)[:3]
    assert_close_gradients(grads, *refs)
    for call in (
        lambda given: torch.ops.flash_attn_3.bwd(dout, q, k, v, *saved, *given, **options),
        lambda given: torch.ops.flash_attn_3._flash_attn_backward(
            dout, q, k, v, *saved, *given, *lengths, None, True, -1, -1, 0.0, deterministic
        ),
    ):
        given = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        with ran(rows):
            call(given)
        assert_close_gradients(given, *refs)


# The drop-in for F.scaled_dot_product_attention


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(150, 150), (100, 150)], ids=str)
def test_sdpa_drop_in(lengths, dims):
    """Its causal mask is aligned top-left: keys that nobody sees have gradients 0."""
    leaves = leaves_of(*(x.transpose(1, 2) for x in inputs(2, *lengths, 4, 2, *dims)))
    dout = randn(2, 4, lengths[0], dims[1], key="dout")
    q, k, v = (x.detach().transpose(1, 2) for x in leaves)
    seen_k, seen_v = k[:, : lengths[0]], v[:, : lengths[0]]
    with ran(all_rows(q, seen_k, seen_v, True)):
        out = flash_attn3.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        got = [x.transpose(1, 2) for x in torch.autograd.grad(out, leaves, dout)]
    assert all(x.shape == y.shape for x, y in zip(got, (q, k, v), strict=True))
    assert not got[1][:, lengths[0] :].any() and not got[2][:, lengths[0] :].any()
    refs, bases = reference_gradients(q, seen_k, seen_v, dout.transpose(1, 2), None, True)
    assert_close_gradients([got[0], got[1][:, : lengths[0]], got[2][:, : lengths[0]]], refs, bases)


def test_sdpa_under_deterministic_algorithms():
    """torch.use_deterministic_algorithms reaches the kernels (flash-attention issue 1766)."""
    leaves = leaves_of(*(x.transpose(1, 2) for x in inputs(2, 500, 500, 8, 2, 128)))
    q, k, v = (x.transpose(1, 2) for x in leaves)
    dout, wanted = randn(2, 8, 500, 128, key="dout"), None
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(50):
            with ran(all_rows(q, k, v, True, True)):
                out = flash_attn3.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
                grads = torch.autograd.grad(out, leaves, dout)
            wanted = wanted or grads
            assert equal(grads, wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_training_step_is_that_of_torch_s_attention():
    """A small transformer layer: the parameters' gradients with our attention and with torch's."""
    torch.manual_seed(0)
    width, heads = 256, 4
    norm, project, last = (
        torch.nn.LayerNorm(width).cuda(),
        torch.nn.Linear(width, 3 * width).cuda(),
        torch.nn.Linear(width, width).cuda(),
    )
    x = torch.randn(2, 300, width, device="cuda")
    parameters = [*norm.parameters(), *project.parameters(), *last.parameters()]

    def gradients_with(attention):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k, v = project(norm(x)).unflatten(-1, (3, heads, width // heads)).unbind(2)
            out = attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True).transpose(1, 2)
            loss = (x + last(out.flatten(2))).square().mean()
        return torch.autograd.grad(loss, parameters)

    for got, want in zip(
        gradients_with(flash_attn3.scaled_dot_product_attention),
        gradients_with(F.scaled_dot_product_attention),
        strict=True,
    ):
        assert (got - want).norm() <= 0.02 * want.norm()
