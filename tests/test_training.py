"""The training example on the CPU: a tiny model learns through the portable backend; its verdict, record and plot."""

import json

import pytest
import torch

from benchmarks import ROOT, train_gpt

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other


@pytest.fixture(scope="module")
def text():
    return train_gpt.corpus()


def test_corpus(text):
    """Real text, split without overlap, the same every time."""
    training, validation = text
    assert len(training) > 10 * len(validation) > 1e5
    assert torch.equal(train_gpt.corpus()[1], validation)
    assert b"import" in bytes(validation[:100_000].tolist())


def test_batches_depend_on_the_seed_alone(text):
    first, again, other = (next(train_gpt.batches(text[0], train_gpt.TINY, seed)) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert first[0].shape == (4, 128) and torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_tiny_model_learns(text):
    run = train_gpt.train(train_gpt.TINY, "flash_attn3", 0, text, "cpu")
    losses = run["losses"]
    assert len(losses) == train_gpt.TINY.steps
    assert losses[0] == pytest.approx(5.545, abs=0.3), "about log 256 before the first step"
    assert sum(losses[-5:]) / 5 < 4.0 and run["validation_loss"] < 4.0
    assert run["tokens_per_s"] > 0


def test_both_attentions_start_alike(text):
    """The same weights and batches: losses differ by the rounding of bf16 alone."""
    losses = [
        train_gpt.train(train_gpt.replace(train_gpt.TINY, steps=3), name, 0, text, "cpu")["losses"]
        for name in train_gpt.ATTENTION
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def runs_of(curves: dict, head_dim: int = 64) -> list[dict]:
    return [
        {"head_dim": head_dim, "attention": name, "seed": seed, "tokens_per_s": 1000 + 200 * (name == "flash_attn3"),
         "peak_gib": 1.5, "validation_loss": 1.0, "losses": losses}
        for (name, seed), losses in curves.items()
    ]  # fmt: skip


def record_of(shift: float, noise: float) -> dict:
    curve = [5.0 - step / 100 for step in range(100)]
    curves = {
        ("flash_attn3", 0): [x + shift for x in curve],
        ("sdpa", 0): curve,
        ("sdpa", 1): [x + noise for x in curve],
    }
    runs = runs_of(curves, 64) + runs_of(curves, 128)
    head = {"device": "a GPU", "torch": "2.11", "date": "2026-01-01", "config": vars(train_gpt.TINY)}
    return {**head, "verdicts": train_gpt.verdicts(runs), "runs": runs}


@pytest.mark.parametrize("shift, within", [(0.01, True), (-0.01, True), (0.03, False), (float("nan"), False)])
def test_verdict(shift, within, capsys):
    record = record_of(shift, -0.02)
    assert [entry["within_seed_noise"] for entry in record["verdicts"]] == [within, within]
    assert record["verdicts"][0]["speedup"] == 1.2
    train_gpt.show(record)
    assert ("OUTSIDE OF" in capsys.readouterr().out) == (not within)


def test_a_late_difference_counts_and_an_early_one_does_not():
    curve = [1.0] * 100
    assert train_gpt.distance(curve, [9.0] * 20 + curve[20:]) == 0
    assert train_gpt.distance(curve, curve[:80] + [2.0] * 20) == 1


def test_record_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    record = record_of(0.01, 0.02)
    train_gpt.write(record, tmp_path / "training.json")
    assert json.loads((tmp_path / "training.json").read_text()) == record
    assert train_gpt.main(["--plot", "--out", str(tmp_path / "training.json")]) == 0
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_committed_record_has_the_format():
    if not train_gpt.RECORD.exists():
        pytest.skip(f"no {train_gpt.RECORD.relative_to(ROOT)} yet")
    record = json.loads(train_gpt.RECORD.read_text())
    assert {"device", "torch", "date", "source_digest", "config", "verdicts", "runs"} <= record.keys()
    assert {run["head_dim"] for run in record["runs"]} == {64, 128}
    assert all(len(run["losses"]) == record["config"]["steps"] >= 300 for run in record["runs"])
    assert all(entry["within_seed_noise"] for entry in record["verdicts"])
    assert train_gpt.verdicts(record["runs"]) == record["verdicts"]
