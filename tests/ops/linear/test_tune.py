"""`python -m fastgen tune`: what it makes of times, and the file that it writes. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops.linear import choose, tune
from fastgen.ops.linear.choose import Isa
from tests.ops.instructions import instruction_set

needs_kernels = pytest.mark.skipif(
    choose.instruction_set() is Isa.PORTABLE, reason="there are no kernels to tune for this processor"
)
ROOT = Path(__file__).parents[3]
ROWS = (1, 2, 4, 8, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The profile of this machine, which is not there yet; little is measured."""
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "new"))
    for name, value in (("_ROWS", (1, 9, 70)), ("_SHAPES", ((32, 48), (48, 32))), ("_ROUNDS", 1), ("_BYTES", 2**14)):
        monkeypatch.setattr(tune, name, value)
    choose.forget()
    yield tmp_path / "new" / "linear.json"
    monkeypatch.undo()
    choose.forget()


def _seconds(**times: list[float | None]) -> dict[int, dict[str, float]]:
    """Of each kernel for `ROWS`; None where it does not serve."""
    return {
        m: {name: each for name, column in times.items() if (each := column[number]) is not None}
        for number, m in enumerate(ROWS)
    }


@pytest.mark.parametrize(
    ("times", "row"),
    [
        ({"gemv": [1, 2, 4, 8, 16], "gemm": [3, 3, 3, 3, 3]}, [(2, "gemv"), (None, "gemm")]),
        ({"gemv": [1, 1, 1, 1, 1], "gemm": [3, 3, 3, 3, 3]}, [(None, "gemv")]),
        ({"gemv": [3, 3, 3, 3, 3], "gemm": [1, 1, 1, 1, 1]}, [(None, "gemm")]),
        # Where two are as fast within noise, they do not take turns.
        ({"gemv": [1.0, 2.02, 1.99, 2.03, 9], "gemm": [2.0, 2.0, 2.0, 2.0, 2.0]}, [(1, "gemv"), (None, "gemm")]),
        ({"gemv": [1.0, 2.0, 2.01, 2.0, 9], "gemm": [2.0, 2.2, 2.0, 2.2, 2.0]}, [(8, "gemv"), (None, "gemm")]),
        # Multiples count, not seconds, which are more with many rows.
        ({"gemv": [1, 10, 100, 1000, 99], "gemm": [2, 20, 100, 1000, 100]}, [(None, "gemv")]),
        # One that does not serve all.
        ({"gemv": [1, 1, 1, None, None], "gemm": [3, 3, 3, 3, 3]}, [(4, "gemv"), (None, "gemm")]),
        ({"gemv": [1] * 5, "gemm": [3] * 5, "bf16x3": [None] * 5}, [(None, "gemv")]),
        (
            {"gemv": [1, 1, 9, 9, 9], "torch": [3, 3, 2, 9, 9], "gemm": [3, 3, 3, 3, 3]},
            [(2, "gemv"), (4, "torch"), (None, "gemm")],
        ),
    ],
)
def test_each_kernel_follows_the_one_before_it_once(
    times: dict[str, list[float | None]], row: list[tuple[int | None, str]]
) -> None:
    assert tune.table(list(times), _seconds(**times)) == row


@given(
    first=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5),
    second=st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5),
    served=st.integers(0, 5),
)
def test_a_row_of_any_times_is_one_of_the_table(first: list[float], second: list[float], served: int) -> None:
    seconds = _seconds(gemv=[*first[:served], *[None] * (5 - served)], gemm=second)
    row = tune.table(("gemv", "gemm"), seconds)
    read = [(math.inf if most is None else most, name) for most, name in json.loads(json.dumps(row))]
    assert [name for _, name in row] in (["gemv"], ["gemm"], ["gemv", "gemm"])

    def cost(bound: float) -> float:
        names = {m: "gemv" if m <= bound else "gemm" for m in ROWS}
        return sum(seconds[m].get(names[m], math.inf) / min(seconds[m].values()) for m in ROWS)

    bound = read[0][0] if read[0][1] == "gemv" else 0
    assert cost(bound) == min(cost(each) for each in (0, *ROWS))


def test_a_profile_is_put_beside_those_of_other_machines(cache: Path) -> None:
    tune.write(cache, "one", {"float32 rows": [(2, "gemv"), (None, "gemm")]})
    tune.write(cache, "other", {"float32 rows": [(None, "gemm")]})
    tune.write(cache, "one", {"float32 rows": [(None, "gemv")]})
    expected = {"one": {"float32 rows": [[None, "gemv"]]}, "other": {"float32 rows": [[None, "gemm"]]}}
    assert json.loads(cache.read_text()) == expected and os.listdir(cache.parent) == [cache.name]


