"""How weights are rounded: to nearest, by GPTQ, and by AutoRound."""

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

from fastgen.quantization.checkpoint import QuantizedTensor

# ---- to nearest: makes the grid of a weight, and rounds each weight to its nearest point

# Parts of the range that a grid may cover, tried to find one that fits better than the grid of all weights.
_SHRINKS = tuple(1 - step / 40 for step in range(17))


class Grid(NamedTuple):
    """The points that the weights of a layer may take: scale * (q - zero) for q from 0 to 2**bits - 1."""

    scales: Tensor  # [N, groups], in the dtype that they are stored in
    zeros: Tensor | None  # uint8 [N, groups]; None if all are 2**(bits - 1)
    bits: int
    group_size: int

    def of_group(self, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
        """Returns scales and zeros of a group, [N] each."""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, group].to(dtype)
        return self.scales[:, group].to(dtype), zeros


class Kind(NamedTuple):
    """The properties of a layer's grids."""

    bits: int = 4  # 4 or 8
    group_size: int = 64  # divides the layer's K
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16


def make_grid(weight: Tensor, kind: Kind, shrink: float = 1.0) -> Grid:
    """Makes a grid for each n and group that covers all of the group's weights.

    Symmetric: the largest absolute value gets the largest q, and the zero point is 2**(bits - 1). Asymmetric: from the
    least weight to the largest, including 0, so that 0 stays 0. Scales are rounded to the dtype that they are stored in
    before anything is rounded to the grid.

    Args:
        weight: [N, K].
        shrink: the part of that range that the grid covers instead.

    Raises:
        ValueError: K is not in whole groups, or a weight is NaN or infinite.
    """
    groups = _groups(weight, kind.group_size)
    if not bool(groups.isfinite().all()):
        raise ValueError("some of the weights are NaN or infinite")
    if kind.symmetric:
        scales = _stored(groups.abs().amax(2) * (shrink / (2 ** (kind.bits - 1) - 1)), kind.scale_dtype)
        return Grid(scales, None, kind.bits, kind.group_size)
    largest = 2**kind.bits - 1
    least, most = groups.amin(2).clamp(max=0) * shrink, groups.amax(2).clamp(min=0) * shrink
    scales = _stored((most - least) / largest, kind.scale_dtype)
    zeros = (-least / scales.float()).round().clamp(0, largest).to(torch.uint8)
    return Grid(scales, zeros, kind.bits, kind.group_size)


def best_grid(weight: Tensor, kind: Kind, importance: Tensor) -> Grid:
    """Returns, of grids with shrinking ranges, the one whose nearest points have the least sum of importance *
    error**2.

    Chosen separately for each n and group of the weight, [N, K]. `importance`, [K], is not negative.
    """
    groups, weights = _groups(weight, kind.group_size), importance.float().view(-1, kind.group_size)
    best, least = make_grid(weight, kind), torch.full(groups.shape[:2], torch.inf, device=weight.device)
    for shrink in _SHRINKS:
        grid = make_grid(weight, kind, shrink)
        points = (_nearest(groups, grid) - _zeros(grid)) * grid.scales.float().unsqueeze(2)
        errors = ((points - groups).square() * weights).sum(2)
        better = errors < least
        zeros = None if best.zeros is None or grid.zeros is None else torch.where(better, grid.zeros, best.zeros)
        best = best._replace(scales=torch.where(better, grid.scales, best.scales), zeros=zeros)
        least = torch.minimum(errors, least)
    return best


def nearest(values: Tensor, scales: Tensor, zeros: Tensor | int, bits: int) -> Tensor:
    """Returns the quantised values of the nearest points, in the dtype of `values`; scales and zeros are broadcast."""
    return (values / scales + zeros).round().clamp(0, 2**bits - 1)


def round_to_nearest(weight: Tensor, grid: Grid) -> QuantizedTensor:
    """Rounds each weight, [N, K], to its nearest point."""
    return on_grid(_nearest(_groups(weight, grid.group_size), grid).view_as(weight), grid)


def on_grid(qweight: Tensor, grid: Grid) -> QuantizedTensor:
    """Returns quantised values of a grid, [N, K], as a weight."""
    return QuantizedTensor(qweight.to(torch.uint8), grid.scales, grid.zeros, None, grid.bits, grid.group_size, None)


def _groups(weight: Tensor, group_size: int) -> Tensor:
    n, k = weight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"{k} in_features are not whole groups of {group_size}")
    return weight.float().reshape(n, -1, group_size)


def _nearest(groups: Tensor, grid: Grid) -> Tensor:
    return nearest(groups, grid.scales.float().unsqueeze(2), _zeros(grid), grid.bits)


