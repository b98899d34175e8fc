"""The memory that is free, and the processors: the smaller of what the machine has and the container's limits leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
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


IN_ROOT = "0::/\n"


@pytest.mark.parametrize(
    ("member", "groups", "free"),
    [
        pytest.param("4:cpu:/x\n0::/\n", {}, 8 * GIB, id="no group of memory"),
        pytest.param(IN_ROOT, {"": ("max", 2 * GIB)}, 8 * GIB, id="no limit"),
        pytest.param(IN_ROOT, {"": (4 * GIB, 3 * GIB, GIB // 2)}, GIB + GIB // 2, id="files can be reclaimed"),
        pytest.param(IN_ROOT, {"": (4 * GIB, 5 * GIB)}, 0, id="beyond the limit"),
        pytest.param(IN_ROOT, {"": (64 * GIB, 3 * GIB)}, 8 * GIB, id="the machine has less"),
        pytest.param(
            "0::/user/job/task\n",
            {"user/job/task": (7 * GIB, 0), "user": (3 * GIB, GIB)},
            2 * GIB,
            id="a group around it",
        ),
        # The kernel takes longer to write statistics than all else that is read, and small calls would notice.
        pytest.param(IN_ROOT, {"": (64 * GIB, GIB, -60 * GIB)}, 8 * GIB, id="statistics are not read far from a limit"),
        # A container sees its group as the root.
        pytest.param(
            "5:pids:/\n4:memory:/docker/abc\n0::/\n", {"memory": (3 * GIB, GIB, 5, 1)}, 2 * GIB + 5, id="version 1"
        ),
    ],
)
def test_free_memory(
    member: str, groups: dict[str, tuple[Any, ...]], free: int, tmp_path: Path, member_of: Callable[[str], None]
) -> None:
    member_of(member)
    for name, sizes in groups.items():
        group(tmp_path / name, *sizes)
    assert memory.free_host_memory() == free == free_memory(torch.device("cpu"))  # what batches are planned with


# A container sees its group as the root.
IN_VERSION_1, FOLDER = "5:memory:/\n4:cpu,cpuacct:/docker/abc\n", "cpu,cpuacct"


@pytest.mark.parametrize(
    ("member", "files", "limit"),
    [
        (IN_ROOT, {}, None),
        (IN_ROOT, {"cpu.max": "max 100000"}, None),
        (IN_ROOT, {"cpu.max": "150000 100000"}, 2),
        (IN_ROOT, {"cpu.max": "400000 100000"}, 4),
        ("0::/pod/task\n", {"pod/cpu.max": "200000 100000", "pod/task/cpu.max": "300000 100000"}, 2),
        (IN_VERSION_1, {f"{FOLDER}/cpu.cfs_period_us": "50000", f"{FOLDER}/cpu.cfs_quota_us": "-1"}, None),
        (IN_VERSION_1, {f"{FOLDER}/cpu.cfs_period_us": "50000", f"{FOLDER}/cpu.cfs_quota_us": "50001"}, 2),
    ],
)
def test_the_least_limit_of_processors_counts(
    member: str, files: dict[str, str], limit: int | None, tmp_path: Path, member_of: Callable[[str], None]
) -> None:
    member_of(member)
    for name, words in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{words}\n")
    assert memory.processor_limit() == limit


def test_on_this_machine() -> None:
    assert 2**20 < memory.free_host_memory() < 2**50


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", nothing)
    assert memory.free_host_memory() == 4 * GIB
