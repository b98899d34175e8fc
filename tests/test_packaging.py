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
from typing import Any

import pytest

import fastgen._version

ROOT = Path(__file__).parents[1]
PACKAGES = ("fastgen", "fastgen_cli", "fastgen_serve")
PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "tools", *PACKAGES)
# Runs a program as it is, and with a library that cannot be loaded, in forks of a process that has imported the rest.
IN_FORKS = """
import os, sys, torch, transformers
from transformers.models.bart import modeling_bart
program, library = sys.argv[1:]
for damaged in (False, True):
    if os.fork() == 0:
        if damaged:
            open(library, "wb").write(b"from another machine")
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
    print("----", flush=True)
"""
TRY = """
import fastgen, torch, transformers
from importlib.metadata import version
assert version("fastgen-transformers") == {version!r}
assert "site-packages" in fastgen.__file__, fastgen.__file__
from fastgen import ops
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
scores = torch.zeros(1, 4)
assert torch.ops.fastgen.no_repeat_ngram_(scores, torch.tensor([[1, 2, 1]]), None, 2) is scores
assert scores.isinf().tolist() == [[False, False, True, False]]
from transformers import BartConfig, BartForConditionalGeneration
config = BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64)
model = BartForConditionalGeneration(config).eval()
inputs = torch.randint(4, 50, (2, 12))
options = dict(num_beams=3, max_new_tokens=12, no_repeat_ngram_size=2)
with fastgen.disabled():
    wanted = model.generate(inputs, **options)
fastgen.enable(strict=True)
for _ in range(2):
    assert torch.equal(model.generate(inputs, **options), wanted)
print(fastgen.status())
print(ops.backends()["no_repeat_ngram"])
"""


def run(*command: str | Path, fails: bool = False, **changes: str) -> str:
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
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}"
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
    (wheel,) = target.glob("fastgen_transformers-*.whl")
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
def wheel(tree, shared_folder) -> Path:
    """With the libraries of this tree, which `make setup` has compiled."""
    with shared_folder("wheel") as (folder, is_new):
        if is_new:
            build_wheel(tree, folder, [*(ROOT / "fastgen" / "ops").glob("libfastgen_*")])
    (found,) = folder.glob("fastgen_transformers-*.whl")
    return found


@pytest.mark.long
def test_compilers_are_quiet_unless_they_fail(tree, tmp_path):
    wheel, output = build_wheel(tree, tmp_path)
    assert not re.findall(r"^.*\.(?:h|cpp):\d+:\d+: .*$", output, re.MULTILINE)
    with zipfile.ZipFile(wheel) as archive:
        assert not has_compiler() or "fastgen/ops/libfastgen_cpu.so" in archive.namelist()


def refused(
    tree: Path, target: Path, isolated: bool = False, python: str | Path = sys.executable, **changes: str
) -> str:
    """The one line with which pip ends, of what an installation lacks."""
    shutil.rmtree(tree / "build", ignore_errors=True)
    pip = (python, "-m", "pip", "wheel", "--no-deps", "--no-index", "-w", target, tree)
    output = run(*pip, *(() if isolated else ("--no-build-isolation",)), fails=True, **changes)
    assert "Traceback" not in output, output
    (line,) = (line.strip() for line in output.splitlines() if "fastgen: " in line)
    return line.partition("fastgen: ")[2]


