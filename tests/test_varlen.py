"""Packed batches: against the oracle, gaps, lengths that contradict each other, reported cases, errors, choice."""

import inspect
import random
import subprocess
import sys

import oracle
import pytest
import torch
from packed_batches import NAN, arguments, compare, cumulative, ints, leaves, make, owners, run

import flash_attn3
from flash_attn3 import checks, dispatch

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "causal window": {"causal": True, "window": (7, 7)},
    "chunk": {"chunk": 8, "causal": True},
    "softcap": {"softcap": 1.5},
    "sink": {"causal": True, "sink": torch.tensor([-1.0, 0.5, 2.0, -torch.inf])},
    "beyond every key": {"window": (2**40, 2**31), "chunk": 2**60},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lengths_and_masks(backend, dtype, options):
    """Empty sequences of either kind, more queries than keys and fewer, seqused, rows before, between and behind."""
    for lengths in (
        (cumulative([9, 0, 30, 1, 0]), cumulative([17, 12, 5, 33, 0]), None, None),
        (ints(2, 20, 40), ints(3, 30, 60), ints(11, 20), ints(27, 0)),
        (ints(0, 20, 40), ints(0, 30, 60), None, ints(0, 29)),
    ):
        compare(*make(44, 70, dtype=dtype), lengths, backend=backend, **OPTIONS[options])


@pytest.mark.parametrize("seed", range(60))
def test_random_batch(seed):
    r = random.Random(seed)
    batch, hkv, group, d, dv = r.randint(0, 5), r.choice([1, 2]), r.choice([1, 3]), r.randint(1, 40), r.randint(1, 40)
    q_lengths, k_lengths = ([r.choice([0, 1, r.randint(0, 40)]) for _ in range(batch)] for _ in range(2))
    used = [
        torch.tensor([r.randint(0, x) for x in y], dtype=torch.int32) if r.random() < 0.4 else None
        for y in (q_lengths, k_lengths)
    ]
    dtype = r.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    q, k, v = make(
        sum(q_lengths) + r.choice([0, 7]), sum(k_lengths) + r.choice([0, 3]), group * hkv, hkv, d, dv, dtype, seed
    )
    compare(
        q, k, v, (cumulative(q_lengths), cumulative(k_lengths), *used),
        qv=torch.randn(*q.shape[:2], dv).to(dtype) if r.random() < 0.2 else None,
        sink=torch.randn(q.shape[1]).to(torch.promote_types(dtype, torch.float32)) if r.random() < 0.3 else None,
        causal=r.random() < 0.5, softcap=r.choice([0.0, 0.0, 3.0]), chunk=r.choice([0, 0, r.randint(1, 30)]),
        window=r.choice([(-1, -1), (r.randint(0, 30), r.randint(-1, 30)), (-1, r.randint(0, 20))]),
    )  # fmt: skip


