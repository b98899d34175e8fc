"""What every test has: a device to run on (`pytest --device cuda`), fixed seeds, no time limits on generated cases."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import filelock
import pytest
import torch
from hypothesis import settings

from tests import near_ties

ROOT = Path(__file__).parents[1]
# Their tests run whole models.
_SLOW_FOLDERS = ("engine", "equivalence", "serve")
_NEAR_TIE = "near-tie"

# A shared or cold machine makes any single case slow; that is not a failure. Every run tries the same cases; others are
# tried with --hypothesis-profile=explore.
settings.register_profile("fastgen", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("fastgen")

# Triton runs kernels on a CPU in its interpreter. It decides that when it is imported, which toolkits do, and so do the
# other conftest files: before there are options.
if not any(argument.startswith("--device") for argument in (*sys.argv, os.environ.get("PYTEST_ADDOPTS", ""))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start keep what they print in a buffer, as a user's do, and what one of them has compiled, all of
# them and the next run have.
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests measure while others run is nothing to remember.
os.environ.setdefault("FASTGEN_CACHE", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device that the tests run on: cpu (default), cuda, cuda:1, ...")
    parser.addoption("--captured", action="store_true", help="equivalence tests run with a simulated captured step")
    parser.addoption("--threads", type=int, help="threads of torch, here and in processes that tests start")
    parser.addoption("--onednn", choices=["on", "off"], default="on", help="whether torch uses oneDNN (on by default)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: those that test programs and servers wait for them most of the time."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _NamesOfToday(logging.Handler):
    """Fails where the library says that it was called by names that it has given up: FastGen must not do that."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        assert not ("past_key_values" in message and "deprecated" in message), message


def pytest_configure(config: pytest.Config) -> None:
    logging.getLogger("transformers.utils.generic").addHandler(_NamesOfToday())
    threads = config.getoption("--threads")
    if threads is None and "PYTEST_XDIST_WORKER" in os.environ:
        # Processes that share out the tests leave each other a core, and so does what they start.
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(config.getoption("--onednn") == "on")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of grids of parameters, `make test` runs a few cases; `make test-long` runs the rest.

    That holds for tests that generate, which are slow, and for those that are `sampled`:

    - By default a few cases run that have each value of each parameter among them. Names that one `parametrize` gives
      together are one parameter.
    - With `sampled(n)`, one case in n runs, those with most values first: with `sampled(1)` the whole grid.
    - A case of whose parameters `sampled(skips=...)` is true counts for nothing, as it would be skipped.

    Names of cases decide which of them run, so every run and every process has the same ones. A case named on the
    command line runs.
    """
    if any("[" in argument for argument in config.args):
        return
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_slow = item.path.relative_to(ROOT).parts[1] in _SLOW_FOLDERS
        if hasattr(item, "callspec") and (is_slow or item.get_closest_marker("sampled")):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("sampled")
        skips = marker.kwargs.get("skips") if marker else None
        run = [case for case in cases if _runs(case) and not (skips and skips(case.callspec.params))]
        run.sort(key=lambda case: zlib.crc32(case.name.encode()))
        stay = _with_each_value(run)
        if marker and marker.args:
            others = [case for case in run[:: marker.args[0]] if case not in stay]
            stay = (stay + others)[: math.ceil(len(run) / marker.args[0])]
        left_out = set(run if skips is None else cases).difference(stay)
        for case in left_out:
            case.add_marker("long")


def _runs(case: pytest.Item) -> bool:
    is_left_out = case.get_closest_marker("long") or case.get_closest_marker("skip")
    return not is_left_out and not any(mark.args and mark.args[0] is True for mark in case.iter_markers("skipif"))


def _with_each_value(cases: list[pytest.Item]) -> list[pytest.Item]:
    """A few cases that have every value of every parameter among them: always the one with most that are missing."""
    values = {case: _values(case) for case in cases}
    missing, chosen = set[frozenset[tuple[str, int]]]().union(*values.values()), []
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def _values(case: pytest.Item) -> set[frozenset[tuple[str, int]]]:
    """Of each parameter of a case, or of those that one `parametrize` gives together, which object it is."""
    given = case.callspec.params
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [names.replace(",", " ").split() if isinstance(names, str) else names for names in together]
    groups += [[name] for name in given if not any(name in names for names in groups)]
    return {frozenset((name, id(given[name])) for name in names if name in given) for names in groups}


def pytest_collectstart() -> None:
    """Looking for garbage among tests that stay would take a quarter of the time of collecting them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported stays: looking through it would be most of the time of each collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not item.config.getoption("--device").startswith("cuda"):
        pytest.skip("needs an NVIDIA GPU: --device cuda")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"torch {torch.__version__}: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"oneDNN {config.getoption('--onednn')}"
    )


