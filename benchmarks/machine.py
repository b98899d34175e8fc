"""What the numbers depend on besides the code: the machine, the versions, and other load."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import time
from typing import Any

import psutil
import torch

import fastgen
from benchmarks import ROOT
from fastgen import memory

# A measurement with more cores than this busy with other work is marked.
BUSY = 0.15


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describes CPU, cores, memory, and the CUDA device if the benchmarks run on it."""
    machine: dict[str, Any] = {
        "cpu": memory.processor(),
        "cores": len(psutil.Process().cpu_affinity()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return machine


def describe_versions() -> dict[str, str]:
    """Returns the versions of everything that affects the numbers."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "fastgen": fastgen.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "numpy")}
    return versions | ({} if torch.version.cuda is None else {"cuda": torch.version.cuda})


def about(device: torch.device) -> dict[str, Any]:
    """Returns the common properties of all records of a run."""
    settings = {"device": str(device), "threads": torch.get_num_threads()}
    return {"machine": describe_machine(device), "versions": describe_versions(), "settings": settings}


def slug(machine: dict[str, Any]) -> str:
    """Returns a folder name for the results. Virtual machines give different processors the same name."""
    words = [machine["cpu"], f"{machine['cores']}-core"]
    if "gpu" in machine:
        words.insert(0, machine["gpu"])
    text = re.sub(r"\((r|tm)\)|@.*", " ", "-".join(words[:-1]), flags=re.IGNORECASE) + "-" + words[-1]
    text += "-avx2" * (machine.get("instructions") == "AVX2")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def commit() -> str | None:
    """Returns the checked-out commit, with "-dirty" if tracked files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


class OtherLoad:
    """Measures the number of cores that other processes keep busy, from the start to `cores()`.

    Args:
        own: the process to exclude, with its children that have ended by then; by default this one.
    """

    def __init__(self, own: int | None = None) -> None:
        self._own = psutil.Process(own)
        self._start = self._read()

    def cores(self) -> float:
        """Returns the cores busy with other work, on average since the start."""
        wall, busy, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(busy - own, 0.0) / wall if wall > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        system = psutil.cpu_times()
        own = self._own.cpu_times()
        # User time includes guest time.
        not_busy = system.idle + system.iowait + system.guest + system.guest_nice
        # Children count only after they have ended, as those of a workload have when it is done.
        return (
            time.perf_counter(),
            sum(system) - not_busy,
            own.user + own.system + own.children_user + own.children_system,
        )
