"""The checks of a finished binary, and the checks that lint and CI make on the sources."""

import hashlib
import json
from collections import Counter

import pytest

from buildtools import ROOT, digest, includes, plan, sass, symbols

# --- instructions ---

SASS = """\
        Function : _ZN1aE
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 BRA 0x40 ;
        /*0020*/                   HGMMA.64x80x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*0030*/             @UP0  UTMALDG.4D [UR8], [UR4], desc[UR6] ;
        /*12340*/                  UTMASTG.4D [UR8], [UR4] ;
        Function : _ZN1bE
        /*0000*/              @!UP1 STL.64 [R1], R2 ;
"""


def test_instructions_are_counted_by_function():
    counted = sass.count_instructions(SASS)
    assert counted["_ZN1aE"] == Counter(LDC=1, BRA=1, HGMMA=1, UTMALDG=1, UTMASTG=1)
    assert counted["_ZN1bE"] == Counter(STL=1)


def test_a_row_must_have_a_function_with_its_instructions():
    row, other = plan.load_table().rows()[:2]
    good = Counter(HGMMA=4, UTMALDG=2, UTMASTG=1)
    name = f"void flash_attn3::forward_kernel<flash_attn3::{row.config} >(flash_attn3::ForwardParams)"
    assert sass.check({name: good}, [row]) == []
    assert sass.check({name: good}, [row, other]) == [f"{other.name}: no function with {other.config}"]
    assert sass.check({name: good - Counter(HGMMA=4)}, [row]) == [f"{row.name}: lacks HGMMA"]
    assert "local memory {'LDL': 3}" in sass.check({name: good + Counter(LDL=3)}, [row])[0]


def test_functions_of_every_row_are_told_apart():
    """Each row finds its own kernel among those of all rows, also where only the function's name says which it is."""
    rows = plan.load_table().rows()
    assert set(sass.REQUIRED) == {row.op for row in rows}
    functions = {}
    for row in rows:
        counts = Counter(dict.fromkeys(sass.REQUIRED[row.op], 1), MOV=1)
        if "<" in row.symbol.removesuffix(row.config):
            functions[f"void flash_attn3::{row.symbol}, 8>(flash_attn3::BackwardParams)"] = counts
        else:
            functions[f"void flash_attn3::some_kernel<flash_attn3::{row.config} >(flash_attn3::Params)"] = counts
    assert len(functions) == len(rows) and sass.check(functions, rows) == []
    assert all(len(sass.functions_of(row, functions)) == 1 for row in rows)
    assert "lacks REDG" in "".join(sass.check({name: c - Counter(REDG=1) for name, c in functions.items()}, rows))


# --- undefined symbols ---


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("U aoti_torch_library_impl", None),
        ("w aoti_torch_get_current_cuda_stream", None),
        ("U aoti_torch_get_current_cuda_stream", "must be declared weak"),
        ("U torch_call_dispatcher", "not in the C shim of torch 2.9"),
        ("U PyErr_SetString", "a symbol of Python"),
        ("U _Py_NoneStruct", "a symbol of Python"),
        ("U _ZN3c105ErrorD1Ev", "from no library"),
        ("U _ZN2at6Tensor3addEv", "from no library"),
        ("U cuTensorMapEncodeTiled", "from no library"),
        ("U memcpy@GLIBC_2.14", None),
        ("U _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev", None),
        ("U _ZTVN10__cxxabiv120__si_class_type_infoE", None),
        ("U _Znwm", None),
    ],
)
def test_undefined_symbols(line, complaint):
    found = symbols.violations(symbols.undefined(f"                 {line}\n"))
    assert (complaint in found[0]) if complaint else found == []


def test_newest_versions_compare_as_numbers():
    listing = "U a@GLIBC_2.9\n U b@GLIBC_2.34\nU c@@GLIBCXX_3.4.21\n"
    assert symbols.newest_versions(symbols.undefined(listing)) == {"GLIBC": "2.34", "GLIBCXX": "3.4.21"}


@pytest.mark.skipif(not (ROOT / "flash_attn3" / "_C.so").is_file(), reason="no extension is built in this checkout")
def test_symbols_of_the_built_extension(capsys):
    assert symbols.main([str(ROOT / "flash_attn3" / "_C.so")]) == 0, capsys.readouterr().out


