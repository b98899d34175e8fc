"""The memory that is free, and the processors: the smaller of what the machine has and the container's limits leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastgen import memory
from fastgen.pipeline.memory import free_memory

GIB = 2**30


def group(folder: Path, limit: object, used: int, reclaimable: int = 0, version: int = 2) -> None:
    """Half of what can be reclaimed is in active use: of files, not of processes."""
    names = ("memory.max", "memory.current", "inactive_file", "active_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    half = reclaimable // 2
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {half}\n{names[3]} {reclaimable - half}\n")


@pytest.fixture
def member_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which groups this process is in; their folder is `tmp_path`, and the machine has 8 GiB available."""
    read, lines = Path.read_text, [""]

    def read_text(path: Path) -> str:
        return lines[0] if str(path) == "/proc/self/cgroup" else read(path)

    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_available", lambda: 8 * GIB)
    monkeypatch.setattr(Path, "read_text", read_text)
    return lambda text: lines.__setitem__(0, text)


def test_without_a_limit_it_is_the_machines(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("4:cpu:/x\n0::/\n")
    assert memory.free_host_memory() == 8 * GIB
    group(tmp_path, "max", 2 * GIB)
    assert memory.free_host_memory() == 8 * GIB


def test_the_limit_of_the_container_counts(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("0::/\n")
    group(tmp_path, 4 * GIB, 3 * GIB, reclaimable=GIB // 2)
    assert memory.free_host_memory() == GIB + GIB // 2
    assert free_memory(torch.device("cpu")) == memory.free_host_memory()  # what batches are planned with
    group(tmp_path, 4 * GIB, 5 * GIB)
    assert memory.free_host_memory() == 0
    group(tmp_path, 64 * GIB, 3 * GIB)
    assert memory.free_host_memory() == 8 * GIB


def test_the_groups_around_it_count_too(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("0::/user/job/task\n")
    group(tmp_path / "user" / "job" / "task", 7 * GIB, 0)
    group(tmp_path / "user", 3 * GIB, GIB)
    assert memory.free_host_memory() == 2 * GIB


def test_version_1(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("5:pids:/\n4:memory:/docker/abc\n0::/\n")
    group(tmp_path / "memory", 3 * GIB, GIB, reclaimable=5, version=1)  # a container sees its group as the root
    assert memory.free_host_memory() == 2 * GIB + 5


def test_statistics_are_read_only_where_a_limit_is_near(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    """The kernel takes longer to write them than all else that is read, and small calls would notice."""
    member_of("0::/\n")
    group(tmp_path, 64 * GIB, GIB, reclaimable=-60 * GIB)  # would be seen
    assert memory.free_host_memory() == 8 * GIB
    group(tmp_path, 4 * GIB, GIB, reclaimable=7)
    assert memory.free_host_memory() == 3 * GIB + 7


@pytest.mark.parametrize("words, limit", [("max 100000", None), ("150000 100000", 2), ("400000 100000", 4)])
def test_a_limit_of_processors(words: str, limit: int | None, tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("0::/\n")
    assert memory.processor_limit() is None
    (tmp_path / "cpu.max").write_text(f"{words}\n")
    assert memory.processor_limit() == limit


def test_the_least_limit_of_processors_counts(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("0::/pod/task\n")
    (tmp_path / "pod" / "task").mkdir(parents=True)
    (tmp_path / "pod" / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "pod" / "task" / "cpu.max").write_text("300000 100000\n")
    assert memory.processor_limit() == 2


def test_a_limit_of_processors_in_version_1(tmp_path: Path, member_of: Callable[[str], None]) -> None:
    member_of("5:memory:/\n4:cpu,cpuacct:/docker/abc\n")
    folder = tmp_path / "cpu,cpuacct"  # a container sees its group as the root
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("50000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert memory.processor_limit() is None
    (folder / "cpu.cfs_quota_us").write_text("50001\n")
    assert memory.processor_limit() == 2


def test_on_this_machine() -> None:
    assert 2**20 < memory.free_host_memory() < 2**50


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", nothing)
    assert memory.free_host_memory() == 4 * GIB
