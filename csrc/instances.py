"""The table of compiled kernels: one row a kernel, one generated .cu a row.

The build generates its sources from this table, the host library finds its kernels through the generated
kernel_table.cpp, and the tests read the rows. Nothing is imported but the standard library, so that every reader can
load this file by its path.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

_CPP_TYPE = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t", "any": "void"}


@dataclass(frozen=True)
class ForwardKernel:
    """One 16-bit forward kernel.

    A CTA computes 64 query rows for each of `warpgroups` consumer warpgroups and walks the keys in blocks of `block_n`
    through rings of `key_stages` and `value_stages` shared-memory buffers. It serves every head dim up to `head_dim`
    and every value head dim up to `head_dim_v`. `allow` names findings of ptxas (buildtools/ptxas.py) that this row is
    permitted, each explained in a comment beside the row.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    warpgroups: int
    block_n: int
    key_stages: int
    value_stages: int
    allow: tuple[str, ...] = ()

    op = family = "forward"
    header = "kernels/forward/launch.h"

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def name(self) -> str:
        return f"forward_{self.dtype}_d{self.head_dim}_dv{self.head_dim_v}_m{self.block_m}_n{self.block_n}"

    @property
    def config(self) -> str:
        """The C++ type that describes this row."""
        sizes = (self.head_dim, self.head_dim_v, self.warpgroups, self.block_n, self.key_stages, self.value_stages)
        return f"ForwardConfig<{_CPP_TYPE[self.dtype]}, {', '.join(map(str, sizes))}>"

    symbol = config  # what the demangled name of the row's kernel contains


# (head_dim, head_dim_v, warpgroups, block_n, key_stages, value_stages). Of two rows for the same head dims the one with
# the smaller block_n serves short sequences: it wastes less on the last and the diagonal blocks.
_FORWARD_TILES = (
    (64, 64, 3, 128, 4, 4),
    (96, 96, 3, 96, 4, 4),
    (128, 128, 3, 64, 4, 4),
    (192, 128, 3, 64, 2, 2),
    (192, 192, 2, 80, 2, 2),
    (256, 256, 2, 64, 2, 2),
    (256, 256, 2, 80, 2, 2),
)

FORWARD = [ForwardKernel(dtype, *tile) for dtype in ("bf16", "fp16") for tile in _FORWARD_TILES]


@dataclass(frozen=True)
class Fp8Kernel:
    """One forward kernel for e4m3 inputs; the tile as in ForwardKernel."""

    head_dim: int
    head_dim_v: int
    warpgroups: int
    block_n: int
    key_stages: int
    value_stages: int
    allow: tuple[str, ...] = ()

    op, dtype, family = "fp8_forward", "e4m3", "fp8"
    header = "kernels/fp8/forward.h"

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def name(self) -> str:
        return f"{self.op}_{self.dtype}_d{self.head_dim}_dv{self.head_dim_v}_m{self.block_m}_n{self.block_n}"

    @property
    def config(self) -> str:
        """The C++ type that describes this row."""
        sizes = (self.head_dim, self.head_dim_v, self.warpgroups, self.block_n, self.key_stages, self.value_stages)
        return f"Fp8Config<{', '.join(map(str, sizes))}>"

    symbol = config


FP8 = [Fp8Kernel(64, 64, 3, 128, 4, 4), Fp8Kernel(128, 128, 3, 96, 4, 4), Fp8Kernel(256, 256, 2, 128, 2, 2)]


@dataclass(frozen=True)
class BackwardKernel:
    """One 16-bit kernel of the backward pass; `op` says which gradients it computes and what a CTA holds.

    "backward": a CTA holds `block_n` keys, walks queries in blocks of `block_m`, computes dK, dV and adds to dQ.
    "backward_keys": the same without dQ. "backward_queries": a CTA holds `block_m` queries, walks keys in blocks of
    `block_n`, computes dQ. `stages` are the shared-memory buffers of what is walked (Q and dO, or K and V).
    """

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: tuple[int, int]
    allow: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.op}_{self.dtype}_d{self.head_dim}_dv{self.head_dim_v}_m{self.block_m}_n{self.block_n}"

    @property
    def header(self) -> str:
        return f"kernels/backward/{self.family}/launch.h"

    @property
    def family(self) -> str:
        """The folder of the kernel. From head dim 192 on a warpgroup cannot hold whole rows of dK and dV."""
        if self.op == "backward_queries":
            return "queries"
        return "keys" if self.head_dim <= 128 else "wide_keys"

    @property
    def config(self) -> str:
        """The C++ type that describes this row."""
        sizes = [self.head_dim, self.head_dim_v, self.block_m, self.block_n, *self.stages]
        if self.family == "keys":
            sizes.append("true" if self.op == "backward" else "false")
        name = {"queries": "QueriesConfig", "keys": "KeysConfig", "wide_keys": "WideKeysConfig"}[self.family]
        return f"{name}<{_CPP_TYPE[self.dtype]}, {', '.join(map(str, sizes))}>"

    symbol = config


# What ptxas spills (at most 28 bytes) are numbers of the tile, outside the loop over steps or in its masked steps, and
# of the producer's search for the next one.
_OUTSIDE = ("spills", "stack")

