"""What users install: wheels from the tree, with and without a compiler, in environments of their own."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import fastgen._version

ROOT = Path(__file__).parents[1]
PACKAGES = ("fastgen", "fastgen_cli")
PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", *PACKAGES)
TRY_OPERATOR = """
import sys, fastgen
from importlib.metadata import version
assert version("fastgen") == {version!r}, version("fastgen")
assert "site-packages" in fastgen.__file__, fastgen.__file__
from fastgen import ops
import torch
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
scores = torch.zeros(1, 4)
assert torch.ops.fastgen.no_repeat_ngram_(scores, torch.tensor([[1, 2, 1]]), None, 2) is scores
assert scores.isinf().tolist() == [[False, False, True, False]]
print(ops.backends()["no_repeat_ngram"])
"""
TRY_GENERATE = """
import fastgen, torch
from transformers import BartConfig, BartForConditionalGeneration
assert "site-packages" in fastgen.__file__, fastgen.__file__
config = BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64)
model = BartForConditionalGeneration(config).eval()
inputs = torch.randint(4, 50, (2, 12))
options = dict(num_beams=3, max_new_tokens=12, no_repeat_ngram_size=2)
with fastgen.disabled():
    wanted = model.generate(inputs, **options)
fastgen.enable(strict=True)
assert torch.equal(model.generate(inputs, **options), wanted)
print(fastgen.status())
print(fastgen.stats())
"""


def run(*command: str | Path, **changes: str) -> str:
    """The output of `command`, run outside the tree so that nothing is found there by accident."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FASTGEN_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=Path(sys.prefix),
        env=environment | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "c++").split()[0]) is not None


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A clean copy of what packaging reads, so that neither build output nor a concurrent build gets in the way."""
    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, tree)
    return tree


def build_wheel(tree: Path, target: Path, compiled: Sequence[Path] = (), **environment: str) -> tuple[Path, str]:
    """The wheel that pip makes from a tree, and what the build had to say.

    Args:
        compiled: libraries that need not be compiled again.
    """
    pip = (sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index", "-w", target)
    shutil.rmtree(tree / "build", ignore_errors=True)
    there = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "fastgen" / "ops"
    for library in compiled:
        there.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, there / library.name)
    output = run(*pip, tree, **environment)
    (wheel,) = target.glob("fastgen-*.whl")
    return wheel, output


def environment_with(wheel: Path, path: Path) -> Path:
    """The Python of a new environment that has the wheel, and sees the dependencies of the one that runs the tests."""
    venv.create(path, symlinks=True)
    python = path / "bin" / "python"
    (site,) = path.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # what pip does with a wheel, in a fraction of the time
        archive.extractall(site)
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site / "dependencies.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    return python


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    """With the libraries of this tree, which `make setup` has compiled."""
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"), [*(ROOT / "fastgen" / "ops").glob("libfastgen_*")])[0]


@pytest.mark.long
def test_compilers_are_quiet_unless_they_fail(tree, tmp_path):
    wheel, output = build_wheel(tree, tmp_path)
    assert not re.findall(r"^.*\.(?:h|cpp):\d+:\d+: .*$", output, re.MULTILINE)
    with zipfile.ZipFile(wheel) as archive:
        assert not has_compiler() or "fastgen/ops/libfastgen_cpu.so" in archive.namelist()


def test_what_a_failing_compiler_prints_is_shown(tree, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nfor line in 1 2 3; do echo error on line $line >&2; done\nexit 1\n")
    compiler.chmod(0o755)
    _, output = build_wheel(tree, tmp_path / "wheel", CC=str(compiler), CXX=str(compiler))
    lines = [line.strip() for line in output.splitlines()]
    start = lines.index("error on line 1")
    assert lines[start : start + 3] == [f"error on line {number}" for number in (1, 2, 3)]
    # Where torch has CUDA and there is no nvcc, another line says that.
    assert [line for line in lines if line.startswith("fastgen: fastgen.ops.")] == [
        "fastgen: fastgen.ops.libfastgen_cpu was not built (the compiler's errors are above); "
        "the operators will run on their torch reference"
    ]


STREAMS = """
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>
extern "C" int has_sse2() { return __builtin_cpu_supports("sse2") != 0; }
std::vector<std::string> lines;
extern "C" void say(int number) {
  std::ostringstream stream;
  std::stringstream other;
  stream << "number " << number << other.str();
  lines.push_back(stream.str());
  throw std::runtime_error(lines.back());
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
def test_the_compiler_of_the_wheel_asks_for_no_newer_system(tmp_path):
    """glibc 2.28 and the libstdc++ of GCC 8, by the versions of the symbols that a library asks for."""
    pytest.importorskip("ziglang", reason="`make wheel` installs it")
    if not has_compiler():
        pytest.skip("it takes the libstdc++ of g++")
    (tmp_path / "say.cpp").write_text(STREAMS)
    run(ROOT / "tools/manylinux/c++", "-O3", "-fPIC", "-shared", tmp_path / "say.cpp", "-o", tmp_path / "libsay.so")
    library = (tmp_path / "libsay.so").read_bytes()
    for name, newest in ((b"GLIBC", (2, 28)), (b"GLIBCXX", (3, 4, 24)), (b"CXXABI", (1, 3, 11))):
        versions = re.findall(rb"\0" + name + rb"_([\d.]+)(?=\0)", library)
        assert versions and max(tuple(map(int, version.split(b"."))) for version in versions) <= newest
    assert ctypes.CDLL(str(tmp_path / "libsay.so")).has_sse2() == 1  # which every x86-64 processor has
    assert b"libc++" not in library  # what is thrown must be what torch catches


def test_make_says_in_one_line_that_python_is_too_old(tmp_path):
    python = tmp_path / "python"
    old = "import sys; sys.version_info = (3, 10, 12); exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{old}' \"$2\"\n")
    python.chmod(0o755)
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    # `make test` runs this: what it says to the makes below it is not meant for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "demo", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    said = [line for line in (done.stdout + done.stderr).splitlines() if "fastgen/csrc" not in line]
    assert said[0].startswith(f"make: Python 3.11 or later is needed, and {python} is 3.10; name another one")
    assert len(said) == 2  # and make's own last line


