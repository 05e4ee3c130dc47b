"""The build's own logic: kernel table, generated sources, ptxas' verdict, object cache, job limit, tools."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from buildtools import ROOT, build, compile_unit, plan, ptxas, toolchain

TABLE = plan.load_table()


# --- the table ---


def test_names_are_unique_and_say_the_row():
    rows = TABLE.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.symbol for row in rows}) == len(rows)
    for row in TABLE.FORWARD + TABLE.FP8 + TABLE.BACKWARD:
        assert row.name == f"{row.op}_{row.dtype}_d{row.head_dim}_dv{row.head_dim_v}_m{row.block_m}_n{row.block_n}"
        assert row.block_m % (16 if row.op in ("backward", "backward_keys") else 64) == 0 and row.block_n % 8 == 0
    for row in TABLE.AUXILIARY:
        assert row.name == (row.op if row.dtype == "any" else f"{row.op}_{row.dtype}") and row.block_m == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_table_covers_the_head_dims(dtype):
    tiles = {(row.head_dim, row.head_dim_v) for row in TABLE.FORWARD if row.dtype == dtype}
    assert {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)} <= tiles
    for op in ("backward_keys", "backward_queries"):
        assert {(row.head_dim, row.head_dim_v) for row in TABLE.BACKWARD if (row.op, row.dtype) == (op, dtype)} == tiles
    assert {row.op for row in TABLE.AUXILIARY if row.dtype == dtype} == {"backward_prepare", "backward_finish"}
    assert [x.name for x in TABLE.rows() if x.dtype == "any"] == ["packed_schedule", "backward_sink", "fp8_transpose"]


def test_filter():
    everything = TABLE.rows()
    assert TABLE.select() == everything == TABLE.select(" , ")
    chosen = TABLE.select("*_bf16_d64_*, *_d256_*")
    assert {row.name for row in chosen} == {
        row.name
        for row in TABLE.FORWARD + TABLE.FP8 + TABLE.BACKWARD
        if (row.dtype, row.head_dim) == ("bf16", 64) or row.head_dim == 256
    }
    assert chosen == [row for row in everything if row in chosen], "the table's order is kept"
    with pytest.raises(ValueError, match=r"'forward_bf16_d65\*'.*forward_bf16_d64"):
        TABLE.select("forward_bf16_d65*")


def test_generated_sources(tmp_path):
    patterns = "*_d128_dv128_*, *_d256_*, *_prepare*, *_finish*, backward_sink, packed_*, fp8_transpose"  # every family
    units = plan.generate(patterns, tmp_path)
    selected = TABLE.select(patterns)
    names = [row.name for row in selected]
    assert {row.op for row in selected} == {row.op for row in TABLE.rows()}
    assert [unit.name for unit in units][: len(names) + 1] == [*names, "kernel_table"]
    for row in selected:
        text = (tmp_path / "generated" / f"{row.name}.cu").read_text()
        assert f'#include "{row.header}"' in text and f"<{row.config}>(params, grid, stream)" in text
        assert (ROOT / "csrc" / row.header).is_file()
    listed = (tmp_path / "generated" / "kernel_table.cpp").read_text()
    entries = re.findall(r'\{"(\w+)", "(\w+)", .*, (\S+), (\S+), (\S+), (\S+)\},', listed)
    assert [entry[0] for entry in entries] == names
    for name, op, *pointers in entries:
        directions = [op.startswith(direction) for direction in ("forward", "backward", "fp8", "packed")]
        assert pointers == [f"&launch_{name}" if own else "nullptr" for own in directions] and sum(directions) == 1
        parameters = ("Forward", "Backward", "Fp8", "Packed")[directions.index(True)]
        assert f"void launch_{name}({parameters}Params const&, int, cudaStream_t);" in listed
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "generated").iterdir()}
    plan.generate(patterns, tmp_path)
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "generated").iterdir()}


def test_torch_is_seen_by_the_binding_alone():
    tools = toolchain.Toolchain(
        *(Path("/nvcc"), "13.0.88", (Path("/cuda"),), Path("/cudalib"), Path("/cutlass"), "4.2.0"),
        *((Path("/torch"),), Path("/torchlib"), "2.9.0", "g++", "12.2.0", Path("/ninja")),
    )
    for source, expected in (("csrc/binding/a.cpp", True), ("csrc/host/a.cpp", False), ("build/generated/a.cu", False)):
        line = plan.command(plan.Unit("a", source), tools, ROOT / "build")
        assert ("/torch" in line) == expected == ("-DTORCH_TARGET_VERSION=0x0209000000000000" in line)
        assert ("arch=compute_90a,code=sm_90a" in line) == source.endswith(".cu")


# --- ptxas ---

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7forwardv' for 'sm_90a'
ptxas info    : Function properties for _Z7forwardv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers
"""
SPILL = CLEAN.replace("0 bytes stack frame, 0 bytes spill stores, 0", "24 bytes stack frame, 16 bytes spill stores, 8")
STACK = CLEAN.replace("0 bytes stack", "32 bytes stack")
SERIAL = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function '_Z7forwardv'\n" + CLEAN
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum registers\n" + CLEAN
)


