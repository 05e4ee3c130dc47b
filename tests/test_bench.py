"""The benchmark harness on the CPU, over tiny cells: what it measures, checks, compares and writes.

And the committed records: their format, and the README's table made from them. A stale digest is a warning, no error.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch

from benchmarks import RECORD, ROOT, cells, plot, providers, readme, reference, report, run, timing

TINY = cells.Cell("fwd", "bf16", 16, 16, 2, 4, 2, 24, 24, True)
TINY_BACKWARD = replace(TINY, op="bwd")
GPU_RECORD = ROOT / "tests" / "records" / "h200.json"


def row(cell: cells.Cell, provider: str, tflops: float, rel_err: float = 2e-3) -> dict:
    ms = cell.flops / tflops / 1e9
    return {**cell.fields(), "provider": provider, "ms": ms, "tflops": tflops, "rel_err": rel_err}


def record_of(*rows: dict) -> dict:
    head = {"device": "a GPU", "driver": "1", "cuda": "13", "torch": "2.11", "date": "2026-01-01"}
    return {**head, "source_digest": "0" * 16, "ceilings": {"bf16_matmul_tflops": 700.0}, "cells": list(rows)}


def standard(dim: int, seqlen: int, causal: bool) -> cells.Cell:
    heads = cells.WIDTH // dim
    return cells.forward("bf16", (dim, dim), (heads, heads), seqlen, causal)


def standard_backward(dim: int, seqlen: int, causal: bool) -> cells.Cell:
    return replace(standard(dim, seqlen, causal), op="bwd")


def test_the_grid_is_the_standard_one():
    grid = cells.all_cells()
    assert len({cell.name for cell in grid}) == len(grid)
    wanted = {standard(d, s, c) for d in (64, 128, 256) for s in cells.SEQLENS for c in (False, True)}
    assert wanted <= set(grid) and {replace(cell, op="bwd") for cell in wanted} <= set(grid)
    for cell in wanted:
        assert cell.batch * cell.seqlen_q == 16384 and cell.heads * cell.head_dim == 2048
    assert standard(128, 8192, False).flops == 4 * 16384 * 8192 * 2048
    assert standard(128, 8192, True).flops * 2 == standard(128, 8192, False).flops
    assert standard_backward(128, 8192, True).flops == 2.5 * standard(128, 8192, True).flops
    deterministic = [cell for cell in grid if cell.deterministic_too]
    assert {cell.op for cell in deterministic} == {"bwd"} and len(deterministic) == 3 * 4 * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (0, 0), (-1, 3), (7, 2), (100, 100)])
def test_visible_pairs(window, causal):
    for seqlen_q, seqlen_k in ((24, 24), (10, 30), (30, 10), (1, 50), (7, 0), (0, 7)):
        seen = oracle.visible(seqlen_q, seqlen_k, causal=causal, window=window)
        assert cells.visible_pairs(seqlen_q, seqlen_k, causal, window) == int(seen.sum())
        position = torch.arange(seqlen_q) + seqlen_k - seqlen_q
        assert torch.equal(reference.visible(position, seqlen_k, causal, window), seen)


def test_flops_of_packed_batches_and_windows_are_exact(monkeypatch):
    lengths = (5, 0, 31, 64)
    monkeypatch.setattr(cells, "sequence_lengths", lambda case: lengths)
    cell = cells.Cell("varlen_fwd", "bf16", 16, 24, 4, 6, 2, 64, 64, True, case="any")
    pairs = sum(int(oracle.visible(n, n, causal=True).sum()) for n in lengths)
    assert cell.flops == 2 * 6 * pairs * (16 + 24)
    assert replace(cell, op="varlen_bwd").flops == 2.5 * cell.flops
    full = replace(cell, causal=False)
    assert full.flops == 2 * 6 * sum(n * n for n in lengths) * (16 + 24)
    window = cells.Cell("fwd", "bf16", 16, 16, 3, 4, 4, 50, 70, False, window=(9, 0))
    assert window.flops == 2 * 3 * 4 * int(oracle.visible(50, 70, window=(9, 0)).sum()) * 32


def test_packed_cells_are_those_of_the_targets():
    targets, grid = cells.load_targets(), cells.all_cells()
    for op in ("varlen_fwd", "varlen_bwd"):
        for case, count in (("lognormal", 64), ("short", 512), ("one-long", 64), ("equal", 16), ("tiny", 8192)):
            cell, lengths = cells.packed_cell(op, case), cells.sequence_lengths(case)
            assert cell in grid and cell.batch == len(lengths) == count and cell.seqlen_q == max(lengths)
            peer = cells.dense_peer(cell)
            assert (peer is not None) == (case in ("equal", "tiny")) and (peer is None or peer in grid)
            assert (cells.target_of(cell, targets) is None) == (op == "varlen_bwd" or case == "tiny")
    assert sum(cells.sequence_lengths("one-long")) == 16384 + 63 * 128
    assert [round(sum(cells.sequence_lengths(case)) / 1000) for case in ("lognormal", "short")] == [78, 74]
    assert {32, 255} == {f(cells.sequence_lengths("short")) for f in (min, max)}
    short = cells.target_of(cells.packed_cell("varlen_fwd", "short"), targets)
    assert short.floor == pytest.approx(1.5 * 3.46) and short.aim == pytest.approx(2.5 * 3.46)
    assert sum(cell.window == (1023, 0) for cell in grid) == 2


def test_every_standard_cell_has_targets():
    targets = cells.load_targets()
    found = {cell.name: cells.target_of(cell, targets) for cell in cells.all_cells()}
    for dim in cells.HEAD_DIMS:
        for seqlen in cells.SEQLENS:
            for causal in (False, True):
                target = found[standard(dim, seqlen, causal).name]
                assert 1.0 <= target.parity <= 1.3
                assert target.floor < target.aim
                back = found[standard_backward(dim, seqlen, causal).name]
                assert 1.0 <= back.parity <= 1.32 and back.floor == pytest.approx(0.97 * back.parity)
                assert back.aim >= 1.1 * back.parity
    assert found["bwd-bf16-d256-full-s16384"].aim == 1.6 and found["bwd-bf16-d256-causal-s16384"].aim == 1.45
    assert found["bwd-bf16-d256-full-s8192"].aim == pytest.approx(1.1 * 1.28)
    assert found["bwd-bf16-d128-causal-s4096-h16/4"].parity == 1.15
    d64 = found["fwd-bf16-d64-causal-s16384"]
    assert d64.parity == 1.22 and d64.floor == pytest.approx(0.97 * 1.22) and d64.aim == pytest.approx(1.12 * 1.22)
    assert found["fwd-bf16-d128-causal-s512"].aim == 1.3
    assert found["fwd-bf16-d256-full-s2048"].aim == pytest.approx(1.05 * 1.09)
    assert found["fwd-bf16-d128-full-s4096-h16/4"].parity == 1.06
    assert found["fwd-bf16-d192x128-full-s1024"] is None


def test_selection_by_name():
    assert len(cells.select(cells.all_cells(), ["*"])) == len(cells.all_cells())
    chosen = cells.select(cells.all_cells(), ["fwd-bf16-d128-causal-s*", "*-d96-*"])
    assert {cell.head_dim for cell in chosen} == {96, 128}
    assert len(cells.select(cells.all_cells(), cells.QUICK)) == 14


def test_measuring_a_cell():
    with torch.no_grad():
        rows = run.measure(TINY, providers.available("cpu"), "cpu", rounds=3, round_ms=0.5)
    assert [row["provider"] for row in rows] == ["flash_attn3", "math"]
    for entry in rows:
        assert entry["ms"] > 0 and entry["tflops"] == pytest.approx(TINY.flops / entry["ms"] / 1e9, rel=1e-3)
        assert entry["rel_err"] < run.WRONG["bf16"]
        assert "graph" not in entry and report.cell_of(entry) == TINY


def test_measuring_a_backward():
    candidates = [*providers.available("cpu"), providers.Provider("fa2", providers._ours)]
    assert [p.name for p in providers.for_cell(TINY_BACKWARD, candidates)] == ["flash_attn3", "math"]
    both = providers.for_cell(standard_backward(64, 512, True), candidates)
    assert [p.label for p in both] == ["flash_attn3", "math", "flash_attn3 deterministic"]
    assert providers.for_cell(TINY, candidates) is candidates
    rows = run.measure(TINY_BACKWARD, both, "cpu", rounds=1, round_ms=0.5)
    assert [report.label(row) for row in rows] == [p.label for p in both]
    assert [row.get("deterministic") for row in rows] == [None, None, True]
    for entry in rows:
        assert entry["tflops"] == pytest.approx(TINY_BACKWARD.flops / entry["ms"] / 1e9, rel=1e-3)
        assert 1e-4 < entry["rel_err"] < run.WRONG["bf16"]
    assert list(report.by_cell(rows)[TINY_BACKWARD]) == [p.label for p in both]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(24, 24), (10, 24), (150, 150)])
def test_wrong_gradients_are_found(lengths, causal, monkeypatch):
    """The sampled rows are those of the whole gradient, however the rows are blocked; one wrong number is enough."""
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 64)
    cell = replace(TINY_BACKWARD, seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal)
    q, k, v, dout = providers.make_inputs(cell, "cpu")
    exact = oracle.gradients(q, k, v, dout, causal=causal)
    refs = reference.sampled_gradients(q, k, v, dout, causal)
    assert reference.gradient_error(exact, refs) < 1e-12
    call = run.backward_call(providers.available("cpu")[0], cell, (q, k, v, dout))
    assert reference.gradient_error(call(), refs) < run.WRONG["bf16"]
    for which in range(3):
        for value in (1.0, torch.nan):
            grads = [x.clone() for x in exact]
            grads[which][-1, -1, -1] += value * grads[which].abs().max()
            assert not reference.gradient_error(grads, refs) < run.WRONG["bf16"]


@pytest.mark.parametrize("op", ["varlen_fwd", "varlen_bwd", "fwd", "bwd"])
def test_measuring_packed_batches_and_windows(op, monkeypatch):
    """The first, the last and the longest sequence are compared; what another mask gives is wrong."""
    for module in (cells, providers):
        monkeypatch.setattr(module, "sequence_lengths", lambda case: (5, 20, 9, 3))
    packed = op.startswith("varlen")
    mask = {"causal": True, "case": "any", "batch": 4} if packed else {"causal": False, "window": (6, 0)}
    cell = replace(TINY, op=op, **mask)
    ours = providers.for_cell(cell, providers.available("cpu"), "cpu")
    (entry,) = run.measure(cell, ours, "cpu", rounds=1, round_ms=0.5)
    assert (
        entry["tflops"] == pytest.approx(cell.flops / entry["ms"] / 1e9, rel=1e-3)
        and entry["rel_err"] < run.WRONG["bf16"]
    )
    assert report.cell_of(json.loads(json.dumps(entry))) == cell
    other = replace(cell, causal=False) if packed else replace(cell, window=(7, 0))
    (provider,) = providers.for_cell(other, providers.available("cpu"), "cpu")
    wrong = replace(provider, call=lambda q, k, v, causal: provider.call(q, k, v, other.causal))
    assert run.measure(cell, [wrong], "cpu", rounds=1, round_ms=0.1)[0]["rel_err"] > run.WRONG["bf16"]


def test_heads_that_are_repeated_for_a_peer():
    q, k, v, dout = providers.make_inputs(TINY_BACKWARD, "cpu")
    _, more_k, more_v, _ = providers.repeated((q, k, v, dout), 2)
    grads = providers.gradients_of(oracle.gradients(q, more_k, more_v, dout, causal=True), 2)
    assert reference.gradient_error(grads, reference.sampled_gradients(q, k, v, dout, True)) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(24, 24), (10, 24), (150, 150)])
def test_wrong_outputs_are_found(lengths, causal):
    """The reference is the formula, and one wrong row in a compared head is enough."""
    cell = replace(TINY, seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal)
    q, k, v, _ = providers.make_inputs(cell, "cpu")
    out = providers.available("cpu")[0].call(q, k, v, causal)
    assert reference.relative_error(out, q, k, v, causal) < run.WRONG["bf16"]
    out[-1, -1, -1] += 1
    assert reference.relative_error(out, q, k, v, causal) > run.WRONG["bf16"]
    out[-1, -1, -1] = torch.nan
    assert not reference.relative_error(out, q, k, v, causal) < run.WRONG["bf16"]


def test_a_wrong_peer_is_left_out_and_a_wrong_result_of_ours_is_shown(capsys):
    def wrong(q, k, v, causal):
        return torch.zeros_like(q)

    def refuses(q, k, v, causal):
        raise RuntimeError("not this one")

    calls = (("flash_attn3", wrong), ("a", wrong), ("b", refuses))
    candidates = [providers.Provider(name, call) for name, call in calls]
    rows = run.measure(TINY, candidates, "cpu", rounds=1, round_ms=0.1)
    assert [entry["provider"] for entry in rows] == ["flash_attn3"]
    assert run.wrong_cells({"cells": rows}) == [f"{TINY.name}: relative error 1.0"]
    assert run.missing_cells({"cells": rows}) == []
    assert run.missing_cells({"cells": [row(TINY, "cudnn", 1.0)]}) == [TINY.name]
    said = capsys.readouterr().out
    assert "a is WRONG" in said and "b does not run" in said and "not this one" in said


def test_host_times(monkeypatch):
    monkeypatch.setattr(timing, "host_us", lambda calls, *_: {name: 1.0 for name, call in calls.items() if call()})
    rows = run.measure_overhead(providers.available("cpu"), "cpu", ("bwd",))
    assert [(row["what"], row["provider"]) for row in rows] == [("fwd_bwd", "flash_attn3"), ("fwd_bwd", "math")]


def test_rounds_alternate_in_order():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    contexts = dict.fromkeys(calls, torch.no_grad)
    timing.interleaved_ms(calls, contexts, "cpu", rounds=2, round_ms=0)
    assert order[4:] == [*"aaa", *"bbbbbb", *"aaa"]  # behind two calls of each to calibrate; one of three leads


def test_host_time_and_ceilings_run_on_a_cpu():
    assert timing.host_us({"x": lambda: None}, {"x": torch.no_grad}, "cpu", 2)["x"] >= 0
    rates = timing.ceilings("cpu", size=32, copy_bytes=1024, round_ms=0.01)
    assert {"bf16_matmul_tflops", "copy_tb_s"} <= rates.keys()


def test_table_and_floors():
    good, bad = standard(128, 8192, True), standard(64, 512, False)
    rates = ((good, "flash_attn3", 800), (good, "cudnn", 600), (bad, "flash_attn3", 300), (bad, "cudnn", 400))
    record = record_of(*(row(*rate) for rate in rates))
    lines = report.table(record)
    assert "aim reached" in lines[1] and "1.333" in lines[1] and "1.19" in lines[1]
    assert "BELOW FLOOR" in lines[2]
    assert report.below_floor(record) == [f"{bad.name}: 0.750 of cuDNN, floor 0.970 (-22.7%)"]


def test_cells_that_fell():
    one, other = standard(128, 8192, True), standard(128, 4096, True)
    before = record_of(row(one, "flash_attn3", 700), row(one, "cudnn", 600), row(other, "flash_attn3", 700))
    after = record_of(row(one, "flash_attn3", 670), row(one, "cudnn", 606), row(other, "flash_attn3", 690))
    assert report.fallen(after, before) == [f"{one.name}: -4.3% (700.0 -> 670.0 TFLOP/s; cuDNN +1.0%)"]


def test_deterministic_mode_in_tables():
    cell = standard_backward(128, 8192, True)
    default = [row(cell, "flash_attn3", 600), row(cell, "cudnn", 500)]
    for rate, text in ((570, "aim reached"), (520, "ok"), (400, "BELOW FLOOR")):
        record = record_of(*default, row(cell, "flash_attn3", rate) | {"deterministic": True})
        (line,) = report.deterministic_table(record)
        assert text in line and f"{600 / rate - 1:+.1%}" in line
        assert report.ratio(report.by_cell(record["cells"])[cell]) == 1.2
        assert len(report.below_floor(record)) == (rate == 400)
        assert "deterministic" not in report.table(record)[0]


def test_merging_two_halves():
    head, back = standard(64, 512, False), standard_backward(64, 512, False)
    overhead = {**run.OVERHEAD.fields(), "provider": "flash_attn3", "us": 19.5}
    earlier = record_of(row(head, "flash_attn3", 1), row(back, "flash_attn3", 2), {**overhead, "what": "fwd"})
    deterministic = row(back, "flash_attn3", 3) | {"deterministic": True}
    later = record_of(row(back, "flash_attn3", 4), deterministic, {**overhead, "what": "fwd_bwd"})
    whole = run.merged(later, earlier)
    assert [(x["op"], x.get("tflops", x.get("what"))) for x in whole["cells"]] == [
        ("fwd", 1), ("bwd", 4), ("bwd", 3), ("overhead", "fwd"), ("overhead", "fwd_bwd"),
    ]  # fmt: skip
    for key in run.SAME_MACHINE:
        with pytest.raises(ValueError, match=key):
            run.merged(later, earlier | {key: "other"})


def test_record_round_trip(tmp_path, capsys):
    cell = replace(standard(64, 512, False), graph=True)
    overhead = {**run.OVERHEAD.fields(), "provider": "flash_attn3", "what": "fwd", "us": 19.5}
    record = record_of(row(cell, "flash_attn3", 300), row(cell, "cudnn", 400), overhead)
    run.write(record, tmp_path / "sub" / "record.json")
    assert json.loads((tmp_path / "sub" / "record.json").read_text()) == record
    run.show(record, tmp_path / "sub" / "record.json")
    said = capsys.readouterr().out
    for text in ("19.5  floor 30, aim 20", "WRONG RESULTS: none", "slower than record.json: none"):
        assert text in said


def test_readme_section(tmp_path):
    rows = [row(standard(d, s, c), p, t) for d in (64, 128) for s in (512, 8192) for c in (False, True)
            for p, t in (("flash_attn3", 660), ("cudnn", 600))]  # fmt: skip
    text = readme.section(record_of(*rows))
    assert text.count("660 (1.10x)") == 8 and "| 256 |" not in text and "a GPU" in text
    page = f"# Title\n\n{readme.START}\nold\n{readme.END}\n\nmore\n"
    page = readme.replaced(page, text)
    assert page.startswith("# Title\n\n") and page.endswith("\n\nmore\n") and "old" not in page
    assert readme.replaced(page, text) == page
    with pytest.raises(ValueError, match="benchmark:start"):
        readme.replaced("no markers", text)


def test_readme_section_with_a_backward():
    rows = [row(cell(128, s, True), p, t) for cell in (standard, standard_backward) for s in cells.SEQLENS
            for p, t in (("flash_attn3", 660), ("cudnn", 600))]  # fmt: skip
    rows += [row(standard_backward(128, s, True), "flash_attn3", 600) | {"deterministic": True} for s in (512, 2048)]
    text = readme.section(record_of(*rows))
    assert text.count("660 (1.10x)") == 12 and text.index("Forward, bf16") < text.index("Backward, timed alone")
    assert "With `deterministic=True` it takes +10.0% to +10.0% more time." in text


def packed_record() -> dict:
    names = {"equal": (500, 230), "short": (150, 30), "tiny": (100, 90)}
    rows = [row(cells.packed_cell(op, case), p, t) for op in ("varlen_fwd", "varlen_bwd")
            for case, rates in names.items() for p, t in zip(("flash_attn3", "fa2"), rates, strict=True)]  # fmt: skip
    rows += [row(cells.dense_peer(cells.packed_cell("varlen_fwd", "equal")), "flash_attn3", 520)]
    window = cells.window_cell("fwd")
    rows += [row(window, "flash_attn3", 600) | {"walked_tflops": 660.0}, row(window, "fa2", 250)]
    return record_of(*rows)


def test_packed_batches_and_windows_in_tables():
    record = packed_record()
    equal = cells.packed_cell("varlen_fwd", "equal")
    share = (500 / equal.flops) / (520 / cells.dense_peer(equal).flops)  # of times: dense FLOPs are half the square
    lines = report.packed_table(record)
    assert len(lines) == 6 and "2.17 x fa2 (parity 2.26, floor 2.19, aim 2.26: BELOW FLOOR)" in lines[0]
    assert f"{share:.3f} of the dense rate" in lines[0] and "dense" not in lines[1]
    assert "5.00 x fa2" in lines[1] and "BELOW FLOOR" in lines[1] and "parity" not in lines[2]
    below = report.below_floor(record)
    assert len(below) == 2 and "2.174 of FlashAttention-2" in below[0] and "short" in below[1]
    (line,) = report.window_table(record)
    assert "flash_attn3 600.0, fa2 250.0  660.0 on the blocks walked" in line
    assert len(report.table(record)) == 2  # the header and the dense cell


def test_fp8_cells_are_ours_alone_and_have_floors():
    chosen = cells.select(cells.all_cells(), ["fwd-fp8-*"])
    assert len(chosen) == len(cells.fp8_cells()) == 36 and not any(cell.standard for cell in chosen)
    targets, candidates = cells.load_targets(), providers.available("cpu")
    for cell in chosen:
        assert [p.name for p in providers.for_cell(cell, candidates)] == ["flash_attn3"]
        assert 0 < cells.fp8_floor(cell, targets) < 1 and cells.target_of(cell, targets) is None
    cell = next(c for c in chosen if (c.head_dim, c.causal, c.seqlen_q) == (128, False, 16384))
    assert cells.fp8_floor(cell, targets) == 988 / 1300
    assert cells.fp8_floor(standard(128, 512, True), targets) is None
    record = record_of(row(cell, "flash_attn3", 900)) | {"ceilings": {"fp8_matmul_tflops": 1300.0}}
    (line,) = report.below_floor(record)
    assert cell.name in line and "0.692 of the fp8 matrix product" in line and "0.760" in line
    assert "69%" in report.table(record)[1]
    assert "| 128 | no | - | - | - | - | - | 900 |" in readme.section(record)
    assert report.below_floor(record_of(row(cell, "flash_attn3", 900))) == []
    q, k, v, _ = providers.make_inputs(replace(cell, batch=1, seqlen_q=64, seqlen_k=64, heads=2, kv_heads=2), "cpu")
    assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn


def test_packed_batches_and_windows_in_the_readme_and_the_plot(tmp_path):
    text = readme.section(packed_record())
    assert "| 512 of 32 to 255 tokens | 150 (5.00x) | 150 (5.00x) |" in text and "(2.17x, 0.96 of dense)" in text
    assert "600 TFLOP/s on visible positions, 660 on the blocks that hold them." in text
    assert "lognormal" not in text
    pytest.importorskip("matplotlib")
    assert plot.draw_packed(packed_record(), tmp_path / "varlen.png")
    assert (tmp_path / "varlen.png").read_bytes().startswith(b"\x89PNG")
    assert not plot.draw_packed(record_of(), tmp_path / "none.png") and not plot.draw(packed_record(), "fwd", tmp_path)


def test_readme_has_the_table_of_the_committed_record():
    assert readme.main(["--check"]) == 0


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(standard(d, s, c), p, 500 + s / 100) for d in (64, 128) for s in cells.SEQLENS for c in (False, True)
            for p in ("flash_attn3", "cudnn")]  # fmt: skip
    assert plot.draw(record_of(*rows), "fwd", tmp_path / "fwd.png")
    assert (tmp_path / "fwd.png").read_bytes().startswith(b"\x89PNG")
    assert not plot.draw(record_of(*rows), "bwd", tmp_path / "bwd.png")
    back = [entry | {"op": "bwd"} for entry in rows]
    back += [row(standard_backward(64, s, True), "flash_attn3", 400) | {"deterministic": True} for s in (512, 8192)]
    assert plot.draw(record_of(*back), "bwd", tmp_path / "bwd.png")
    assert ("flash_attn3 deterministic", True) in plot.series(record_of(*back), "bwd")["head dim 64"]


def load_committed(path: Path) -> dict:
    if not path.exists():
        pytest.skip(f"no {path.relative_to(ROOT)} yet")
    record = json.loads(path.read_text())
    from buildtools.digest import source_digest

    if record["source_digest"] != source_digest(ROOT):
        warnings.warn(f"{path.relative_to(ROOT)} is stale: it has to be measured again", stacklevel=2)
    return record


def test_committed_benchmark_has_the_format():
    record = load_committed(RECORD)
    wanted = {"device", "driver", "cuda", "torch", "date", "source_digest", "ceilings", "cells"}
    assert wanted <= record.keys() and len(record["source_digest"]) == 16
    for entry in record["cells"]:
        cell = report.cell_of(entry)
        assert cell.op in ("fwd", "bwd", "varlen_fwd", "varlen_bwd", "decode", "overhead")
        if cell.op == "overhead":
            assert entry["us"] > 0 and entry["what"] in ("fwd", "fwd_bwd", "sdpa_fwd")
        else:
            assert entry["ms"] > 0 and entry["rel_err"] < run.WRONG[entry["dtype"]]


def test_committed_test_record_has_the_format():
    record = load_committed(GPU_RECORD)
    for key in ("device", "torch", "python", "cuda", "date", "source_digest", "extension_sha256"):
        assert isinstance(record[key], str) and record[key]
    assert record["passed"] > 0 and record["failed"] == 0
    assert sum(record["skipped_reasons"].values()) == record["skipped"]
    assert not any(record["sanitizer"].values())
