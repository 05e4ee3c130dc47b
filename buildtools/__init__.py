"""Builds the native extension flash_attn3/_C.so and checks what came out; used by setup.py, never installed.

toolchain finds nvcc, CUTLASS and torch's headers; plan turns the kernel table into sources and a ninja file; build
drives it; compile_unit runs one compiler, measures and caches it; ptxas judges the compiler's report; report, sass,
symbols, includes and digest are the checks that CI runs. Only the standard library is imported.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
