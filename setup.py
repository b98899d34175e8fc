"""Builds the compiled operators (fastgen/csrc). Everything else about the package is in pyproject.toml.

The libraries are optional: where there is no torch, no compiler, or the build fails, one line says so, the package
installs without them, and the operators run on their torch reference. They use the stable C interface of torch only and
nothing of Python, so one build serves every Python version and every torch from MINIMUM_TORCH on.

Environment variables:
    FASTGEN_NO_EXT=1    do not build them
    FASTGEN_DEVICES     which are built: cpu, cuda, or both with a comma between; default: those that torch has
    FASTGEN_CUDA_ARCH   what nvcc builds for (its -arch option); default: all-major
    CXX, CUDA_HOME      the compiler, and the CUDA toolkit to use
    MAX_JOBS            how many files are compiled at a time; default: as many as there are cores
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

MINIMUM_TORCH = (2, 10)
WINDOWS = os.name == "nt"
CSRC = Path("fastgen/csrc")


def say(message: str) -> None:
    print(f"fastgen: {message}", file=sys.stderr)


def find_torch() -> Path | None:
    """The directory of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def cuda_major(nvcc: str) -> str | None:
    found = re.search(r"release (\d+)\.", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found.group(1) if found else None


def extensions() -> list[Extension]:
    """One library per kind of device that can be built for here."""
    reference = "the operators will run on their torch reference"
    if os.environ.get("FASTGEN_NO_EXT", "0") not in ("", "0"):
        say(f"FASTGEN_NO_EXT is set, so csrc is not built; {reference}")
        return []
    torch = find_torch()
    if torch is None:
        say(f"torch is not there at build time (pip needs --no-build-isolation), so csrc is not built; {reference}")
        return []
    about = runpy.run_path(str(torch / "version.py"))
    if tuple(int(part) for part in about["__version__"].split(".")[:2]) < MINIMUM_TORCH:
        say(f"torch {about['__version__']} is too old to build csrc for; {reference}")
        return []

    def extension(device: str, pattern: str, libraries: list[str], macros: list[tuple[str, str | None]]) -> Extension:
        # gcc makes no vectors of a loop that chooses between two numbers where computing the other one could trap.
        options = ["-fno-trapping-math"] if device == "cpu" else []
        return Extension(
            f"fastgen.ops.libfastgen_{device}",
            sources=sorted(path.as_posix() for path in (CSRC / device).glob(pattern)),
            depends=[path.as_posix() for path in CSRC.rglob("*.h")] + ["setup.py"],
            include_dirs=[str(torch / "include")],
            library_dirs=[str(torch / "lib")],
            libraries=libraries,
            define_macros=[
                ("TORCH_TARGET_VERSION", f"0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}000000000000"),
                *macros,
            ],
            extra_compile_args=["/std:c++17", "/O2"] if WINDOWS else ["-std=c++17", "-O3", *options],
            language="c++",
            optional=True,
        )

    wanted = (os.environ.get("FASTGEN_DEVICES") or "cpu,cuda").split(",")
    found = [extension("cpu", "*.cpp", ["torch_cpu"], [])] if "cpu" in wanted else []
    if about.get("cuda") and "cuda" in wanted:
        nvcc = find_nvcc()
        if nvcc is None:
            say("torch has CUDA but there is no nvcc, so the operators will run on their torch reference on CUDA")
        elif cuda_major(nvcc) != about["cuda"].split(".")[0]:
            say(f"torch was built with CUDA {about['cuda']}, of which nvcc is not; {reference} on CUDA")
        else:
            found.append(extension("cuda", "*.cu", ["torch_cpu", "torch_cuda"], [("USE_CUDA", None)]))
    return found


@contextlib.contextmanager
def quiet_unless_failing() -> Iterator[None]:
    """Shows what compilers print, which may be screens of notes about their own headers, only if they fail."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed:
        streams = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        for descriptor in streams:
            os.dup2(printed.fileno(), descriptor)
        failed = True
        try:
            yield
            failed = False
        finally:
            for descriptor, stream in streams.items():
                os.dup2(stream, descriptor)
                os.close(stream)
            if failed:
                printed.seek(0)
                sys.stderr.write(printed.read().decode(errors="replace"))


def side_by_side(compiler: Any) -> None:
    """Makes a compiler of setuptools, which takes one file after the other, use all cores."""
    compile_all = compiler.compile
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(os.environ.get("MAX_JOBS") or cores)

    def compile(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
        with ThreadPoolExecutor(jobs) as pool:
            found = pool.map(lambda source: compile_all([source], *arguments, **options), sources)
            return [built for objects in found for built in objects]

    compiler.compile = compile


class BuildLibraries(build_ext):
    """Builds shared libraries that are loaded by path: no Python in their names, and no module initialisation."""

    def build_extensions(self) -> None:
        side_by_side(self.compiler)
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + (".dll" if WINDOWS else ".so")

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []

    def build_extension(self, extension: Extension) -> None:
        built = Path(self.get_ext_fullpath(extension.name))
        compiler = getattr(self.compiler, "compiler_cxx", None)
        try:
            if compiler and not shutil.which(compiler[0]):
                raise FileNotFoundError(f"there is no C++ compiler {compiler[0]}")
            with quiet_unless_failing():
                if extension.sources[0].endswith(".cu"):
                    self.build_with_nvcc(extension, built)
                else:
                    super().build_extension(extension)
        except Exception as error:  # whatever it was, the package is complete without the library
            compiled = isinstance(error, (CompileError, LinkError, subprocess.CalledProcessError))
            reason = "the compiler's errors are above" if compiled else " ".join(str(error).split())
            say(f"{extension.name} was not built ({reason}); the operators will run on their torch reference")
            built.unlink(missing_ok=True)

    def build_with_nvcc(self, extension: Extension, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [find_nvcc(), "-shared", "-o", str(target), *extension.sources, *extension.extra_compile_args]
        command += ["-arch", os.environ.get("FASTGEN_CUDA_ARCH", "all-major"), "--cudart", "shared"]
        command += [f"-D{name}={value}" if value else f"-D{name}" for name, value in extension.define_macros]
        command += [option for path in extension.include_dirs for option in ("-isystem", path)]
        command += [f"-L{path}" for path in extension.library_dirs] + [f"-l{name}" for name in extension.libraries]
        if not WINDOWS:
            command += ["-Xcompiler", "-fPIC"]
        subprocess.run(command, check=True)

    def copy_extensions_to_source(self) -> None:
        # A library of an earlier build is not what the sources say any more.
        for extension in self.extensions:
            name = self.get_ext_filename(extension.name)
            if not Path(self.build_lib, name).exists():
                Path(name).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])  # the libraries know nothing of Python


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel})
