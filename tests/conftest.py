"""Shared by all tests: which flash_attn3 is under test, and where the helpers are.

The installed library is tested. `python -m pytest` puts the checkout first on sys.path, where a flash_attn3 without its
extension would hide an installed one that has it, so the checkout goes to the end. tests/ itself goes there too, for
`import oracle` from any folder below.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT), str(TESTS)]


def pytest_report_header() -> str:
    import flash_attn3
    from flash_attn3 import ops

    kernels = f"{len(ops.kernel_table())} kernels" if ops.loaded else ops.load_error
    return f"flash_attn3: {Path(flash_attn3.__file__).parent} ({kernels})"
