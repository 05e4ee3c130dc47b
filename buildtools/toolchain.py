"""Finds what the build needs on this machine: nvcc, the CUDA headers, CUTLASS, torch's headers and a host compiler.

nvcc comes from CUDA_HOME, from PATH or from NVIDIA's PyPI packages; CUTLASS from CUTLASS_PATH or the PyPI package
nvidia-cutlass; torch is the one this Python imports (a CPU-only torch will do). A missing or too old tool raises
ToolchainError with what would work. Nothing is downloaded and no GPU is looked for.

usage: python -m buildtools.toolchain     says what was found; exit status 1 if the kernels cannot be built, and why
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MIN_NVCC = (12, 8)
MIN_TORCH = (2, 9)
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
PORTABLE_VARIABLE = "FLASH_ATTN3_PORTABLE"
_HOW_TO_GET_NVCC = "`pip install -r requirements-nvcc.txt` (nvidia-cuda-nvcc and its companions, from PyPI)"


class ToolchainError(RuntimeError):
    """A tool that the build needs is missing or too old."""


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    nvcc_version: str
    cuda_includes: tuple[Path, ...]
    cuda_lib: Path  # holds libcudart_static.a
    cutlass_include: Path
    cutlass_version: str
    torch_includes: tuple[Path, ...]
    torch_lib: Path
    torch_version: str
    cxx: str
    cxx_version: str
    ninja: Path

    @property
    def identity(self) -> str:
        """What distinguishes the output of these compilers from that of others, as part of a cache key."""
        return f"nvcc {self.nvcc_version}, c++ {self.cxx_version}"

    def describe(self) -> str:
        return f"nvcc {self.nvcc_version}, CUTLASS {self.cutlass_version}, torch {self.torch_version} headers"


def portable_requested() -> bool:
    """Whether the environment asks for an install without kernels (FLASH_ATTN3_PORTABLE=1)."""
    return os.environ.get(PORTABLE_VARIABLE, "0") not in ("", "0")


def find_toolchain() -> Toolchain:
    """Everything the build needs; raises ToolchainError at the first thing that is missing."""
    nvcc = find_nvcc()
    root = _toolkit_root(nvcc)
    cutlass_include, cutlass_version = _find_cutlass()
    torch_root, torch_version = _find_torch()
    cxx = os.environ.get("CXX") or "g++"
    if not shutil.which(cxx):
        raise ToolchainError(f"the host compiler {cxx!r} is not on PATH; install g++ or set CXX")
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=".".join(map(str, nvcc_version(nvcc))),
        cuda_includes=_cuda_includes(root),
        cuda_lib=_cuda_lib(root),
        cutlass_include=cutlass_include,
        cutlass_version=cutlass_version,
        torch_includes=(torch_root / "include",),
        torch_lib=torch_root / "lib",
        torch_version=torch_version,
        cxx=cxx,
        cxx_version=_output([cxx, "-dumpfullversion"]).strip(),
        ninja=_find_ninja(),
    )


def find_nvcc() -> Path:
    """The nvcc to build with, at least version 12.8; raises ToolchainError that says how to get one."""
    candidates = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            if not (Path(home) / "bin" / "nvcc").is_file():
                raise ToolchainError(f"{variable}={home} has no bin/nvcc; unset it or point it at a CUDA toolkit")
            candidates.append(Path(home) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates += [root / "bin" / "nvcc" for root in pypi_cuda_roots() if (root / "bin" / "nvcc").is_file()]
    if not candidates:
        raise ToolchainError(
            "no nvcc found in CUDA_HOME, on PATH or among this Python's packages. The kernels need nvcc >= "
            f"{_dotted(MIN_NVCC)}: install a CUDA toolkit, or {_HOW_TO_GET_NVCC}, "
            f"or set {PORTABLE_VARIABLE}=1 to install without kernels (plain PyTorch on every device)."
        )
    for nvcc in candidates:
        if nvcc_version(nvcc) >= MIN_NVCC:
            return nvcc
    found = ", ".join(f"{nvcc} is {_dotted(nvcc_version(nvcc))}" for nvcc in candidates)
    raise ToolchainError(
        f"the kernels need nvcc >= {_dotted(MIN_NVCC)}, but {found}. A newer one: {_HOW_TO_GET_NVCC}; "
        f"{PORTABLE_VARIABLE}=1 installs without kernels."
    )


def nvcc_version(nvcc: Path) -> tuple[int, ...]:
    """Version of an nvcc, e.g. (13, 0, 88)."""
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    if not match:
        raise ToolchainError(f"`{nvcc} --version` does not print a version")
    return tuple(map(int, match.groups()))


def _toolkit_root(nvcc: Path) -> Path:
    # Distributions put wrappers and links on PATH, so nvcc is asked where it lives.
    match = re.search(r"^#\$ _HERE_=(.+)$", _output([str(nvcc), "--dryrun", "-x", "cu", "-E", os.devnull]), re.M)
    return Path(match.group(1)).resolve().parent if match else nvcc.resolve().parent.parent


def _cuda_includes(root: Path) -> tuple[Path, ...]:
    homes = (root, *pypi_cuda_roots())
    runtime = _first(
        "the CUDA runtime headers (cuda_runtime_api.h)",
        "nvidia-cuda-runtime",
        (home / sub for home in homes for sub in ("include", "targets/x86_64-linux/include")),
        "cuda_runtime_api.h",
    )
    cccl = _first(
        "the CUDA C++ headers (cuda/std)",
        "nvidia-cuda-cccl",
        (home / sub for home in homes for sub in ("include/cccl", "include")),
        "cuda/std/version",
    )
    return tuple(dict.fromkeys((runtime, cccl)))


def _cuda_lib(root: Path) -> Path:
    homes = (root, *pypi_cuda_roots())
    subs = ("lib64", "lib", "targets/x86_64-linux/lib")
    places = (home / sub for home in homes for sub in subs)
    return _first("the static CUDA runtime (libcudart_static.a)", "nvidia-cuda-runtime", places, "libcudart_static.a")


def pypi_cuda_roots() -> list[Path]:
    """Folders of NVIDIA's PyPI packages: nvidia/cu13 (one tree), nvidia/cuda_nvcc, nvidia/cuda_runtime, ..."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in spec.submodule_search_locations] if spec and spec.submodule_search_locations else []
    return [child for place in places for child in sorted(place.iterdir(), reverse=True) if child.is_dir()]