# (op, head_dim, head_dim_v, block_m, block_n, stages[, allow])
_BACKWARD_TILES = (
    ("backward", 64, 64, 128, 128, (2, 2)),
    ("backward", 96, 96, 128, 128, (2, 2), _OUTSIDE),
    ("backward", 128, 128, 80, 128, (2, 2), _OUTSIDE),
    ("backward_keys", 64, 64, 128, 128, (3, 2)),
    ("backward_keys", 96, 96, 128, 128, (2, 2), _OUTSIDE),
    ("backward_keys", 128, 128, 80, 128, (2, 2)),
    ("backward_keys", 192, 128, 96, 64, (2, 2), _OUTSIDE),
    ("backward_keys", 192, 192, 96, 64, (2, 2), _OUTSIDE),
    ("backward_keys", 256, 256, 64, 64, (2, 2), _OUTSIDE),
    ("backward_queries", 64, 64, 192, 80, (4, 4)),
    ("backward_queries", 96, 96, 192, 64, (3, 3)),
    ("backward_queries", 128, 128, 192, 64, (3, 3)),
    ("backward_queries", 192, 128, 128, 64, (3, 2)),
    ("backward_queries", 192, 192, 128, 64, (2, 2)),
    ("backward_queries", 256, 256, 128, 64, (2, 1)),
)

BACKWARD = [BackwardKernel(op, dtype, *tile) for dtype in ("bf16", "fp16") for op, *tile in _BACKWARD_TILES]


@dataclass(frozen=True)
class AuxiliaryKernel:
    """A short kernel before or after the main ones, for every problem of its dtype; the row's tile is empty.

    "backward_prepare" and "backward_finish" come before and after the main kernels of a backward pass. Dtype "any" is
    for kernels that see no 16-bit elements: "packed_schedule" before all others of a packed batch, "backward_sink"
    after all others of a backward pass with a sink, "fp8_transpose" before an fp8_forward.
    """

    op: str
    dtype: str
    allow: tuple[str, ...] = ()
    head_dim = head_dim_v = 256
    block_m = block_n = 0
    family = "auxiliary"

    @property
    def name(self) -> str:
        return self.op if self.dtype == "any" else f"{self.op}_{self.dtype}"

    @property
    def header(self) -> str:
        folder, name = self.op.split("_")
        return f"kernels/{folder}/{name}.h"

    @property
    def config(self) -> str:
        return _CPP_TYPE[self.dtype]

    @property
    def symbol(self) -> str:
        return f"{self.op}_kernel<{self.config}"


AUXILIARY = [
    *(AuxiliaryKernel(op, dtype) for dtype in ("bf16", "fp16") for op in ("backward_prepare", "backward_finish")),
    AuxiliaryKernel("packed_schedule", "any"),
    AuxiliaryKernel("backward_sink", "any"),
    AuxiliaryKernel("fp8_transpose", "any"),
]

Kernel = ForwardKernel | Fp8Kernel | BackwardKernel | AuxiliaryKernel


def rows() -> list[Kernel]:
    """Every row, in the order of the row ids of a full build."""
    return [*FORWARD, *FP8, *BACKWARD, *AUXILIARY]


def select(patterns: str = "") -> list[Kernel]:
    """The rows whose name matches one of the comma-separated shell patterns; all rows if there is no pattern.

    Raises ValueError if a pattern matches no row.
    """
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(row.name, pattern) for row in rows()):
            raise ValueError(f"no kernel matches {pattern!r}; the table has: {', '.join(row.name for row in rows())}")
    return [row for row in rows() if not wanted or any(fnmatchcase(row.name, p) for p in wanted)]


# The members of KernelRow that point to a launch function, and the types of their parameters.
_DIRECTIONS = {"forward": "ForwardParams", "backward": "BackwardParams", "fp8": "Fp8Params", "packed": "PackedParams"}


def _direction(row: Kernel) -> str:
    return row.op.split("_")[0]


def _launch_template(row: Kernel) -> str:
    launch = {"queries": "launch_backward_queries", "keys": "launch_backward_keys", "wide_keys": "launch_wide_keys"}
    return launch.get(row.family, f"launch_{row.op}")


def render(row: Kernel) -> str:
    """The generated .cu of one row: its launch function."""
    launch, params = _launch_template(row), _DIRECTIONS[_direction(row)]
    return f"""// Generated from csrc/instances.py.
#include "{row.header}"

namespace flash_attn3 {{
void launch_{row.name}({params} const& params, int grid, cudaStream_t stream) {{
  {launch}<{row.config}>(params, grid, stream);
}}
}}  // namespace flash_attn3
"""


def render_table(selected: list[Kernel]) -> str:
    """The generated kernel_table.cpp: what the host library knows of each compiled row; the index is the row id."""
    declarations = "\n".join(
        f"void launch_{row.name}({_DIRECTIONS[_direction(row)]} const&, int, cudaStream_t);" for row in selected
    )

    def entry(row: Kernel) -> str:
        pointers = ", ".join(f"&launch_{row.name}" if name == _direction(row) else "nullptr" for name in _DIRECTIONS)
        return (
            f'    {{"{row.name}", "{row.op}", "{row.dtype}", {row.head_dim}, {row.head_dim_v}, {row.block_m}, '
            f"{row.block_n}, {pointers}}},"
        )

    entries = "\n".join(entry(row) for row in selected)
    return f"""// Generated from csrc/instances.py: the kernels of this build.
#include "host/kernel_table.h"

namespace flash_attn3 {{
{declarations}

KernelRow const kKernelTable[] = {{
{entries}
}};
int const kKernelCount = {len(selected)};
static_assert({len(selected)} <= kMaxKernels);
}}  // namespace flash_attn3
"""
