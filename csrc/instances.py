"""The table of compiled kernels: one row a kernel, one generated .cu a row.

The build generates its sources from this table, the host library finds its kernels through the generated
kernel_table.cpp, and the tests read the rows. Nothing is imported but the standard library, so that every reader can
load this file by its path.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

_CPP_TYPE = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}


@dataclass(frozen=True)
class ForwardKernel:
    """One 16-bit forward kernel.

    A CTA computes 64 query rows for each of `warpgroups` consumer warpgroups and walks the keys in blocks of `block_n`
    through rings of `key_stages` and
    `value_stages` shared-memory buffers. It serves every head dim up to `head_dim` and every value head
    dim up to `head_dim_v`. `allow` names findings of ptxas (buildtools/ptxas.py) that this row is permitted, each
    justified by a measurement in a comment beside the row.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    warpgroups: int
    block_n: int
    key_stages: int
    value_stages: int
    allow: tuple[str, ...] = ()

    op = "forward"

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


def rows() -> list[ForwardKernel]:
    """Every row, in the order of the row ids of a full build."""
    return list(FORWARD)


def select(patterns: str = "") -> list[ForwardKernel]:
    """The rows whose name matches one of the comma-separated shell patterns; all rows if there is no pattern.

    Raises ValueError if a pattern matches no row.
    """
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(row.name, pattern) for row in rows()):
            raise ValueError(f"no kernel matches {pattern!r}; the table has: {', '.join(row.name for row in rows())}")
    return [row for row in rows() if not wanted or any(fnmatchcase(row.name, p) for p in wanted)]


def render(row: ForwardKernel) -> str:
    """The generated .cu of one row: its launch function."""
    return f"""// Generated from csrc/instances.py.
#include "kernels/forward/launch.h"

namespace flash_attn3 {{
void launch_{row.name}(ForwardParams const& params, int grid, cudaStream_t stream) {{
  launch_forward<{row.config}>(params, grid, stream);
}}
}}  // namespace flash_attn3
"""


def render_table(selected: list[ForwardKernel]) -> str:
    """The generated kernel_table.cpp: what the host library knows of each compiled row; the index is the row id."""
    declarations = "\n".join(f"void launch_{row.name}(ForwardParams const&, int, cudaStream_t);" for row in selected)
    entries = "\n".join(
        f'    {{"{row.name}", "{row.op}", "{row.dtype}", {row.head_dim}, {row.head_dim_v}, {row.block_m}, '
        f"{row.block_n}, &launch_{row.name}}},"
        for row in selected
    )
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