@pytest.fixture(autouse=True)
def near_ties_are_counted(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Near-ties go into the report of their test, which also processes that share out the tests hand on.

    Without `monkeypatch`: it would be set up here, before the fixtures of a folder, and undone after theirs. What a
    test patches on top of theirs would then put their patches back for all tests that follow.
    """
    with mock.patch.object(near_ties, "report", lambda line: record_property(_NEAR_TIE, line)):
        yield


@pytest.fixture(autouse=True)
def settings_are_put_back() -> Iterator[None]:
    """Those of all calls, whatever a test enables. Without `monkeypatch`, as above."""
    from fastgen import settings as of_fastgen

    with mock.patch.object(of_fastgen, "_current", of_fastgen._current):
        yield


@pytest.fixture
def counted() -> Iterator[None]:
    """FastGen is enabled, and its counts start at zero."""
    import fastgen

    fastgen.enable()
    fastgen.reset_stats()
    yield
    fastgen.enable()


@pytest.fixture
def strict(counted: None) -> None:
    """A fallback fails the test."""
    import fastgen

    fastgen.enable(strict=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [
        f"{report.nodeid}: {line}"
        for report in terminalreporter.getreports("passed")
        for name, line in report.user_properties
        if name == _NEAR_TIE
    ]
    if found:
        terminalreporter.section(f"{len(found)} near-ties in {len({line.split(': ')[0] for line in found})} tests")
        terminalreporter.write_line("\n".join(found))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device named by --device. The run stops if it was asked for and is not there."""
    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.exit(f"--device {device}: torch {torch.__version__} sees no CUDA device", returncode=4)
    return device


@pytest.fixture(scope="session")
def shared_folder(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], contextlib.AbstractContextManager[tuple[Path, bool]]]:
    """What takes long to make, made once for all processes that share out the tests.

    Inside `with shared_folder(name) as (folder, is_new)` one process at a time is; the first one gets an empty folder.
    """

    @contextlib.contextmanager
    def take(name: str) -> Iterator[tuple[Path, bool]]:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
        done = folder / "done"
        with filelock.FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            yield folder, not done.exists()
            done.touch()

    return take


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> None:
    """Skips where the kernels cannot run: comparing the reference with itself would show nothing."""
    from fastgen.ops import gpu

    if not gpu.available(torch.empty(0, device=device)):
        pytest.skip(f"the Triton kernels cannot run on {device}: {gpu.unavailable(device)}")


@pytest.fixture(scope="session")
def programs(shared_folder: Callable[[str], contextlib.AbstractContextManager[tuple[Path, bool]]]) -> Path:
    """The folder of `python` and the commands, as forks of a process that has imported what takes long.

    For tests of what a program does, not of how Python starts or imports. The process ends after the tests.
    """
    with shared_folder("programs") as (shared, is_new):
        if is_new:
            # A short path: that of a socket has at most 107 bytes.
            folder = tempfile.mkdtemp(prefix="fastgen-")
            tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            command = [sys.executable, "-m", "tests.fork_server", folder, str(tests)]
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
            server = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            (shared / "place").write_text(folder)
        return Path((shared / "place").read_text(), "bin")


@pytest.fixture
def tests_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the tests is taken for the library's own, so that it is captured."""
    from fastgen.decoding import library_code

    place, is_of_package = library_code._place, library_code._is_of_package
    here = str(Path(__file__).parent)
    monkeypatch.setattr(library_code, "_place", lambda path: "transformers" if path.startswith(here) else place(path))
    monkeypatch.setattr(library_code, "_is_of_package", lambda name: name.startswith("tests.") or is_of_package(name))
    monkeypatch.setattr(library_code.Reached, "_of", OrderedDict())
