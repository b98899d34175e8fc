"""Memory of one backend of a generation workload, measured in a process of its own.

Two things are measured during one run:

* the peak: on the CPU the largest resident set above what the process had with the model loaded and warmed up, on CUDA
  the largest allocation above that point. It includes everything: activations, copies, code, repacked weights.
* the K/V memory: bytes of the storages in which the cache holds keys and values after each forward pass, each storage
  counted once and whole. So capacity allocated ahead counts, and so does what a view keeps alive. Copies that exist
  only inside a step (the old tensor beside its concatenation or its reordered copy) are in the peak alone.

`python -m benchmarks.memory` is the process; `measure_in_process` starts it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.backends import BASELINE, Job, Task, make
from benchmarks.machine import ROOT
from fastgen import releases
from fastgen.decoding import library_code

# ---- keys and values


def held_tensors(holder: Any) -> Iterator[Tensor]:
    """Every floating-point tensor that a cache, or an object inside one, keeps alive.

    The attributes of caches, of their layers and of FastGen's KV cache are followed, whatever they are called. Integer
    tensors are bookkeeping, not keys and values.
    """
    todo, seen = [holder], set()
    while todo:
        value = todo.pop()
        if value is None or isinstance(value, (bool, int, float, str, type)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            # A tensor of FastGen's own class has no storage: what it stands for is in its attributes.
            if type(value) is Tensor and value.is_floating_point():
                yield value
            todo.extend(vars(value).values() if hasattr(value, "__dict__") else ())
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, Iterable) and isinstance(value, (list, tuple)):
            todo.extend(value)
        elif dataclasses.is_dataclass(value) or _is_part_of_a_cache(value):
            todo.extend(getattr(value, "__dict__", {}).values())


def _is_part_of_a_cache(value: Any) -> bool:
    return any(kind.__module__.startswith(("fastgen.", "transformers.cache_utils")) for kind in type(value).__mro__)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class KeyValueMeter:
    """Looks at the cache after every forward pass of one `generate` call of `model`.

    The decoding loops hand the outputs of each pass to `_update_model_kwargs_for_generation`. Wrapping that method of
    the class shows the cache as it is, and neither keeps it alive nor changes which code runs: a method replaced on
    the model itself would be a reason for FastGen to leave the call alone.
    """

    _METHOD = "_update_model_kwargs_for_generation"

    def __init__(self, model: Any) -> None:
        # Where the method is defined: a model with one of its own hands on more than K and V, to FastGen.
        self._kind = next(kind for kind in type(model).__mro__ if self._METHOD in vars(kind))
        self._own = vars(self._kind)[self._METHOD]
        self.steps = 0
        self.at_end = 0
        self.largest = 0

    def __enter__(self) -> KeyValueMeter:
        original = getattr(self._kind, self._METHOD)

        @functools.wraps(original)
        def look(model: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.at_end = storage_bytes(held_tensors(releases.cache_in(outputs)))
            self.largest = max(self.largest, self.at_end)
            self.steps += 1
            return original(model, outputs, *args, **kwargs)

        setattr(self._kind, self._METHOD, library_code.trust(look))
        return self

    def __exit__(self, *exception: Any) -> None:
        setattr(self._kind, self._METHOD, self._own)


# ---- peak


class PeakMemory:
    """The largest memory use inside the block, above that at its start: `bytes`, and `method` says of what."""

    _SAMPLE_SECONDS = 0.005

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            self.method = "torch.cuda.max_memory_allocated"
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
            return self
        self._start = psutil.Process().memory_info().rss
        self._sampler = None
        if _reset_high_water_mark():
            self.method = "resident set (high-water mark)"
        else:
            self.method = f"resident set (sampled every {self._SAMPLE_SECONDS * 1e3:g} ms)"
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._start
        elif self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        else:
            self.bytes = max((high_water_mark() or 0) - self._start, 0)

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(self._SAMPLE_SECONDS):
            self.bytes = max(self.bytes, process.memory_info().rss - self._start)


def _reset_high_water_mark() -> bool:
    """Lets Linux forget the largest resident set so far; False where it cannot."""
    before = high_water_mark()
    if before is None:
        return False
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Systems that accept the write and do nothing would report a peak from before the run.
    after, now = high_water_mark(), psutil.Process().memory_info().rss
    return after is not None and after <= max(now * 1.02, now + 2**20)


def high_water_mark(process: int | str = "self") -> int | None:
    """The largest resident set so far of the process of this number, in bytes; None where the system does not tell."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class DevicePeaks:
    """The largest memory on a CUDA device of each of several backends that take turns in one process.

    A backend keeps what it has allocated between its runs (graphs, static buffers), so a run counts that and what the
    run allocates beyond it. What other backends keep is not counted. `bytes` has the largest of all runs of each
    backend, warm-up included: what a graph needs is allocated when it is captured.
    """

    method = "torch.cuda.max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def of(self, backend: str) -> Iterator[None]:
        """What runs in here is the backend's. Does nothing where there is no CUDA device."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        start = torch.cuda.memory_allocated(self._device)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            kept = self._kept.get(backend, 0)
            peak = kept + torch.cuda.max_memory_allocated(self._device) - start
            self.bytes[backend] = max(self.bytes.get(backend, 0), peak)
            self._kept[backend] = kept + torch.cuda.memory_allocated(self._device) - start


# ---- one backend, one process


def measure(workload: Task, backend: str, device: str, threads: int | None) -> dict[str, Any]:
    """Builds the model, makes one run of the backend and reports its memory. For a process that does nothing else."""
    if threads is not None:
        torch.set_num_threads(threads)
    model, inputs = workload.build(torch.device(device))
    # What the first call of anything loads is not what this backend needs for its work.
    job = Job(workload, model, workload.smallest(inputs), torch.get_num_threads())
    _run(BASELINE, job, new_tokens=2)
    with KeyValueMeter(model) as meter, PeakMemory(torch.device(device)) as peak:
        tokens = _run(backend, dataclasses.replace(job, inputs=inputs), workload.new_tokens)
    return {
        "peak_bytes": peak.bytes,
        "peak_method": peak.method,
        "kv_bytes_at_end": meter.at_end,
        "kv_bytes_largest": meter.largest,
        "forward_passes": meter.steps,
        "model_bytes": storage_bytes(model.parameters()),
        "digest": digest(tokens),
    }


def _run(name: str, job: Job, new_tokens: int) -> Tensor:
    backend = make(name)
    try:
        backend.setup(job)
        return backend.run(new_tokens)
    finally:
        backend.close()


def digest(tokens: Tensor) -> str:
    """A short name for these tokens, to compare them across processes."""
    tokens = tokens.cpu().contiguous()
    return hashlib.sha256(f"{tuple(tokens.shape)}".encode() + tokens.numpy().tobytes()).hexdigest()[:16]


def measure_in_process(workload: Task, backend: str, device: str, threads: int | None) -> dict[str, Any]:
    """`measure` in a new process.

    Raises:
        RuntimeError: the process failed; the message ends in what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, "task"), Path(folder, "result")
        task.write_bytes(pickle.dumps((workload, backend, device, threads)))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", str(task), str(result)],
            env=child_environment(threads),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            said = (done.stderr or "").strip().splitlines()
            raise RuntimeError(
                f"measuring the memory of {backend} ended with status {done.returncode}: {said[-1] if said else ''}"
            )
        return pickle.loads(result.read_bytes())


def child_environment(threads: int | None) -> dict[str, str]:
    """The environment of a process that imports this checkout and uses as many threads as this one."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["TOKENIZERS_PARALLELISM"] = environment.get("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    # Whether FastGen is on is the workload's to say.
    environment.pop("FASTGEN_DISABLE", None)
    return environment


def main() -> None:
    """`python -m benchmarks.memory TASK RESULT`: files with the pickled arguments and result of `measure`."""
    task, result = (Path(argument) for argument in sys.argv[1:3])
    result.write_bytes(pickle.dumps(measure(*pickle.loads(task.read_bytes()))))


if __name__ == "__main__":
    main()
