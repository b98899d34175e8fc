from __future__ import annotations

import mmap

import pytest
import torch

from benchmarks import memory
from fastgen.decoding.kv import growing as kv
from fastgen.decoding.kv.rows import Beams


def test_storages_are_counted_once_and_whole():
    whole = torch.zeros(10, 10)
    assert memory.storage_bytes([whole[:2], whole.transpose(0, 1), whole[5:, 5:]]) == 400
    assert memory.storage_bytes([whole, torch.zeros(5)]) == 420
    assert memory.storage_bytes([]) == 0


def test_tensors_of_a_library_cache():
    from transformers import DynamicCache, EncoderDecoderCache

    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    keys, values = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 4)
    cache.self_attention_cache.update(keys, values, 0)
    cache.cross_attention_cache.update(keys.repeat(1, 1, 4, 1), values.repeat(1, 1, 4, 1), 0)
    assert memory.storage_bytes(memory.held_tensors(cache)) == 2 * 480 + 2 * 4 * 480
    assert memory.storage_bytes(memory.held_tensors(None)) == 0


def test_tensors_of_the_store(monkeypatch):
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0, raising=False)
    layer, batch, per_input, width, length, capacity = kv.GrowingKV(initial_capacity=8), 2, 4, 4, 64, 8
    layer.extend(torch.zeros(batch, 1, length, width), torch.zeros(batch, 1, length, width))
    layer.expand(Beams(batch, per_input))
    prefix = 2 * batch * length * width * 4
    assert memory.storage_bytes(memory.held_tensors(layer)) == prefix
    keys, _ = layer.extend(torch.zeros(batch * per_input, 1, 1, width), torch.zeros(batch * per_input, 1, 1, width))
    # What is allocated ahead counts, and the prefix counts once.
    allocated = memory.storage_bytes(memory.held_tensors(layer)) - prefix
    assert allocated >= 2 * batch * per_input * capacity * width * 4
    # A full tensor that somebody made of the parts is held as well.
    assert keys.materialize().shape == (batch * per_input, 1, length + 1, width)
    full = batch * per_input * (length + 1) * width * 4
    assert memory.storage_bytes(memory.held_tensors(layer)) == prefix + allocated + full


@pytest.mark.parametrize("resettable", [True, False])
def test_peak(monkeypatch, resettable):
    if not resettable:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    with memory.PeakMemory(torch.device("cpu")) as peak:
        for _ in range(3):
            # 128 MiB of the system, whatever malloc has in store, gone again before the block ends.
            torch.frombuffer(mmap.mmap(-1, 2**27), dtype=torch.uint8).fill_(1)
    assert 2**27 * 0.9 < peak.bytes < 2**29
    assert peak.method.startswith("resident set")


def test_digest_tells_tokens_apart():
    tokens = torch.arange(6).view(2, 3)
    assert memory.digest(tokens) == memory.digest(tokens.clone())
    assert memory.digest(tokens) != memory.digest(tokens.view(3, 2))
    assert memory.digest(tokens) != memory.digest(tokens + 1)


def test_children_import_this_checkout(monkeypatch):
    monkeypatch.setenv("FASTGEN_DISABLE", "1")
    environment = memory.child_environment(threads=3)
    assert environment["PYTHONPATH"].startswith(str(memory.ROOT)) and environment["OMP_NUM_THREADS"] == "3"
    assert "FASTGEN_DISABLE" not in environment