@pytest.mark.parametrize("content", ["", "[]", "7", "{", "\x00", "[" * 100_000], ids=lambda text: text[:4])
def test_a_broken_file_is_replaced(content: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    tune.write(cache, "one", {})
    assert json.loads(cache.read_text()) == {"one": {}}


@pytest.mark.parametrize("fails", ["dump", "replace"])
def test_a_write_that_fails_leaves_the_old_file(fails: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.write(cache, "one", {})
    before = cache.read_text()

    def fail(*given: object, **options: object) -> None:
        if fails == "dump":
            given[1].write("half")  # type: ignore[attr-defined]
        raise OSError("no space")

    monkeypatch.setattr(*{"dump": (json, "dump"), "replace": (os, "replace")}[fails], fail)
    with pytest.raises(OSError, match="no space"):
        tune.write(cache, "other", {})
    assert cache.read_text() == before and os.listdir(cache.parent) == [cache.name]


@needs_kernels
def test_a_run_gives_the_profile_that_chooses(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    isa, threads, state = choose.instruction_set(), torch.get_num_threads(), torch.get_rng_state()
    assert choose.backend().startswith("the shipped table")
    assert tune.main() == 0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    printed = capsys.readouterr()
    assert str(cache) in printed.out and choose.machine(isa) in printed.out and not printed.err
    (machine, profile), *others = json.loads(cache.read_text()).items()
    assert machine == choose.machine(isa) and not others
    both = {f"{dtype} {layout}" for dtype in ("float32", "bfloat16", "float16") for layout in ("rows", "columns")}
    assert set(profile) == {"float32 panels"} | both
    assert choose.backend().startswith("a profile of this machine (")
    for name, row in profile.items():
        key = choose._key(name)
        for m in (1, 2, 9, 10, 70, 1000):
            assert choose.name_of(*key, m) == next(each for most, each in row if most is None or m <= most)
        x, weight = torch.randn(70, 48).to(key[0]), torch.randn(32, 48).to(key[0])
        weight = weight.t().contiguous().t() if key[1] is choose.Layout.COLUMNS else weight
        for m in range(1, 71):  # it names none that does not serve
            kernel = choose.kernel_for(x[:m], weight, None)
            assert kernel is None or kernel.multiply(x[:m], weight, None).shape == (m, 32)
    cache.unlink()
    choose.forget()
    assert choose.backend().startswith("the shipped table")


@needs_kernels
def test_every_kernel_that_serves_is_measured() -> None:
    for isa in (Isa.AVX2, choose.instruction_set()):
        for key, names in choose.SERVE.items():
            found = tune.measured(key, isa)
            assert list(found) == [1, 9, 70]
            expected = [name for name in names if name != "bf16x3" or isa is Isa.AMX]
            assert list(found[1]) == expected
            # Torch may be so slow with few rows that it is not measured with more.
            assert set(found[70]) | {choose.TORCH} == {name for name in expected if name != "gemv"} | {choose.TORCH}


def test_a_kernel_far_slower_than_one_that_takes_over_from_it_is_beaten() -> None:
    names = ("gemv", "torch", "gemm")
    assert tune._beaten(names, {"gemv": 1.0, "torch": 3.9, "gemm": 1.0}) == set()
    assert tune._beaten(names, {"gemv": 1.0, "torch": 4.1, "gemm": 1.0}) == {"torch"}
    assert tune._beaten(names, {"gemv": 1.0, "torch": 1.0, "gemm": 8.0}) == set()  # it may win with more rows


@needs_kernels
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", "/proc/nowhere")
    assert tune.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastgen: /proc/nowhere/linear.json cannot be written")


@pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")
def test_there_is_nothing_to_tune_without_vectors(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with instruction_set("default"):
        choose.forget()
        assert tune.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastgen: there is nothing to tune: torch's products") and not cache.exists()


@needs_kernels
def test_the_command_without_a_folder_says_so() -> None:
    environment = {**os.environ, "FASTGEN_CACHE": ""}
    command = [sys.executable, "-m", "fastgen", "tune"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == ["fastgen: FASTGEN_CACHE is empty: name a folder for the profile"]


@pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")
def test_a_tensor_that_is_evicted_keeps_its_numbers() -> None:
    x = torch.arange(1000.0)[3:]
    assert torch.ops.fastgen.evict(x) in (True, False)
    assert torch.equal(x, torch.arange(3.0, 1000.0))
