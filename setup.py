"""Builds the compiled operators (fastgen/csrc). Everything else about the package is in pyproject.toml.

Where there is no torch, no compiler, or the build fails, the installation fails with one line that says what to do: an
installation that lacks the operators without a word would only be slow. They use the stable C interface of torch only
and nothing of Python, so one build serves every Python version and every torch from MINIMUM_TORCH on.

Environment variables:
    FASTGEN_NO_EXT=1    do not build them: they run on their torch reference, which is several times slower
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
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

MINIMUM_TORCH = (2, 10)
CSRC = Path("fastgen/csrc")


def say(message: str) -> None:
    print(f"fastgen: {message}", file=sys.stderr)


def find_torch() -> Path | None:
    """The directory of the installed torch, found without importing it.

    An isolated build sees nothing of what is installed, but it runs in the environment that it builds for, and that
    torch is the one to build against: another one would be a download of gigabytes.
    """
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return Path(spec.origin).parent
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:  # a virtual environment does not see those of the user
        folders.append(site.getusersitepackages())
    return next((there for each in folders if (there := Path(each, "torch", "version.py").parent).is_dir()), None)


def version_of(torch: Path) -> tuple[str, str | None]:
    """Its release, and that of the CUDA that it was built with."""
    about = runpy.run_path(str(torch / "version.py"))
    return about["__version__"], about.get("cuda")


def wanted_devices() -> list[str]:
    return [name.strip() for name in (os.environ.get("FASTGEN_DEVICES") or "cpu,cuda").split(",")]


def no_cuda(torch: Path) -> str | None:
    """Why nothing can be built for CUDA; None if it can."""
    cuda = version_of(torch)[1]
    nvcc = find_nvcc()
    if not cuda:
        return "torch was built without it"
    if nvcc is None:
        return "torch has CUDA but there is no nvcc"
    return None if cuda_major(nvcc) == cuda.split(".")[0] else f"torch was built with CUDA {cuda}, of which nvcc is not"


def is_left_out() -> bool:
    return os.environ.get("FASTGEN_NO_EXT", "0") not in ("", "0")


WITHOUT = "or set FASTGEN_NO_EXT=1 to install without them, which is several times slower"


def missing() -> str | None:
    """What the build lacks, and what to do; None if it can begin."""
    if is_left_out():
        return None
    least = ".".join(map(str, MINIMUM_TORCH))
    torch = find_torch()
    if torch is None:
        return (
            f"the operators are compiled against torch, and {sys.prefix} has none: run `pip install 'torch>={least}'` "
            "first (with --index-url https://download.pytorch.org/whl/cpu where there is no GPU), build with "
            f"--no-build-isolation where torch is somewhere else, {WITHOUT}"
        )
    release, _ = version_of(torch)
    if tuple(int(part) for part in release.split(".")[:2]) < MINIMUM_TORCH:
        return f"torch {release} is too old to build for: run `pip install -U 'torch>={least}'`, {WITHOUT}"
    for device in wanted_devices():
        if device not in ("cpu", "cuda"):
            return f"FASTGEN_DEVICES is {os.environ['FASTGEN_DEVICES']!r}: it can be cpu, cuda, or cpu,cuda"
        reason = no_cuda(torch) if device == "cuda" and os.environ.get("FASTGEN_DEVICES") else None
        if reason:
            return f"FASTGEN_DEVICES asks for CUDA, but {reason}: set FASTGEN_DEVICES=cpu, {WITHOUT}"
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if not shutil.which(compiler):
        return f"there is no C++ compiler {compiler} for the operators: install g++, or name one with CXX, {WITHOUT}"
    return None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def cuda_major(nvcc: str) -> str | None:
    found = re.search(r"release (\d+)\.", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found.group(1) if found else None


def extensions() -> list[Extension]:
    """One library per kind of device that can be built for here."""
    if is_left_out():
        say("FASTGEN_NO_EXT is set, so csrc is not built; the operators will run on their torch reference")
        return []
    torch = find_torch()
    if torch is None or missing():
        return [Extension("fastgen.ops.libfastgen_cpu", sources=[])]  # which cannot be built; metadata can be had

    def extension(device: str, pattern: str, libraries: list[str], macros: list[tuple[str, str | None]]) -> Extension:
        # gcc makes no vectors of a loop that chooses between two numbers where computing the other one could trap.
        # Debugging information, which Python's own options ask for, takes a third of the time to compile.
        options = ["-fno-trapping-math", "-g0"] if device == "cpu" else []
        return Extension(
            f"fastgen.ops.libfastgen_{device}",
            sources=sorted(path.as_posix() for path in (CSRC / device).rglob(pattern)),
            depends=[path.as_posix() for path in CSRC.rglob("*.h")] + ["setup.py"],
            include_dirs=[str(torch / "include")],
            library_dirs=[str(torch / "lib")],
            libraries=libraries,
            define_macros=[
                ("TORCH_TARGET_VERSION", f"0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}000000000000"),
                *macros,
            ],
            extra_compile_args=["-std=c++17", "-O3", *options],
            language="c++",
        )

    wanted = wanted_devices()
    found = [extension("cpu", "*.cpp", ["torch_cpu"], [])] if "cpu" in wanted else []
    reason = no_cuda(torch)
    if "cuda" in wanted and reason is None:
        found.append(extension("cuda", "*.cu", ["torch_cpu", "torch_cuda"], [("USE_CUDA", None)]))
    elif version_of(torch)[1] and "cuda" in wanted:
        say(f"{reason}, so the operators will run on their torch reference on CUDA")
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


def side_by_side(compiler: Any, shown: TextIO) -> None:
    """Makes a compiler of setuptools, which takes one file after the other, use all cores, and say how far it is.

    Args:
        shown: where a line for each file goes.
    """
    compile_all = compiler.compile
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(os.environ.get("MAX_JOBS") or cores)

    def compile(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
        number = count(1)

        def compile_one(source: str) -> list[str]:
            built = compile_all([source], *arguments, **options)
            shown.write(f"fastgen: compiled {Path(source).name} ({next(number)} of {len(sources)})\n")
            return list(built)

        with ThreadPoolExecutor(jobs) as pool:
            return [built for objects in pool.map(compile_one, sources) for built in objects]

    compiler.compile = compile


class BuildLibraries(build_ext):
    """Builds shared libraries that are loaded by path: no Python in their names, and no module initialisation."""

    def build_extensions(self) -> None:
        lacking = missing()
        if lacking:
            raise SystemExit(f"fastgen: {lacking}")
        # What compilers print is kept back below; this goes to where it went.
        with os.fdopen(os.dup(2), "w", buffering=1) as shown:
            side_by_side(self.compiler, shown)
            super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, extension: Extension) -> None:
        built = Path(self.get_ext_fullpath(extension.name))
        try:
            with quiet_unless_failing():
                if extension.sources[0].endswith(".cu"):
                    self.build_with_nvcc(extension, built)
                else:
                    super().build_extension(extension)
        except (CompileError, LinkError, subprocess.CalledProcessError, OSError) as error:
            built.unlink(missing_ok=True)
            compiled = not isinstance(error, OSError)
            reason = "the compiler's errors are above" if compiled else " ".join(str(error).split())
            is_cuda = extension.name.endswith("cuda")
            remedy = "FASTGEN_DEVICES=cpu to build for the CPU alone" if is_cuda else "CXX to try another compiler"
            message = f"fastgen: {extension.name} was not built ({reason}): set {remedy}, {WITHOUT}"
            raise SystemExit(message) from None

    def build_with_nvcc(self, extension: Extension, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [find_nvcc(), "-shared", "-o", str(target), *extension.sources, *extension.extra_compile_args]
        command += ["-arch", os.environ.get("FASTGEN_CUDA_ARCH", "all-major"), "--cudart", "shared"]
        command += [f"-D{name}={value}" if value else f"-D{name}" for name, value in extension.define_macros]
        command += [option for path in extension.include_dirs for option in ("-isystem", path)]
        command += [f"-L{path}" for path in extension.library_dirs] + [f"-l{name}" for name in extension.libraries]
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


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel})
