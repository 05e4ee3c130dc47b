"""What is measured: the cells, their names and FLOPs, and the targets that they are compared with (targets.json).

A packed cell ("varlen") names its lengths by `case`; `batch` is then the number of sequences, `seqlen_q` the longest.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import torch

TOKENS = 16384  # batch * seqlen of the standard grid
WIDTH = 2048  # heads * head_dim of the standard grid
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
GRAPH_SEQLENS = (512, 1024)  # short enough for the host's time to show in eager mode
DETERMINISTIC_SEQLENS = (512, 2048, 8192, 16384)
OPS = ("fwd", "bwd", "varlen_fwd", "varlen_bwd")
UNBOUNDED = (-1, -1)
TARGETS = Path(__file__).with_name("targets.json")


@dataclass(frozen=True)
class Cell:
    """One problem, in the field names of the record."""

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    graph: bool = False
    window: tuple[int, int] = UNBOUNDED
    case: str = ""

    @property
    def name(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        parts = [self.op, self.dtype, f"d{dims}", "causal" if self.causal else "full", f"s{self.seqlen_q}"]
        parts += [f"h{self.heads}/{self.kv_heads}"] if self.heads != self.kv_heads else []
        parts += [f"w{self.window[0]},{self.window[1]}"] if self.window != UNBOUNDED else []
        return "-".join(parts + ([self.case] if self.case else []) + (["graph"] if self.graph else []))

    @property
    def packed(self) -> bool:
        return self.op.startswith("varlen")

    @property
    def backward(self) -> bool:
        return self.op.endswith("bwd")

    @property
    def flops(self) -> float:
        """2 B H Sq Sk (D + Dv), half of it when causal; 2.5 times that for a backward.

        Of packed sequences and windows the exact sum over visible pairs takes the place of B Sq Sk.
        """
        if self.packed:
            pairs = sum(visible_pairs(n, n, self.causal, self.window) for n in sequence_lengths(self.case))
        elif self.window != UNBOUNDED:
            pairs = self.batch * visible_pairs(self.seqlen_q, self.seqlen_k, self.causal, self.window)
        else:
            pairs = self.batch * self.seqlen_q * self.seqlen_k * (0.5 if self.causal else 1.0)
        return 2.0 * self.heads * pairs * (self.head_dim + self.head_dim_v) * (2.5 if self.backward else 1.0)

    @property
    def standard(self) -> bool:
        """Whether the cell is one of the standard grid, but for its length and graph mode."""
        same = (
            self.dtype != "fp8"
            and self.head_dim == self.head_dim_v
            and self.heads == self.kv_heads == WIDTH // self.head_dim
        )
        return same and not self.packed and self.window == UNBOUNDED and self.batch * self.seqlen_q == TOKENS

    @property
    def deterministic_too(self) -> bool:
        """Whether our deterministic mode is measured beside the default one."""
        return self.op == "bwd" and self.standard and self.seqlen_q in DETERMINISTIC_SEQLENS

    def fields(self) -> dict:
        """The cell in a record; "graph", "window" and "case" only where they say something."""
        fields = asdict(self) | {"window": list(self.window)}
        absent = {"graph": False, "window": list(UNBOUNDED), "case": ""}
        return {key: value for key, value in fields.items() if key not in absent or value != absent[key]}


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] = UNBOUNDED) -> int:
    """(row, key) pairs of a bottom-right aligned mask."""
    left, right = window[0], 0 if causal else window[1]
    position = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    begin = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    end = (position + right + 1).clamp(max=seqlen_k) if right >= 0 else torch.full_like(position, seqlen_k)
    return int((end - begin).clamp(min=0).sum())


@cache
def sequence_lengths(case: str) -> tuple[int, ...]:
    """Tokens of each sequence, of queries and keys alike."""
    generator = torch.Generator().manual_seed(0)
    lognormal = torch.exp(torch.randn(64, generator=generator) + 6.4).clamp(8, 16384).int()
    short = torch.randint(32, 256, (512,), generator=generator)
    lengths = {
        "lognormal": lognormal.tolist(),
        "short": short.tolist(),
        "one-long": [16384] + [128] * 63,
        "equal": [2048] * 16,
        "tiny": [34] * 8192,
    }
    return tuple(lengths[case])


def forward(dtype: str, dims: tuple[int, int], heads: tuple[int, int], seqlen: int, causal: bool, graph=False) -> Cell:
    """A forward cell of TOKENS tokens."""
    return Cell("fwd", dtype, *dims, max(1, TOKENS // seqlen), *heads, seqlen, seqlen, causal, graph)


def backward(dims: tuple[int, int], heads: tuple[int, int], seqlen: int, causal: bool) -> Cell:
    """A backward cell of TOKENS tokens."""
    return Cell("bwd", "bf16", *dims, max(1, TOKENS // seqlen), *heads, seqlen, seqlen, causal)


def all_cells() -> list[Cell]:
    """Forward: the standard grid, its short lengths once more in a CUDA graph, GQA, fp16 and the other head dims.

    Forward of float8_e4m3fn inputs: the standard grid. Backward: the standard grid, GQA and the other head dims.
    Both: packed sequences, dense batches of equal lengths to compare them with, and a window.
    """
    return [
        *(*_forward_cells(), *fp8_cells(), *_dense_peers("fwd"), window_cell("fwd")),
        *(*_backward_cells(), *_dense_peers("bwd"), window_cell("bwd")),
        *_packed_cells("varlen_fwd"),
        *_packed_cells("varlen_bwd"),
    ]


def packed_cell(op: str, case: str) -> Cell:
    """Causal, head dim 128, 32 query heads on 8; "tiny" of another model."""
    lengths = sequence_lengths(case)
    dim, heads, causal = (256, (8, 8), False) if case == "tiny" else (128, (32, 8), True)
    return Cell(op, "bf16", dim, dim, len(lengths), *heads, max(lengths), max(lengths), causal, case=case)


def dense_peer(cell: Cell) -> Cell | None:
    """The dense cell of the same sequences, where their lengths are equal."""
    if not cell.packed or len(set(sequence_lengths(cell.case))) > 1:
        return None
    return replace(cell, op=cell.op.removeprefix("varlen_"), case="")


def window_cell(op: str) -> Cell:
    """1024 tokens of the longest sequences of the standard grid."""
    return Cell(op, "bf16", 128, 128, 1, 16, 16, TOKENS, TOKENS, False, window=(1023, 0))


def _packed_cells(op: str) -> list[Cell]:
    return [packed_cell(op, case) for case in ("lognormal", "short", "one-long", "equal", "tiny")]


def _dense_peers(op: str) -> list[Cell]:
    peers = (dense_peer(cell) for cell in _packed_cells(f"varlen_{op}"))
    return [peer for peer in peers if peer is not None]


def fp8_cells() -> list[Cell]:
    return [
        forward("fp8", (dim, dim), (WIDTH // dim, WIDTH // dim), seqlen, causal)
        for dim in HEAD_DIMS
        for causal in (False, True)
        for seqlen in SEQLENS
    ]


def _backward_cells() -> list[Cell]:
    cells = []
    for dim in HEAD_DIMS:
        heads = (WIDTH // dim, WIDTH // dim)
        for causal in (False, True):
            cells += [backward((dim, dim), heads, seqlen, causal) for seqlen in SEQLENS]
    for causal in (False, True):
        cells += [backward((128, 128), (16, 4), seqlen, causal) for seqlen in (128, 512, 1024, 4096)]
        for dims, heads in (((96, 96), 16), ((192, 192), 8), ((192, 128), 16)):
            cells.append(backward(dims, (heads, heads), 4096, causal))
    return cells


def _forward_cells() -> list[Cell]:
    cells = []
    for dim in HEAD_DIMS:
        dims, heads = (dim, dim), (WIDTH // dim, WIDTH // dim)
        for causal in (False, True):
            cells += [forward("bf16", dims, heads, seqlen, causal) for seqlen in SEQLENS]
            cells += [forward("bf16", dims, heads, seqlen, causal, graph=True) for seqlen in GRAPH_SEQLENS]
    for causal in (False, True):
        cells += [forward("bf16", (128, 128), (16, 4), seqlen, causal) for seqlen in (128, 512, 1024, 4096)]
        cells += [forward("fp16", (128, 128), (16, 16), seqlen, causal) for seqlen in (2048, 8192)]
        for dims, heads in (((96, 96), 16), ((192, 192), 8), ((192, 128), 16)):
            cells += [forward("bf16", dims, (heads, heads), seqlen, causal) for seqlen in (1024, 8192)]
    return cells


QUICK = (
    "fwd-bf16-d64-*-s8192",
    "fwd-bf16-d128-*-s1024",
    "fwd-bf16-d128-*-s8192",
    "fwd-bf16-d256-*-s8192",
    "bwd-bf16-d64-*-s8192",
    "bwd-bf16-d128-*-s8192",
    "bwd-bf16-d256-*-s8192",
)


def select(cells: Iterable[Cell], patterns: Iterable[str]) -> list[Cell]:
    """Cells whose name matches one of the shell patterns."""
    patterns = list(patterns)
    return [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class Target:
    """Ratios to cuDNN in the same run; of packed cells to FlashAttention-2 as torch has it."""

    parity: float
    floor: float
    aim: float


def load_targets(path: Path = TARGETS) -> dict:
    return json.loads(path.read_text())


def target_of(cell: Cell, targets: dict) -> Target | None:
    """Parity, floor and aim of a cell, or None where none was measured."""
    if cell.packed:
        row = targets["times_fa2"].get(cell.case) if cell.op == "varlen_fwd" else None
        return Target(row["parity"], row["floor"] * row["parity"], row["aim"] * row["parity"]) if row else None
    if cell.window != UNBOUNDED:
        return None
    for row in targets["parity"]:
        heads = (row["heads"], row["kv_heads"]) == (cell.heads, cell.kv_heads) if "heads" in row else cell.standard
        same = (row["op"], row["head_dim"], row["causal"], row["seqlen"]) == (
            cell.op, cell.head_dim, cell.causal, cell.seqlen_q,
        )  # fmt: skip
        if heads and same and cell.head_dim == cell.head_dim_v and cell.seqlen_q == cell.seqlen_k:
            parity = row["parity"]
            rule = next(rule for rule in targets["aims"] if _applies(rule, cell))
            bounds = [rule["times_cudnn"] for rule in targets["aims_times_cudnn"] if _applies(rule, cell)]
            return Target(parity, targets["floor"] * parity, max([rule["times_parity"] * parity, *bounds]))
    return None


def fp8_floor(cell: Cell, targets: dict) -> float | None:
    """The share of the run's fp8 matrix product that a cell of float8_e4m3fn inputs is to reach, or None."""
    if cell.dtype != "fp8":
        return None
    row = next(r for r in targets["fp8"]["rates"] if (r["head_dim"], r["causal"]) == (cell.head_dim, cell.causal))
    return row["tflops"][SEQLENS.index(cell.seqlen_q)] / targets["fp8"]["matmul_tflops"]


def _applies(rule: dict, cell: Cell) -> bool:
    return (
        rule["op"] == cell.op
        and rule.get("head_dim", cell.head_dim) == cell.head_dim
        and rule.get("causal", cell.causal) == cell.causal
        and rule.get("min_seqlen", 0) <= cell.seqlen_q <= rule.get("max_seqlen", cell.seqlen_q)
    )
