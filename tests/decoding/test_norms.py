"""RMS norms are known by what they compute, and are one kernel inside a captured step."""

from __future__ import annotations

import threading

import pytest
import torch
import wrapt
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fastgen.decoding import layer_forms
from fastgen.decoding.layers import FastLayers
from fastgen.ops import gpu

HALF = [torch.float16, torch.bfloat16]
WIDTH = 24


@pytest.fixture(autouse=True)
def there_are_kernels(monkeypatch):
    monkeypatch.setattr(layer_forms, "available", lambda weight: weight.dtype in gpu.KERNEL_TYPES)
    layer_forms._norm_forms.clear()


class Gated(nn.Module):
    """As Mamba 2 has them: a gate may be passed, and the mean is that of a group."""

    def __init__(self, width, group_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6
        self.group_size = group_size

    def forward(self, hidden_states, gate=None):
        x = hidden_states.float() if gate is None else hidden_states.float() * nn.functional.silu(gate.float())
        groups = x.unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * groups.flatten(-2).to(hidden_states.dtype)


class Half(LlamaRMSNorm):
    """It does something else besides."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2


class Shifted(LlamaRMSNorm):
    """As if the small number were another one."""

    def forward(self, hidden_states):
        self.variance_epsilon, own = self.variance_epsilon * 1.5, self.variance_epsilon
        result = super().forward(hidden_states)
        self.variance_epsilon = own
        return result


class Crosswise(LlamaRMSNorm):
    """Over another dimension, which is the last where there are two."""

    def forward(self, hidden_states):
        squares = hidden_states.float().square().mean(1, keepdim=True)
        return self.weight * (hidden_states.float() * (squares + self.variance_epsilon).rsqrt()).to(hidden_states.dtype)


class Floored(LlamaRMSNorm):
    """Its small number is a lower limit."""

    def forward(self, hidden_states):
        squares = hidden_states.float().square().mean(-1, keepdim=True)
        scaled = hidden_states.float() * squares.clamp(min=self.variance_epsilon).rsqrt()
        return self.weight * scaled.to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    "kind, form",
    [
        (LlamaRMSNorm, ("variance_epsilon", True, 0.0)),
        (T5LayerNorm, ("variance_epsilon", True, 0.0)),
        (Olmo2RMSNorm, ("variance_epsilon", False, 0.0)),
        (GemmaRMSNorm, ("eps", False, 1.0)),
        (CohereLayerNorm, None),
        (Half, None),
        (Shifted, None),
        (Crosswise, None),
        (lambda width: Floored(width, eps=1e-12), None),
        (nn.LayerNorm, None),
        (lambda width: nn.LayerNorm(width, bias=False), None),
        (lambda width: nn.PReLU(width), None),
        (lambda width: nn.Linear(width, width), None),
    ],
)
def test_the_form_of_a_layer(kind, form, dtype):
    layer = kind(WIDTH).to(dtype)
    random = torch.random.get_rng_state()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = layer_forms.norm_form(layer)
    if form is not None and dtype is torch.float32:
        form = (form[0], True, form[2]) if not form[2] else form  # where nothing is rounded they are one
    assert found == form
    assert torch.random.get_rng_state().equal(random)
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())
    if found is not None:
        with torch.no_grad():
            layer.weight.normal_()
            x = torch.randn(2, 3, WIDTH, dtype=dtype)
            # The interpreter does not round to bfloat16: it cuts off.
            cuts = dtype is torch.bfloat16 and gpu.is_interpreted()
            rtol = 2e-2 if cuts else 2e-3 if dtype in HALF else 1e-6
            torch.testing.assert_close(layer_forms.normalise(layer, found, x), layer(x), rtol=rtol, atol=1e-6)


def test_layers_of_one_class_have_numbers_of_their_own():
    one, other = LlamaRMSNorm(WIDTH, eps=1e-6), LlamaRMSNorm(WIDTH, eps=1.0)
    assert layer_forms.norm_form(one) == layer_forms.norm_form(other)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for layer in (one, other):
            torch.testing.assert_close(layer_forms.normalise(layer, layer_forms.norm_form(layer), x), layer(x))


def test_layers_of_one_class_may_compute_different_things():
    norm = ("variance_epsilon", True, 0.0)
    assert layer_forms.norm_form(Gated(WIDTH, group_size=WIDTH)) == norm
    assert layer_forms.norm_form(Gated(WIDTH, group_size=8)) is None
    assert layer_forms.norm_form(Gated(2 * WIDTH, group_size=WIDTH)) is None


def test_a_layer_that_also_takes_a_gate():
    model = nn.Sequential(Gated(WIDTH, group_size=WIDTH))
    layer, x, gate = model[0], torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = layer(x), layer(x, gate)
        with FastLayers.of(model), layer_forms.fused_norms():
            assert "forward" in vars(layer)
            for found, wanted in zip((layer(x), layer(x, gate)), expected, strict=True):
                torch.testing.assert_close(found, wanted)
            assert layer(hidden_states=x).equal(expected[0]) and layer(x, gate=gate).equal(expected[1])


class Watcher:
    """It cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    def see(self, *call):
        pass


def test_what_hooks_hold_is_not_copied():
    layer = LlamaRMSNorm(WIDTH)
    layer.register_forward_hook(Watcher().see)
    assert layer_forms.norm_form(layer) == ("variance_epsilon", True, 0.0)


def test_the_method_of_the_class_as_an_attribute_changes_nothing():
    """Hooks that were removed leave it behind, and so does a copy of a model that generates."""
    layer = LlamaRMSNorm(WIDTH)
    layer.forward = layer.forward
    assert layer_forms.norm_form(layer) == layer_forms.norm_form(LlamaRMSNorm(WIDTH)) is not None


def wrapped(layer):
    """A wrapper of the user's that equals what it wraps."""
    layer.forward = wrapt.FunctionWrapper(layer.forward, lambda function, instance, args, kwargs: function(*args) * 2)
    return layer


def changed(name, value):
    layer = LlamaRMSNorm(WIDTH)
    setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        changed("other", 0.5),
        changed("variance_epsilon", 1),
        changed("seen", []),
        changed("child", nn.Linear(2, 2)),
        changed("bias", nn.Parameter(torch.zeros(WIDTH))),
        changed("forward", lambda x: x),
        changed("forward", wrapt.FunctionWrapper(LlamaRMSNorm(WIDTH).forward, lambda f, i, a, k: f(*a, **k) * 2)),
        wrapped(LlamaRMSNorm(WIDTH)),
        changed("weight", nn.Parameter(torch.ones(1, WIDTH))),
        LlamaRMSNorm(WIDTH).double(),
    ],
)
def test_layers_that_are_more_are_left_alone(layer):
    assert layer_forms.norm_form(layer) is None


def test_only_inside_a_step(monkeypatch):
    calls = []
    monkeypatch.setattr(layer_forms, "rms_norm", lambda x, *more, **options: calls.append(1) or x)
    model = nn.Sequential(LlamaRMSNorm(WIDTH))
    x = torch.randn(2, WIDTH)
    with torch.no_grad(), FastLayers.of(model):
        model(x)
        assert not calls
        with layer_forms.fused_norms():
            model(x)
            assert len(calls) == 1
            model(x.half())  # not of the weight's type
            with torch.enable_grad():
                model(x)
            with torch.autocast("cpu", torch.bfloat16):
                model(x)
            with monkeypatch.context() as compiling:  # it would have to break the graph
                compiling.setattr(torch.compiler, "is_compiling", lambda: True)
                model(x)
    with torch.no_grad(), layer_forms.fused_norms():
        model(x)
    assert len(calls) == 1 and "forward" not in vars(model[0])
