"""The demo's parts that need neither the model nor a GPU, and the whole of it where the model is installed."""

import importlib.util
import re

import pytest
import torch

from examples import sentence_encoder as demo


def test_sentences_are_this_projects_own():
    found = demo.sentences(50)
    assert len(found) == 50 == len(set(found))
    assert all(len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 5 for sentence in found)


def test_sentences_of_a_folder(tmp_path):
    (tmp_path / "README.md").write_text(
        "# A title\n\nOne two three four five six. Too short.\n\n```\ncode that is no prose at all\n```\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "x.py").write_text(
        '"""Module doc that has enough words."""\ndef f():\n    """Another one that\n    spans two lines."""\n'
    )
    assert demo.sentences(9, tmp_path) == [
        "One two three four five six.",
        "Module doc that has enough words.",
        "Another one that spans two lines.",
    ]


def test_batches_have_one_length_and_lose_nobody():
    ids = [[0] * (1 + i % 7) for i in range(100)]
    batches = demo.batches_of_equal_length(ids, 8)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    for batch in batches:
        assert len(batch) <= 8 and len({len(ids[i]) for i in batch}) == 1


def test_attention_that_transformers_calls():
    q, k, v = (torch.randn(2, 3, 10, 32) for _ in range(3))
    out, weights = demo.attention_for_transformers(None, q, k, v, None, scaling=0.2, dropout=0.0)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="attention_mask"):
        demo.attention_for_transformers(None, q, k, v, torch.zeros(1), scaling=0.2)


def test_peak_of_live_tensors():
    def call():
        a = torch.zeros(1000)
        b = a + 1
        del a
        return b * 2

    assert demo.peak_bytes(call, torch.device("cpu")) == 8000


def test_llama_layer_on_a_small_scale(capsys):
    layer = demo.AttentionLayer(width=64, heads=4, kv_heads=2, head_dim=16)
    with torch.inference_mode():
        assert demo.llama_layer(torch.device("cpu"), seqlen=200, layer=layer)
    assert "flash_attn3 ran: the portable backend" in capsys.readouterr().out


def test_exact_attention_is_sdpa_in_float32():
    q, k, v = torch.randn(1, 700, 4, 16), torch.randn(1, 700, 2, 16), torch.randn(1, 700, 2, 16)
    torch.testing.assert_close(demo.exact(q, k, v), demo.sdpa(q, k, v), atol=1e-5, rtol=1e-4)


def test_the_whole_demo(capsys, monkeypatch):
    for package in ("transformers", demo.PACKAGE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(demo, "MAX_SENTENCES", {True: 40, False: 40})
    monkeypatch.setattr(demo, "REPEATS", 1)
    assert demo.main([]) == 0
    said = capsys.readouterr().out
    assert "embeddings agree" in said and "SDPA" in said and "peak MB" in said
