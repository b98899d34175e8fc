"""Layers of a model in a faster form, for as long as it generates.

Inside `FastLayers`, a layer that spells out a function of torch uses that, an RMS norm is one kernel in a captured
step (`fastgen.decoding.norms`), and a linear layer that is its weight and bias alone has a `forward` that
chooses its product (`fastgen.decoding.products`). Hooks keep working: they run around `forward`.

A packed weight counts as long as the parameter is the same object, in the same memory, of the same version. Torch does
not count writing through `parameter.data`. So a call does not use what was packed before it began, even if that belongs
to a call that still runs in another thread, unless the user asks for it (`packed_weights="keep"`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import caches, counters, interrupts, patching, settings
from fastgen.decoding import host_memory, library_code, norms
from fastgen.decoding.modules import modules_of
from fastgen.decoding.parameter_snapshot import ParameterSnapshot, is_plain
from fastgen.decoding.products import HALF, FixedProducts, Gain, HalfProducts, MeasuredProducts, precision_on
from fastgen.interrupts import undoing
from fastgen.memory import free_host_memory
from fastgen.ops import dot_linear, linear, split_linear

# Linear layers whose weights are [outputs, inputs]; with True: [inputs, outputs].
Kinds = Mapping[type[nn.Module], bool]
LINEAR: Kinds = {nn.Linear: False}

# What layers compute that spell it out.
Functions = Mapping[type[nn.Module], Callable[[Tensor], Tensor]]

# Weights of fewer numbers stay with torch: they are in the processor's caches, and calling FastGen's product takes as
# long as it saves.
MIN_WEIGHT = 2**18
# In fewer bits they take less memory, too, and so less time when the cache holds other things as well.
MIN_QUANTISED = 2**16
# At most so much of the memory that is free goes into packed weights.
_MAX_MEMORY = 0.5


_plain_linear: ContextVar[bool] = ContextVar("fastgen_plain_linear", default=False)


def plain_linear() -> AbstractContextManager[None]:
    """Inside this, linear layers run on torch's own products: what is captured is made of these."""
    return patching.held(_plain_linear, True)


# Products of layers of a model that are not their own.
Products = Mapping[nn.Module, Callable[[Tensor], Tensor]]
_overridden_linear: ContextVar[Products | None] = ContextVar("fastgen_overridden_linear", default=None)


def override_linear(products: Products) -> AbstractContextManager[None]:
    """Inside this, the linear layers among these multiply so in the calling thread, if they have a faster form."""
    return patching.held(_overridden_linear, products)


class _PackingBudget:
    """What decides whether a call packs another weight: memory, and the uses of each layer that are certain to come."""

    def __init__(self) -> None:
        self.steps = 0
        self.left: int | None = None  # bytes that may still be packed; unknown before the first

    def has_memory(self, size: int, device: torch.device) -> bool:
        """Whether a weight of so many bytes may be packed."""
        if self.left is None:  # asked for when something is packed, which most calls of small models never do
            self.left = int(free_memory(device) * _MAX_MEMORY)
        return size <= self.left

    def take_memory(self, size: int, device: torch.device) -> bool:
        """The same for one that is kept: there is so much less left then."""
        if not self.has_memory(size, device):
            return False
        self.left -= size
        return True


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_memory()