def test_wheel_contains_everything(tree, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = [
        path.relative_to(tree).as_posix()
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.is_file() and "csrc" not in path.parts and path.relative_to(tree).as_posix() not in names
    ]
    assert not missing
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "csrc" in name or name.startswith("tests")]
    if has_compiler():
        assert "fastgen/ops/libfastgen_cpu.so" in names
        assert "-py3-none-linux" in wheel.name or sys.platform != "linux"


def test_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    python = environment_with(wheel, tmp_path / "venv")
    backend = run(python, "-c", TRY_OPERATOR.format(version=fastgen._version.__version__)).splitlines()[-1]
    assert backend.startswith("C++ (csrc)" if has_compiler() else "torch reference: the extension was not built")


def test_wheel_generates_in_an_environment_of_its_own(wheel, tmp_path):
    pytest.importorskip("transformers")
    output = run(environment_with(wheel, tmp_path / "venv"), "-c", TRY_GENERATE)
    assert "no_repeat_ngram" in output


def test_built_library_can_be_left_out_at_run_time(wheel, tmp_path):
    python = environment_with(wheel, tmp_path / "venv")
    output = run(python, "-c", TRY_OPERATOR.format(version=fastgen._version.__version__), FASTGEN_NO_EXT="1")
    assert output.splitlines()[-1].startswith("torch reference: FASTGEN_NO_EXT is set")


def test_library_that_cannot_be_loaded_is_no_failure(wheel, tmp_path):
    python = environment_with(wheel, tmp_path / "venv")
    (operators,) = (tmp_path / "venv").glob("lib/python*/site-packages/fastgen/ops")
    (operators / "libfastgen_cpu.so").write_bytes(b"from another machine")
    output = run(python, "-c", TRY_OPERATOR.format(version=fastgen._version.__version__))
    assert output.splitlines()[-1].startswith("torch reference: libfastgen_cpu.so cannot be loaded: ")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"},
            "fastgen.ops.libfastgen_cpu was not built (there is no C++ compiler /nonexistent/c++)",
        ),
        ({"FASTGEN_NO_EXT": "1"}, "FASTGEN_NO_EXT is set, so csrc is not built"),
    ],
    ids=["no compiler", "FASTGEN_NO_EXT"],
)
def test_builds_without_a_compiler(tree, tmp_path, environment, said):
    wheel, output = build_wheel(tree, tmp_path / "wheel", **environment)
    lines = [line for line in output.splitlines() if "fastgen: " in line and said in line]
    assert lines and all("torch reference" in line for line in lines)
    python = environment_with(wheel, tmp_path / "venv")
    backend = run(python, "-c", TRY_OPERATOR.format(version=fastgen._version.__version__)).splitlines()[-1]
    assert backend.startswith("torch reference: the extension was not built")


def test_builds_without_torch(tree, tmp_path):
    """With build isolation, which is pip's default, there is no torch at build time."""
    setuptools = importlib.util.find_spec("setuptools")
    assert setuptools is not None and setuptools.origin is not None
    venv.create(tmp_path / "bare", symlinks=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for pattern in ("setuptools*", "_distutils_hack", "packaging*"):
        for source in Path(setuptools.origin).parents[1].glob(pattern):
            (site / source.name).symlink_to(source)
    build = (
        f"import os; os.chdir({str(tree)!r}); from setuptools import build_meta as b; b.build_wheel({str(tmp_path)!r})"
    )
    shutil.rmtree(tree / "build", ignore_errors=True)
    output = run(tmp_path / "bare" / "bin" / "python", "-c", build)
    assert "torch is not there at build time" in output
    (wheel,) = tmp_path.glob("fastgen-*-py3-none-any.whl")
    assert zipfile.ZipFile(wheel).testzip() is None


@pytest.mark.parametrize("module", ["fastgen", "fastgen.ops"])
def test_import_is_light(module):
    """Patches are applied when the toolkit is imported; FastGen imports neither it nor torch."""
    heavy = ("torch", "transformers", "fairseq", "datasets", "pyarrow", "numpy")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(ROOT)).splitlines()[-1] == "[]"
