"""Quantises the linear layers of a block, using its calibration inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.quantization import autoround
from fastgen.quantization.blocks import Block, Carried, seen_by
from fastgen.quantization.gptq import DAMPING, Plan, gptq, output_error, plan
from fastgen.quantization.quantized_tensor import QuantizedTensor, dequantized
from fastgen.quantization.rtn import Kind, best_grid, make_grid, round_to_nearest

_LEAST_GROUP = 16  # smaller groups need more memory for scales than they save


class Recipe(NamedTuple):
    method: str = "gptq"  # or "rtn", or "autoround"
    bits: int = 4  # 4 or 8
    group_size: int = 64
    symmetric: bool = True
    damping: float = DAMPING
    max_error: float | None = None
    """Layers whose relative output error is larger get 8 bits. Layers that share their input are treated alike."""
    eight: frozenset[str] = frozenset()
    """Layers that get 8 bits, whatever their errors."""
    iterations: int = 200
    """Steps of "autoround" for each block."""


class Quantised(NamedTuple):
    weight: QuantizedTensor
    error: float  # relative output error on the calibration inputs


class Choice(NamedTuple):
    """Layers with the same input, which get 4 or 8 bits together."""

    names: tuple[str, ...]
    gain: float  # how much 8 bits reduce the sum of their relative output errors
    weights: int  # number of weights
    share: float  # bits of scale per weight


class _Inputs:
    """The statistics of inputs that some layers of a block share."""

    def __init__(self, layer: nn.Linear) -> None:
        self.names: list[str] = []
        inputs = layer.in_features
        self.hessian = torch.zeros(inputs, inputs, dtype=torch.float32, device=layer.weight.device)

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self.hessian.addmm_(rows.T, rows)


def quantise_block(
    block: Block,
    carried: Carried,
    recipe: Recipe,
    step: Callable[[], object],
    wanted: Sequence[Any] = (),
    config: Any = None,
) -> dict[str, Quantised]:
    """Quantises the layers of a block, and returns them by name. The block itself is not changed.

    Leaves out layers whose in_features no group size divides; see `group_size_of`.

    Args:
        step: called after each layer.
        wanted: the block's result on each sample in the original model, which "autoround" approximates. Without it, and
            for layers that AutoRound leaves out, "gptq" is used.
        config: the model's configuration, for "autoround".

    Raises:
        ValueError: an input or a weight is NaN or infinite.
    """
    layers = {name: layer for name, layer in block.linears.items() if group_size_of(layer.in_features, recipe)}
    found: dict[str, Quantised] = {}
    tuned = _tuned(block, layers, carried, recipe, wanted, config) if recipe.method == "autoround" and wanted else {}
    for inputs in _collect(block, carried, layers):
        if not bool(inputs.hessian.isfinite().all()):
            raise ValueError(f"the inputs of {inputs.names[0]} are NaN or infinite on the calibration text")
        shared = {name: layers[name].weight for name in inputs.names}
        # Computed once for all of them: it takes most of the time.
        left = shared.keys() - tuned.keys()
        rounding = plan(inputs.hessian, recipe.damping) if recipe.method != "rtn" and left else None
        kind = recipe._replace(bits=8) if recipe.eight.intersection(shared) else recipe
        quantised = {
            name: quantise(weight, inputs.hessian, kind, rounding)
            if name in left
            else _measured(tuned[name], weight, inputs.hessian)
            for name, weight in shared.items()
        }
        if recipe.max_error is not None and any(layer.error > recipe.max_error for layer in quantised.values()):
            more = recipe._replace(bits=8)
            quantised = {name: quantise(weight, inputs.hessian, more, rounding) for name, weight in shared.items()}
        found |= quantised
        for _ in quantised:
            step()
    return {name: found[name] for name in layers}


def choices_of(block: Block, carried: Carried, recipe: Recipe) -> list[Choice]:
    """Returns the gains of 8 bits, rounded to nearest, for a block's layers; those that share inputs are one choice."""
    layers = {name: layer for name, layer in block.linears.items() if group_size_of(layer.in_features, recipe)}
    found = []
    for inputs in _collect(block, carried, layers):
        weights = [layers[name].weight for name in inputs.names]
        errors = {
            bits: sum(quantise(weight, inputs.hessian, nearest).error for weight in weights)
            for bits in (4, 8)
            for nearest in [recipe._replace(method="rtn", bits=bits)]
        }
        size = group_size_of(weights[0].shape[1], recipe) or recipe.group_size
        share = weights[0].element_size() * 8 / size  # of a scale, which has the type of the weight
        count = sum(weight.numel() for weight in weights)
        found.append(Choice(tuple(inputs.names), errors[4] - errors[8], count, share))
    return found


