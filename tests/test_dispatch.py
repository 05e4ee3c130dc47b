"""Which backend runs what: reasons as data, mocked devices (C25), normalised windows, explain."""

import itertools

import oracle
import pytest
import torch

import flash_attn3
from flash_attn3 import checks, dispatch, ops

CUDA = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability that cuda:0 seems to have, with the extension and all its kernels loaded."""

    def set_to(value):
        monkeypatch.setattr(ops, "loaded", True)
        monkeypatch.setattr(dispatch, "_rows", {dtype: [(256, 256)] for dtype in checks.HALF})
        monkeypatch.setattr(dispatch, "_fp8_rows", [(256, 256)])
        every = {(dtype, flag): [(256, 256)] for dtype in checks.HALF for flag in (False, True)}
        monkeypatch.setattr(dispatch, "_backward_rows", every)
        monkeypatch.setattr(dispatch, "_ops", {"packed_schedule", "backward_sink"})
        monkeypatch.setattr(dispatch, "_hopper", {})
        monkeypatch.setattr(dispatch, "capability", lambda index: value)

    return set_to


def problem(**changes):
    base = dispatch.Problem(CUDA, torch.bfloat16, 128, 128, 64, 64, 0.125)
    return base._replace(**changes)


def test_hopper_runs_the_kernels(capability):
    capability((9, 0))
    for changes in (
        {},
        {"window": (-1, 0)},
        {"window": (5, 3)},
        {"attention_chunk": 4},
        {"softcap": 2.0},
        {"has_sink": True},
        {"varlen": True},
        {"dtype": torch.float16},
        {"dtype": torch.float8_e4m3fn},
        {"head_dim": 256, "head_dim_v": 256},
        {"head_dim": 1, "head_dim_v": 3},
        {"seqlen_q": 0},
    ):
        assert dispatch.reasons_not_supported(problem(**changes)) == [], changes
        assert dispatch.use_kernel(problem(**changes), None)
        assert not dispatch.use_kernel(problem(**changes), "portable")


@pytest.mark.parametrize("found", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_portable_c25(capability, found):
    capability(found)
    reasons = dispatch.reasons_not_supported(problem())
    assert len(reasons) == 1 and f"{found[0]}.{found[1]}" in reasons[0] and "9.0" in reasons[0]
    assert not dispatch.use_kernel(problem(), None)
    with pytest.raises(NotImplementedError, match=rf"{found[0]}\.{found[1]}.*9\.0"):
        dispatch.use_kernel(problem(), "kernel")
    assert not dispatch.has_kernels(0)


def test_capability_is_that_of_the_tensors_device(monkeypatch, capability):
    capability(None)
    monkeypatch.setattr(dispatch, "capability", lambda index: (9, 0) if index == 1 else (8, 6))
    assert dispatch.has_kernels(1) and not dispatch.has_kernels(0)
    assert dispatch.reasons_not_supported(problem(device=torch.device("cuda", 1))) == []
    assert "8.6" in dispatch.reasons_not_supported(problem())[0]


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"device": torch.device("cpu")}, "device cpu"),
        ({"dtype": torch.float32}, "float32"),
        ({"dtype": torch.float8_e4m3fn, "varlen": True}, "cu_seqlens_q"),
        ({"dtype": torch.float8_e4m3fn, "head_dim": 264}, "264"),
        ({"head_dim": 264}, "264"),
        ({"head_dim_v": 512}, "512"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
        ({"softmax_scale": 1e-50}, "softmax_scale"),
        ({"softcap": 1e-39}, "softcap"),
        ({"softcap": 1e39}, "softcap"),
        ({"softcap": 1e38, "softmax_scale": 1e-5}, "softcap"),
        ({"has_qv": True}, "qv"),
    ],
)
def test_each_reason_names_its_argument(capability, changes, word):
    capability((9, 0))
    reasons = dispatch.reasons_not_supported(problem(**changes))
    assert len(reasons) == 1 and word in reasons[0]
    with pytest.raises(NotImplementedError, match=word):
        dispatch.use_kernel(problem(**changes), "kernel")


def test_a_kernel_that_the_build_lacks(monkeypatch, capability):
    """A subset of the kernels: what none of them covers is portable, and explain says why."""
    capability((9, 0))
    monkeypatch.setattr(dispatch, "_rows", {torch.bfloat16: [(192, 128), (128, 160)], torch.float16: []})
    for dims in ((64, 64), (128, 160), (192, 128)):
        assert dispatch.use_kernel(problem(head_dim=dims[0], head_dim_v=dims[1]), None)
    monkeypatch.setattr(dispatch, "_fp8_rows", [(64, 64)])
    assert dispatch.use_kernel(problem(dtype=torch.float8_e4m3fn), None)
    fp8 = {"dtype": torch.float8_e4m3fn, "head_dim": 80}
    for changes in (fp8, {"dtype": torch.float16}, {"head_dim": 192, "head_dim_v": 160}, {"head_dim": 256}):
        assert not dispatch.use_kernel(problem(**changes), None)
        reasons = dispatch.reasons_not_supported(problem(**changes))
        assert len(reasons) == 1 and "this build lacks the kernel" in reasons[0]
        how = dispatch.explain_problem(problem(**changes))
        assert how.backend == "portable" and how.reasons == tuple(reasons)


@pytest.mark.skipif(not ops.loaded, reason="needs the extension")
def test_has_row_is_what_select_kernel_finds():
    dims = (1, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257)
    for dtype in checks.HALF:
        for head_dim in dims:
            for head_dim_v in dims:
                row = torch.ops.flash_attn3.select_kernel(head_dim, head_dim_v, 9, 9, False, dtype == torch.bfloat16)
                packed = torch.ops.flash_attn3.select_kernel(head_dim, head_dim_v, 9, 9, True, dtype == torch.bfloat16)
                assert (row >= 0) == (packed >= 0)
                assert dispatch.has_row(dtype, head_dim, head_dim_v) == (row >= 0)
                row = torch.ops.flash_attn3.select_fp8(head_dim, head_dim_v, 9, 9)
                complete = row >= 0 and dispatch.has_op("fp8_transpose")
                assert dispatch.has_fp8_row(head_dim, head_dim_v) == complete


def test_what_the_fp8_forward_needs():
    rows = [{"op": "fp8_forward", "dtype": "e4m3", "head_dim": d, "head_dim_v": d} for d in (64, 256)]
    assert dispatch.fp8_rows(rows) == []
    rows.append({"op": "fp8_transpose", "dtype": "any", "head_dim": 256, "head_dim_v": 256})
    assert dispatch.fp8_rows(rows) == [(256, 256)]


def table(*rows):
    """A kernel table of (op, head_dim, head_dim_v) rows, bf16."""
    return [{"op": op, "dtype": "bf16", "head_dim": d, "head_dim_v": dv} for op, d, dv in rows]


def test_what_a_backward_needs():
    """Prepare and finish around the fused kernel, or prepare before the two that are deterministic."""
    prepare, finish = ("backward_prepare", 256, 256), ("backward_finish", 256, 256)
    fused, keys, queries = ("backward", 128, 128), ("backward_keys", 192, 128), ("backward_queries", 256, 96)
    for rows, default, repeatable in (
        ((), [], []),
        ((prepare, fused), [], []),
        ((fused, finish), [], []),
        ((prepare, fused, finish), [(128, 128)], []),
        ((prepare, keys), [], []),
        ((keys, queries), [], []),
        ((prepare, keys, queries), [(192, 96)], [(192, 96)]),
        ((prepare, keys, queries, fused, finish), [(128, 128), (192, 96)], [(192, 96)]),
    ):
        found = dispatch.backward_rows(table(*rows))
        assert sorted(found[torch.bfloat16, False]) == default, rows
        assert found[torch.bfloat16, True] == repeatable, rows
        assert found[torch.float16, False] == []


def test_a_backward_that_the_build_lacks(monkeypatch, capability):
    """The forward by a kernel, the backward in PyTorch, and explain says why; for each kind of backward."""
    capability((9, 0))
    rows = {(torch.bfloat16, False): [(128, 128)], (torch.bfloat16, True): [(64, 64)]}
    monkeypatch.setattr(dispatch, "_backward_rows", rows)
    assert not any(dispatch.backward_reasons_not_supported(problem(), x) for x in (True, False))
    for head_dim, deterministic in ((96, True), (192, False), (192, True)):
        p = problem(head_dim=head_dim)
        assert dispatch.use_kernel(p, None)
        (reason,) = dispatch.backward_reasons_not_supported(p, deterministic)
        assert "this build lacks" in reason and str(head_dim) in reason and ("determin" in reason) == deterministic
    assert not dispatch.backward_reasons_not_supported(problem(head_dim=96), False)
    for changes in ({"has_qv": True}, {"device": torch.device("cpu")}):  # a portable forward has a portable backward
        assert dispatch.backward_reasons_not_supported(problem(**changes), False) == dispatch.reasons_not_supported(
            problem(**changes)
        )


@pytest.mark.skipif(not dispatch.has_backward(torch.bfloat16, 64, 64, False), reason="needs the backward kernels")
def test_has_backward_is_what_select_backward_finds():
    dims = (1, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257)
    for dtype in checks.HALF:
        for head_dim in dims:
            for head_dim_v in dims:
                for flag, length in ((False, 9), (False, 9999), (True, 9)):
                    numbers = (head_dim, head_dim_v, length, length, -1, 0, 0, False, dtype == torch.bfloat16, flag)
                    rows = torch.ops.flash_attn3.select_backward(*numbers)
                    assert dispatch.has_backward(dtype, head_dim, head_dim_v, flag) == (min(rows) >= 0)


def test_deterministic_is_asked_for_or_switched_on():
    assert not dispatch.must_be_deterministic(False) and dispatch.must_be_deterministic(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert dispatch.must_be_deterministic(False) is True
    finally:
        torch.use_deterministic_algorithms(False)


def test_explain_names_the_rows_of_the_backward(monkeypatch, capability):
    capability((9, 0))
    names = [
        "forward_x",
        "backward_prepare_x",
        "backward_x",
        "backward_finish_x",
        "backward_keys_x",
        "backward_queries_x",
    ]
    monkeypatch.setattr(ops, "kernel_table", lambda: [{"id": i, "name": name} for i, name in enumerate(names)])
    library = torch.library.Library("flash_attn3", "IMPL")
    try:
        asked = []

        def select_kernel(*numbers):
            asked.append(numbers)
            return 0

        def select_backward(*numbers):
            asked.append(numbers)
            return (1, 4, 5) if numbers[-1] else (1, 2, 3)

        for function in (select_kernel, select_backward):
            library.impl(function.__name__, function, "CompositeExplicitAutograd", allow_override=True)
        for flag, rows in ((False, (1, 2, 3)), (True, (1, 4, 5))):
            how = dispatch.explain_problem(problem(varlen=flag, window=(5, 3), attention_chunk=4), flag)
            assert how.kernel == "forward_x" and how.backward_reasons == ()
            assert how.backward == "kernel, " + ", ".join(names[row] for row in rows) and how.backward in str(how)
            backward = (64, 64, 128, 128, 5, 3, 4, flag, True, flag)
            assert asked[-2:] == [(64, 64, 128, 128, flag, True), backward]
        monkeypatch.setattr(dispatch, "_backward_rows", {})
        how = dispatch.explain_problem(problem())
        assert how.kernel and how.reasons == () and how.backward.startswith("portable")
        assert len(how.backward_reasons) == 1 and how.backward_reasons[0] in str(how)
    finally:
        library._destroy()


def test_without_the_extension(monkeypatch, capability):
    capability((9, 0))
    monkeypatch.setattr(ops, "loaded", False)
    monkeypatch.setattr(ops, "load_error", "no extension here")
    assert dispatch.reasons_not_supported(problem()) == ["no extension here"]
    assert not dispatch.has_kernels(0)
    assert ops.kernel_table() == []


def test_normalised_windows_see_the_same_keys():
    for sq in (1, 2, 5, 9):
        for sk in (0, 1, 4, 9):
            for left in (-1, 0, 1, 3, 8, 50):
                for right in (-1, 0, 1, 3, 8, 50):
                    for causal in (False, True):
                        window = dispatch.normalize_window((left, right), causal, sq, sk)
                        want = oracle.visible(sq, sk, causal=causal, window=(left, right))
                        assert torch.equal(oracle.visible(sq, sk, window=window), want)
                        assert window[1] == 0 or not causal


def test_windows_that_are_none():
    assert dispatch.normalize_window((127, 126), False, 128, 128) == (-1, 126)
    assert dispatch.normalize_window((127, 127), False, 128, 128) == (-1, -1)
    assert dispatch.normalize_window((127, 127), True, 128, 128) == (-1, 0)
    assert dispatch.normalize_window((126, 0), False, 128, 128) == (126, 0)
    assert dispatch.normalize_window((-1, 0), False, 1, 128) == (-1, 0)


def test_normalised_chunks_see_the_same_keys():
    for sq in (0, 1, 5, 9):
        for sk in (0, 1, 4, 9):
            for chunk in (0, 1, 3, 4, 5, 8, 9, 10, 50):
                want = oracle.visible(sq, sk, chunk=chunk)
                normal = dispatch.normalize_chunk(chunk, sq, sk)
                assert torch.equal(oracle.visible(sq, sk, chunk=normal), want) and normal <= max(sq, sk)
    assert dispatch.normalize_chunk(2**70, 9, 9) == 0


def test_normalised_bounds_of_packed_batches():
    """Those of an operator fit int32, and see the same keys of sequences of any length."""
    largest = dispatch.MAX_LENGTH
    for given, causal, chunk, want in (
        ((-1, -1), False, 0, ((-1, -1), 0)),
        ((127, 126), False, 64, ((127, 126), 64)),
        ((127, 126), True, 2**31, ((127, 0), largest)),
        ((2**31, 2**70), False, 2**70, ((-1, -1), largest)),
        ((largest, largest), False, largest, ((largest, largest), largest)),
    ):
        assert dispatch.normalize_packed(given, causal, chunk) == want


def test_explain():
    q, k = torch.randn(1, 8, 4, 16).bfloat16(), torch.randn(1, 9, 2, 16).bfloat16()
    how = flash_attn3.explain(q, k, k, causal=True, softcap=3.0, window_size=(2, 2))
    assert how.backend == "portable" and how.kernel is None
    assert how.backward.startswith("portable") and how.backward_reasons == how.reasons
    text = str(how)
    assert text.count("device cpu") == 1
    assert flash_attn3.explain(q, k, k, deterministic=True).backward == how.backward
    for word in ("portable", "device cpu", "backward"):
        assert word in text, text
    assert flash_attn3.explain(q.float(), k.float(), k.float()).backend == "portable"
    cu = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    assert str(flash_attn3.explain_varlen(q[0], k[0], k[0], *cu, 8, 9)) == str(flash_attn3.explain(q, k, k))
    with pytest.raises(ValueError, match="k has 9 keys and v 8"):
        flash_attn3.explain(q, k, k[:, :8])


@pytest.mark.skipif(not ops.loaded, reason="needs the extension")
def test_explain_names_the_kernel(capability):
    capability((9, 0))
    names = {row["name"] for row in ops.kernel_table()}
    how = dispatch.explain_problem(problem(head_dim=128, head_dim_v=128, window=(-1, 0)))
    assert how.backend == "kernel" and how.kernel in names and how.reasons == ()
    assert how.kernel in str(how)


@pytest.mark.skipif(
    not (
        dispatch.has_backward(torch.bfloat16, 128, 128, True) and dispatch.has_backward(torch.bfloat16, 128, 128, False)
    ),
    reason="needs the backward kernels",
)
def test_explain_asks_with_the_lengths(capability):
    capability((9, 0))
    for seqlen, causal, deterministic in itertools.product((64, 900, 4096), (False, True), (False, True)):
        dims = {"head_dim": 128, "head_dim_v": 128, "seqlen_q": seqlen, "seqlen_k": seqlen}
        how = dispatch.explain_problem(problem(**dims, window=(-1, 0) if causal else (-1, -1)), deterministic)
        bounds = (-1, 0 if causal else -1, 0)
        rows = torch.ops.flash_attn3.select_backward(128, 128, seqlen, seqlen, *bounds, False, True, deterministic)
        assert how.backward == "kernel, " + ", ".join(ops.kernel_table()[row]["name"] for row in rows)


def test_backend_argument():
    q = torch.randn(1, 8, 2, 16)
    assert torch.equal(flash_attn3.attention(q, q, q), flash_attn3.attention(q, q, q, backend="portable"))
    with pytest.raises(NotImplementedError, match="device cpu"):
        flash_attn3.attention(q, q, q, backend="kernel")
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        flash_attn3.attention(q, q, q, backend="cuda")
