"""AutoRound: rounding that is tuned block by block (Cheng et al., 2024, "Optimize Weight Rounding via Signed Gradient
Descent for the Quantization of LLMs").

The package `auto-round` implements it (tested: 0.16.1). It tunes in which direction each weight of a block is rounded,
and how much of its range a group covers, so that the block returns what it did in floating point. This module gives the
package one block at a time, with the inputs that calibration has kept, and reads back the quantised values and scales.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastgen.quantization.quantized_tensor import QuantizedTensor
from fastgen.quantization.rtn import Kind

_BATCH = 8  # samples of a step, one after the other, because their lengths may differ
_PLACE = "layers.0"  # of the block in the model that the package is given


class Call(NamedTuple):
    """The arguments of a block for a sample, and its result in floating point."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which the package does not report every block."""
    logger = logging.getLogger("autoround")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@_quiet()
def tune(
    module: nn.Module, kinds: Mapping[str, Kind], calls: Sequence[Call], config: Any, iterations: int
) -> dict[str, QuantizedTensor]:
    """Tunes the rounding of a block's linear layers. The block itself is not changed.

    Args:
        module: the block, in any floating dtype. It is tuned in float32.
        kinds: the grids of the layers, by their names in the block. Other layers are not quantised.
        calls: a call for each sample.
        config: configuration of the block's model.
        iterations: steps, of 8 samples each.

    Returns:
        The layers by name, without those that the package leaves out: it may require sizes that are multiples of 32.
    """
    from auto_round import AutoRound

    device = next(module.parameters()).device
    own = copy.deepcopy(module).float().requires_grad_(False)
    model = _Model(own, calls, config)
    tuning = AutoRound(
        model,
        tokenizer=SimpleNamespace(pad_token_id=None),  # the package requires one for text of its own
        scheme="W4A16",
        layer_config={f"{_PLACE}.block.{name}": _layer(kind) for name, kind in kinds.items()} | _others(model, kinds),
        iters=iterations,
        nsamples=len(calls),
        batch_size=1,
        gradient_accumulate_steps=min(_BATCH, len(calls)),
        to_quant_block_names=_PLACE,
        device_map=str(device),
        scale_dtype=next(iter(kinds.values())).scale_dtype,
        amp=False,
        enable_torch_compile=False,
        low_cpu_mem_usage=False,
        enable_quanted_input=False,  # the block's final output is not needed
    )
    # The block gets the number of a sample, and ignores its input.
    unused = torch.zeros(1, 1, 1, device=device)
    inputs = [(((unused,), {"sample": torch.tensor([[number]])}),) for number in range(len(calls))]
    wanted = [_first(call.wanted).float() for call in calls]
    with torch.enable_grad():
        tuning.quantize_block(model.layers[0], inputs, device=str(device), reference_output=wanted)
    layers = {name: own.get_submodule(name) for name in kinds}
    return {name: _grouped(layers[name], kind) for name, kind in kinds.items() if hasattr(layers[name], "scale")}


class _Block(nn.Module):
    """A block that is called with the number of a sample."""

    def __init__(self, block: nn.Module, calls: Sequence[Call]) -> None:
        super().__init__()
        self.block, self.calls = block, calls

    def forward(self, hidden_states: Tensor, sample: Tensor) -> Tensor:
        args, kwargs, _ = self.calls[int(sample)]
        return _first(self.block(*tree_map(_wide, args), **tree_map(_wide, kwargs)))


class _Model(nn.Module):
    def __init__(self, block: nn.Module, calls: Sequence[Call], config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(block, calls)])
        self.head = nn.Identity()  # the package takes the last module for the output layer
        self.config, self.name_or_path = config, ""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def _layer(kind: Kind) -> dict[str, Any]:
    return {"bits": kind.bits, "group_size": kind.group_size, "sym": kind.symmetric, "data_type": "int", "act_bits": 16}


def _others(model: nn.Module, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    own = {f"{_PLACE}.block.{name}" for name in kinds}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: {"bits": 16, "act_bits": 16} for name in linear - own}


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _first(returned: Any) -> Tensor:
    """Returns the hidden states, which blocks return alone or before other values."""
    found = returned if isinstance(returned, Tensor) else returned[0]
    assert isinstance(found, Tensor)
    return found


def _grouped(layer: Any, kind: Kind) -> QuantizedTensor:
    """Converts a layer that the package has tuned: its weight is scale * (q - zero), rounded to its own dtype."""
    weight: Tensor = layer.weight.detach()
    shape = weight.shape[0], weight.shape[1] // kind.group_size
    scales = layer.scale.to(weight.device).reshape(shape).to(kind.scale_dtype)
    zeros = 2 ** (kind.bits - 1) if kind.symmetric else layer.zp.to(weight.device).reshape(*shape, 1).float()
    steps = weight.float().unflatten(1, (shape[1], kind.group_size)) / scales.float().unsqueeze(2)
    qweight = (steps.round() + zeros).clamp(0, 2**kind.bits - 1).to(torch.uint8).flatten(1)
    apart = zeros.squeeze(2).to(torch.uint8) if isinstance(zeros, Tensor) else None
    return QuantizedTensor(qweight, scales, apart, None, kind.bits, kind.group_size, None)