def test_a_sequence_is_bitwise_what_it_is_alone():
    """Whatever else is in the batch (C29), and the same as a dense batch of one."""
    q, k, v = make(60, 90)
    cu_q, cu_k = cumulative([10, 37, 13]), cumulative([40, 20, 30])
    packed = run(q, k, v, (cu_q, cu_k, None, None), causal=True, window=(20, 0))
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        inputs = leaves(q[None, rows], k[None, keys], v[None, keys])
        out, lse = flash_attn3.attention(*inputs, causal=True, window_size=(20, 0), return_lse=True)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert torch.equal(packed[0][rows], out[0]) and torch.equal(packed[1][:, rows], lse[0])
        got = (packed[2][rows], packed[3][keys], packed[4][keys])
        assert all(torch.equal(a, b[0]) for a, b in zip(got, grads, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_outside_the_sequences_reaches_nothing_c11_c17_c18(causal):
    """NaN in the rows of q, k, v, dout and dlse that nobody owns: bitwise the results with zeros; 0 and -inf there."""
    cu_q, cu_k = ints(2, 23, 40), ints(1, 33, 55)
    lengths = (cu_q, cu_k, ints(18, 17), ints(32, 15))
    q, k, v = make(50, 60, 16, 1)
    dout, dlse = torch.randn(50, 16, 16).bfloat16(), torch.randn(16, 50)
    rows, keys = torch.ones(50, dtype=torch.bool), torch.ones(60, dtype=torch.bool)
    rows[2:20] = rows[23:40] = keys[1:33] = keys[33:48] = False
    results = []
    for value in (0.0, NAN):
        tensors = [x.clone() for x in (q, k, v, dout, dlse.t())]
        for x, outside in zip(tensors, (rows, keys, keys, rows, rows), strict=True):
            x[outside] = value
        results.append(run(*tensors[:3], lengths, tensors[3], tensors[4].t(), causal=causal))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    out, lse, dq, dk, dv = results[1]
    assert (out[rows] == 0).all() and (dq[rows] == 0).all() and (dk[keys] == 0).all() and (dv[keys] == 0).all()
    assert (lse[:, rows] == -torch.inf).all() and (out[2:20] != 0).all() and (dv[1:33] != 0).all()


MALFORMED = {
    "goes backwards": (ints(0, 20, 10, 40), ints(0, 20, 30, 60), None, None),
    "goes backwards in k": (ints(0, 10, 20, 40), ints(0, 40, 30, 60), None, None),
    "begins below 0": (ints(-5, 10, 20, 40), ints(0, 20, 30, 60), None, None),
    "ends beyond": (ints(0, 10, 20, 400), ints(0, 20, 30, 60), None, None),
    "all beyond": (ints(99, 100, 200, 400), ints(0, 20, 30, 60), None, None),
    "back into the tensor": (ints(0, 99, 20, 40), ints(0, 20, 30, 60), None, None),
    "back to the end, empty": (ints(0, 99, 44, 44), ints(0, 20, 30, 60), None, None),
    "huge": (ints(0, 2**31 - 1, -(2**31), 40), ints(0, 20, 30, 60), None, None),
    "seqused above the length": (ints(0, 10, 20, 40), ints(0, 20, 30, 60), ints(10, 11, 20), None),
    "seqused below 0": (ints(0, 10, 20, 40), ints(0, 20, 30, 60), None, ints(20, 10, -1)),
    "of an empty sequence": (ints(0, 10, 10, 40), ints(0, 20, 30, 60), ints(9, 1, 30), None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_lengths(name):
    """NaN in the rows of the sequence, everything else right; and an error that names it where it is asked for."""
    lengths, (q, k, v) = MALFORMED[name], make(44, 62, dtype=torch.float32)
    for options in ({}, {"causal": True, "sink": torch.randn(4)}):
        compare(q, k, v, lengths, **options)
    bad = [a[4] or b[4] for a, b in zip(*owners(lengths, 44, 62), strict=True)]
    assert any(bad)
    checks.check_seqlens()
    try:
        with pytest.raises(ValueError, match=rf"sequence {bad.index(True)}: (cu_seqlens|seqused)_[qk]"):
            flash_attn3.attention_varlen(q, k, v, **arguments(lengths))
        flash_attn3.attention_varlen(q, k, v, ints(0, 44), ints(0, 62), 1, 1)
    finally:
        flash_attn3.check_seqlens(False)
    flash_attn3.attention_varlen(q, k, v, **arguments(lengths))


def test_the_environment_turns_the_check_on():
    code = """
import torch, flash_attn3
x, cu = torch.zeros(4, 1, 8).half(), torch.tensor([0, 3, 2], dtype=torch.int32)
flash_attn3.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4)
"""
    environment = {"FLASH_ATTN3_CHECK_SEQLENS": "1", "PYTHONPATH": ":".join(x for x in sys.path if x)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ValueError: sequence 1: cu_seqlens_q goes from 3 to 2" in result.stderr


def test_empty_sequences_c12():
    for d, total_k in ((16, 306), (16, 305)):  # the second: one row short of cu_seqlens_k[-1]
        q, k, v = make(153, total_k, 4, 4, d, d)
        lengths = (cumulative([0, 0, 153]), cumulative([0, 1, 305]), None, None)
        *_, dk, dv = compare(q, k, v, lengths)
        assert (dk[0] == 0).all() and (dv[0] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_queries_or_without_keys_c13_c14(causal):
    few, many = ints(0, 0, 120, 204, 204), ints(0, 253, 428, 512, 819)
    *_, dk, dv = compare(*make(204, 819, 4, 1), (few, many, None, None), causal=causal)
    for grad in (dk, dv):
        assert (grad[:253] == 0).all() and (grad[512:] == 0).all()
    out, lse, dq, *_ = compare(*make(819, 204, 4, 1), (many, few, None, None), causal=causal)
    for x in (out, dq):
        assert (x[:253] == 0).all() and (x[512:] == 0).all()
    assert (lse[:, :253] == -torch.inf).all() and (lse[:, 512:] == -torch.inf).all()


def test_nothing_at_all_c15(backend):
    for (tq, cu_q), (tk, cu_k) in (
        ((256, ints(0, 100, 256)), (0, ints(0, 0, 0))),
        ((0, ints(0, 0, 0)), (256, ints(0, 100, 256))),
        ((0, ints(0)), (0, ints(0))),
        ((9, ints(0)), (5, ints(0))),
    ):
        q, k, v = make(tq, tk, 8, 2)
        out, lse, dq, dk, dv = run(q, k, v, (cu_q, cu_k, None, None), dlse=torch.randn(8, tq), backend=backend)
        assert out.shape == q.shape and lse.shape == (8, tq) and (out == 0).all() and (lse == -torch.inf).all()
        assert all(x.shape == y.shape and (x == 0).all() for x, y in ((dq, q), (dk, k), (dv, v)))
        sink = torch.randn(8)
        out, lse, *_, dsink = run(q, k, v, (cu_q, cu_k, None, None), dlse=torch.ones(8, tq), sink=sink)
        owned = cu_q[-1].item() if len(cu_q) > 1 else 0
        assert torch.equal(lse[:, :owned], sink[:, None].expand(-1, owned)) and (lse[:, owned:] == -torch.inf).all()
        assert torch.equal(dsink, torch.full((8,), float(owned)))


def test_max_seqlen_is_not_read_c34(backend):
    """0-dim tensors, of any integer type, even without a value."""
    q, k, v = make(30, 40)
    cu_q, cu_k = cumulative([10, 20]), cumulative([25, 15])
    want = flash_attn3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 25, causal=True)
    for bound in (
        torch.tensor(25, dtype=torch.int32),
        torch.tensor(0),
        torch.empty((), dtype=torch.int64, device="meta"),
    ):
        got = flash_attn3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, bound, bound, causal=True)
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_through_the_lse_c48(causal):
    q, k, v = make(90, 90, dtype=torch.float32)
    inputs, cu = leaves(q, k, v), cumulative([40, 1, 49])
    weight = torch.randn(90, 4, 16)
    out, lse = flash_attn3.attention_varlen(*inputs, cu, cu, 49, 49, causal=causal, return_lse=True)
    assert lse.requires_grad
    got = torch.autograd.grad((out * weight).sum() + lse.square().mean(), inputs)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle.packed(*doubles, lengths=(cu, cu, None, None), causal=causal)
    want = torch.autograd.grad((out * weight).sum() + lse.square().mean(), doubles)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "features", [{}, {"causal": True, "window_size": (3, 1), "softcap": 2.0}, {"attention_chunk": 2}]
)
def test_against_finite_differences(features):
    torch.manual_seed(3)
    shapes = ((7, 2, 3), (9, 1, 3), (9, 1, 2), (7, 2, 2), (2,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    lengths = arguments((ints(0, 3, 3, 6), ints(0, 4, 6, 8), None, ints(3, 2, 2)))

    def call(q, k, v, qv, sink):
        out, lse = flash_attn3.attention_varlen(q, k, v, qv=qv, sink=sink, return_lse=True, **lengths, **features)
        return out, lse.where(lse.detach().isfinite(), 0)

    assert torch.autograd.gradcheck(call, inputs)


def test_e4m3_with_descales_and_qv():
    torch.manual_seed(4)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make(30, 40, dtype=torch.float32))
    lengths = (cumulative([10, 20]), cumulative([25, 15]), None, None)
    descales = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    out, lse = flash_attn3.flash_attn_varlen_func(
        q, k, v, *lengths[:2], 20, 25, causal=True, return_attn_probs=True, **descales
    )
    ref, ref_lse = oracle.packed(q, k, v, lengths=lengths, causal=True, **descales)
    assert out.dtype == torch.bfloat16
    oracle.assert_close("out", out, ref, ref.bfloat16())
    oracle.assert_close("lse", lse, ref_lse, ref_lse.float())
    with pytest.raises(ValueError, match=r"k_descale has shape \(3, 2\).*\(2, 2\)"):
        flash_attn3.flash_attn_varlen_func(q, k, v, *lengths[:2], 20, 25, k_descale=torch.ones(3, 2))


def test_views_are_as_good_as_copies():
    q, k, v = make(40, 40, 4, 4)
    lengths = (cumulative([15, 25]),) * 2 + (None, None)
    want = run(q, k, v, lengths, causal=True)
    for view in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        got = run(*(view(x) for x in (q, k, v)), lengths, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    strided = torch.stack([lengths[0], lengths[0]], 1)[:, 0]
    got = run(q, k, v, (strided, strided, None, None), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Errors and choice


def test_signatures_and_docstrings():
    def parameters(function):
        return {name: (x.kind, x.default) for name, x in inspect.signature(function).parameters.items()}

    compatible = parameters(flash_attn3.flash_attn_varlen_func)
    assert parameters(flash_attn3.explain_varlen) == compatible
    assert not {"sink", "dropout_p", "s_aux", "learnable_sink", "block_table"} & set(compatible)
    assert all(name in flash_attn3.flash_attn_varlen_func.__doc__ for name in compatible)
    added = set(parameters(flash_attn3.attention_varlen)) - set(parameters(flash_attn3.attention))
    bounds = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"}
    assert added == bounds and set(parameters(flash_attn3.attention)) < set(parameters(flash_attn3.attention_varlen))


CU = ints(0, 3, 9)
ERRORS = {
    "q is dense": ({"q": torch.zeros(1, 9, 4, 16).half()}, r"q has shape \(1, 9, 4, 16\); .*\(tokens, heads"),
    "cu_seqlens is None": ({"cu_seqlens_k": None}, "cu_seqlens_k is None"),
    "cu_seqlens is a list": ({"cu_seqlens_q": [0, 9]}, "cu_seqlens_q is "),
    "cu_seqlens is int64": ({"cu_seqlens_q": CU.long()}, "cu_seqlens_q has .*int64.*must be .*int32"),
    "cu_seqlens is 2-D": ({"cu_seqlens_q": CU[None]}, r"cu_seqlens_q has shape \(1, 3\)"),
    "cu_seqlens is empty": ({"cu_seqlens_q": CU[:0]}, r"cu_seqlens_q has shape \(0,\)"),
    "cu_seqlens is elsewhere": ({"cu_seqlens_q": CU.to("meta")}, "cu_seqlens_q has .*meta"),
    "different batches": ({"cu_seqlens_k": CU[:2]}, r"cu_seqlens_k has shape \(2,\).*\(3,\)"),
    "seqused": ({"seqused_q": CU}, r"seqused_q has shape \(3,\).*\(2,\)"),
    "seqused is a number": ({"seqused_k": 3}, "seqused_k is 3"),
    "lengths of k and v": ({"v": torch.zeros(8, 2, 16).half()}, "k has 9 keys and v 8"),
    "max_seqlen below 0": ({"max_seqlen_q": -1}, "max_seqlen_q is -1"),
    "max_seqlen is None": ({"max_seqlen_k": None}, "max_seqlen_k: None"),
    "max_seqlen is a float": ({"max_seqlen_k": 2.0}, "max_seqlen_k: 2.0"),
    "max_seqlen is 1-D": ({"max_seqlen_q": ints(3)}, r"max_seqlen_q has shape \(1,\)"),
    "max_seqlen is a float tensor": ({"max_seqlen_q": torch.tensor(3.0)}, "max_seqlen_q has .*float32"),
    "float32": ({name: torch.zeros(9, 2, 16) for name in "qkv"}, r"float32.*flash_attn3\.attention_varlen"),
    "window": ({"window_size": (-2, 0)}, "window_size"),
    "qv": ({"qv": torch.zeros(9, 4, 8).half()}, r"qv has shape \(9, 4, 8\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    changes, message = ERRORS[name]
    call = {
        "q": torch.zeros(9, 4, 16).half(), "k": torch.zeros(9, 2, 16).half(), "v": torch.zeros(9, 2, 16).half(),
        "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 6, "max_seqlen_k": 6,
    }  # fmt: skip
    for function in (flash_attn3.flash_attn_varlen_func, flash_attn3.explain_varlen):
        function(**call)
        if name == "float32" and function is flash_attn3.explain_varlen:
            continue
        with pytest.raises((ValueError, RuntimeError), match=message):
            function(**{**call, **changes})


def test_errors_of_sinks():
    q, k, v = make(9, 9)
    for sink, message in (
        (torch.zeros(2), r"sink has shape \(2,\).*\(4,\)"),
        (torch.zeros(4).half(), "sink has .*float16.*float32"),
        (0.0, "sink is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn3.attention_varlen(q, k, v, CU, CU, 9, 9, sink=sink)
        with pytest.raises(ValueError, match=message):
            flash_attn3.attention(q[None], k[None], v[None], sink=sink)


def test_explain():
    q, k, v = make(9, 9)
    how = flash_attn3.explain_varlen(q, k, v, CU, CU, 9, 9, window_size=(2, 0))
    assert how.backend == "portable" and "device cpu" in str(how)


def test_a_build_without_the_kernels_of_packed_batches(monkeypatch):
    from flash_attn3 import ops

    monkeypatch.setattr(ops, "loaded", True)
    monkeypatch.setattr(dispatch, "is_hopper", lambda index: True)
    every = {dtype: [(256, 256)] for dtype in checks.HALF}
    monkeypatch.setattr(dispatch, "_rows", every)
    monkeypatch.setattr(dispatch, "_backward_rows", {(dtype, False): rows for dtype, rows in every.items()})
    problem = dispatch.Problem(
        torch.device("cuda", 0), torch.float16, 128, 128, 64, 64, 0.1, varlen=True, has_sink=True
    )
    for present, forward, backward in (
        (set(), "packed_schedule", "packed_schedule"),
        ({"packed_schedule"}, None, "backward_sink"),
        ({"packed_schedule", "backward_sink"}, None, None),
    ):
        monkeypatch.setattr(dispatch, "_ops", present)
        reasons = dispatch.reasons_not_supported(problem), dispatch.backward_reasons_not_supported(problem, False)
        for found, word in zip(reasons, (forward, backward), strict=True):
            assert len(found) == (word is not None) and (word is None or word in found[0])