def _find_cutlass() -> tuple[Path, str]:
    if override := os.environ.get("CUTLASS_PATH"):
        include = Path(override) / "include"
        if not (include / "cutlass" / "version.h").is_file():
            raise ToolchainError(f"CUTLASS_PATH={override} has no include/cutlass/version.h")
    else:
        spec = importlib.util.find_spec("cutlass_library")
        include = Path(spec.origin).parent / "source" / "include" if spec and spec.origin else None
        if include is None or not (include / "cutlass" / "version.h").is_file():
            raise ToolchainError(
                f"the CUTLASS headers are missing: `pip install --no-deps {CUTLASS_REQUIREMENT}`, or set CUTLASS_PATH "
                "to a checkout of CUTLASS 4.2"
            )
    text = (include / "cutlass" / "version.h").read_text()
    numbers = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return include, ".".join(n.group(1) for n in numbers if n)


def _find_torch() -> tuple[Path, str]:
    # Importing torch takes seconds and is not needed: its headers and its version file are enough.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError(
            "torch is missing: install torch >= 2.9 (a CPU build is enough) and build with `--no-build-isolation`"
        )
    root = Path(spec.origin).parent
    version = re.search(r"__version__ = ['\"](.+?)['\"]", (root / "version.py").read_text()).group(1)
    if tuple(int(n) for n in version.split(".")[:2]) < MIN_TORCH:
        raise ToolchainError(f"torch {version} is too old; the extension needs the stable ABI of {_dotted(MIN_TORCH)}")
    return root, version


def _find_ninja() -> Path:
    beside = Path(sys.executable).parent / "ninja"
    found = beside if beside.is_file() else shutil.which("ninja")
    if not found:
        raise ToolchainError("ninja is missing: `pip install ninja`")
    return Path(found)


def _first(what: str, package: str, places, marker: str) -> Path:
    for place in places:
        if (place / marker).exists():
            return place.resolve()
    raise ToolchainError(
        f"{what} are not beside nvcc: `pip install {package}`, or set CUDA_HOME to a whole toolkit; "
        f"{PORTABLE_VARIABLE}=1 installs without kernels."
    )


def _output(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main() -> int:
    if portable_requested():
        print(f"{PORTABLE_VARIABLE} is set: installing without kernels", file=sys.stderr)
        return 1
    try:
        print(find_toolchain().describe())
    except ToolchainError as error:
        print(f"installing without kernels, for the portable backend only: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
