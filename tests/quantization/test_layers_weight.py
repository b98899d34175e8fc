"""A weight that is unpacked when its numbers are needed: read like any tensor, and never written to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastgen.quantization.layers import Unpacked

NUMBERS = torch.randn(6, 8)


@pytest.fixture
def weight() -> Unpacked:
    return Unpacked.of(NUMBERS.shape, NUMBERS.dtype, NUMBERS.device, None, NUMBERS.clone)


def is_unpacked(weight: Unpacked) -> bool:
    return weight._unpacked_once.cache_info().currsize == 1


def test_what_needs_no_numbers(weight: Unpacked) -> None:
    assert weight.shape == (6, 8) and weight.dtype is torch.float32 and weight.device.type == "cpu"
    assert (weight.dim(), weight.numel(), weight.nbytes, weight.stride()) == (2, 48, 192, (8, 1))
    assert weight.is_contiguous() and not weight.requires_grad and weight.is_leaf
    assert type(weight.data) is type(weight.detach()) is Unpacked
    assert not is_unpacked(weight)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.clone(),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w + 0,
        lambda w: w[:],
        lambda w: w.t().t(),
        lambda w: w.view(-1).view(6, 8),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: torch.from_numpy(np.asarray(w)),
        copy.copy,
        copy.deepcopy,
        lambda w: w.cpu(),
        lambda w: w.double().float(),
        lambda w: nn.functional.linear(torch.eye(8), w).t(),
        lambda w: nn.functional.embedding(torch.arange(6), w),
        lambda w: torch.stack(w.unbind()),
        lambda w: torch.empty(6, 8).copy_(w),
        lambda w: torch.utils.dlpack.from_dlpack(w),
        lambda w: nn.Parameter(w.clone()),
    ],
)
def test_reading(weight: Unpacked, read: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(read(weight), NUMBERS)


def test_saving(weight: Unpacked, tmp_path: Path) -> None:
    save_file({"weight": weight}, tmp_path / "weight.safetensors")
    assert torch.equal(load_file(tmp_path / "weight.safetensors")["weight"], NUMBERS)
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    found = torch.load(buffer)
    assert type(found) is Tensor and torch.equal(found, NUMBERS)
    assert repr(weight) == repr(NUMBERS) and weight.data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: setattr(w, "data", NUMBERS),
        lambda w: setattr(w, "data", w.data.__iadd__(1.0)),
        lambda w: setattr(w, "requires_grad", True),
        lambda w: w.data.__setitem__((3, 4), 0.0),
        lambda w: w.zero_(),
        lambda w: w.copy_(NUMBERS),
        lambda w: w[3].zero_(),
        lambda w: w.view(-1)[2:4].fill_(1.0),
        lambda w: w.t().mul_(2.0),
        lambda w: w.requires_grad_(),
        lambda w: w.chunk(2)[0].zero_(),
        nn.init.normal_,
        lambda w: torch.add(NUMBERS, 1.0, out=w),
        lambda w: w.data[0].normal_(),
        lambda w: w.index_copy_(0, torch.tensor([1]), NUMBERS[:1]),
        lambda w: w.resize_(3),
        lambda w: w.set_(NUMBERS),
        lambda w: nn.Parameter(w),
        lambda w: torch._foreach_add_([w], 1.0),
    ],
)
def test_writing_is_refused(weight: Unpacked, write: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="cannot be written to: call model.dequantize") as error:
        write(weight)
    assert "\n" not in str(error.value) and torch.equal(weight, NUMBERS)
    weight.requires_grad = False
    assert weight.requires_grad_(False) is weight
