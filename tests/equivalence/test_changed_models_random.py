"""Changes to a model, or to functions that it calls, between calls: the answer is the library's.

Each kind of change alone, and random sequences of them, of which `make test-long` runs 2,000 and `make test` a sample.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

import fastgen
from fastgen import settings
from fastgen.optimizer.transformers.captured import pays
from tests.equivalence import encoder_models
from tests.equivalence.captured import GREEDY, build, captures
from tests.equivalence.check import check
from tests.equivalence.models import BY_NAME
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

CPU = torch.device("cpu")
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 1000))]
OPTIONS = {**GREEDY, "min_new_tokens": 16, "max_new_tokens": 16}


class Wrapper(nn.Module):
    """A user's module around one of the library's. It passes attributes on, so that what is inside can be changed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class Around(Wrapper):
    def __init__(self, layer: nn.Module, by: float) -> None:
        super().__init__(layer)
        self.by = by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _times(self.layer(*args, **kwargs), self.by)


class Half(Wrapper):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.layer(x.bfloat16(), *(each.bfloat16() for each in others)).to(x.dtype) * 2.0


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by


def _times(result: Any, by: float) -> Any:
    if isinstance(result, tuple):
        return (_times(result[0], by), *result[1:])
    return result.flip(-1) * by if isinstance(result, Tensor) and result.is_floating_point() else result


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _times(result, 1.7) if func is F.linear else result


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _times(result, 1.7) if func in (torch.ops.aten.silu.default, torch.ops.aten.gelu.default) else result


class World:
    """A model, its changes, and how it is called."""

    functions: tuple[tuple[Any, str], ...] = (
        (F, "scaled_dot_product_attention"),
        (F, "linear"),
        (nn.Linear, "forward"),
    )

    def __init__(self, model: Any, rng: random.Random) -> None:
        self.model, self.rng = model, rng
        self.around = contextlib.ExitStack()  # functions that are replaced, and modes
        self.switches: list[dict[str, float]] = []  # of forward passes that are closures
        self.replaced = 0
        self.during: list[Callable[[], Any]] = []  # contexts that the next call is in

    def layer(self) -> Any:
        layers = self.layers()
        return layers[self.rng.randrange(len(layers))]

    def layers(self) -> Any:
        raise NotImplementedError

    def linear(self) -> nn.Linear:
        """Any linear layer of the library's, not tied to another."""
        return self.rng.choice([each for each in self.layer().modules() if type(each) is nn.Linear])

    def by(self) -> float:
        return self.rng.choice([-2.0, 0.3, 1.9, 5.0])


class Llama(World):
    functions = (
        *World.functions,
        (F, "silu"),
        (modeling_llama.LlamaRMSNorm, "forward"),
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "eager_attention_forward"),
    )

    def layers(self) -> Any:
        return self.model.model.layers

    def holder(self) -> tuple[nn.Module, str]:
        layer = self.layer()
        return self.rng.choice([(layer, "mlp"), (layer.mlp, "act_fn"), (layer.mlp, "down_proj")])


class Bert(World):
    functions = (*World.functions, (F, "gelu"), (nn.LayerNorm, "forward"))

    def layers(self) -> Any:
        return self.model.bert.encoder.layer

    def holder(self) -> tuple[nn.Module, str]:
        layer = self.layer()
        return self.rng.choice([(layer, "output"), (layer.output, "dense"), (layer.intermediate, "dense")])


def _around(world: World) -> None:
    owner, name = world.holder()
    setattr(owner, name, Around(getattr(owner, name), world.by()).eval())


def _switched(world: World) -> bool:
    found = [vars(module) for module in world.model.modules() if isinstance(module, (Around, Scaled))]
    for switch in (*found, *world.switches):
        switch["by"] *= -1.7
    return bool(found or world.switches)


def _forward(world: World) -> None:
    owner, name = world.holder()
    module, switch = getattr(owner, name), {"by": world.by()}
    forward = module.forward
    world.switches.append(switch)
    module.forward = lambda *args, **kwargs: _times(forward(*args, **kwargs), switch["by"])


def _function(world: World) -> None:
    owner, name = world.rng.choice(world.functions)
    function, by = getattr(owner, name), world.by()

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return _times(function(*args, **kwargs), by)

    setattr(owner, name, replaced)
    world.around.callback(setattr, owner, name, function)
    world.replaced += 1


