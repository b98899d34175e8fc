"""Layers of a model in a faster form, for as long as it generates.

Inside `FastLayers`, layers that spell out a function that torch has in one piece use that, and linear layers have a
`forward` of their own, which packs the weight once that pays and multiplies with the packed one where that is faster
(`fastgen.ops.linear`). Everything that makes a layer more than its weight and bias leaves it alone: a forward pass of
its own or replaced by somebody (adapters, quantised layers, offloading), parametrisations, weights of other types.
Hooks keep working: they run around `forward`.

A packed weight counts as long as the parameter is the same object, in the same memory, of the same version. Writing
through `parameter.data` is not counted by torch, which is why nothing is kept from one call to the next unless the user
asks for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastgen import patching, settings
from fastgen.ops import linear

# Whose weights are [outputs, inputs]; with True: [inputs, outputs].
Kinds = Mapping[type[nn.Module], bool]
LINEAR: Kinds = {nn.Linear: False}

# What layers compute that spell it out.
Functions = Mapping[type[nn.Module], Callable[[Tensor], Tensor]]

# The time a product takes below this size is that of calling it.
MIN_WEIGHT_BYTES = 2**18
# A shape is measured when it has been used so often: a short call must not wait for a measurement.
MEASURED_FROM = 24
# At most so much of the memory that is free goes into packed weights.
_MAX_MEMORY = 0.5


class _Shape:
    """What packing gains for the layers of one shape, by the number of rows."""

    def __init__(self, inputs: int, outputs: int, transposed: bool) -> None:
        self.outputs = outputs
        self._shape = inputs, outputs, transposed
        self._uses: dict[int, int] = {}
        self._gains: dict[int, float] = {}
        self.packing = float("inf")

    def gain(self, rows: int) -> float:
        """Seconds that a product with so many rows takes less with a packed weight; 0 as long as it is not known."""
        known = self._gains.get(rows)
        if known is not None:
            return known
        uses = self._uses[rows] = self._uses.get(rows, 0) + 1
        costs = linear.costs(rows, *self._shape, measure=uses >= MEASURED_FROM)
        if costs is None:
            return 0.0
        self.packing = costs.packing
        gain = self._gains[rows] = costs.plain - costs.packed
        return gain


class _Memory:
    """How many bytes may still be packed."""

    def __init__(self) -> None:
        self._left = int(_free_memory() * _MAX_MEMORY)

    def take(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True


def _serves(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and patching.is_active()
    )


class _Replacement:
    """What stands for the `forward` of a layer while the model generates."""

    __slots__ = ("_module", "_plain")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plain = module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model, made meanwhile, has the ordinary forward pass of its own layer.
        return getattr, (self._module, "forward")


class _Function(_Replacement):
    """A function of torch for what the layer spells out."""

    __slots__ = ("_function",)

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self._function(x) if _serves(x) else self._plain(x)


class _Linear(_Replacement):
    """A linear layer with a packed weight, once there is one.

    The time that the packed weight would have saved so far is counted, and the weight is packed when that comes to what
    packing costs. So a call is never much slower than it would be without, however early it ends.
    """

    __slots__ = ("_data", "_memory", "_missed", "_packed", "_shape", "_transposed", "_version")

    def __init__(self, module: nn.Module, transposed: bool, shape: _Shape, memory: _Memory) -> None:
        super().__init__(module)
        self._transposed = transposed
        self._shape = shape
        self._memory = memory
        self._missed = 0.0
        self._packed: Tensor | None = None
        self._version: tuple[int, int] | None = None
        self._data: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not _serves(x):
            return self._plain(x)
        parameters = self._module._parameters
        weight = parameters["weight"]
        gain = self._shape.gain(x.numel() // x.shape[-1])
        if gain <= 0.0 or not self._is_packed(weight, gain):
            return self._plain(x)
        return linear.packed_linear(x, self._packed, parameters["bias"], self._shape.outputs)

    def _is_packed(self, weight: Tensor, gain: float) -> bool:
        """Whether there is a packed copy of this very weight; makes it when it is due."""
        version = weight._version, weight.data_ptr()
        if self._data is weight and self._version == version:
            return self._packed is not None
        if self._data is not None:  # it has been changed since: forget it, and see whether it may be packed again
            self._missed, self._packed, self._data = 0.0, None, None
        self._missed += gain
        if self._missed < self._shape.packing:
            return False
        self._data, self._version = weight, version
        if is_plain(self._module) and self._memory.take(weight.nbytes):
            self._packed = linear.pack(weight.t() if self._transposed else weight)
        return self._packed is not None


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is its weight and bias and nothing else, in float32 on the CPU."""
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            # An attribute of that name is the work of a hook or a parametrisation.
            if name == "weight" or getattr(module, name, None) is not None:
                return False
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
            return False
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu" or parameter.layout != torch.strided:
            return False
    return not parametrize.is_parametrized(module)


