"""The forms of layers while a model generates: each replaces the `forward` of one layer.

A call does not use a quantised copy made before it began, even one of a call that still runs in another thread, unless
the user asks for it (`packed_weights="keep"`). `fastgen.decoding.weights` holds the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import counters, interrupts, patching
from fastgen.decoding.modules import is_plain
from fastgen.decoding.weights import cache, formats
from fastgen.ops.linear import choose

_plain_linear: ContextVar[bool] = ContextVar("fastgen_plain_linear", default=False)


def plain_linear() -> AbstractContextManager[None]:
    """Makes linear layers run on torch's own products, of which captures consist, inside this context."""
    return patching.held(_plain_linear, True)


# Functions that replace the products of some layers.
Overrides = Mapping[nn.Module, Callable[[Tensor], Tensor]]
_overridden_linear: ContextVar[Overrides | None] = ContextVar("fastgen_overridden_linear", default=None)


def override_linear(overrides: Overrides) -> AbstractContextManager[None]:
    """Inside this, the calling thread uses these functions for the products of layers that have a faster form."""
    return patching.held(_overridden_linear, overrides)


def serves(x: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """Whether a function of FastGen's can process this input now."""
    return (
        type(x) is Tensor
        and x.dtype is dtype
        and x.device.type == device
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device)
        and not torch.compiler.is_compiling()
        and patching.is_active()
    )


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight parameter of a linear layer that has one."""
    weight = module._parameters["weight"]
    assert weight is not None  # the caller has checked
    return weight


class Replacement:
    """Replaces the `forward` of a layer while the model generates.

    Attributes:
        active: the model generates. If a user has wrapped this `forward` meanwhile, the wrapper keeps it.
        holders: what uses this form: more than one if models share the layer, and generate at the same time.
    """

    __slots__ = ("_module", "_plain", "active", "holders")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plain = module.forward
        self.active = True
        self.holders: set[object] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model made meanwhile has the ordinary forward pass of its own layer.
        return getattr, (self._module, "forward")

    def guarded(self) -> Hashable:
        """Returns what a captured step depends on besides the module's parameters and settings."""
        return None

    def _input(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns the layer's input if it is the only argument; None for a call that is left to the layer itself.

        An input passed by keyword is left to it, too, because its name differs between classes.
        """
        return arguments[0] if self.active and len(arguments) == 1 and not named else None


class FunctionForm(Replacement):
    """One function that replaces the operators of a layer, if it serves the layer's input."""

    __slots__ = ("_function", "_serves")

    def __init__(
        self, module: nn.Module, function: Callable[[Tensor], Tensor], serves: Callable[[Any], bool] = serves
    ) -> None:
        super().__init__(module)
        self._function, self._serves = function, serves

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        x = self._input(arguments, named)  # None for more than an input, such as a norm with a gate
        return self._function(x) if self._serves(x) else self._plain(*arguments, **named)


class _LinearForm(Replacement):
    """A linear layer with one of FastGen's kernels, if `_product` has one."""

    __slots__ = ("_device", "_dtype", "_failed")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        weight = weight_of(module)
        self._dtype, self._device = weight.dtype, weight.device.type
        self._failed = False

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        x = self._input(arguments, named)
        overrides = _overridden_linear.get()
        if overrides is not None and x is not None and self._module in overrides:
            return overrides[self._module](x)
        if self._failed or (_plain_linear.get() and self._is_exact()) or not serves(x, self._dtype, self._device):
            return self._plain(*arguments, **named)
        try:
            y = self._product(x)
        except Exception as error:
            interrupts.pass_on(error)
            if not self._is_exact():  # torch's result would not be in the precision that the user asks for
                raise
            self._failed, y = True, None
            counters.count_fallback("linear layer", f"{type(error).__name__}: {error}")
        return self._plain(x) if y is None else y

    def _product(self, x: Tensor) -> Tensor | None:
        """Returns the result, or None if torch's product is as good."""
        raise NotImplementedError

    def _is_exact(self) -> bool:
        """Whether the layer reads its own weight, or an exact copy, so that torch's product may replace this one."""
        return True


class FloatLinear(_LinearForm):
    """A linear layer on its unpacked weight, with the kernel that `fastgen.ops.linear.choose` selects."""

    __slots__ = ("_checked", "_transposed")

    def __init__(self, module: nn.Module, transposed: bool) -> None:
        super().__init__(module)
        self._transposed = transposed
        # Weight and bias, and whether the layer is plain. Replaced as a whole, because other threads read it.
        self._checked: tuple[Tensor | None, Tensor | None, bool] = (None, None, False)

    def _product(self, x: Tensor) -> Tensor | None:
        parameters = self._module._parameters
        if "bias" not in parameters:  # a user has made it an attribute
            return None
        weight, bias = parameters.get("weight"), parameters["bias"]
        former, former_bias, plain = self._checked
        if weight is not former or bias is not former_bias:
            plain = is_plain(self._module, self._dtype, self._device)
            self._checked = weight, bias, plain
        if weight is None or not plain:
            return None
        rows = weight.t() if self._transposed else weight  # [N, K]
        kernel = choose.kernel_for(x, rows, bias)
        return None if kernel is None else kernel.multiply(x, rows, bias)


class QuantizedLinear(_LinearForm):
    """A linear layer on a quantised copy of its weight, which is made when the layer is first used.

    Attributes:
        used: a product has used the copy.
    """

    __slots__ = ("_since", "_transposed", "_weight", "form", "used")

    def __init__(self, module: nn.Module, transposed: bool, form: cache.Format) -> None:
        super().__init__(module)
        self.form = form
        self.used = False
        self._transposed = transposed
        self._since = cache.now()  # an older copy, which a draft has made, is not used
        self._weight: cache.DerivedWeight | None = None

    def _is_exact(self) -> bool:
        return False

    def guarded(self) -> Hashable:
        parameter, weight = self._module._parameters.get("weight"), self._weight
        if parameter is None or weight is None or not weight.is_of(parameter):
            return None
        return weight.number

    def is_like(self, other: QuantizedLinear) -> bool:
        """Whether it serves what another form of the same layer serves. `model.half()` keeps layers and parameters."""
        return (self.form, self._dtype, self._device) == (other.form, other._dtype, other._device)

    def begin_call(self) -> None:
        """Invalidates copies that were made before. Products that are running are not disturbed."""
        self._since = cache.now()

    def end_call(self) -> None:
        """Forgets the weight, unless it has a copy that the user wants to outlive the call."""
        self.used = False
        if self._weight is not None and self._weight.copy is None:
            self._weight = None

    def _product(self, x: Tensor) -> Tensor | None:
        parameters = self._module._parameters
        parameter = parameters.get("weight")
        if parameter is None:
            return None
        weight = self._weight  # read once: another thread may replace it
        if weight is None or not weight.is_of(parameter):
            if not is_plain(self._module, self._dtype, self._device):
                self._weight = None
                return None
            weight = self._weight = cache.of(parameter.t() if self._transposed else parameter, self.form, parameter)
        if x.shape[-1] != parameter.shape[0 if self._transposed else 1]:
            return None  # torch raises an error for an input of the wrong size
        copy = weight.required(self._since)
        self.used = True
        return formats.multiply_low_bit(x, copy, parameters["bias"])
