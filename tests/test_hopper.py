"""FlashAttention-3's names: modules, metadata, signatures, operator schemas, and the dense calls behind them."""

import importlib
import importlib.metadata
import inspect
import subprocess
import sys

import oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

torch.set_num_threads(1)
interface = importlib.import_module("flash_attn_interface")
MODULES = (
    "flash_attn_interface",
    "flash_attn_config",
    "flash_attn_3",
    "flash_attn_3._C",
    "flash_attn_3.flash_attn_interface",
    "flash_attn_3.flash_attn_config",
)
SIGNATURES = {
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
    "kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, "
    "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, "
    "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, "
    "sm_margin=0",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
    "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    "maybe_contiguous": "x",
}


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    scope = {}
    exec(f"def function({SIGNATURES[name]}): pass", {"torch": torch}, scope)
    assert parameters(getattr(interface, name)) == parameters(scope["function"])


def test_same_objects_everywhere():
    inner = importlib.import_module("flash_attn_3.flash_attn_interface")
    library = importlib.import_module("flash_attn3")
    for name in (*SIGNATURES, "flash_attn_func", "flash_attn_qkvpacked_func"):
        assert inspect.isfunction(getattr(interface, name))
        assert getattr(inner, name) is getattr(interface, name)
    assert library.flash_attn_func is interface.flash_attn_func
    assert importlib.import_module("flash_attn_3").__version__ == library.__version__


def test_imports_without_a_gpu_change_nothing():
    code = (
        f"import {', '.join(MODULES)}\nimport torch\nimport torch.nn.attention as a\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert getattr(a, 'current_flash_attention_impl', lambda: None)() is None\n"
        "assert torch.ops.flash_attn_3.fwd and torch.ops.flash_attn_3.bwd"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_config(capsys):
    config = importlib.import_module("flash_attn_3.flash_attn_config")
    assert config.CONFIG is importlib.import_module("flash_attn_config").CONFIG
    flags = config.CONFIG["build_flags"]
    assert len(flags) == 20 and all(isinstance(value, bool) for value in flags.values())
    assert [name for name, value in flags.items() if value] == ["FLASHATTENTION_DISABLE_SM8x"]
    config.show()
    assert "FLASHATTENTION_DISABLE_VARLEN: False" in capsys.readouterr().out


def test_metadata():
    try:
        distribution = importlib.metadata.distribution("flash-attn-3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-attn-3 is not installed")
    names = {"flash_attn3", "flash_attn_3", "flash_attn_interface", "flash_attn_config"}
    assert names <= set(distribution.read_text("top_level.txt").split())
    owners = importlib.metadata.packages_distributions()
    for name in names:
        assert "flash-attn-3" in [owner.replace("_", "-") for owner in owners[name]]


def dense():
    torch.manual_seed(0)
    return [torch.randn(2, s, h, 16).bfloat16() for s, h in ((20, 4), (30, 2), (30, 2), (20, 4))]


def test_what_comes_later_says_so():
    q, k, v, _ = dense()
    calls = (
        lambda: interface.flash_attn_with_kvcache(q, k, v),
        lambda: interface.flash_attn_combine(q, q),
        lambda: interface.get_scheduler_metadata(1, 1, 1, 1, 1, 64, None),
        lambda: torch.ops.flash_attn_3.fwd_combine(q, q),
        lambda: torch.ops.flash_attn_3.get_scheduler_metadata(1, 1, 1, 1, 1, 64, 64, torch.bfloat16, q),
        lambda: interface._flash_attn_forward(q, k, v, page_table=q),
        lambda: torch.ops.flash_attn_3.fwd(q, k, v, seqused_k=q),
        lambda: torch.ops.flash_attn_3.fwd(q, k, v, cu_seqlens_q=q),
        lambda: torch.ops.flash_attn_3.bwd(q, q, k, v, q, q, seqused_q=q),
        lambda: interface._flash_attn_backward(q, q, k, v, q, q, sequed_k=q, dq=q, dk=k, dv=v),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"not implemented in this version|in this version; leave it out"):
            call()
    with pytest.raises(NotImplementedError, match="page_table"):
        interface._flash_attn_forward(q, k, v, page_table=q)


def test_raw_operators():
    q, k, v, dout = dense()
    ops = torch.ops.flash_attn_3
    want, want_lse = interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want_grads = torch.autograd.grad(interface.flash_attn_func(*leaves, causal=True), leaves, dout)

    out, lse, *rest = ops.fwd(q, k, v, is_causal=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert [(tuple(x.shape), x.dtype) for x in rest] == [((0,), torch.float32)] * 2
    given = torch.full((2, 4, 20, 16), float("nan")).bfloat16().transpose(1, 2)
    out, _, *_ = ops.fwd(q, k, v, out=given, is_causal=True)
    assert out.data_ptr() == given.data_ptr() and torch.equal(given, want)

    grads = ops.bwd(dout, q, k, v, want, want_lse, is_causal=True)
    assert len(grads) == 5 and all(torch.equal(a, b) for a, b in zip(grads[:3], want_grads, strict=True))
    packed = torch.full((2, 30, 2, 2, 16), float("nan")).bfloat16()
    dq, (dk, dv) = torch.empty_like(q), packed.unbind(2)
    ops.bwd(dout, q, k, v, want, want_lse, dq, dk, dv, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), want_grads, strict=True))