def _zeros(grid: Grid) -> Tensor | int:
    return 2 ** (grid.bits - 1) if grid.zeros is None else grid.zeros.float().unsqueeze(2)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scales as they are stored: never 0, because they are divisors. A group of zeros may have any scale."""
    limits = torch.finfo(dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return scales.clamp(limits.tiny * limits.eps, limits.max).to(dtype)


# ---- GPTQ: rounding that compensates for its errors (Frantar et al., 2022, "GPTQ: Accurate Post-Training Quantization
# for Generative Pre-trained Transformers", Algorithm 1)
#
# Columns of the weight are rounded one after the other. The columns that are not yet rounded compensate for the error
# of each, according to the second derivatives of the layer's squared output error. These form its Hessian, which is the
# same for every output: the sum of x x^T over the calibration inputs x.

DAMPING = 0.01
_COLUMNS = 128  # their errors reach later columns in one product (the paper's section 3.3, step 2)


class Plan(NamedTuple):
    """How layers with the same inputs are rounded. It does not depend on their weights."""

    order: Tensor  # int64 [inputs]: the columns in the order of rounding
    rows: Tensor
    """[inputs, inputs], upper triangular: row j, divided by its diagonal element, gives how the columns from j on
    compensate for the error of column j. In the order of `order`.
    """


def plan(hessian: Tensor, damping: float = DAMPING) -> Plan:
    """Returns the order of the columns, largest activations first ("act-order"), and the upper triangular U with U^T U
    = the inverse of the damped Hessian.

    Args:
        hessian: [inputs, inputs], float32 or float64: the sum of x x^T.
        damping: the part of the mean of the Hessian's diagonal that is added to the diagonal; multiplied by 10
            repeatedly if it is too small for a positive definite matrix.

    Raises:
        ValueError: the Hessian has elements that are NaN or infinite, or the damping is not positive.
    """
    if not damping > 0:
        raise ValueError(f"the damping is {damping}: it must be more than 0")
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return Plan(order, _compensation(hessian, damping, order))


def gptq(weight: Tensor, grid: Grid, plan: Plan) -> QuantizedTensor:
    """Rounds the weight to a grid, with a small error of the layer's output on the calibration inputs.

    The grid is known beforehand. So columns can be rounded in any order while their groups stay contiguous ("static
    groups"). An input that was always 0 is rounded to nearest. The weight, [N, K], is updated in the dtype of the plan.
    """
    order, rows = plan
    inputs = weight.shape[1]
    values = weight.to(rows.dtype)[:, order]
    qweight = torch.empty_like(values)
    groups = (order // grid.group_size).tolist()
    for first in range(0, inputs, _COLUMNS):
        last = min(first + _COLUMNS, inputs)
        errors = torch.empty_like(values[:, first:last])
        for column in range(first, last):
            scales, zeros = grid.of_group(groups[column], values.dtype)
            rounded = nearest(values[:, column], scales, zeros, grid.bits)
            qweight[:, column] = rounded
            error = (values[:, column] - (rounded - zeros) * scales) / rows[column, column]
            values[:, column:last] -= torch.outer(error, rows[column, column:last])
            errors[:, column - first] = error
        values[:, last:] -= errors @ rows[first:last, last:]
    return on_grid(qweight[:, torch.argsort(order)], grid)


def _compensation(hessian: Tensor, damping: float, order: Tensor) -> Tensor:
    # In float64, because few samples make a nearly singular matrix.
    ordered = hessian[order][:, order].double()
    diagonal = ordered.diagonal()
    mean = diagonal.mean()
    # An input that was always 0 has a row and column of zeros: it neither compensates for others, nor is compensated
    # for.
    diagonal[diagonal == 0] = mean if mean > 0 else 1
    if not bool(ordered.isfinite().all()):
        raise ValueError("the Hessian has elements that are NaN or infinite")
    while True:
        damped = ordered.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper.to(hessian.dtype)
        damping *= 10


def output_error(weight: Tensor, quantised: Tensor, hessian: Tensor) -> float:
    """Returns ||(W - Q) X|| / ||W X|| in Frobenius norms, for a Hessian X X^T; 0 if W X is 0 and both weights are
    equal.

    Both weights are [N, K].
    """
    weight = weight.to(hessian.dtype)
    lost, whole = (_energy(part, hessian) for part in (weight - quantised.to(hessian.dtype), weight))
    return (lost / whole) ** 0.5 if whole > 0 else (float("inf") if lost > 0 else 0.0)


def _energy(weight: Tensor, hessian: Tensor) -> float:
    return max(float(((weight @ hessian) * weight).sum(dtype=torch.float64)), 0.0)


# ---- AutoRound: rounding that is tuned block by block (Cheng et al., 2024, "Optimize Weight Rounding via Signed
# Gradient Descent for the Quantization of LLMs")
#
# The package `auto-round` implements it (tested: 0.16.1). It tunes in which direction each weight of a block is
# rounded, and how much of its range a group covers, so that the block returns what it did in floating point. It gets
# one block at a time, with the inputs that calibration has kept; the quantised values and scales are read back.

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
