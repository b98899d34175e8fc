"""The KV cache of a layer, against concatenating and indexing full tensors."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.kv import growing as kv
from fastgen.decoding.kv.growing import GrowingKV
from fastgen.decoding.kv.rows import Beams
from fastgen.decoding.kv.view import KVView


def test_a_suffix_is_not_copied_within_its_capacity():
    layer = GrowingKV(8)
    layer.expand(Beams(2, 1))
    before = {layer.extend(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))[0].data_ptr() for _ in range(8)}
    assert len(before) == 1


@torch.no_grad()
@pytest.mark.parametrize("moves", [False, True])
def test_what_a_reorder_has_gathered_is_not_forgotten(moves, monkeypatch):
    """Nor where a short prefix moves in front of it, when something else than the operator needs the suffix."""
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 0 if moves else 2**40)
    layer = GrowingKV(4)
    layer.extend(*torch.randn(2, 1, 1, 3, 2))
    layer.expand(Beams(1, 2))
    with pytest.raises(ValueError, match="1 positions cannot be forgotten"):
        layer.crop(1)
    keys, _ = layer.extend(*torch.randn(2, 2, 1, 2, 2))
    assert isinstance(keys, KVView) is moves
    layer.reorder(torch.tensor([1, 0]))
    if moves:
        layer.materialize_suffix()
    layer.extend(*torch.randn(2, 2, 1, 1, 2))
    with pytest.raises(ValueError, match="2 positions cannot be forgotten"):
        layer.crop(2)
    layer.crop(1)
    assert layer.length == 5


def moved_layer(prompt: bool = False) -> GrowingKV:
    layer = GrowingKV(4)
    if prompt:
        layer.extend(*torch.randn(2, 1, 1, 3, 2))
    layer.expand(Beams(1, 2))
    layer.extend(*torch.randn(2, 2, 1, 3, 2))
    if prompt:
        layer.crop(3)
    return layer


@torch.no_grad()
def test_a_reorder_on_a_cpu_writes_the_suffix_once_and_keeps_one():
    layer, index = moved_layer(), torch.tensor([1, 1])
    before = layer.read()
    content = [part.clone() for part in before]
    layer.reorder(index)
    for part, old, was in zip(layer.read(), before, content, strict=True):
        assert torch.equal(part, was[index]) and torch.equal(old, was)
    left = [weakref.ref(part.untyped_storage()) for part in before]
    del before, old
    layer.reorder(index.clone())
    assert all(part() is None for part in left)


@torch.no_grad()
@pytest.mark.parametrize(("prompt", "index"), [(False, [0, 1]), (True, [1, 0])], ids=["identity", "only a prompt"])
def test_a_reorder_that_changes_nothing_writes_nothing(prompt, index):
    layer = moved_layer(prompt)
    keys, _ = layer.read()
    version, content = keys._version, keys.clone()
    layer.reorder(torch.tensor(index))
    found, _ = layer.read()
    assert (found.data_ptr(), keys._version) == (keys.data_ptr(), version) and torch.equal(found, content)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_index_that_is_written_to_is_looked_at_again(mode):
    with mode():
        layer, index = moved_layer(), torch.tensor([0, 1])
        content = layer.read()[0].clone()
        layer.reorder(index)
        index.copy_(torch.tensor([1, 0]))
        layer.reorder(index)
        assert torch.equal(layer.read()[0], content[[1, 0]])


def test_gradients_pass_a_reorder():
    layer = GrowingKV(4)
    layer.expand(Beams(1, 2))
    with torch.no_grad():
        layer.extend(*torch.randn(2, 2, 1, 1, 2))
        layer.reorder(torch.tensor([1, 0]))
    keys = torch.randn(2, 1, 1, 2, requires_grad=True)
    layer.extend(keys, keys)
    layer.reorder(torch.tensor([1, 1]))
    layer.read()[0][:, :, 1].sum().backward()
    assert keys.grad.flatten().tolist() == [0, 0, 2, 2]


def test_what_an_empty_layer_cannot_do():
    with pytest.raises(ValueError, match="expanded"):
        GrowingKV(1).keep(torch.tensor([0]))
    with pytest.raises(ValueError, match="no keys"):
        GrowingKV(1).read()


def test_the_prefix_is_stored_once_and_never_moves():
    layer, beams = GrowingKV(4), Beams(2, 4)
    keys = torch.randn(2, 8, 1024, 16)
    layer.extend(keys, keys.clone())
    layer.expand(beams)
    shared = layer.read()[0]
    assert isinstance(shared, KVView) and shared.shape == (8, 8, 1024, 16)
    assert shared._parts.prefix.data_ptr() == keys.data_ptr()
    layer.reorder(torch.tensor([1, 1, 1, 1, 5, 5, 5, 5]))
    assert layer.read()[0]._parts.prefix.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("per_input", [1, 2])
def test_a_window_drops_what_lies_behind_it_from_the_prefix(per_input):
    layer, keys = GrowingKV(2, window=10), torch.randn(3, 2, 40, 4)
    layer.extend(keys, keys)
    assert (layer.length, layer.cached, layer.dropped) == (40, 40, 0)
    layer.expand(Beams(3, per_input))
    kept = 40 if per_input == 1 else 9
    assert (layer.length, layer.cached, layer.dropped) == (40, kept, 40 - kept)
    new = torch.randn(3 * per_input, 2, 1, 4)
    expected = torch.cat([keys[:, :, -kept:].repeat_interleave(per_input, dim=0), new], dim=2)
    assert torch.equal(layer.extend(new, new)[0] + 0, expected)
    assert (layer.length, layer.cached) == (41, kept + 1)


@given(
    batch=st.integers(1, 3),
    per_input=st.integers(1, 4),
    chunks=st.lists(st.integers(1, 4), max_size=3),
    capacity=st.integers(1, 3),
    worth=st.booleans(),
    table=st.booleans(),
    grad=st.booleans(),
    steps=st.lists(st.sampled_from(["step", "two", "reorder", "look", "leave", "crop"]), max_size=14),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=120, deadline=None)
def test_steps_reorders_and_inputs_that_leave(batch, per_input, chunks, capacity, worth, table, grad, steps, seed):
    """Two layers, whose suffix is moved or read through a table, until of one of them the full tensor is looked at."""
    torch.manual_seed(seed)
    heads, width, beams = 2, 8, Beams(batch, per_input)

    def values(keys):
        return -keys[..., :5]

    with torch.set_grad_enabled(grad), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "MIN_SHARED_PREFIX", 0 if worth else 1000)
        patch.setattr(kv, "MIN_SHARED_BYTES", 0)
        patch.setattr(kv, "MIN_TABLE_BYTES", 0 if table else 2**40)
        layers, full = [GrowingKV(capacity), GrowingKV(capacity)], torch.zeros(batch, heads, 0, width)
        for count in chunks:
            new = torch.randn(batch, heads, count, width)
            full = torch.cat([full, new], dim=2)
            for layer in layers:
                assert torch.equal(layer.extend(new, values(new))[1], values(full))
        for layer in layers:
            layer.expand(beams)
        full = full.repeat_interleave(per_input, dim=0)
        may_crop = False
        for step in ["step", *steps]:
            rows = full.shape[0]
            if step in ("step", "two"):
                new = torch.randn(rows, heads, 1 if step == "step" else 2, width)
                full = torch.cat([full, new], dim=2)
                for layer in layers:
                    layer.extend(new, values(new))
                may_crop = True
            elif step == "reorder":
                index = (
                    torch.randint(per_input, (rows // per_input, per_input)) + torch.arange(0, rows, per_input)[:, None]
                ).view(-1)
                for layer in layers:
                    layer.reorder(index)
                full, may_crop = full[index], False
            elif step == "leave" and rows > per_input:
                inputs = torch.arange(rows // per_input)[torch.randperm(rows // per_input) > 0]
                for layer in layers:
                    layer.keep(inputs)
                beams.keep(inputs)
                full = full.unflatten(0, (-1, per_input))[inputs].flatten(0, 1)
            elif step == "crop" and may_crop and full.shape[2] > 1:
                for layer in layers:
                    layer.crop(1)
                full, may_crop = full[:, :, :-1], False
            elif step == "look":
                assert all(
                    torch.equal(have + 0, x) for have, x in zip(layers[1].read(), (full, values(full)), strict=True)
                )
            query = torch.randn(full.shape[0], heads, 1, width)
            expected = torch.nn.functional.scaled_dot_product_attention(query, full, values(full))
            for layer in layers:
                assert layer.length == full.shape[2]
                found = torch.nn.functional.scaled_dot_product_attention(query, *layer.read())
                torch.testing.assert_close(found, expected)
        assert layers[0]._uses_ancestry or grad or per_input == 1 or not table
        for layer in layers:
            for have, want in zip(layer.materialize(), (full, values(full)), strict=True):
                assert torch.equal(have, want) and have.is_contiguous()


def test_a_table_is_not_used_without_a_kernel_that_reads_it(monkeypatch):
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 0)
    monkeypatch.setattr(kv.attention, "reads_ancestry", lambda device: False)
    with torch.no_grad():
        layer = GrowingKV(4)
        layer.expand(Beams(2, 2))
        keys, _ = layer.extend(torch.randn(4, 2, 1, 8), torch.randn(4, 2, 1, 8))
    assert type(keys) is torch.Tensor


def test_nothing_is_held_by_what_was_handed_out(monkeypatch):
    """K and V of a call go with the call, and do not wait for the collector of cycles."""
    monkeypatch.setattr(kv, "MIN_TABLE_BYTES", 0)
    gc.disable()
    try:
        with torch.no_grad():
            layer = GrowingKV(4)
            layer.expand(Beams(2, 2))
            keys, values = layer.extend(torch.randn(4, 2, 1, 8), torch.randn(4, 2, 1, 8))
        assert type(keys) is KVView and type(values) is KVView
        gone = weakref.ref(layer)
        del layer, keys, values
        assert gone() is None
    finally:
        gc.enable()
