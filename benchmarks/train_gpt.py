"""Trains a small byte-level GPT on Python's own sources, with flash_attn3 and with torch's attention; compares them.

For head dims 64 and 128: the same initial weights and batches with both, and a second seed of torch's attention, whose
distance from the first is the noise of a seed. The loss curves must be no further apart than that. Weights and AdamW's
state are fp32, the forward runs under bf16 autocast. Writes benchmarks/results/training.json: losses, tokens a second,
peak memory, the verdict (exit status 1 if a curve is outside of the noise).

usage: python -m benchmarks.train_gpt [--steps 300] [--out PATH]
       python -m benchmarks.train_gpt --tiny          seconds on a CPU, through the portable backend
       python -m benchmarks.train_gpt --plot          draw the record (needs matplotlib)
"""

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import flash_attn3
from benchmarks import RESULTS
from benchmarks.run import machine

RECORD = RESULTS / "training.json"
VOCABULARY = 256  # bytes
WINDOW = 20  # steps whose losses are averaged before curves are compared
WARM_STEPS = 20  # not timed


@dataclass(frozen=True)
class Config:
    head_dim: int = 64
    width: int = 768
    layers: int = 6
    seqlen: int = 2048
    batch: int = 8
    steps: int = 300
    learning_rate: float = 1e-3
    warmup: int = 40

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


TINY = Config(head_dim=32, width=64, layers=2, seqlen=128, batch=4, steps=30, learning_rate=3e-3, warmup=5)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, (B, S, H, D)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn3.flash_attn_func(q, k, v, causal=True)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTION: dict[str, Attend] = {"flash_attn3": ours, "sdpa": torchs}
RUNS = (("flash_attn3", 0), ("sdpa", 0), ("sdpa", 1))  # attention and seed


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's .py files in the order of their paths: the first 95 % to train, the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    text = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    cut = int(0.95 * len(text))
    return text[:cut], text[cut:]


def batches(text: Tensor, config: Config, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) (batch, seqlen) from random places; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(config.seqlen + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - config.seqlen - 1, (config.batch, 1), generator=generator)
        tokens = text[starts.to(text.device, non_blocking=True) + span].long()
        yield tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.shape, self.attend = (3, config.heads, config.head_dim), attend
        self.norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, self.shape).unbind(2)  # (B, S, H, D)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Learned positions, tied embeddings."""

    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Parameter(torch.empty(config.seqlen, config.width))
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if residual else 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def optimizer_of(model: GPT, config: Config, device: str) -> tuple[torch.optim.Optimizer, Callable[[int], float]]:
    """AdamW, without decay of norms, and the learning rate's factor at a step: warm-up, then a cosine to a tenth."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return optimizer, factor


def train(config: Config, attention: str, seed: int, text: tuple[Tensor, Tensor], device: str) -> dict:
    """One run: its losses by step, validation loss, tokens a second and peak memory."""
    torch.manual_seed(seed)
    model = GPT(config, ATTENTION[attention]).to(device)  # made on the CPU: the same weights for the same seed
    optimizer, factor = optimizer_of(model, config, device)
    data = batches(text[0], config, seed)
    losses = torch.zeros(config.steps, device=device)
    warm = min(WARM_STEPS, config.steps // 3)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bar = tqdm(range(config.steps), desc=f"D {config.head_dim}, {attention}, seed {seed}", unit="step", mininterval=1)
    for step in bar:
        if step == warm:
            synchronize(device)
            begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor(step)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(*next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if step % 50 == 49:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    synchronize(device)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "head_dim": config.head_dim,
        "attention": attention,
        "seed": seed,
        "tokens_per_s": round((config.steps - warm) * config.batch * config.seqlen / seconds),
        "peak_gib": round(peak, 2),
        "validation_loss": round(validation_loss(model, text[1], config, device), 4),
        "losses": [round(value, 4) for value in losses.tolist()],
    }


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, config: Config, device: str, count: int = 8) -> float:
    """Mean over the same few batches for every run."""
    data = batches(text, config, seed=2**31)
    with torch.autocast(device, dtype=torch.bfloat16):
        return torch.stack([model(*next(data)) for _ in range(count)]).mean().item()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def distance(first: list[float], second: list[float]) -> float:
    """The largest difference between two loss curves, each averaged over windows of WINDOW steps.

    The first window, where the loss falls from 5.5 to 3, takes no part if there are others.
    """
    means = [torch.tensor(x).split(WINDOW) for x in (first, second)]
    means = [x[1:] or x for x in means]
    return max(abs((a.mean() - b.mean()).item()) for a, b in zip(*means, strict=True))


def verdicts(runs: list[dict]) -> list[dict]:
    """For each head dim, whether our curve lies within the noise of a seed of torch's."""
    results = []
    for head_dim in dict.fromkeys(run["head_dim"] for run in runs):
        of = {(run["attention"], run["seed"]): run for run in runs if run["head_dim"] == head_dim}
        mine, reference, other = (of[run] for run in RUNS)
        difference = distance(mine["losses"], reference["losses"])
        noise = distance(reference["losses"], other["losses"])
        results.append(
            {
                "head_dim": head_dim,
                "difference": round(difference, 4),
                "seed_noise": round(noise, 4),
                "within_seed_noise": difference <= noise,  # NaN is outside
                "speedup": round(mine["tokens_per_s"] / reference["tokens_per_s"], 3),
            }
        )
    return results