def _serves(x: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
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


class Replacement:
    """What stands for the `forward` of a layer while the model generates.

    Attributes:
        active: the model generates. Somebody who has wrapped this `forward` meanwhile keeps it.
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
        """The layer's input, if that is all that there is; None for a call that is left to the layer itself.

        The input by its name would be as good, but what its name is differs between classes.
        """
        return arguments[0] if self.active and len(arguments) == 1 and not named else None


class _Function(Replacement):
    """A function for what the layer spells out, where it serves the layer's input."""

    __slots__ = ("_function", "_serves")

    def __init__(
        self, module: nn.Module, function: Callable[[Tensor], Tensor], serves: Callable[[Any], bool] = _serves
    ) -> None:
        super().__init__(module)
        self._function, self._serves = function, serves

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        x = self._input(arguments, named)  # a norm with a gate beside its input, say, is more than the function
        return self._function(x) if self._serves(x) else self._plain(*arguments, **named)


class _OwnProduct(Replacement):
    """A linear layer with a product of FastGen's, where `_product` has one."""

    __slots__ = ("_device", "_dtype", "_failed")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._dtype, self._device = module.weight.dtype, module.weight.device.type
        self._failed = False

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        x = self._input(arguments, named)
        others = _overridden_linear.get()
        if others is not None and x is not None and self._module in others:
            return others[self._module](x)
        if self._failed or (_plain_linear.get() and self._is_exact()) or not _serves(x, self._dtype, self._device):
            return self._plain(*arguments, **named)
        try:
            y = self._product(x)
        except Exception as error:
            interrupts.pass_on(error)
            if not self._can_do_without():
                raise
            self._failed, y = True, None
            counters.count_fallback("linear layer", f"{type(error).__name__}: {error}")
        return self._plain(x) if y is None else y

    def _product(self, x: Tensor) -> Tensor | None:
        """The result, or None where torch's product is as good."""
        raise NotImplementedError

    def _can_do_without(self) -> bool:
        """Called where `_product` fails. Whatever it is, the layer can do what it always did."""
        return True

    def _is_exact(self) -> bool:
        """Whether the layer's weight is multiplied with as it is, or a copy of the same numbers."""
        return True


class _HalfLinear(_OwnProduct):
    """A linear layer in half precision that multiplies with its weight as it is, where that is faster."""

    __slots__ = ("_bias", "_products", "_weight")

    def __init__(self, module: nn.Module, products: HalfProducts) -> None:
        super().__init__(module)
        self._products = products
        self._weight, self._bias = module._parameters["weight"], module._parameters.get("bias")

    def _is_as_it_was(self) -> bool:
        """Whether weight and bias are those that have been looked at."""
        parameters = self._module._parameters
        return parameters.get("weight") is self._weight and parameters.get("bias") is self._bias

    def _product(self, x: Tensor) -> Tensor | None:
        if self._weight is None or not self._is_as_it_was():
            return None
        product = self._products.faster(x, self._weight, self._bias)
        return None if product is None else product(x, self._weight, self._bias)


class _Linear(_OwnProduct):
    """A linear layer with a packed weight, once there is one, and with the weight as it is where that is faster.

    The weight is packed when the time that it would have saved so far comes to what packing costs, or certainly will.
    `used` says that something was multiplied with a packed weight.
    """

    __slots__ = ("_missed", "_transposed", "_weight", "budget", "products", "used")

    def __init__(self, module: nn.Module, transposed: bool, products: FixedProducts, budget: _PackingBudget) -> None:
        super().__init__(module)
        self.products = products
        self.used = False
        self._transposed = transposed
        self.budget = budget
        self._missed = 0.0
        self._weight: ParameterSnapshot | None = None

    @property
    def precision(self) -> str:
        return self.products.precision

    @property
    def form(self) -> tuple[str, int]:
        """Of the packed weight: layers of the same one can have the same."""
        return self.products.precision, self.products.group_size

    def _is_exact(self) -> bool:
        return self.precision == "fp32"

    def guarded(self) -> Hashable:
        parameter, weight = self._module._parameters.get("weight"), self._weight
        if self._is_exact() or parameter is None or weight is None or not weight.is_of(parameter):
            return None
        return weight.number

    def forget(self) -> None:
        """Drops the packed weight, and one that another thread is packing. Products under way are not disturbed."""
        self._missed, self._weight = 0.0, None

    def end_call(self) -> None:
        """Only a packed weight may outlive the call, if the user wants that."""
        self.used = False
        if self._weight is not None and self._weight.panels is None:
            self._weight = None

    def _can_do_without(self) -> bool:
        if self.products.must_pack:
            return False
        self._weight = None
        return True

    def _product(self, x: Tensor) -> Tensor | None:
        parameters = self._module._parameters
        parameter, gain = parameters.get("weight"), self.products.gain(x.numel() // x.shape[-1])
        if parameter is None or not (gain.is_faster or gain.streams or gain.dots or gain.splits or gain.packs):
            return None
        weight = self._weight  # read once: another thread may replace it
        if weight is None or not weight.is_of(parameter):
            if weight is not None and weight.panels is not None:
                self._missed = 0.0  # it has been changed since it was packed: see whether it may be packed again
            weight = self._weight = ParameterSnapshot(parameter, is_plain(self._module, self._dtype, self._device))
        if gain.is_faster:
            if weight.panels is None:
                self._pack_if_due(weight, parameter, gain.seconds)
            if weight.panels is not None:
                self.used = True
                return self.products.multiply(x, weight.panels, parameters["bias"])
        return self._unpacked(gain, x, self._as_rows(parameter), parameters["bias"]) if weight.is_plain else None

    def _unpacked(self, gain: Gain, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product without a packed weight that is kept."""
        # Into memory that the layer before has freed.
        if gain.packs and host_memory.is_kept() and self.budget.has_memory(weight.nbytes, weight.device):
            return self.products.multiply(x, self.products.pack(weight), bias)
        if gain.dots and dot_linear.serves(x, weight, bias):
            return dot_linear.dot_linear(x, weight, bias)
        if gain.splits and split_linear.serves(x, weight, bias):
            return split_linear.split_linear(x, weight, bias)
        return self.products.stream(x, weight, bias) if gain.streams else None

    def _as_rows(self, parameter: Tensor) -> Tensor:
        return parameter.t() if self._transposed else parameter

    def _pack_if_due(self, weight: ParameterSnapshot, parameter: Tensor, gain: float) -> None:
        """Packs the weight once that pays, by what this and earlier products have missed.

        Raises:
            torch.OutOfMemoryError: memory is too short for a weight that must be packed.
        """
        self._missed += gain
        is_due = gain > 0.0 and self._missed + gain * self.budget.steps >= self.products.packing
        if not is_due or not weight.may_be_packed:
            return
        size, device = int(parameter.numel() * self.products.itemsize), parameter.device
        if self.budget.take_memory(size, device) or (self.products.must_pack and size < free_memory(device)):
            weight.panels = self.products.pack(self._as_rows(parameter))
        elif not self.products.must_pack:
            weight.may_be_packed = False
        else:
            raise torch.OutOfMemoryError(
                f"there is no memory for weights in {self.precision}: {size} more bytes are needed. With "
                'linear_products="fixed" no layer goes on in float32 instead'
            )


class _User:
    """A thread that has entered `FastLayers`, and what lets it leave."""

    def __init__(self, thread: int, leave: Callable[[_User], None]) -> None:
        self.thread, self.leaving = thread, undoing(partial(leave, self))


class FastLayers:
    """A context in which layers of a model have a faster form.

    Contexts of the same model, nested or in several threads, share the packed weights. They are dropped when another
    context begins, because that must see the weights as they are then, and when the last one ends. With
    `Settings.packed_weights == "keep"` they live as long as the model. A thread that asks for other products waits
    until the model is free: layers have one form at a time. Inside a context of its own, it has the products of that.
    """

    _lock = threading.RLock()
    _freed = threading.Condition(_lock)
    _of: weakref.WeakKeyDictionary[nn.Module, FastLayers] = weakref.WeakKeyDictionary()
    _shapes: dict[tuple[int, int, int, bool], MeasuredProducts] = {}
    _half_shapes: dict[tuple[int, int, int, torch.dtype], HalfProducts] = {}

    def __init__(self, model: nn.Module, kinds: Kinds, functions: Functions) -> None:
        self._model = weakref.ref(model)
        self._kinds = kinds
        self._functions = functions
        self._users: list[_User] = []  # each as often as its thread has entered
        self._asked: tuple[str, ...] = ()  # for which products
        self._budget = _PackingBudget()
        self._installed: dict[nn.Module, Replacement] = {}
        self._kept: dict[nn.Module, Replacement] = {}

    @classmethod
    def of(cls, model: nn.Module, kinds: Kinds = LINEAR, functions: Functions = MappingProxyType({})) -> FastLayers:
        with cls._lock:
            return cls._of.setdefault(model, cls(model, kinds, functions))

    @classmethod
    def drop_kept(cls) -> None:
        """Drops the packed weights of all models that do not generate at the moment."""
        with cls._lock:
            for layers in list(cls._of.values()):
                layers._kept = {}

    def expect(self, steps: int) -> None:
        """From now on each layer that is still in use will be used so often at least."""
        self._budget.steps = max(steps, 0)

    def __enter__(self) -> FastLayers:
        self.enter()
        return self

    def __exit__(self, *exception: Any) -> None:
        thread = threading.get_ident()
        last = next((user for user in reversed(self._users) if user.thread == thread), None)
        if last is not None:  # an interrupt may have let it leave
            last.leaving.__exit__(*exception)

    def enter(self) -> _User:
        """For who leaves by `leaving.close()`, which may be called again."""
        thread, now = threading.get_ident(), settings.current()
        precision = f"{now.weight_dtype} {now.weight_group_size}"
        asked = precision, now.linear_products, "never" if now.packed_weights == "never" else "packed"
        user = _User(thread, self._leave)
        user.leaving.__enter__()
        try:
            with self._lock:
                self._freed.wait_for(lambda: not self._users or asked == self._asked or self._is_used_by(thread))
                self._users.append(user)
                if len(self._users) == 1:
                    self._asked = asked
                    self._install()
                elif now.packed_weights != "keep":
                    for layer in self._linear_layers():
                        layer.forget()
                    self._budget.left = None
        except BaseException:
            user.leaving.close()
            raise
        return user

    def _is_used_by(self, thread: int) -> bool:
        return any(user.thread == thread for user in self._users)

    def _leave(self, user: _User) -> None:
        """May be called again, where an interrupt has stopped it."""
        with self._lock:
            if user in self._users:
                self._users.remove(user)
                self.expect(0)  # it was known of the call that ends; others may go on
            if not self._users:
                self._remove()
                self._freed.notify_all()

    @classmethod
    def forget_other_threads(cls) -> None:
        """In a forked process: the other threads have not come along, and will not leave their contexts."""
        cls._lock = threading.RLock()
        cls._freed = threading.Condition(cls._lock)
        for layers in list(cls._of.values()):
            layers._users = [user for user in layers._users if user.thread == threading.get_ident()]
            if layers._installed and not layers._users:
                layers._remove()

    def _install(self) -> None:
        model, precision = self._model(), cache(precision_on)
        self._budget = _PackingBudget()
        for module in modules_of(model) if model is not None else ():
            replacement = self._replacement(module, precision)
            if replacement is None:
                continue
            former = self._kept.get(module)
            if type(former) is _Linear and type(replacement) is _Linear and former.form == replacement.form:
                # The weight may have another size since, and torch another number of threads.
                former.products, former.budget = replacement.products, replacement.budget
                replacement = former
            replacement.active = True
            self._installed[module] = replacement  # first: what is noted is taken out
            module.forward = replacement
        self._kept = {}

    def _linear_layers(self) -> list[_Linear]:
        return [layer for layer in self._installed.values() if type(layer) is _Linear]

    def _replacement(self, module: nn.Module, precision_on: Callable[[torch.device], str]) -> Replacement | None:
        own = vars(module).get("forward")
        # What a copy of the model has that was made while it generated is its class's, and is gone when the call is.
        if own is not None and own != type(module).forward.__get__(module):
            if type(own) is _Linear and settings.current().packed_weights != "keep":
                own.forget()  # of another model that shares this layer, and generates at the moment
            return None  # somebody else's, an adapter's or a hook's
        if not library_code.is_own(type(module).forward):
            return None
        function = self._functions.get(type(module))
        if function is not None:
            return _Function(module, function)
        if not module._parameters:
            return None
        form = norms.form_of(module)
        if form is not None:
            return _Function(module, partial(norms.normalise, module, form), partial(norms.serves, module))
        transposed = next(
            (t for kind, t in self._kinds.items() if isinstance(module, kind) and type(module).forward is kind.forward),
            None,
        )
        if transposed is None or settings.current().packed_weights == "never":
            return None
        weight = module._parameters.get("weight")
        if weight is None:
            return None
        precision = precision_on(weight.device)
        is_in_few_bits = precision != "fp32" or settings.current().self_speculation != "off"
        least = min(MIN_WEIGHT, MIN_QUANTISED) if is_in_few_bits else MIN_WEIGHT
        if weight.numel() < least:
            return None
        if precision != "fp32":
            quantized = self._quantized(module, transposed, precision)
            if quantized is not None or weight.dtype not in HALF:
                return quantized
        if weight.dtype in HALF and not transposed and is_plain(module, weight.dtype):
            return _HalfLinear(module, self._half(weight)) if settings.current().linear_products == "measured" else None
        if not is_plain(module):
            return None
        if settings.current().linear_products == "fixed":
            return _Linear(module, transposed, FixedProducts("fp32"), self._budget) if linear.has_vectors() else None
        if not linear.is_available():
            return None
        outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
        # What a product costs depends on the number of threads.
        key = torch.get_num_threads(), inputs, outputs, transposed
        products = self._shapes.get(key)
        if products is None:
            products = self._shapes[key] = MeasuredProducts(inputs, outputs, transposed)
        return _Linear(module, transposed, products, self._budget)

    def _quantized(self, module: nn.Module, transposed: bool, precision: str) -> Replacement | None:
        """Weights in groups serve layers in half precision, too."""
        group_size = settings.current().weight_group_size
        weight = module.weight
        products = FixedProducts(precision, group_size, weight.device)
        if not is_plain(module, weight.dtype, weight.device.type) or weight.dtype not in products.types:
            return None
        return _Linear(module, transposed, products, self._budget)

    def _half(self, weight: Tensor) -> HalfProducts:
        outputs, inputs = weight.shape
        key = torch.get_num_threads(), inputs, outputs, weight.dtype
        return self._half_shapes.setdefault(key, HalfProducts(*key[1:]))

    def _remove(self) -> None:
        layers = self._linear_layers()
        for precision in {layer.precision for layer in layers if layer.used} - {"fp32"}:
            counters.count_accelerated(f"{precision} weights")
        for layer in layers:
            layer.end_call()
        for module, replacement in self._installed.items():
            replacement.active = False
            if vars(module).get("forward") is replacement:
                del module.forward
        if settings.current().packed_weights == "keep":
            self._kept = {layer: used for layer, used in self._installed.items() if type(used) is _Linear}
        self._installed = {}


caches.register(FastLayers.drop_kept)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FastLayers.forget_other_threads)