@pytest.mark.parametrize("backend", ["kernel", "portable"])
def test_packed_batches(request, backend):
    """Positionally as clients call: raw operators and underscored functions, into strided outputs, gaps filled."""
    if backend == "kernel":
        request.getfixturevalue("kernels")
    q, k, v, dout = (x.flatten(0, 1) for x in dense())
    cu_q, cu_k = torch.tensor([0, 12, 38], dtype=torch.int32), torch.tensor([0, 30, 55], dtype=torch.int32)
    used_q, used_k = torch.tensor([12, 20], dtype=torch.int32), torch.tensor([28, 25], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = interface.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, 26, 30, used_q, used_k, window_size=(9, 3), softcap=2.0, return_attn_probs=True
    )
    want_grads = torch.autograd.grad(want, leaves, dout)
    ops, options = torch.ops.flash_attn_3, {"window_size_left": 9, "window_size_right": 3, "softcap": 2.0}
    given = torch.full((4, 40, 16), float("nan")).bfloat16().transpose(0, 1)
    for out in (None, given):
        got, lse, *rest = ops.fwd(
            q, k, v, None, None, None, out, cu_q, cu_k, None, used_q, used_k, 26, 30, **options, num_splits=1
        )
        assert torch.equal(got, want) and torch.equal(lse, want_lse) and len(rest) == 2
        got, lse, *_ = interface._flash_attn_forward(
            q, k, v, out_=out, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k,
            max_seqlen_q=26, max_seqlen_k=torch.tensor(30), **options,
        )  # fmt: skip
        assert torch.equal(got, want) and torch.equal(lse, want_lse) and (out is None or got is out)
    lengths = (cu_q, cu_k, used_q, used_k, 26, 30)
    results = ops.bwd(dout, q, k, v, want, want_lse, None, None, None, *lengths, **options)
    assert all(torch.equal(a, b) for a, b in zip(results[:3], want_grads, strict=True))
    for raw in (True, False):
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        if raw:
            ops.bwd(dout, q, k, v, want, want_lse, *grads, *lengths, **options)
        else:
            delta = interface._flash_attn_backward(dout, q, k, v, want, want_lse, *lengths, *grads, **options)
            assert delta.shape == want_lse.shape
        assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))
    with pytest.raises((ValueError, RuntimeError), match="softmax_lse has shape"):
        ops.bwd(dout, q, k, v, want, want_lse.t().contiguous(), None, None, None, *lengths)


def test_underscore_functions():
    q, k, v, dout = dense()
    out, lse, *rest = interface._flash_attn_forward(q, k, v, causal=True, num_splits=0, max_seqlen_q=20, softcap=2.0)
    ref, ref_lse = oracle.attention(q, k, v, causal=True, softcap=2.0)
    base, base_lse = oracle.attention(q, k, v, causal=True, softcap=2.0, dtype=q.dtype)
    oracle.assert_close("out", out, ref, base)
    oracle.assert_close("lse", lse, ref_lse, base_lse)
    assert [tuple(x.shape) for x in rest] == [(0,), (0,)]
    given = torch.empty(2, 4, 20, 16).bfloat16().transpose(1, 2)
    assert interface._flash_attn_forward(q, k, v, out_=given, causal=True, softcap=2.0)[0] is given
    assert torch.equal(given, out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    delta = interface._flash_attn_backward(
        dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], is_causal=True, softcap=2.0
    )
    assert delta.shape == lse.shape and delta.dtype == torch.float32
    want = oracle.gradients(q, k, v, dout, causal=True, softcap=2.0)
    base = oracle.gradients(q, k, v, dout, causal=True, softcap=2.0, dtype=q.dtype)
    for name, *values in zip(("dq", "dk", "dv"), grads, want, base, strict=True):
        oracle.assert_close(name, *values, floor=1e-4)
    qv = torch.randn_like(q)
    out = interface._flash_attn_forward(q, k, v, qv=qv)[0]
    assert torch.equal(out, interface.flash_attn_func(q, k, v, qv=qv))