def _restored(world: World) -> bool:
    had, world.replaced = world.replaced, 0
    world.around.close()
    return had > 0


def _hook(world: World) -> None:
    owner, name = world.holder()
    by = world.by()
    getattr(owner, name).register_forward_hook(lambda module, args, result: _times(result, by))


def _unhooked(world: World) -> bool:
    hooks = [module._forward_hooks for module in world.model.modules() if module._forward_hooks]
    for each in hooks:
        each.clear()
    return bool(hooks)


def _mode(world: World) -> None:
    world.during.append(world.rng.choice([Mode, DispatchMode]))


def _attribute(world: World) -> None:
    layer, by = world.layer(), abs(world.by()) * 3
    attention = getattr(layer, "self_attn", None) or layer.attention.self
    attention.scaling = by


def _uncounted(world: World) -> None:
    world.model.calls_of_mine = getattr(world.model, "calls_of_mine", 0) + 1


def _parametrised(world: World) -> None:
    parametrize.register_parametrization(world.linear(), "weight", Scaled(world.by()).eval())


@torch.no_grad()
def _in_place(world: World) -> None:
    weight = next(world.linear().parameters())
    if world.rng.random() < 0.5:
        weight.mul_(world.by())
    else:
        weight.data.copy_(weight.data.flip(0) * world.by())


@torch.no_grad()
def _parameter(world: World) -> None:
    linear = world.linear()  # not one with a parametrisation: that has another class
    linear.weight = nn.Parameter(linear.weight.flip(0) * world.by())


def _memory(world: World) -> None:
    linear = world.linear()
    linear.weight.data = linear.weight.data.flip(0) * world.by()


def _buffer(world: World) -> bool:
    found = [module for module in world.model.modules() if "inv_freq" in module._buffers]
    for module in found:
        module.inv_freq = module.inv_freq * world.by()
    return bool(found)


def _untied(world: World) -> bool:
    head = world.model.get_output_embeddings()
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().flip(0))
    return head is not None


def _layer_deleted(world: World) -> bool:
    layers = world.layers()
    if len(layers) == 1:
        return False
    del layers[len(layers) - 1]
    return True


def _exchanged(world: World) -> None:
    layers = world.layers()
    with torch.no_grad():
        made = copy.deepcopy(layers[0])
        for parameter in made.parameters():
            parameter.mul_(world.by())
    layers[0] = made


def _type_of_one_layer(world: World) -> bool:
    owner, name = world.holder()
    module = getattr(owner, name)
    # A forward pass that is a closure keeps the module itself, and setting an attribute of a wrapper replaces nothing.
    has_closures = any("forward" in vars(part) for part in module.modules())
    if has_closures and isinstance(owner, Around):
        return False
    setattr(owner, name, Half((module if has_closures else copy.deepcopy(module)).bfloat16()).eval())
    return True


def _class(world: World) -> None:
    """A class of the user's with a forward pass of its own."""
    module = world.layer()
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _times(kind.forward(self, *args, **kwargs), 1.9)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


CHANGES: list[Callable[[World], object]] = [
    _around, _switched, _switched, _forward, _function, _function, _restored, _hook, _unhooked, _mode, _attribute,
    _parametrised, _switched, _in_place, _parameter, _memory, _buffer, _untied, _layer_deleted,
    _exchanged, _type_of_one_layer, _class,
]  # fmt: skip


class Count:
    """Changes, how many altered the result; sequences, and how many had a captured step."""

    changes = altered = sequences = captured = 0


def _change(world: World, done: list[str], order: list[Callable[[World], object]]) -> None:
    """Makes the first change that does something, and now and then another one that alters nothing."""
    if world.rng.random() < 0.2:
        _uncounted(world)
    done.append(next(change for change in order if change(world) is not False).__name__)


