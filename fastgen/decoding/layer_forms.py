"""The forms of layers while a model generates: each replaces the `forward` of one layer.

**Linear layers.** A call does not use a quantised copy made before it began, even one of a call that still runs in
another thread, unless the user asks for it (`packed_weights="keep"`). `fastgen.decoding.derived_weights` holds them.

**Half precision on a CPU without instructions for it.** With AVX2, torch multiplies number by number. The two
convolutions of a Whisper encoder in bfloat16 then take more than half of the call's time, and the products of attention
two thirds of a prefill, in models that spell attention out. In float32, with the result rounded once, they take a few
percent of it.

**RMS norms** are one kernel in a captured step. Every model has its own class for them. So the form that a layer
computes is found by probing: the layer runs on pseudo-random values with a pseudo-random weight, and its results must
equal those of one form. A probe is valid for layers of a class that have the same width and the same attributes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fastgen import counters, interrupts, patching, settings
from fastgen.decoding import derived_weights
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import is_slow, upcast
from fastgen.ops.rms_norm import available, reference, rms_norm

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
    """Returns the weight parameter of a layer that has one."""
    weight = module._parameters["weight"]
    assert weight is not None  # the caller has checked
    return weight


def runs_own_forward(module: nn.Module) -> bool:
    """Whether a module runs the forward pass of its class.

    An attribute may hold that very method: accelerate leaves it there when it removes its hooks, and so does a copy of
    the model that was made during a call.
    """
    return "forward" not in vars(module) or has_former_forward(module, type(module).forward)


def has_former_forward(module: nn.Module, former: object) -> bool:
    """Whether an attribute holds a module's forward pass as it was when its class had this `former` function."""
    own = vars(module).get("forward")
    # Not compared with `==`: a wrapper that looks like the method may be equal to it.
    return type(own) is MethodType and own.__self__ is module and own.__func__ is former


def is_plain(
    module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu", *, dimensions: int = 2
) -> bool:
    """Whether a layer has only a weight and maybe a bias, of this dtype and on this type of device.

    Args:
        dimensions: of the weight.
    """
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            # A hook or a parametrisation may have made an attribute of that name.
            if name == "weight" or getattr(module, name, None) is not None:
                return False
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
            return False
        if parameter.dtype is not dtype or parameter.device.type != device or parameter.layout != torch.strided:
            return False
        if parameter.dim() != (dimensions if name == "weight" else 1):
            return False
        if name == "bias" and not parameter.is_contiguous():
            return False
    return not parametrize.is_parametrized(module)


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
        return choose.linear(x, rows, bias)


class QuantizedLinear(_LinearForm):
    """A linear layer on a quantised copy of its weight, which is made when the layer is first used.

    Attributes:
        used: a product has used the copy.
    """

    __slots__ = ("_since", "_transposed", "_weight", "form", "used")

    def __init__(self, module: nn.Module, transposed: bool, form: derived_weights.Format) -> None:
        super().__init__(module)
        self.form = form
        self.used = False
        self._transposed = transposed
        self._since = derived_weights.now()  # an older copy, which a draft has made, is not used
        self._weight: derived_weights.DerivedWeight | None = None

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
        self._since = derived_weights.now()

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
            weight = self._weight = derived_weights.of(
                parameter.t() if self._transposed else parameter, self.form, parameter
            )
        if x.shape[-1] != parameter.shape[0 if self._transposed else 1]:
            return None  # torch raises an error for an input of the wrong size
        copy = weight.required(self._since)
        self.used = True
        return choose.linear(x, copy, parameters["bias"])


# ---- half precision

_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # of the weight
# Functions that multiply batches of matrices.
_MATMUL = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})
_BADDBMM = frozenset({torch.baddbmm, Tensor.baddbmm})


def convolution_form(module: nn.Module) -> FunctionForm | None:
    """Returns the form of a convolution; None for any other layer, or if torch's convolution is as good."""
    weight = module._parameters.get("weight")
    dimensions = _DIMENSIONS.get(type(module))
    if weight is None or dimensions is None or not _is_upcast(weight.dtype):
        return None
    if not is_plain(module, weight.dtype, dimensions=dimensions):
        return None
    return FunctionForm(module, partial(_convolve, module), partial(serves, dtype=weight.dtype))


def _convolve(module: nn.Module, x: Tensor) -> Tensor:
    bias = module._parameters["bias"]
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    result = module._conv_forward(x.float(), weight_of(module).float(), None if bias is None else bias.float())
    return result.to(x.dtype)


