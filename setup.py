"""Installs flash-attn-3: the Python packages and, unless a portable install is asked for, the native extension.

Two kinds of install. With kernels: buildtools compiles csrc/ into flash_attn3/_C.so and describes it in
flash_attn3/_build.json; the extension uses torch's stable ABI and no Python symbol, so the wheel is py3-none-PLATFORM.
Portable (FLASH_ATTN3_PORTABLE=1): neither file, wheel py3-none-any, plain PyTorch on every device.
Metadata is in pyproject.toml; install with `pip install --no-build-isolation .`.
"""

import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup

if int(setuptools.__version__.split(".")[0]) < 77:  # --no-build-isolation takes whatever is there
    raise SystemExit(f"error: setuptools {setuptools.__version__} is too old: `pip install -U 'setuptools>=77'`")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends do not put the source folder there

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

from buildtools.build import OUTPUTS, BuildError, build_extension  # noqa: E402
from buildtools.toolchain import ToolchainError, portable_requested  # noqa: E402

PORTABLE = portable_requested()


class BuildModules(build_py):
    """Copies the modules, after removing an earlier copy: a module deleted since must not get into the wheel."""

    def run(self):
        if not self.editable_mode:
            for package in ("flash_attn3", "flash_attn_3"):
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        elif PORTABLE:
            for name in OUTPUTS:
                (ROOT / "flash_attn3" / name).unlink(missing_ok=True)
        super().run()


class BuildExtension(build_ext):
    """Has buildtools write the extension and its description, into the wheel or, for an editable install, in place."""

    def run(self):
        folder = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        try:
            build_extension(folder / "flash_attn3", self.distribution.get_version())
        except (ToolchainError, BuildError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None

    def get_outputs(self):
        return [str(Path(self.build_lib) / "flash_attn3" / name) for name in OUTPUTS]

    def get_output_mapping(self):
        inplace = self.inplace or self.editable_mode
        return {out: str(ROOT / "flash_attn3" / Path(out).name) for out in self.get_outputs()} if inplace else {}


class BuildWheel(bdist_wheel):
    """Tags the wheel for every Python 3 of the platform."""

    def get_tag(self):
        platform = super().get_tag()[2]
        return "py3", "none", "any" if PORTABLE else platform


setup(
    packages=[*find_packages(include=["flash_attn3", "flash_attn3.*"]), "flash_attn_3"],
    py_modules=["flash_attn_interface", "flash_attn_config"],
    package_dir={"": "hopper", "flash_attn3": "flash_attn3"},
    include_package_data=False,
    ext_modules=[] if PORTABLE else [Extension("flash_attn3._C", sources=[])],
    cmdclass={"build_py": BuildModules, "build_ext": BuildExtension, "bdist_wheel": BuildWheel},
)
