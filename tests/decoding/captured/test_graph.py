"""The flag that is read late, and, on a GPU, the graph itself."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from fastgen.decoding.captured import graph


def test_backend(monkeypatch):
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        monkeypatch.setattr(graph.operators, "is_interpreted", lambda: True)
        assert "interpreted" in graph.backend()
        monkeypatch.setattr(graph.operators, "is_interpreted", lambda: False)
        assert graph.backend() == "recorded programs" and graph.unavailable(cpu) is None
        monkeypatch.setattr(graph._library, "load", lambda device: "the extension was not built")
        assert graph.backend() == "no steps are captured: the extension was not built"
        assert graph.unavailable(torch.device("meta")) == "the model is on meta"


def test_late_flag(device):
    flag, done = graph.LateFlag(device, late=2), torch.zeros((), dtype=torch.bool, device=device)
    flag.send(done)
    assert not flag.is_set()
    done.fill_(True)
    found = []
    for _ in range(3):
        flag.send(done)
        found.append(flag.is_set())
    assert found[-1]
    flag.reset()
    done.fill_(False)
    flag.send(done)
    assert not flag.is_set()


@pytest.mark.gpu
def test_a_graph(device):
    """Captured without being executed, replayed on what is there then; one that fails leaves the device usable."""
    x = torch.ones(4, device=device)
    (x + 1).mul_(2)  # loads what it needs
    torch.cuda.synchronize()
    made = graph.Graph(device)
    made.capture(lambda: x.copy_((x + 1) * 2))
    assert x.tolist() == [1] * 4
    made.replay()
    made.replay()
    assert x.tolist() == [10] * 4
    for _ in range(2):
        with pytest.raises(RuntimeError):
            graph.Graph(device).capture(lambda: x.sum().item())
    assert x.sum().item() == 40
    assert torch.rand(4, device=device).max().item() < 1
    made.replay()
    assert x.tolist() == [22] * 4
    x.fill_(10)
    again = graph.Graph(device)
    again.capture(lambda: x.zero_())
    again.replay()
    assert x.tolist() == [0] * 4


def test_a_late_flag_of_the_cpu_has_no_destructor():
    """Python loses an interrupt that comes in one, and says that it has ignored it."""
    flag = graph.LateFlag(torch.device("cpu"), late=2)
    flag.is_set()
    assert not hasattr(flag, "__del__") and not weakref.getweakrefs(flag)


class _Torch:
    """What torch 2.11 keeps of captures, where its source says so: no GPU is needed to see that it is put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording: set[int] = set()  # pools into which a capture is under way
        self.users: dict[int, int] = {}  # of each pool
        self.generator_is_capturing = False
        self.capture_fails = False
        self.pools, self.streams = 0, 0
        self.emptied = 0

        def new_pool() -> int:
            self.pools += 1
            return self.pools

        def new_stream() -> SimpleNamespace:
            self.streams += 1
            return SimpleNamespace(number=self.streams, wait_stream=lambda other: None)

        def empty_cache() -> None:
            assert not self.recording
            self.emptied += 1

        real_zeros = torch.zeros
        for owner, name, value in (
            (torch.cuda, "CUDAGraph", lambda: _CUDAGraph(self)),
            (torch.cuda, "graph_pool_handle", new_pool),
            (torch.cuda, "Stream", new_stream),
            (torch.cuda, "stream", contextlib.nullcontext),
            (torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device", contextlib.nullcontext),
            (torch.cuda, "empty_cache", empty_cache),
            (torch._C, "_cuda_endAllocateToPool", lambda index, pool: self.end(pool)),
            (torch._C, "_cuda_releasePool", lambda index, pool: self.release(pool)),
            (torch, "zeros", lambda size, device: real_zeros(size)),
        ):
            monkeypatch.setattr(owner, name, value)
        monkeypatch.setattr(graph, "_shared", {})

    def private_pool(self) -> int:
        return min((0, *self.users)) - 1

    def begin(self, pool: int) -> None:
        if self.users.get(pool, 1) == 0:  # its blocks are in use still, so it is not gone
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)

    def end(self, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, pool: int) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0


class _CUDAGraph:
    def __init__(self, owner: _Torch) -> None:
        self._owner, self._pool, self._has_ended, self._is_invalid = owner, 0, False, False

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        self._pool = pool = self._owner.private_pool() if pool is None else pool
        self._owner.generator_is_capturing = True
        self._owner.begin(pool)

    def capture_end(self) -> None:
        if self._owner.capture_fails:
            self._owner.capture_fails, self._is_invalid = False, True
        if self._is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._owner.end(self._pool)
        self._owner.generator_is_capturing, self._has_ended = False, True

    def reset(self) -> None:
        if self._has_ended:
            self._owner.release(self._pool)
        self._has_ended = False

    __del__ = reset


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch):
    """Neither in the allocator nor in the generator; the next one succeeds, and so does one after an error of ours."""
    owner = _Torch(monkeypatch)
    device = torch.device("cuda", 0)
    first = graph.Graph(device)
    first.capture(lambda: None)

    def wait() -> None:
        owner.capture_fails = True
        raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            graph.Graph(device).capture(wait)
        assert owner.recording == set()
        assert not owner.generator_is_capturing

    with pytest.raises(ZeroDivisionError):
        graph.Graph(device).capture(lambda: 1 / 0)
    graph.Graph(device).capture(lambda: None)
    assert owner.recording == set() and not owner.generator_is_capturing
    assert owner.users[1] == 1, "the pool of the first graph is still its own, and nobody else's"
    assert first is not None
    assert gc.isenabled()


def test_a_capture_ends_badly_by_itself(monkeypatch):
    owner = _Torch(monkeypatch)

    def fail_late() -> None:
        assert not gc.isenabled()
        owner.capture_fails = True

    with pytest.raises(RuntimeError, match="previous error"):
        graph.Graph(torch.device("cuda")).capture(fail_late)
    assert owner.recording == set() and not owner.generator_is_capturing and gc.isenabled()


def test_captures_share_a_pool_and_a_stream(monkeypatch):
    """Workspaces of cuBLAS are one for each stream; memory that is cached could not go to the pool later."""
    owner = _Torch(monkeypatch)
    for _ in range(3):  # each of them gone before the next
        graph.Graph(torch.device("cuda")).capture(lambda: None)
    assert (owner.pools, owner.streams, owner.emptied) == (1, 1, 3)


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "older"), ((8, 0), None), ((12, 0), None)])
def test_gpus_that_triton_does_not_compile_for(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(graph.operators, "is_installed", lambda: True)
    found = graph.unavailable(torch.device("cuda"))
    assert found is None if reason is None else reason in found


def test_events_are_of_the_stream_of_the_flag(monkeypatch):
    """Not of the device that happens to be the current one; and as many as can be under way."""
    log, made = [], []

    class Event:
        def __init__(self) -> None:
            made.append(self)

        def record(self, stream: str) -> None:
            log.append(stream)

        def synchronize(self) -> None:
            log.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    flag = graph.LateFlag(torch.device("cpu"), late=2)
    flag._device, flag._is_cuda = torch.device("cuda:1"), True
    found = [flag.is_set() for _ in range(6)]
    assert found == [False] * 6
    assert log == ["of cuda:1"] * 3 + ["wait"] + ["of cuda:1", "wait"] * 3
    assert len(made) == 3
    del log[:]
    del flag
    assert log == ["wait"], "a replay may still write to the memory of the flag"
