"""What is measured: the cells, their names and FLOPs, and the targets that they are compared with (targets.json)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

TOKENS = 16384  # batch * seqlen of the standard grid
WIDTH = 2048  # heads * head_dim of the standard grid
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
GRAPH_SEQLENS = (512, 1024)  # short enough for the host's time to show in eager mode
DETERMINISTIC_SEQLENS = (512, 2048, 8192, 16384)
OPS = ("fwd", "bwd")
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

    @property
    def name(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        parts = [self.op, self.dtype, f"d{dims}", "causal" if self.causal else "full", f"s{self.seqlen_q}"]
        parts += [f"h{self.heads}/{self.kv_heads}"] if self.heads != self.kv_heads else []
        return "-".join(parts + (["graph"] if self.graph else []))

    @property
    def flops(self) -> float:
        """2 B H Sq Sk (D + Dv), half of it when causal; 2.5 times that for a backward."""
        full = 2.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return full * (2.5 if self.op == "bwd" else 1.0) * (0.5 if self.causal else 1.0)

    @property
    def standard(self) -> bool:
        """Whether the cell is one of the standard grid, but for its length and graph mode."""
        return self.head_dim == self.head_dim_v and self.heads == self.kv_heads == WIDTH // self.head_dim

    @property
    def deterministic_too(self) -> bool:
        """Whether our deterministic mode is measured beside the default one."""
        return self.op == "bwd" and self.standard and self.seqlen_q in DETERMINISTIC_SEQLENS

    def fields(self) -> dict:
        """The cell in a record; "graph" only where it is true."""
        fields = asdict(self)
        return fields if self.graph else {key: value for key, value in fields.items() if key != "graph"}


def forward(dtype: str, dims: tuple[int, int], heads: tuple[int, int], seqlen: int, causal: bool, graph=False) -> Cell:
    """A forward cell of TOKENS tokens."""
    return Cell("fwd", dtype, *dims, max(1, TOKENS // seqlen), *heads, seqlen, seqlen, causal, graph)


def backward(dims: tuple[int, int], heads: tuple[int, int], seqlen: int, causal: bool) -> Cell:
    """A backward cell of TOKENS tokens."""
    return Cell("bwd", "bf16", *dims, max(1, TOKENS // seqlen), *heads, seqlen, seqlen, causal)


def all_cells() -> list[Cell]:
    """Forward: the standard grid, its short lengths once more in a CUDA graph, GQA, fp16 and the other head dims.

    Backward: the standard grid, GQA and the other head dims.
    """
    return [*_forward_cells(), *_backward_cells()]


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
    """Ratios to cuDNN in the same run."""

    parity: float
    floor: float
    aim: float


def load_targets(path: Path = TARGETS) -> dict:
    return json.loads(path.read_text())


def target_of(cell: Cell, targets: dict) -> Target | None:
    """Parity, floor and aim of a cell, or None where none was measured."""
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


def _applies(rule: dict, cell: Cell) -> bool:
    return (
        rule["op"] == cell.op
        and rule.get("head_dim", cell.head_dim) == cell.head_dim
        and rule.get("causal", cell.causal) == cell.causal
        and rule.get("min_seqlen", 0) <= cell.seqlen_q <= rule.get("max_seqlen", cell.seqlen_q)
    )
