"""Memory that is kept while a model generates: blocks are used again, and given back at the end."""

import contextlib
import signal
import threading

import pytest
import torch

import fastgen
from fastgen import memory, settings
from fastgen.decoding import host_memory

resource = pytest.importorskip("resource")

BLOCK = 2**26
PAGE = resource.getpagesize()

glibc = pytest.mark.skipif(host_memory.unavailable() is not None, reason=str(host_memory.unavailable()))


def page_faults(repetitions: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repetitions):
        torch.empty(BLOCK, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the C library, as (function, argument, ...)."""
    made = []

    class Library:
        def mallopt(self, parameter, value):
            made.append(("mallopt", parameter, value))

        def malloc_trim(self, pad):
            made.append(("malloc_trim", pad.value))

    monkeypatch.setattr(host_memory, "_library", Library)
    monkeypatch.setattr(host_memory, "_left_behind", 0)
    monkeypatch.setattr(host_memory, "unavailable", lambda: None)
    return made


@glibc
def test_blocks_are_used_again():
    with host_memory.kept(torch.device("cpu")):
        # What lies between two blocks, and how they are aligned, may take a few until one fits.
        assert page_faults(24) < 8 * BLOCK // PAGE


@glibc
@pytest.mark.parametrize("packed_weights", ["call", "keep"])
def test_what_is_free_is_given_back_unless_it_is_kept(packed_weights):
    with settings.changed(packed_weights=packed_weights):
        host_memory._library().malloc_trim(0)  # what other tests have left would be used first
        before = host_memory._resident()
        with host_memory.kept(torch.device("cpu")):
            block = torch.ones(4 * BLOCK, dtype=torch.uint8)
            above = torch.ones(2**18, dtype=torch.uint8)  # what lies above a free block keeps it from the system
            del block
            assert host_memory._resident() - before > 3 * BLOCK
        left = host_memory._resident() - before
    assert (left > 3 * BLOCK) is (packed_weights == "keep")
    assert above.all()
    with host_memory.kept(torch.device("cpu")):  # leaves nothing behind for the tests that follow
        host_memory._library().malloc_trim(0)


@glibc
def test_what_other_threads_have_freed_goes_back():
    """Between what they keep: the library gives back by itself only what lies above that."""
    with host_memory.kept(torch.device("cpu")):
        pass  # from here on, blocks of a MiB come from the arena of a thread
    kept, freed = [], []

    def work():
        blocks = []
        for _ in range(128):
            blocks.append(torch.ones(2**20, dtype=torch.uint8))
            kept.append(torch.ones(2**10, dtype=torch.uint8))
        blocks.clear()
        freed.append(host_memory._resident())
        memory.give_back_free()
        freed.append(host_memory._resident())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert freed[0] - freed[1] > 100 * 2**20


def test_nested_calls_leave_with_the_last(calls):
    cpu = torch.device("cpu")
    with host_memory.kept(cpu):
        entered = list(calls)
        with contextlib.suppress(KeyError), host_memory.kept(cpu):
            raise KeyError
        assert calls == entered and entered
    left = dict(call[1:] for call in calls[len(entered) :] if call[0] == "mallopt")
    assert left == host_memory._AFTERWARDS and not host_memory._inside


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_ends_it(calls, monkeypatch, at):
    """Also one that comes while the library is told."""
    mallopt = host_memory._library.mallopt

    def interrupted(library, parameter, value):
        mallopt(library, parameter, value)
        if len(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(host_memory._library, "mallopt", interrupted)
    cpu = torch.device("cpu")
    with pytest.raises(KeyboardInterrupt), host_memory.kept(cpu):
        pass
    with host_memory.kept(cpu):  # puts right what the end of the other did not come to
        pass
    left = {parameter: value for name, parameter, value in calls if name == "mallopt"}
    assert left == host_memory._AFTERWARDS and not host_memory._inside


def test_a_call_from_a_signal_handler(calls, monkeypatch):
    """It comes at any time, as here while the outer call finds out what the process holds."""

    def handler(*_):
        with host_memory.kept(torch.device("cpu")):
            pass

    def resident():
        if not calls:
            monkeypatch.setattr(host_memory, "_resident", lambda: 0)
            signal.raise_signal(signal.SIGUSR1)
        return 0

    monkeypatch.setattr(host_memory, "_resident", resident)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with host_memory.kept(torch.device("cpu")):
            assert host_memory._inside
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not host_memory._inside


def test_calls_that_leave_a_little_behind_add_up(calls, monkeypatch):
    held = [0]
    monkeypatch.setattr(host_memory, "_resident", lambda: held[0])
    trims = []
    for _ in range(6):
        calls.clear()
        with host_memory.kept(torch.device("cpu")):
            held[0] += host_memory._MIN_TRIMMED // 2
        held[0] -= 100  # what others free does not count
        trims.append(("malloc_trim", 0) in calls)
    assert trims == [False, False, True] * 2


def test_other_devices_and_threads_are_left_alone(calls):
    with host_memory.kept(torch.device("meta")):
        pass

    def in_a_thread():
        with host_memory.kept(torch.device("cpu")):
            pass

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert not calls


@pytest.mark.parametrize("name, value", [("MALLOC_MMAP_MAX_", "10"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")])
def test_settings_of_the_user_stay(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_memory, "_library", object)
    assert "environment" in (host_memory.unavailable.__wrapped__() or "")


@glibc
def test_another_c_library(monkeypatch):
    assert host_memory._library.__wrapped__() is not None
    monkeypatch.setattr(host_memory, "_resident", lambda: 0)  # no /proc
    assert host_memory._library.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(host_memory.os, "confstr", lambda name: None)
    assert host_memory._library.__wrapped__() is None
    monkeypatch.setattr(host_memory, "_library", lambda: None)
    assert "C library" in (host_memory.unavailable.__wrapped__() or "")


def test_generate_keeps_it(calls):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2))
    tokens = torch.randint(5, 40, (2, 3))
    model.eval().generate(tokens, max_new_tokens=2, num_beams=2)
    assert calls[0] == ("mallopt", host_memory._MMAP_MAX, 0) and not host_memory._inside
    calls.clear()
    with fastgen.disabled():
        model.generate(tokens, max_new_tokens=2)
    assert not calls


def test_zeros_take_memory_where_they_are_written_to(dtype=torch.bfloat16):
    before = host_memory._resident()
    made = host_memory.zeros((4, BLOCK // 4 // dtype.itemsize), dtype, torch.device("cpu"))
    assert made.nbytes == BLOCK and made.dtype is dtype
    assert host_memory._resident() - before < BLOCK // 8
    made[1] = 1
    assert BLOCK // 8 < host_memory._resident() - before < BLOCK // 2
    assert made[:, :: PAGE // 2].float().mean(dim=1).tolist() == [0, 1, 0, 0]
    del made
    assert host_memory._resident() - before < BLOCK // 8


def test_zeros_that_there_is_no_memory_for():
    with pytest.raises(MemoryError, match="281474976710656 bytes") as raised:
        host_memory.zeros((2**46,), torch.float32, torch.device("cpu"))
    assert memory.is_out(raised.value)


def test_memory_of_zeros_is_given_back_and_used_again():
    before = host_memory._resident()
    made = host_memory.zeros((4, BLOCK // 16), torch.float32, torch.device("cpu"))
    made.fill_(3)
    assert host_memory._resident() - before > BLOCK // 2
    assert host_memory.give_back(made)
    assert host_memory._resident() - before < BLOCK // 8
    assert not made.any()
    made[2, 5] = 1
    assert made.sum() == 1
    address = made.data_ptr()
    del made
    assert address not in host_memory._mapped


@pytest.mark.parametrize("row", [2**20, 2**20 + 12, 2**14 + 4])
@pytest.mark.parametrize(("first", "count"), [(0, 3), (10, 100), (5, 2)])
def test_rows_that_are_given_back_take_no_memory(row, first, count):
    """What the rows beside them have of a page stays."""
    made = host_memory.zeros((120, row // 4), torch.float32, torch.device("cpu")).fill_(3)
    before = host_memory._resident()
    assert host_memory.give_back(made, first, count)
    assert before - host_memory._resident() >= count * row - 2 * PAGE - 2**16 or count * row < 2**17
    cleared = made[first : first + count]
    assert not cleared.any() and int((made == 3).sum()) == made.numel() - cleared.numel()


def test_rows_that_are_not_given_back_stay():
    for other in (torch.ones(7, 5), host_memory.zeros((2**16, 8), torch.float32, torch.device("cpu")).fill_(1)):
        assert not host_memory.give_back(other, 2, 3) and other.all()


def test_memory_of_others_is_not_given_back():
    """Nor that of a part of what is one of ours: the rest is somebody's."""
    for other in (torch.ones(BLOCK // 4), torch.ones(3)):
        assert not host_memory.give_back(other) and other.all()
    made = host_memory.zeros((4, BLOCK // 16), torch.float32, torch.device("cpu")).fill_(1)
    assert not host_memory.give_back(made[:2]) and not host_memory.give_back(made[1:]) and made.all()


def test_memory_that_the_process_has_locked_stays(monkeypatch):
    made = host_memory.zeros((BLOCK // 4,), torch.float32, torch.device("cpu")).fill_(1)
    pages = host_memory._mapped[made.data_ptr()]

    def refuse(self, *advice):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(type(pages), "madvise", refuse, raising=False)
    assert not host_memory.give_back(made) and made.all()
    assert not host_memory.give_back(made, 3, 2 * PAGE) and made.all()