def test_ptxas_report_of_a_clean_kernel():
    report = ptxas.parse(CLEAN + CLEAN.replace("7forward", "5other").replace("168", "90"))
    assert [(k.symbol, k.registers, k.stack) for k in report.kernels] == [("_Z7forwardv", 168, 0), ("_Z5otherv", 90, 0)]
    assert not report.refused()


@pytest.mark.parametrize(
    ("log", "finding"), [(SPILL, "spills"), (STACK, "stack"), (SERIAL, "C7510"), (IGNORED, "setmaxnreg")]
)
def test_ptxas_findings_are_refused_unless_allowed(log, finding):
    report = ptxas.parse(CLEAN + log)
    assert list(report.refused()) == [finding]
    assert not report.refused((finding,))
    assert report.refused(("another",))


def test_ptxas_counts_spilled_bytes():
    kernel = ptxas.parse(SPILL).kernels[0]
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (24, 16, 8)


# --- one unit and the cache ---

# Stands for a compiler: object and dependency file as asked, and the text that it is told to print.
COMPILER = """\
import sys
from pathlib import Path
source, out, log = sys.argv[1:4]
with open("runs", "a") as runs:
    runs.write("x")
Path(out).write_text(Path(source).read_text() + Path("my header.h").read_text())
Path(out + ".d").write_text(f"{out}: {source} \\\\\\n my\\\\ header.h\\n")
print(log)
"""


@pytest.fixture
def unit(tmp_path, monkeypatch):
    """Runs a unit in an empty folder: unit(log=..., allow=[...]) -> exit status."""
    monkeypatch.chdir(tmp_path)
    Path("compiler.py").write_text(COMPILER)
    Path("a.cu").write_text("source 1\n")
    Path("my header.h").write_text("header 1\n")

    def run(log: str = CLEAN, allow: tuple[str, ...] = (), identity: str = "nvcc 13") -> int:
        spec = {
            "name": "a",
            "command": [sys.executable, "compiler.py", "a.cu", "a.o", log],
            "identity": identity,
            "allow": list(allow),
            "object": "a.o",
            "depfile": "a.o.d",
            "report": "a.json",
            "cache": "cache",
        }
        for name in ("a.o", "a.o.d", "a.json"):
            Path(name).unlink(missing_ok=True)
        Path("spec.json").write_text(json.dumps(spec))
        return compile_unit.main(["spec.json"])

    return run


def runs() -> int:
    return len(Path("runs").read_text())


def test_cache_serves_the_same_inputs(unit, capsys):
    assert unit() == 0
    assert json.loads(Path("a.json").read_text())["kernels"][0]["registers"] == 168
    assert "168 regs  0 spills" in capsys.readouterr().out
    Path("a.cu").touch()
    assert unit() == 0
    assert runs() == 1 and Path("a.o").read_text() == "source 1\nheader 1\n" and Path("a.o.d").is_file()
    assert "(cached)" in capsys.readouterr().out


def test_cache_notices_a_header_the_source_and_the_compiler(unit):
    unit()
    for path, changes in (("my header.h", 2), ("a.cu", 3)):
        before = Path(path).read_text()
        Path(path).write_text("changed\n")
        unit()
        assert runs() == changes and "changed" in Path("a.o").read_text()
        Path(path).write_text(before)
        unit()
        assert runs() == changes, "going back to an earlier content costs nothing"
    unit(identity="nvcc 14")
    assert runs() == 4