def upcast_products(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Inside this, the calling thread's batches of products in this type are computed in float32, and rounded once."""
    return _Upcasting() if _is_upcast(dtype) else contextlib.nullcontext()


def _is_upcast(dtype: torch.dtype) -> bool:
    """Whether products of this type are slow, and the user does not ask for torch's own."""
    return is_slow(dtype) and settings.current().packed_weights != "never"


class _Upcasting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        given = [*args, *named.values()]
        if function in _MATMUL and len(given) == 2 and named.keys() <= {"other", "mat2"} and _are_served(given):
            # With a vector, converting the matrices would take longer than the product.
            return upcast(torch.matmul, *given) if given[1].shape[-1] > 1 else function(*args, **named)
        if function in _BADDBMM and named.keys() <= {"batch1", "batch2", "beta", "alpha"}:
            tensors = [each for each in given if isinstance(each, Tensor)]
            if len(tensors) == 3 and _are_served(tensors):
                scales = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
                return upcast(partial(torch.baddbmm, **scales), *tensors)
        return function(*args, **named)


def _are_served(tensors: Sequence[Any]) -> bool:
    """Whether all of these are batches of matrices in one type that is slow."""
    first = tensors[0]
    return (
        isinstance(first, Tensor)
        and is_slow(first.dtype)
        and all(isinstance(each, Tensor) and serves(each, first.dtype) and each.dim() > 2 for each in tensors)
    )


# ---- RMS norms


class NormForm(NamedTuple):
    """What an RMS norm layer computes: the name of its `eps` attribute, and the options of `rms_norm`."""

    eps: str
    rounds_scaled: bool
    offset: float


_fuses_norms: ContextVar[bool] = ContextVar("fastgen_fused_norms", default=False)
_norm_forms: weakref.WeakKeyDictionary[type[nn.Module], dict[Hashable, NormForm | None]] = weakref.WeakKeyDictionary()
# Types of attributes that a layer may have besides its weight: immutable and comparable.
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}


def fused_norms() -> AbstractContextManager[None]:
    """Makes RMS norms run as one kernel inside this context, because a captured step launches it at no cost."""
    return patching.held(_fuses_norms, True)


def serves_norm(module: nn.Module, x: Any) -> bool:
    """Whether the kernel can process a layer's input now."""
    if not _fuses_norms.get():  # first, because outside of a captured step nothing else matters
        return False
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and serves(x, weight.dtype, weight.device.type)
        and x.device == weight.device
        and x.shape[-1:] == weight.shape
    )


def normalise(module: nn.Module, form: NormForm, x: Tensor) -> Tensor:
    eps = getattr(module, form.eps)
    return rms_norm(x, weight_of(module), eps, offset=form.offset, rounds_scaled=form.rounds_scaled)


def norm_form(module: nn.Module) -> NormForm | None:
    """Returns the form of a layer; None if it is no RMS norm, or there is no kernel for its weight."""
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.dim() != 1 or weight.numel() == 0:
        return None
    if len(module._parameters) > 1 or module._buffers or module._modules or not runs_own_forward(module):
        return None
    if not available(weight):
        return None
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    floats = [name for name, value in attributes.items() if type(value) is float]
    if len(floats) != 1 or not _PLAIN_TYPES.issuperset(map(type, attributes.values())):
        return None
    forms = _norm_forms.setdefault(type(module), {})
    key = weight.dtype, weight.numel(), module.training, *attributes.items()
    if key not in forms:
        forms[key] = _probed_norm(module, weight, attributes, floats[0])
    return forms[key]


@torch.no_grad()
def _probed_norm(module: nn.Module, of: Tensor, attributes: dict[str, Any], eps: str) -> NormForm | None:
    """Returns the form whose results equal the layer's, in half precision bit for bit; None if there is none.

    Args:
        of: the layer's weight, for its width, dtype and device.
    """
    width, device = of.numel(), of.device
    values = torch.arange(4 * width, dtype=torch.float32, device=device)
    values = values.mul(12.9898).sin().view(4, width)  # pseudo-random without torch's generator
    values[1:] *= torch.tensor([[1.0], [30.0], [0.1]], dtype=torch.float32, device=device)
    values = values.to(of.dtype)
    weight, x = values[0], values[None, 1:]  # [1, 3, width], as in a model
    try:
        # Not a deep copy, which would also copy objects that hooks hold.
        layer = type(module).__new__(type(module))
        nn.Module.__init__(layer)
        vars(layer).update(attributes, training=module.training)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        setattr(layer, eps, 0.01)  # the layer's own value may be too small to affect the results
        expected = type(layer).forward(layer, x)
    except Exception as error:  # the layer is no norm
        interrupts.pass_on(error)
        return None
    if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype is not x.dtype:
        return None
    for form in (NormForm(eps, True, 0.0), NormForm(eps, False, 0.0), NormForm(eps, False, 1.0)):
        found = reference(x, layer.weight, getattr(layer, eps), form.offset, form.rounds_scaled)
        close = x.dtype is torch.float32 and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        if close or torch.equal(found, expected):
            return form
    return None
