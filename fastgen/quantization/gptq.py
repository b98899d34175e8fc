"""GPTQ: rounding that compensates for its errors (Frantar et al., 2022, "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", Algorithm 1).

Columns of the weight are rounded one after the other. The columns that are not yet rounded compensate for the error of
each, according to the second derivatives of the layer's squared output error. These form its Hessian, which is the same
for every output: the sum of x x^T over the calibration inputs x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.quantization.quantized_tensor import QuantizedTensor
from fastgen.quantization.rtn import Grid, nearest, on_grid

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