@pytest.mark.parametrize("log", [SPILL, SERIAL])
def test_a_refused_unit_fails_each_time_and_compiles_once(unit, capsys, log):
    assert unit(log) == 1 and unit(log) == 1
    assert runs() == 1 and not Path("a.o.d").is_file()
    assert "refused (" in capsys.readouterr().out
    assert unit(log, allow=("spills", "C7510")) == 0 and runs() == 1


def test_a_failing_compiler_is_shown(unit, capsys):
    Path("compiler.py").write_text("import sys; print('no such thing'); sys.exit(2)")
    assert unit() == 1
    assert "no such thing" in capsys.readouterr().out and not list(Path("cache").rglob("*.json"))


def test_a_file_that_changes_during_its_compilation_is_not_cached(unit, capsys):
    Path("compiler.py").write_text(COMPILER + "time.sleep(0.05); Path('my header.h').write_text('later')")
    Path("compiler.py").write_text("import time\n" + Path("compiler.py").read_text())
    assert unit() == 1
    assert "my header.h; build again" in capsys.readouterr().out and not list(Path("cache").rglob("*.json"))
    Path("compiler.py").write_text(COMPILER)
    assert unit() == 0


def test_cache_is_pruned_oldest_first(tmp_path):
    for age in range(4):
        entry = tmp_path / "key" / f"{age}.json"
        entry.parent.mkdir(exist_ok=True)
        entry.write_text("{}")
        entry.with_suffix(".o").write_bytes(bytes(1000))
        os.utime(entry, (1e9 - age, 1e9 - age))
    build.prune_cache(tmp_path, 2100)
    assert sorted(p.name for p in (tmp_path / "key").iterdir()) == ["0.json", "0.o", "1.json", "1.o"]


# --- jobs and tools ---


@pytest.mark.parametrize(("cores", "gigabytes", "jobs"), [(2, 24, 2), (16, 24, 6), (96, 512, 96), (8, 7, 1), (4, 1, 1)])
def test_jobs_are_limited_by_cores_and_memory(monkeypatch, cores, gigabytes, jobs):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert build.job_limit(cores, gigabytes * 2**30) == jobs
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build.job_limit(cores, gigabytes * 2**30) == 3


def test_available_memory_is_plausible():
    assert 2**27 < build.available_memory() < 2**45


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    """No CUDA anywhere; returns a function that puts an nvcc of some version into a folder."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "pypi_cuda_roots", lambda: [])

    def add_nvcc(home: Path, version: str) -> Path:
        nvcc = home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release, V{version}'\n")
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        return nvcc

    return add_nvcc


def test_no_nvcc_says_what_would_help(bare_machine):
    with pytest.raises(toolchain.ToolchainError, match=r"pip install.*nvidia-cuda-nvcc.*FLASH_ATTN3_PORTABLE=1"):
        toolchain.find_nvcc()


def test_old_nvcc_is_refused_by_version(bare_machine, tmp_path):
    bare_machine(tmp_path, "12.4.131")
    with pytest.raises(toolchain.ToolchainError, match=r"nvcc >= 12\.8, but .* is 12\.4\.131.*nvidia-cuda-nvcc"):
        toolchain.find_nvcc()


def test_order_of_nvcc(bare_machine, tmp_path, monkeypatch):
    on_path = bare_machine(tmp_path, "12.8.61")
    assert toolchain.find_nvcc() == on_path
    monkeypatch.setattr(toolchain, "pypi_cuda_roots", lambda: [tmp_path / "pypi"])
    bare_machine(tmp_path / "pypi", "13.0.88")
    assert toolchain.find_nvcc() == on_path
    home = bare_machine(tmp_path / "home", "12.9.86")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_nvcc() == home
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(toolchain.ToolchainError, match=r"CUDA_HOME=.*nowhere"):
        toolchain.find_nvcc()


def test_pypi_nvcc_serves_when_path_is_too_old(bare_machine, tmp_path, monkeypatch):
    bare_machine(tmp_path, "12.0.1")
    pypi = bare_machine(tmp_path / "pypi", "13.0.88")
    monkeypatch.setattr(toolchain, "pypi_cuda_roots", lambda: [tmp_path / "pypi"])
    assert toolchain.find_nvcc() == pypi


def test_cutlass_is_pinned_once():
    assert f'"{toolchain.CUTLASS_REQUIREMENT}"' in (ROOT / "pyproject.toml").read_text()