class FastLayers:
    """A context in which layers of a model have a faster form.

    Contexts of the same model, nested or in several threads, share the packed weights. They are dropped when the last
    one ends, or with `Settings.packed_weights == "keep"` with the model. Other threads that use the model meanwhile get
    the ordinary forward pass if FastGen is suspended for them.

    Args:
        kinds: the classes of linear layers, and whether their weight is stored transposed.
        functions: classes of layers without a state, and a function that computes the same.
    """

    _lock = threading.RLock()
    _of: weakref.WeakKeyDictionary[nn.Module, FastLayers] = weakref.WeakKeyDictionary()
    _shapes: dict[tuple[int, int, int, bool], _Shape] = {}

    def __init__(self, model: nn.Module, kinds: Kinds, functions: Functions) -> None:
        self._model = weakref.ref(model)
        self._kinds = kinds
        self._functions = functions
        self._users = 0
        self._installed: dict[nn.Module, _Replacement] = {}
        self._kept: dict[nn.Module, _Replacement] = {}

    @classmethod
    def of(cls, model: nn.Module, kinds: Kinds = LINEAR, functions: Functions = MappingProxyType({})) -> FastLayers:
        """The context of this model."""
        with cls._lock:
            found = cls._of.get(model)
            if found is None:
                found = cls._of[model] = cls(model, kinds, functions)
            return found

    @classmethod
    def drop_kept(cls) -> None:
        """Drops the packed weights of all models that do not generate at the moment."""
        with cls._lock:
            for layers in list(cls._of.values()):
                layers._kept = {}

    def __enter__(self) -> FastLayers:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()
        return self

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _install(self) -> None:
        model, memory = self._model(), _Memory()
        for module in model.modules() if model is not None else ():
            replacement = self._kept.get(module) or self._replacement(module, memory)
            if replacement is not None:
                module.forward = self._installed[module] = replacement
        self._kept = {}

    def _replacement(self, module: nn.Module, memory: _Memory) -> _Replacement | None:
        if "forward" in vars(module):
            return None  # somebody else's, an adapter's or a hook's
        function = self._functions.get(type(module))
        if function is not None:
            return _Function(module, function)
        transposed = self._kind(module)
        if transposed is None or settings.current().packed_weights == "never" or not linear.is_available():
            return None
        weight = module._parameters["weight"]
        if not is_plain(module) or weight.nbytes < MIN_WEIGHT_BYTES:
            return None
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        return _Linear(module, transposed, self._shape(inputs, outputs, transposed), memory)

    def _remove(self) -> None:
        for module, forward in self._installed.items():
            if vars(module).get("forward") is forward:
                del module.forward
        if settings.current().packed_weights == "keep":
            self._kept = self._installed
        self._installed = {}

    def _kind(self, module: nn.Module) -> bool | None:
        """Whether the layer stores its weight transposed; None where it is no layer of a kind that is known."""
        for kind, transposed in self._kinds.items():
            if isinstance(module, kind) and type(module).forward is kind.forward:
                return transposed
        return None

    @classmethod
    def _shape(cls, inputs: int, outputs: int, transposed: bool) -> _Shape:
        # What a product costs depends on the number of threads.
        key = torch.get_num_threads(), inputs, outputs, transposed
        return cls._shapes.setdefault(key, _Shape(inputs, outputs, transposed))


def _free_memory() -> int:
    """Bytes that can be allocated on this machine without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 2**32
