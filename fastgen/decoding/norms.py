"""RMS norm layers as one kernel, inside a captured step.

Every model has its own class for them. So the form that a layer computes is found by probing: the layer runs on
pseudo-random values with a pseudo-random weight, and its results must equal those of one form. A probe is valid for
layers of a class that have the same width and the same attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen import interrupts, patching
from fastgen.decoding import layer_forms
from fastgen.decoding.modules import runs_own_forward
from fastgen.ops.rms_norm import available, reference, rms_norm


class Form(NamedTuple):
    """What an RMS norm layer computes: the name of its `eps` attribute, and the options of `rms_norm`."""

    eps: str
    rounds_scaled: bool
    offset: float


_inside: ContextVar[bool] = ContextVar("fastgen_fused_norms", default=False)
_forms: weakref.WeakKeyDictionary[type[nn.Module], dict[Hashable, Form | None]] = weakref.WeakKeyDictionary()
# Types of attributes that a layer may have besides its weight: immutable and comparable.
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}


def fused() -> AbstractContextManager[None]:
    """Makes RMS norms run as one kernel inside this context, because a captured step launches it at no cost."""
    return patching.held(_inside, True)


def serves(module: nn.Module, x: Any) -> bool:
    """Whether the kernel can process a layer's input now."""
    if not _inside.get():  # first, because outside of a captured step nothing else matters
        return False
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and layer_forms.serves(x, weight.dtype, weight.device.type)
        and x.device == weight.device
        and x.shape[-1:] == weight.shape
    )


def normalise(module: nn.Module, form: Form, x: Tensor) -> Tensor:
    weight, eps = module._parameters["weight"], getattr(module, form.eps)
    assert weight is not None, "a layer that `serves` has one"
    return rms_norm(x, weight, eps, offset=form.offset, rounds_scaled=form.rounds_scaled)


def form_of(module: nn.Module) -> Form | None:
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
    forms = _forms.setdefault(type(module), {})
    key = weight.dtype, weight.numel(), module.training, *attributes.items()
    if key not in forms:
        forms[key] = _probed(module, weight, attributes, floats[0])
    return forms[key]


@torch.no_grad()
def _probed(module: nn.Module, of: Tensor, attributes: dict[str, Any], eps: str) -> Form | None:
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
    for form in (Form(eps, True, 0.0), Form(eps, False, 0.0), Form(eps, False, 1.0)):
        found = reference(x, layer.weight, getattr(layer, eps), form.offset, form.rounds_scaled)
        close = x.dtype is torch.float32 and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        if close or torch.equal(found, expected):
            return form
    return None
