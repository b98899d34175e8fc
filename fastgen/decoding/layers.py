"""Faster forms of a model's layers while it generates.

Inside `FastLayers`, a layer that spells out a torch function calls that function. An RMS norm is one kernel in a
captured step. A linear layer that only has a weight and a bias uses the kernel that `fastgen.ops.linear.choose`
selects, or a quantised copy of its weight. `fastgen.decoding.layer_forms` has these forms. Hooks keep working, because
they run around `forward`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import counters, memory, settings
from fastgen.decoding import derived_weights, layer_forms, library_code
from fastgen.decoding.layer_forms import (
    FloatLinear,
    FunctionForm,
    QuantizedLinear,
    Replacement,
    is_plain,
    runs_own_forward,
    weight_of,
)
from fastgen.decoding.library_code import modules_of
from fastgen.interrupts import undoing
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import HALF, is_slow

# Classes of linear layers: False if their weights are [N, K], True if [K, N].
Kinds = Mapping[type[nn.Module], bool]
LINEAR: Kinds = {nn.Linear: False}

# The functions that layers of some classes spell out.
Functions = Mapping[type[nn.Module], Callable[[Tensor], Tensor]]

# Returns another replacement for a layer, which decides at each call what to do.
Forms = Callable[[nn.Module], Replacement | None]

# Smaller weights stay with torch: they are in the processor's caches, and calling FastGen's kernel costs as much as it
# saves.
MIN_WEIGHT = 2**18
# The same for low-bit weights, which also take less memory, and so less time if the cache holds other data as well;
# and for half precision without instructions for it, where torch takes much longer.
MIN_NARROW = 2**16


class _User:
    """A thread that has entered `FastLayers`, and the context through which it leaves."""

    def __init__(self, thread: int, leave: Callable[[_User], None]) -> None:
        self.thread, self.leaving = thread, undoing(partial(leave, self))


class _Used(threading.local):
    """The layers whose faster forms this thread uses, once for each time that it has entered."""

    def __init__(self) -> None:
        self.layers: list[FastLayers] = []


_used = _Used()


class FastLayers:
    """A context in which layers of a model have a faster form.

    Contexts of the same model, nested or in several threads, share the quantised copies. The copies are dropped when
    another context begins, which must see the weights of that time, and when the last one ends. With
    `Settings.packed_weights == "keep"` they live as long as the model. Layers have one form at a time, so a thread that
    asks for other forms waits until the model is free. Inside a context of its own, it keeps the forms of that one.
    """

    _lock = threading.RLock()
    _freed = threading.Condition(_lock)
    _of: weakref.WeakKeyDictionary[nn.Module, FastLayers] = weakref.WeakKeyDictionary()

    def __init__(self, model: nn.Module, kinds: Kinds, functions: Functions, form_of: Forms) -> None:
        self._model = weakref.ref(model)
        self._kinds = kinds
        self._functions = functions
        self._form_of = form_of
        self._users: list[_User] = []  # one for each time that a thread has entered
        self._asked: tuple[str, ...] = ()  # the precision and packing of the installed forms
        self._installed: dict[nn.Module, Replacement] = {}
        self._stacked: frozenset[int] | None = None  # addresses of weights of several experts, [experts, any, any]
        self._kept: dict[nn.Module, Replacement] = {}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        kinds: Kinds = LINEAR,
        functions: Functions = MappingProxyType({}),
        form_of: Forms = lambda module: None,
    ) -> FastLayers:
        with cls._lock:
            return cls._of.setdefault(model, cls(model, kinds, functions, form_of))

    @classmethod
    def drop_kept(cls) -> None:
        """Drops what is kept of models that are not generating."""
        with cls._lock:
            for layers in list(cls._of.values()):
                layers._kept = {}

    def __enter__(self) -> FastLayers:
        self.enter()
        return self

    def __exit__(self, *exception: Any) -> None:
        thread = threading.get_ident()
        last = next((user for user in reversed(self._users) if user.thread == thread), None)
        if last is not None:  # otherwise an interrupt has let it leave already
            last.leaving.__exit__(*exception)

    def enter(self) -> _User:
        """Enters, for callers that leave through `leaving.close()`, which may be called repeatedly."""
        thread, now = threading.get_ident(), settings.current()
        precision = f"{now.weight_dtype} {now.weight_group_size}"
        asked = precision, "never" if now.packed_weights == "never" else "packed"
        user = _User(thread, self._leave)
        user.leaving.__enter__()
        try:
            with self._lock:
                self._freed.wait_for(lambda: not self._users or asked == self._asked or self._is_used_by(thread))
                self._users.append(user)
                _used.layers.append(self)
                if len(self._users) == 1:
                    self._asked = asked
                    self._install()
                if now.packed_weights != "keep":
                    for layer in self._quantized_layers():
                        layer.begin_call()
        except BaseException:
            user.leaving.close()
            raise
        return user

    @classmethod
    def have_experts(cls, weight: Tensor) -> bool:
        """Whether this is a stacked weight of a model of whose layers the calling thread uses the faster forms."""
        return any(weight.data_ptr() in layers._addresses_of_experts() for layers in _used.layers)

    def _addresses_of_experts(self) -> frozenset[int]:
        if self._stacked is None:
            model = self._model()
            modules = modules_of(model) if model is not None else []
            weights = (each for module in modules for each in module._parameters.values())
            self._stacked = frozenset(each.data_ptr() for each in weights if each is not None and each.dim() == 3)
        return self._stacked

    def _is_used_by(self, thread: int) -> bool:
        return any(user.thread == thread for user in self._users)

    def _leave(self, user: _User) -> None:
        """Leaves. May be called again if an interrupt has stopped it."""
        with self._lock:
            if user in self._users:
                self._users.remove(user)
                if user.thread == threading.get_ident() and self in _used.layers:
                    _used.layers.remove(self)
            if not self._users:
                self._remove()
                self._freed.notify_all()

    @classmethod
    def forget_other_threads(cls) -> None:
        """In a forked process, removes the other threads, which do not exist there and cannot leave their contexts."""
        cls._lock = threading.RLock()
        cls._freed = threading.Condition(cls._lock)
        for layers in list(cls._of.values()):
            layers._users = [user for user in layers._users if user.thread == threading.get_ident()]
            if layers._installed and not layers._users:
                layers._remove()

    def _install(self) -> None:
        model, precision = self._model(), cache(precision_on)
        modules = modules_of(model) if model is not None else []
        self._stacked = None
        for module in modules:
            replacement = self._replacement(module, precision)
            if replacement is None:
                continue
            former = self._kept.get(module)
            if type(former) is type(replacement) is QuantizedLinear and not replacement.holders:
                replacement = former if former.is_like(replacement) else replacement
            replacement.holders.add(self)
            replacement.active = True
            self._installed[module] = replacement  # noted first, so that it is removed in any case
            vars(module)["forward"] = replacement
        self._kept = {}
        if model is not None and not self._quantized_layers():
            _tell_of_no_layers(model)

    def _quantized_layers(self) -> list[QuantizedLinear]:
        return [layer for layer in self._installed.values() if type(layer) is QuantizedLinear]

    def _replacement(self, module: nn.Module, precision_on: Callable[[torch.device], str]) -> Replacement | None:
        if not runs_own_forward(module):
            own = vars(module)["forward"]
            if type(own) is QuantizedLinear:  # of another model that shares this layer, and generates at the moment
                if settings.current().packed_weights != "keep":
                    own.begin_call()
                if _is_asked_for(own.form):
                    return own  # which stays when the other model is done
            return None  # set by other code, such as an adapter or a hook
        if not library_code.is_own(type(module).forward):
            return None
        function = self._functions.get(type(module))
        if function is not None:
            return FunctionForm(module, function)
        if not module._parameters:
            return self._form_of(module)
        form = layer_forms.norm_form(module)
        if form is not None:
            return FunctionForm(
                module, partial(layer_forms.normalise, module, form), partial(layer_forms.serves_norm, module)
            )
        return layer_forms.convolution_form(module) or self._linear(module, precision_on)

    def _linear(self, module: nn.Module, precision_on: Callable[[torch.device], str]) -> Replacement | None:
        """Returns the form of a linear layer; None for any other layer, or if torch's product is as good."""
        own = type(module).forward
        kinds = self._kinds.items()
        transposed = next((t for kind, t in kinds if isinstance(module, kind) and own is kind.forward), None)
        weight = module._parameters.get("weight")
        if transposed is None or weight is None or settings.current().packed_weights == "never":
            return None
        precision = precision_on(weight.device)
        is_low_bit = precision != "fp32" or settings.current().self_speculation != "off"
        is_narrow = is_low_bit or is_slow(weight.dtype)
        if weight.numel() < (min(MIN_WEIGHT, MIN_NARROW) if is_narrow else MIN_WEIGHT):
            return None
        if precision != "fp32":
            replacement = _quantized(module, transposed, precision)
            if replacement is not None or weight.dtype not in HALF:
                return replacement
        is_served = weight.dtype is torch.float32 or weight.dtype in HALF
        if not is_served or not choose.is_available() or not is_plain(module, weight.dtype):
            return None
        return FloatLinear(module, transposed)

    def _remove(self) -> None:
        layers = self._quantized_layers()
        for precision in {layer.form.name for layer in layers if layer.used}:
            counters.count_accelerated(f"{precision} weights")
        for module, replacement in self._installed.items():
            replacement.holders.discard(self)
            if replacement.holders:  # another model that shares the layer generates
                continue
            if type(replacement) is QuantizedLinear:
                replacement.end_call()
            replacement.active = False
            if vars(module).get("forward") is replacement:
                del module.forward
        if settings.current().packed_weights == "keep":
            self._kept = {layer: used for layer, used in self._installed.items() if type(used) is QuantizedLinear}
        self._installed = {}


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def precision_on(device: torch.device) -> str:
    """Returns the requested precision of quantised copies, if there are kernels for it on this device, else "fp32"."""
    wanted = settings.current().weight_dtype
    if wanted == "fp32" or not choose.is_for(device):
        return "fp32"
    reason = choose.unavailable(wanted, device)
    if reason is None:
        return wanted
    counters.count_fallback(f"{wanted} weights", reason)
    return "fp32"


def _is_asked_for(form: derived_weights.Format) -> bool:
    now = settings.current()
    return now.weight_dtype != "fp32" and form is derived_weights.low_bit(now.weight_dtype, now.weight_group_size)


def _tell_of_no_layers(model: nn.Module) -> None:
    """Counts a call in which a requested precision changes no layer. Without kernels that has been counted."""
    wanted = settings.current().weight_dtype
    if wanted != "fp32" and choose.unavailable(wanted, device_of(model)) is None:
        reason = f"the model has no linear layer of at least {min(MIN_WEIGHT, MIN_NARROW)} weights that it serves"
        counters.count_not_used(f"{wanted} weights", reason)


def _quantized(module: nn.Module, transposed: bool, precision: str) -> QuantizedLinear | None:
    """Returns the form of a layer with a low-bit weight, or None. Weights in groups serve half precision, too."""
    weight = weight_of(module)
    is_served = weight.dtype in choose.types(precision, weight.device)
    if not is_served or not is_plain(module, weight.dtype, weight.device.type):
        return None
    return QuantizedLinear(module, transposed, derived_weights.low_bit(precision, settings.current().weight_group_size))


memory.register(FastLayers.drop_kept)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FastLayers.forget_other_threads)