def most_gaining(choices: Sequence[Choice], bits_per_weight: float) -> frozenset[str]:
    """Returns the layers that get 8 bits: those that gain most per byte, while the average stays within the budget.

    Raises ValueError if 4 bits with their scales already exceed it.
    """
    weights = sum(choice.weights for choice in choices)
    used = sum(choice.weights * (4 + choice.share) for choice in choices)
    budget = bits_per_weight * weights
    if used > budget:
        raise ValueError(
            f"4 bits with their scales are {used / weights:.2f} bits per weight, of {bits_per_weight} asked for"
        )
    chosen: list[str] = []
    for choice in sorted(choices, key=lambda choice: -choice.gain / choice.weights):
        if choice.gain > 0 and used + 4 * choice.weights <= budget:
            used += 4 * choice.weights
            chosen += choice.names
    return frozenset(chosen)


@torch.no_grad()
def quantise(weight: Tensor, hessian: Tensor, recipe: Recipe, rounding: Plan | None = None) -> Quantised:
    """Quantises a weight, [N, K], by the recipe, ignoring its `max_error`.

    With "gptq", takes the best of three: GPTQ on the grid that covers all weights, GPTQ on the grid of the least
    weighted error, and rounding to nearest. So the error on the calibration inputs is never larger than that of the
    last.

    Args:
        rounding: GPTQ's plan for this Hessian, if there is one already.

    Raises:
        ValueError: no group size divides K, or a weight is NaN or infinite.
    """
    kind = _kind(weight, recipe)
    grid = make_grid(weight, kind)
    candidates = [round_to_nearest(weight, grid)]
    if recipe.method != "rtn":
        diagonal = hessian.diagonal()
        importance = diagonal if bool(diagonal.any()) else torch.ones_like(diagonal)
        rounding = rounding or plan(hessian, recipe.damping)
        for possible in (grid, best_grid(weight, kind, importance)):
            candidates.append(gptq(weight, possible, rounding))
    return min((_measured(one, weight, hessian) for one in candidates), key=lambda quantised: quantised.error)


def _kind(weight: Tensor, recipe: Recipe) -> Kind:
    size = group_size_of(weight.shape[1], recipe) or recipe.group_size
    # In the dtype of the weight, in which compressed-tensors multiplies values and scales.
    return Kind(recipe.bits, size, recipe.symmetric, weight.dtype)


def _measured(quantised: QuantizedTensor, weight: Tensor, hessian: Tensor) -> Quantised:
    return Quantised(quantised, output_error(weight, dequantized(quantised, weight.dtype), hessian))


def _tuned(
    block: Block, layers: dict[str, nn.Linear], carried: Carried, recipe: Recipe, wanted: Sequence[Any], config: Any
) -> dict[str, QuantizedTensor]:
    """Returns the layers by name as AutoRound rounds them, without those that it leaves out."""
    own = {name: name.removeprefix(f"{block.name}.") for name in layers}
    kinds = {
        own[name]: _kind(layer.weight, recipe._replace(bits=8) if name in recipe.eight else recipe)
        for name, layer in layers.items()
    }
    calls = [autoround.Call(*carried.inputs(block, sample), returned) for sample, returned in enumerate(wanted)]
    found = autoround.tune(block.module, kinds, calls, config, recipe.iterations) if kinds else {}
    return {name: found[short] for name, short in own.items() if short in found}


def group_size_of(k: int, recipe: Recipe) -> int | None:
    """Returns the largest of the recipe's group size and its halves that divides K; None if that is too small."""
    size = recipe.group_size
    while k % size and size % 2 == 0:
        size //= 2
    return size if k % size == 0 and size >= min(_LEAST_GROUP, recipe.group_size) else None


@torch.no_grad()
def use(block: Block, quantised: dict[str, QuantizedTensor]) -> None:
    """Sets the weights of a block's layers to the dequantised values."""
    for name, weight in quantised.items():
        layer = block.linears[name]
        layer.weight.copy_(dequantized(weight, layer.weight.dtype))


def _collect(block: Block, carried: Carried, layers: dict[str, nn.Linear]) -> list[_Inputs]:
    """Collects the inputs of the layers on all samples; once for layers that get the same tensor."""
    found: dict[str, _Inputs] = {}
    leaders: dict[str, _Inputs] = {}
    latest: list[tuple[Tensor, _Inputs]] = []

    def hook(name: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if name not in found:  # first call: it shares the previous layer's input, or begins a new one
                same = bool(latest) and latest[0][0] is x
                found[name] = latest[0][1] if same else leaders.setdefault(name, _Inputs(layers[name]))
                found[name].names.append(name)
            if name in leaders:
                leaders[name].add(x)
            latest[:] = [(x, found[name])]

        return seen

    with seen_by((layer, hook(name)) for name, layer in layers.items()):
        for _ in carried.run(block):
            latest.clear()
    for name in [name for name in layers if name not in found]:  # no sample has reached it
        leaders[name] = _Inputs(layers[name])
        leaders[name].names.append(name)
    return list(leaders.values())
