"""What an installation looks like from outside: names, metadata and tags of the wheel and of an editable install.

Built from a copy of the checkout by the project's own build backend, without kernels, so that no compiler is needed.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from buildtools import ROOT

MODULES = {"flash_attn3", "flash_attn_3", "flash_attn_interface", "flash_attn_config"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what a build reads."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "_build.json", "*.egg-info")
    for name in ("buildtools", "csrc", "flash_attn3", "hopper"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def call_backend(checkout: Path, hook: str, out: Path, **environment: str) -> subprocess.CompletedProcess:
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out)!r}))"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATTN3_", "CUDA_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=checkout, env={**env, **environment}, capture_output=True, text=True)


def build(checkout: Path, hook: str, out: Path) -> Path:
    done = call_backend(checkout, hook, out, FLASH_ATTN3_PORTABLE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.split()[-1]


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(suffix))
        return archive.read(name).decode()


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    # A module that was deleted from the sources since the last build must not come back.
    left_over = checkout / "build" / "lib" / "flash_attn3" / "deleted_since.py"
    left_over.parent.mkdir(parents=True)
    left_over.touch()
    return build(checkout, "build_wheel", tmp_path_factory.mktemp("wheel"))


def test_wheel_is_for_every_python_and_torch(wheel):
    assert wheel.name == f"flash_attn_3-{version()}-py3-none-any.whl"
    metadata = read(wheel, ".dist-info/METADATA")
    for line in ("Name: flash-attn-3", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.9"):
        assert f"\n{line}\n" in metadata
    assert "License-Expression: BSD-3-Clause" in metadata


def test_wheel_has_the_four_modules_and_nothing_else(wheel):
    assert set(read(wheel, "top_level.txt").split()) == MODULES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0].removesuffix(".py") for name in names if ".dist-info/" not in name}
    assert top == MODULES
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "flash_attn3").rglob("*.py")}
    assert {name for name in names if name.startswith("flash_attn3/")} == sources
    assert {"flash_attn_3/_C.py", "flash_attn_3/flash_attn_interface.py", "flash_attn_interface.py"} <= set(names)


def test_editable_install_is_found_by_its_modules(checkout, tmp_path):
    for name in ("_C.so", "_build.json"):  # of an earlier install with kernels
        (checkout / "flash_attn3" / name).touch()
    editable = build(checkout, "build_editable", tmp_path)
    assert not (checkout / "flash_attn3" / "_C.so").exists() and not (checkout / "flash_attn3" / "_build.json").exists()
    assert set(read(editable, "top_level.txt").split()) == MODULES
    site = tmp_path / "site"
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(site)
    code = f"""
import importlib.util, site, sys
from importlib.metadata import packages_distributions, version
site.addsitedir({str(site)!r})
found = packages_distributions()
for name in {sorted(MODULES)!r}:
    print(name, *[d for d in found[name] if d.replace("_", "-") == "flash-attn-3"][:1])
print(version("flash-attn-3"))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*(f"{name} flash-attn-3" for name in sorted(MODULES)), version()]


def test_install_without_nvcc_says_what_would_help(checkout, tmp_path):
    empty = tmp_path / "toolkit"
    empty.mkdir()
    done = call_backend(checkout, "build_wheel", tmp_path, CUDA_HOME=str(empty))
    assert done.returncode != 0
    assert f"error: CUDA_HOME={empty} has no bin/nvcc" in done.stdout + done.stderr
    assert "Traceback" not in (done.stdout + done.stderr).split("error: CUDA_HOME")[-1]


def version() -> str:
    from flash_attn3.version import __version__

    return __version__