def test_what_a_failing_compiler_prints_is_shown(tree, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nfor line in 1 2 3; do echo error on line $line >&2; done\nexit 1\n")
    compiler.chmod(0o755)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    output = run(*pip, "-w", tmp_path, tree, fails=True, CC=str(compiler), CXX=str(compiler))
    lines = [line.strip() for line in output.splitlines()]
    assert "error on line 3" in lines and "Traceback" not in output
    (line,) = (line for line in lines if line.startswith("fastgen: "))
    assert line == (
        "fastgen: fastgen.ops.libfastgen_cpu was not built (the compiler's errors are above): set CXX to try another "
        "compiler, or set FASTGEN_NO_EXT=1 to install without them, which is several times slower"
    )


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


def test_a_wheel_in_an_environment_of_its_own(wheel, tmp_path):
    """With its library, and with one that cannot be loaded: whoever did not ask for that is told."""
    pytest.importorskip("transformers")
    python = environment_with(wheel, tmp_path / "venv")
    (operators,) = (tmp_path / "venv").glob("lib/python*/site-packages/fastgen/ops")
    program = TRY.format(version=fastgen._version.__version__)
    said = run(python, "-c", IN_FORKS, program, operators / "libfastgen_cpu.so").split("----\n")
    # What serves an operator there, and what the first accelerated calls say of operators that are missing.
    backends = [part.splitlines()[-1] for part in said[:2]]
    warned = [[line for line in part.splitlines() if "compiled operators" in line] for part in said[:2]]
    assert backends[0].startswith("C++ (csrc)" if has_compiler() else "torch reference: the extension was not built")
    assert bool(warned[0]) != has_compiler()
    backend, told = backends[1], warned[1]
    cannot = "libfastgen_cpu.so cannot be loaded, install FastGen again for this torch: "
    assert backend.startswith(f"torch reference: {cannot}") and cannot in told[0]
    assert len(told) == 1 and told[0].startswith("<string>:")  # the line of the user's that was the first to notice


def built_without_pip(tree: Path, target: Path, **options: Any) -> str:
    shutil.rmtree(tree / "build", ignore_errors=True)
    calls = f"backend.get_requires_for_build_wheel(); backend.build_wheel({str(target)!r})"
    code = f"import os, sys; os.chdir({str(tree)!r}); sys.path.insert(0, 'tools'); import build_backend as backend"
    return run(sys.executable, "-c", f"{code}; {calls}", **options)


def test_builds_without_operators_where_that_is_asked_for(tree, tmp_path):
    output = built_without_pip(tree, tmp_path / "wheel", FASTGEN_NO_EXT="1")
    assert "FASTGEN_NO_EXT is set, so csrc is not built" in output
    (wheel,) = (tmp_path / "wheel").glob("fastgen_transformers-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_no_compiler_is_one_line(tree, tmp_path):
    line = refused(tree, tmp_path / "wheel", CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert line.startswith("there is no C++ compiler /nonexistent/c++ for the operators: install g++")
    assert "FASTGEN_NO_EXT=1" in line


@pytest.mark.parametrize(
    "devices, said", [("gpu", "it can be cpu, cuda, or cpu,cuda"), ("cpu, cuda", "asks for CUDA, but")]
)
def test_devices_that_cannot_be_built_for_are_one_line(tree, tmp_path, devices, said):
    output = built_without_pip(tree, tmp_path, fails=True, FASTGEN_DEVICES=devices, CUDA_HOME="/nonexistent")
    assert output.startswith("fastgen: ") and output.count("\n") == 1 and said in output


@pytest.fixture
def bare(tmp_path) -> Path:
    """The Python of an environment with setuptools and pip alone."""
    venv.create(tmp_path / "bare", symlinks=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for name in ("setuptools", "_distutils_hack", "packaging", "pip"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            for source in Path(spec.origin).parents[1].glob(f"{name}*"):
                (site / source.name).symlink_to(source)
    return tmp_path / "bare" / "bin" / "python"


def test_no_torch_is_one_line(tree, bare, tmp_path):
    line = refused(tree, tmp_path / "wheel", python=bare)
    assert f"{tmp_path / 'bare'} has none: run `pip install 'torch>=2.10'` first" in line
    assert "https://download.pytorch.org/whl/cpu" in line and "FASTGEN_NO_EXT=1" in line


@pytest.mark.parametrize("release", [None, "65.5.0"])
def test_no_setuptools_is_one_line(tree, bare, tmp_path, release):
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for path in site.glob("setuptools*"):
        path.unlink()
    if release is not None:
        (site / "setuptools").mkdir()
        (site / "setuptools" / "__init__.py").write_text(f"__version__ = {release!r}\n")
    line = refused(tree, tmp_path / "wheel", python=bare)
    assert line.startswith("the build needs setuptools 77 or later") and "pip install 'setuptools>=77'" in line
    assert (release or "there is none") in line


def test_an_isolated_build_finds_the_torch_of_its_environment(tree, bare, tmp_path):
    """pip hides what is installed from the build; a torch of its own would be a download of gigabytes."""
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site / "torch").symlink_to(Path(torch.origin).parent)
    hidden = "import sys; sys.path = [path for path in sys.path if not path.endswith('site-packages')]"
    find = "import runpy, setuptools; hidden(); print(runpy.run_path('setup.py')['find_torch']())"
    code = f"import os; os.chdir({str(tree)!r})\ndef hidden():\n    {hidden}\n{find}"
    assert run(bare, "-c", code).strip() == str(site / "torch")


def test_another_distribution_of_the_same_name_is_one_line(wheel, tmp_path):
    python = environment_with(wheel, tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    run(python, "-c", "import fastgen")
    (site / "fastgen-0.2.3.dist-info").mkdir()
    said = run(python, "-c", "import fastgen", fails=True).splitlines()[-1]
    assert said.startswith(f"ImportError: two distributions have installed a package `fastgen` into {site}")
    assert "pip uninstall fastgen fastgen-transformers" in said
