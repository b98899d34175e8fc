"""The forms that layers take while a model generates: each stands for the `forward` of one layer.

A call does not use a quantised copy that was made before it began, even if that belongs to a call that still runs in
another thread, unless the user asks for it (`packed_weights="keep"`). `fastgen.decoding.weights` has the copies.
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
    """Inside this, linear layers run on torch's own products: what is captured is made of these."""
    return patching.held(_plain_linear, True)


# By layer of a model, what stands for its own product.
Overrides = Mapping[nn.Module, Callable[[Tensor], Tensor]]
_overridden_linear: ContextVar[Overrides | None] = ContextVar("fastgen_overridden_linear", default=None)


def override_linear(overrides: Overrides) -> AbstractContextManager[None]:
    """Inside this, the linear layers among these multiply so in the calling thread, if they have a faster form."""
    return patching.held(_overridden_linear, overrides)


def serves(x: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """Whether a function of FastGen's serves this input now."""
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
    """The parameter of a linear layer that has one."""
    weight = module._parameters["weight"]
    assert weight is not None  # the caller has checked
    return weight


class Replacement:
    """What stands for the `forward` of a layer while the model generates.

    Attributes:
        active: the model generates. A user who has wrapped this `forward` meanwhile keeps it.
    """

    __slots__ = ("_module", "_plain", "active")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plain = module.forward
        self.active = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model, made meanwhile, has the ordinary forward pass of its own layer.
        return getattr, (self._module, "forward")

    def guarded(self) -> Hashable:
        """What a captured step has of it that may change, besides the module's parameters and settings."""
        return None

    def _input(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The layer's input, if it is the only argument; None for a call that is left to the layer itself.

        An input by keyword is left, too: its name differs between classes.
        """
        return arguments[0] if self.active and len(arguments) == 1 and not named else None


class FunctionForm(Replacement):
    """One function in place of the operators of a layer, where it serves the layer's input."""

    __slots__ = ("_function", "_serves")

    def __init__(
        self, module: nn.Module, function: Callable[[Tensor], Tensor], serves: Callable[[Any], bool] = serves
    ) -> None:
        super().__init__(module)
        self._function, self._serves = function, serves

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        x = self._input(arguments, named)  # a norm with a gate beside its input, say, is more than the function
        return self._function(x) if self._serves(x) else self._plain(*arguments, **named)


class _LinearForm(Replacement):
    """A linear layer with a kernel of FastGen's, where `_product` has one."""

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
            if not self._is_exact():  # the result would not be the one that the user asks for
                raise
            self._failed, y = True, None
            counters.count_fallback("linear layer", f"{type(error).__name__}: {error}")
        return self._plain(x) if y is None else y

    def _product(self, x: Tensor) -> Tensor | None:
        """The result, or None where torch's product is as good."""
        raise NotImplementedError

    def _is_exact(self) -> bool:
        """Whether the layer reads its own weight, or an exact copy, so that torch's product may stand in."""
        return True


class FloatLinear(_LinearForm):
    """A linear layer on its unpacked weight, with the kernel that `fastgen.ops.linear.choose` names."""

    __slots__ = ("_checked", "_transposed")

    def __init__(self, module: nn.Module, transposed: bool) -> None:
        super().__init__(module)
        self._transposed = transposed
        # Weight and bias, and whether the layer is plain. Replaced as one: other threads read it.
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
    """A linear layer on a quantised copy of its weight, which is made when the layer is used first.

    Attributes:
        used: something was multiplied with the copy.
    """

    __slots__ = ("_since", "_transposed", "_weight", "form", "used")

    def __init__(self, module: nn.Module, transposed: bool, form: cache.Format) -> None:
        super().__init__(module)
        self.form = form
        self.used = False
        self._transposed = transposed
        self._since = cache.now()  # an older copy, which a draft has made, does not count
        self._weight: cache.DerivedWeight | None = None

    def _is_exact(self) -> bool:
        return False

    def guarded(self) -> Hashable:
        parameter, weight = self._module._parameters.get("weight"), self._weight
        if parameter is None or weight is None or not weight.is_of(parameter):
            return None
        return weight.number

    def begin_call(self) -> None:
        """A copy that was made before does not count. Running products are not disturbed."""
        self._since = cache.now()

    def end_call(self) -> None:
        """Only a copy may outlive the call, if the user wants that."""
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
            return None  # torch raises for an input that does not fit
        copy = weight.required(self._since)
        self.used = True
        return formats.multiply_low_bit(x, copy, parameters["bias"])