def _sequence(
    world: World,
    call: Callable[[World], Any],
    captured: Callable[[], int],
    rounds: list[list[Callable[[World], object]]] | None = None,
) -> None:
    """`call` returns the library's result, after it has compared both."""
    rng, done = world.rng, []
    try:
        for _ in range(rng.choice([1, 2, 3] if rounds is None else [1, 2])):
            before = call(world)
        Count.sequences += 1
        Count.captured += captured() > 0
        for number in range(rng.choice([2, 3, 4]) if rounds is None else len(rounds)):
            for _ in range(rng.choice([1, 1, 2]) if rounds is None else 1):
                _change(world, done, rng.sample(CHANGES, len(CHANGES)) if rounds is None else rounds[number])
            for _ in range(rng.choice([1, 1, 3] if rounds is None else [1, 2])):
                with contextlib.ExitStack() as during:
                    for context in world.during:
                        during.enter_context(context())
                    now = call(world)
            world.during.clear()
            Count.changes += 1
            Count.altered += before.shape != now.shape or not torch.equal(before, now)
            before = now
    except BaseException as error:
        error.add_note(f"after {done}") if hasattr(error, "add_note") else None
        raise
    finally:
        world.around.close()


def _generated(inputs: dict[str, Any], world: World) -> Any:
    return check(world.model, inputs, OPTIONS)


def _generate(rng: random.Random, rounds: list[list[Callable[[World], object]]] | None = None) -> None:
    model, inputs = build(BY_NAME["llama"], CPU)
    model.set_attn_implementation(rng.choice(["sdpa", "sdpa", "eager"]))
    with settings.changed(captured_step=rng.choice(["auto", "always"])):
        _sequence(Llama(model, rng), functools.partial(_generated, inputs), captures, rounds)


def _encoded(world: World) -> Tensor:
    given = encoder_models.inputs(world.__dict__.setdefault("lengths", world.rng.choice([[9], [9, 4, 40]])))
    found, expected = encoder_models.both(world.model, given)
    encoder_models.assert_close(found.logits, expected.logits, 1e-4)
    return expected.logits


def _encode(rng: random.Random, rounds: list[list[Callable[[World], object]]] | None = None) -> None:
    model = copy.deepcopy(encoder_models.build("Bert", "SequenceClassification"))
    _sequence(Bert(model, rng), _encoded, _encodings, rounds)


@pytest.fixture(autouse=True)
def passes_are_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "PASSES", 1)


whats = pytest.mark.parametrize("what", [_generate, _encode], ids=["generate", "encoder"])


@whats
@pytest.mark.parametrize("seed", SEEDS)
def test_changes(seed: int, what: Callable[..., None]) -> None:
    what(random.Random(seed))


# Changes that undo or alter earlier ones.
BACK = [_switched, _restored, _unhooked]


@whats
@pytest.mark.parametrize("change", [each for each in dict.fromkeys(CHANGES) if each not in BACK])
def test_each_kind_of_change(change: Callable[[World], object], what: Callable[..., None]) -> None:
    """Then it is undone, or repeated. If a model has nothing of the kind, an attribute changes."""
    what(random.Random(change.__name__), [[change, _attribute], [*BACK, change, _attribute]])


# What a Llama calls, some of it without an effect on its tokens. It does not call the last of its functions above.
REPLACED = [
    *Llama.functions[:-1],
    (torch, "matmul"),
    (Tensor, "transpose"),
    (nn.Module, "__call__"),
    (modeling_llama, "rotate_half"),
    (type(ACT2FN["silu"]), "forward"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("owner", "name"), REPLACED)
def test_each_function(owner: Any, name: str) -> None:
    """Replaced before anything ran, and once a step is captured, which then does not serve; and restored again."""
    model, inputs = build(BY_NAME["llama"], CPU)
    world = Llama(model, random.Random(name))
    world.functions = ((owner, name),)
    for captured in range(2):
        _function(world)
        try:
            check(model, inputs, OPTIONS)
        finally:
            _restored(world)
        assert captures() == captured
        check(model, inputs, OPTIONS)


def _encodings() -> int:
    return sum(
        entry["accelerated"] for name, entry in fastgen.stats().items() if name.startswith("transformers.encoder")
    )


@pytest.fixture(scope="module", autouse=True)
def sequences_are_worth_it() -> Iterator[None]:
    """Changes alter the library's results, and steps were captured before them: counted in each process."""
    yield
    if Count.sequences >= 32:
        assert Count.altered >= 0.8 * Count.changes, (Count.altered, Count.changes)
        assert Count.captured >= 0.5 * Count.sequences, (Count.captured, Count.sequences)
