"""Turns the kernel table into generated sources, compiler commands and a ninja file; runs nothing.

Units: one generated .cu for each selected row of csrc/instances.py, the generated kernel_table.cpp, and every source
in csrc/host and csrc/binding. A .cu is compiled by nvcc for sm_90a, a .cpp by the host compiler. Commands run at the
checkout's root and name what lies below it by relative paths, so that checkouts can share a cache. Everything written
here lies under build/, and a file is rewritten only when its content changes, so that ninja sees what really changed.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from buildtools import ROOT
from buildtools.toolchain import Toolchain

# sm_90a only: WGMMA, TMA multicast and setmaxnreg exist on no other architecture.
_NVCC_FLAGS = (
    "-O3 -std=c++17 --use_fast_math -lineinfo -Xptxas -v -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED "
    "-DCUTLASS_DEBUG_TRACE_LEVEL=0 --expt-relaxed-constexpr --expt-extended-lambda "
    "-Xcompiler -fPIC,-fvisibility=hidden -gencode arch=compute_90a,code=sm_90a"
).split()
_CXX_FLAGS = "-O2 -std=c++17 -fPIC -fvisibility=hidden -Wall -DNDEBUG".split()
# USE_CUDA opens the CUDA part of torch's stable ABI even under a CPU-only torch; 2.9 is the oldest torch served.
_TORCH_FLAGS = "-DUSE_CUDA -DTORCH_TARGET_VERSION=0x0209000000000000".split()
# libtorch stays a dependency although nothing is taken from it directly: on a CUDA build of torch it brings
# libtorch_cuda, where the weak aoti_torch_get_current_cuda_stream is found.
_LINK_FLAGS = (
    "-shared -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,--gc-sections -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 "
    "-Wl,--as-needed -lcudart_static -ldl -lrt -lpthread"
).split()

_NINJA = """\
ninja_required_version = 1.7
builddir = {build}
rule unit
  command = {python} -m buildtools.compile_unit $in
  description = $name
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -o $out @$out.rsp
  rspfile = $out.rsp
  rspfile_content = $in {flags}
  description = link _C.so

"""


@dataclass(frozen=True)
class Unit:
    """One translation unit: where it is compiled from, and which findings of ptxas it may have."""

    name: str
    source: str
    allow: tuple[str, ...] = ()


def load_table(root: Path = ROOT) -> ModuleType:
    """The module csrc/instances.py of the checkout at `root`."""
    spec = importlib.util.spec_from_file_location("flash_attn3_instances", root / "csrc" / "instances.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def generate(patterns: str, build: Path, root: Path = ROOT) -> list[Unit]:
    """Writes the generated sources of the rows that `patterns` selects; returns the units of the extension."""
    table = load_table(root)
    selected = table.select(patterns)
    units = []
    for row in selected:
        source = build / "generated" / f"{row.name}.cu"
        write_if_changed(source, table.render(row))
        units.append(Unit(row.name, _relative(source, root), row.allow))
    source = build / "generated" / "kernel_table.cpp"
    write_if_changed(source, table.render_table(selected))
    units.append(Unit("kernel_table", _relative(source, root)))
    for folder in ("host", "binding"):
        for path in sorted((root / "csrc" / folder).glob("*.c*")):
            if path.suffix in (".cpp", ".cu"):
                units.append(Unit(f"{folder}_{path.stem}", _relative(path, root)))
    return units


def command(unit: Unit, tools: Toolchain, build: Path, root: Path = ROOT) -> list[str]:
    """The compiler call of a unit."""
    includes = ["-Icsrc"]
    for path in (tools.cutlass_include, *tools.cuda_includes):
        includes += ["-isystem", _relative(path, root)]
    flags = list(_NVCC_FLAGS if unit.source.endswith(".cu") else _CXX_FLAGS)
    if unit.source.startswith("csrc/binding/"):
        flags += _TORCH_FLAGS
        for path in tools.torch_includes:
            includes += ["-isystem", _relative(path, root)]
    compiler = [str(tools.nvcc), "-ccbin", tools.cxx] if unit.source.endswith(".cu") else [tools.cxx]
    out = _relative(_object(unit, build), root)
    return [*compiler, *flags, *includes, "-MD", "-MF", f"{out}.d", "-c", unit.source, "-o", out]


def write_ninja(units: list[Unit], tools: Toolchain, build: Path, cache: Path, root: Path = ROOT) -> Path:
    """Writes build.ninja and one .json a unit for buildtools.compile_unit; returns the ninja file.

    Targets: build/_C.so, and build/objects/NAME.o for each unit. ninja runs at the root.
    """
    link = [f"-L{tools.torch_lib}", f"-L{tools.cuda_lib}", *_LINK_FLAGS]
    lines = [
        _NINJA.format(
            build=_escape(_relative(build, root)),
            python=_escape(sys.executable),
            cxx=_escape(tools.cxx),
            flags=_escape(" ".join(link)),
        )
    ]
    objects = []
    for unit in units:
        spec = build / "units" / f"{unit.name}.json"
        out = _object(unit, build)
        content = {
            "name": unit.name,
            "command": command(unit, tools, build, root),
            "identity": tools.identity,
            "allow": list(unit.allow),
            "object": _relative(out, root),
            "depfile": _relative(out, root) + ".d",
            "report": _relative(out.with_suffix(".json"), root),
            "cache": str(cache),
        }
        write_if_changed(spec, json.dumps(content, indent=1))
        target = _escape(_relative(out, root))
        objects.append(target)
        lines.append(f"build {target}: unit {_escape(_relative(spec, root))} | {_escape(unit.source)}\n")
        lines.append(f"  name = {unit.name}\n")
    lines.append(f"build {_escape(_relative(build / '_C.so', root))}: link {' '.join(objects)}\n")
    ninja_file = build / "build.ninja"
    write_if_changed(ninja_file, "".join(lines))
    (build / "objects").mkdir(parents=True, exist_ok=True)
    return ninja_file


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _object(unit: Unit, build: Path) -> Path:
    return build / "objects" / f"{unit.name}.o"


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