def test_the_backwards_of_the_operators_run_on_the_kernels(kernels):
    """Into the caller's tensors, with `deterministic` passed on; torch's global switch counts too."""
    q, k, v, dout = dense()
    out, lse = interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    backward = torch.ops.flash_attn3.portable_backward
    want = backward(dout, None, q, k, v, None, out, lse, None, 0.25, -1, 0, 0, 0.0)[:3]

    def bwd(**options):
        grads = torch.empty(2, 4, 20, 16).bfloat16().transpose(1, 2), None, torch.empty_like(v)
        results = torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *grads, is_causal=True, **options)
        assert results[0].numel() == 0 and results[2].numel() == 0
        return grads[0], results[1], grads[2]

    def underscore(**options):
        grads = {name: torch.full_like(x, float("nan")) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        interface._flash_attn_backward(dout, q, k, v, out, lse, **grads, is_causal=True, **options)
        return grads.values()

    for function in (bwd, underscore):
        for deterministic in (False, True):
            for switch in (False, True):
                torch.use_deterministic_algorithms(switch)
                try:
                    grads = function(deterministic=deterministic)
                finally:
                    torch.use_deterministic_algorithms(False)
                assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))
                assert kernels.backward.pop()["deterministic"] == (deterministic or switch) and not kernels.backward


def test_errors_of_the_operators():
    q, k, v, dout = dense()
    out, lse = interface.flash_attn_func(q, k, v, return_attn_probs=True)
    with pytest.raises(ValueError, match="dk is None"):
        interface._flash_attn_backward(dout, q, k, v, out, lse, dq=q.clone())
    with pytest.raises((ValueError, RuntimeError), match="out has shape"):
        interface._flash_attn_forward(q, k, v, out_=out[:, :3])
    with pytest.raises((ValueError, RuntimeError), match="dout has shape"):
        torch.ops.flash_attn_3.bwd(dout[:1], q, k, v, out, lse)
    with pytest.raises((ValueError, RuntimeError), match="softmax_lse has shape"):
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse[:1])
    with pytest.raises((ValueError, RuntimeError), match="dq has shape"):
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, k.clone())


def test_custom_operators_trace():
    q, k, v, dout = dense()
    out, lse = interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    options = (0.25, True, -1, -1)
    descales, dense_lengths = (None,) * 4, (None,) * 4
    ops = torch.ops.flash_attn_3
    forward, backward = (*descales, *dense_lengths, *options, 0, 0.0), (*dense_lengths, *options, 0.0, True)
    torch.library.opcheck(ops._flash_attn_forward.default, (q, k, v, *forward))
    torch.library.opcheck(ops._flash_attn_forward_out.default, (q, k, v, *forward, out))
    torch.library.opcheck(ops._flash_attn_backward.default, (dout, q, k, v, out, lse, *grads, *backward))
    q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
    lengths = (torch.tensor([0, 15, 38], dtype=torch.int32), torch.tensor([0, 50, 60], dtype=torch.int32), None, None)
    forward, backward = (*descales, *lengths, *options, 0, 0.0), (*lengths, *options, 0.0, True)
    out, lse, *_ = ops._flash_attn_forward(q, k, v, *forward)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    torch.library.opcheck(ops._flash_attn_forward.default, (q, k, v, *forward))
    torch.library.opcheck(ops._flash_attn_forward_out.default, (q, k, v, *forward, out))
    torch.library.opcheck(ops._flash_attn_backward.default, (dout, q, k, v, out, lse, *grads, *backward))
    with FakeTensorMode():
        q, k, v, _ = dense()
        given = torch.empty_like(q)
        for options in ({"num_splits": 0}, {"num_splits": -1}, {"out_": given}):
            out, lse, *rest = interface._flash_attn_forward(q, k, v, causal=True, **options)
            assert out.shape == q.shape and lse.shape == (2, 4, 20)
            assert [tuple(x.shape) for x in rest] == [(0,), (0,)]