@pytest.mark.skipif(not (ROOT / "flash_attn3" / "_C.so").is_file(), reason="no extension is built in this checkout")
def test_description_of_the_built_extension():
    description = json.loads((ROOT / "flash_attn3" / "_build.json").read_text())
    extension = (ROOT / "flash_attn3" / "_C.so").read_bytes()
    assert description["extension_sha256"] == hashlib.sha256(extension).hexdigest()
    assert set(description["kernels"]) <= {row.name for row in plan.load_table().rows()}
    assert {"version", "digest", "nvcc", "torch", "cutlass"} <= set(description)


# --- includes ---


@pytest.mark.parametrize(
    ("source", "included", "allowed"),
    [
        ("binding/forward.cpp", "torch/csrc/stable/tensor.h", True),
        ("binding/forward.cpp", "host/plan.h", True),
        ("binding/forward.cpp", "torch/extension.h", False),
        ("binding/forward.cpp", "ATen/ATen.h", False),
        ("binding/forward.cpp", "kernels/forward/launch.h", False),
        ("host/plan.cpp", "torch/csrc/stable/tensor.h", False),
        ("host/plan.cpp", "binding/forward.h", False),
        ("host/plan.cpp", "cute/tensor.hpp", False),
        ("host/plan.cpp", "cuda.h", True),
        ("kernels/common/softmax.h", "kernels/forward/config.h", False),
        ("kernels/forward/config.h", "kernels/common/softmax.h", True),
        ("kernels/forward/config.h", "kernels/backward/config.h", False),
        ("kernels/forward/config.h", "host/params.h", True),
        ("kernels/packed/schedule.h", "host/packed.h", True),
        ("kernels/packed/schedule.h", "kernels/forward/config.h", False),
        ("kernels/fp8/config.h", "kernels/forward/config.h", True),
        ("kernels/forward/config.h", "kernels/fp8/config.h", False),
        ("kernels/forward/config.h", "host/plan.h", False),
        ("kernels/forward/config.h", "cute/tensor.hpp", True),
        ("kernels/forward/config.h", "c10/util/Exception.h", False),
    ],
)
def test_direction_of_includes(source, included, allowed):
    assert (includes.refuse(source, included) is None) == allowed


def test_violations_are_found_in_files(tmp_path):
    (tmp_path / "csrc" / "host").mkdir(parents=True)
    (tmp_path / "csrc" / "host" / "a.h").write_text("#pragma once\n# include <torch/all.h>\n")
    (tmp_path / "flash_attn3").mkdir()
    (tmp_path / "flash_attn3" / "a.py").write_text("def f():\n    from flash_attn_interface import g\n")
    assert includes.native_violations(tmp_path)[0].startswith("csrc/host/a.h:2: includes torch/all.h")
    assert includes.python_violations(tmp_path)[0].startswith("flash_attn3/a.py:2: imports flash_attn_interface")


def test_includes_and_imports_of_this_checkout():
    assert includes.native_violations() + includes.python_violations() == []


# --- digest ---


def test_digest_is_of_the_named_sources_only(tmp_path):
    for name, content in {"setup.py": "1", "csrc/b.h": "2", "csrc/a/b.cpp": "3", "hopper/x.py": "4"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    expected = hashlib.sha256(
        b"csrc/a/b.cpp\x003\x00csrc/b.h\x002\x00hopper/x.py\x004\x00setup.py\x001\x00"
    ).hexdigest()
    assert digest.source_digest(tmp_path) == expected[:16]
    for name in ("csrc/notes.md", "hopper/__pycache__/x.py", "tests/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("5")
    assert digest.source_digest(tmp_path) == expected[:16]
    (tmp_path / "csrc" / "b.h").write_text("changed")
    assert digest.source_digest(tmp_path) != expected[:16]


def test_records_are_compared_with_the_sources(tmp_path):
    (tmp_path / "setup.py").write_text("")
    fresh, stale = (tmp_path / name for name in digest.RECORDS)
    for path, recorded in ((fresh, digest.source_digest(tmp_path)), (stale, "0123456789abcdef")):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"source_digest": recorded}))
    assert [line.split(": ")[1] for line in digest.record_states(tmp_path)] == [
        "fresh",
        "stale (digest 0123456789abcdef)",
    ]
    stale.unlink()
    assert digest.record_states(tmp_path)[1].endswith("absent")
