"""Checks that an extension loads under every torch >= 2.9 and every Python: what it leaves undefined.

Allowed are the C functions of torch's shim that exist in 2.9 (torch_2_9_shim.txt), one weak function that only CUDA
builds of torch define, and the C and C++ run-time libraries. Anything of Python, or a C++ symbol of torch, would tie
the file to one build of them.

usage: python -m buildtools.symbols flash_attn3/_C.so
"""

import re
import subprocess
import sys
from pathlib import Path

# Defined by libtorch_cuda, absent from a CPU-only torch, so it has to be weak.
WEAK = ("aoti_torch_get_current_cuda_stream",)
# Weak references that the compiler's start-up code makes.
_STARTUP = ("_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize")
# What libstdc++ and the C++ ABI define, by demangled name: torch's libraries offer some of it without a version.
_CXX_RUNTIME = re.compile(r"((vtable|typeinfo|typeinfo name) for |void |bool )?(std::|__cxxabi)|operator (new|delete)")


def shim_functions() -> frozenset[str]:
    """The functions of torch's C shim that torch 2.9.0 defines on every platform."""
    lines = (Path(__file__).parent / "torch_2_9_shim.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def undefined(nm_output: str) -> list[tuple[str, str]]:
    """(kind, name) of each line of `nm -D --undefined-only`; the name keeps its version, kind is U, w or v."""
    lines = (line.split() for line in nm_output.splitlines() if line.strip())
    return [(parts[-2], parts[-1]) for parts in lines]


def violations(symbols: list[tuple[str, str]]) -> list[str]:
    """One line for each undefined symbol that a torch >= 2.9 or a Python may lack."""
    shim = shim_functions()
    found = []
    for kind, name in symbols:
        bare, _, version = name.partition("@")
        if bare in WEAK:
            if kind not in "wv":
                found.append(f"{bare}: must be declared weak, a CPU-only torch does not define it")
        elif re.match(r"_?Py[A-Z_]", bare):
            found.append(f"{bare}: a symbol of Python")
        elif bare.startswith(("aoti_torch_", "torch_")):
            if bare not in shim:
                found.append(f"{bare}: not in the C shim of torch 2.9")
        elif not (version or bare in _STARTUP or _CXX_RUNTIME.match(demangle([bare])[0])):
            found.append(f"{bare}: from no library that is known to be there")
    return found


def demangle(names: list[str]) -> list[str]:
    """The C++ names of mangled symbols, by binutils' c++filt."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def newest_versions(symbols: list[tuple[str, str]]) -> dict[str, str]:
    """The newest version of each run-time library that a symbol asks for, e.g. {"GLIBC": "2.34"}."""
    newest: dict[str, str] = {}
    for _, name in symbols:
        if match := re.search(r"@+(GLIBC|GLIBCXX|CXXABI)_([\d.]+)$", name):
            library, version = match.groups()
            newest[library] = max(newest.get(library, "0"), version, key=lambda v: [int(n) for n in v.split(".")])
    return newest


def main(argv: list[str]) -> int:
    if not Path(argv[0]).is_file():
        print(f"{argv[0]} is not built")
        return 1
    listing = subprocess.run(["nm", "-D", "--undefined-only", argv[0]], capture_output=True, text=True, check=True)
    symbols = undefined(listing.stdout)
    found = violations(symbols)
    if found:
        print(f"{argv[0]}:\n  " + "\n  ".join(found))
        return 1
    used = sum(name.startswith(("aoti_torch_", "torch_")) for _, name in symbols)
    needs = ", ".join(f"{library} {version}" for library, version in sorted(newest_versions(symbols).items()))
    print(f"{argv[0]}: {used} functions of torch's C shim, all in 2.9; no Python symbol; needs {needs}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