def write(record: dict, path: Path) -> None:
    """JSON with one run a line."""
    head = json.dumps({key: value for key, value in record.items() if key != "runs"}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "runs": [\n{rows}\n ]\n}}\n')
    print(f"written: {path}")


def show(record: dict) -> None:
    print(
        f"{'head dim':>8} {'attention':<12} {'seed':>4} {'tokens/s':>10} {'peak GiB':>9} {'loss':>7} {'validation':>10}"
    )
    for run in record["runs"]:
        last = sum(run["losses"][-WINDOW:]) / len(run["losses"][-WINDOW:])
        print(
            f"{run['head_dim']:>8} {run['attention']:<12} {run['seed']:>4} {run['tokens_per_s']:>10} "
            f"{run['peak_gib']:>9.2f} {last:>7.4f} {run['validation_loss']:>10.4f}"
        )
    for entry in record["verdicts"]:
        print(
            f"head dim {entry['head_dim']}: curves differ by {entry['difference']:.4f}, two seeds by "
            f"{entry['seed_noise']:.4f}: {'within' if entry['within_seed_noise'] else 'OUTSIDE OF'} the noise; "
            f"{entry['speedup']:.3f} x the tokens/s of torch's attention"
        )


def draw(record: dict, path: Path) -> None:
    """Losses by step of every run, one panel a head dim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {RUNS[0]: ("#d62728", "-"), RUNS[1]: ("#2ca02c", "--"), RUNS[2]: ("#7f7f7f", ":")}
    head_dims = list(dict.fromkeys(run["head_dim"] for run in record["runs"]))
    figure, axes = pyplot.subplots(1, len(head_dims), figsize=(6 * len(head_dims), 4.2), squeeze=False, sharey=True)
    for axis, head_dim in zip(axes[0], head_dims, strict=True):
        for run in record["runs"]:
            if run["head_dim"] == head_dim:
                color, style = styles[run["attention"], run["seed"]]
                label = f"{run['attention']}, seed {run['seed']}: {run['tokens_per_s'] / 1e3:.0f}k tokens/s"
                axis.plot(run["losses"], style, color=color, linewidth=1, label=f"{label}, {run['peak_gib']:.1f} GiB")
        axis.set_title(f"head dim {head_dim}")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("training loss, nats a byte")
    size = record["config"]
    text = f"GPT, {size['layers']} layers of width {size['width']}, {size['batch']} x {size['seqlen']} bytes a step"
    figure.suptitle(f"{text}, {record['device']}, torch {record['torch']}, {record['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"written: {path}")


def run(configs: list[Config], device: str) -> dict:
    """The whole record."""
    text = tuple(part.to(device) for part in corpus())
    print(f"{sum(map(len, text)) / 1e6:.1f} MB of Python sources, {device}")
    runs = [train(config, *which, text, device) for config in configs for which in RUNS]
    size = asdict(configs[0])
    size.pop("head_dim")
    return {**machine(device), "config": size, "verdicts": verdicts(runs), "runs": runs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--plot", action="store_true", help="only draw the record")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--out", type=Path, help=f"where the record is (default: {RECORD.name} in its folder)")
    options = parser.parse_args(arguments)
    if options.plot:
        path = options.out or RECORD
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        return 0
    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA device: --tiny runs on a CPU")
        return 2
    configs = [TINY] if options.tiny else [Config(64), Config(128)]
    configs = [replace(config, steps=options.steps or config.steps) for config in configs]
    record = run(configs, "cpu" if options.tiny else "cuda")
    show(record)
    path = options.out or (None if options.tiny or options.steps else RECORD)
    if path:
        write(record, path)
    return 0 if all(entry["within_seed_noise"] for entry in record["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
