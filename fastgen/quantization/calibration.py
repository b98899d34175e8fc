"""Quantises a model block by block: runs samples through it, and rounds the linear layers of a block by its inputs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastgen.quantization.checkpoint import QuantizedTensor, dequantized
from fastgen.quantization.layers import is_plain_embedding
from fastgen.quantization.rounding import (
    DAMPING,
    Call,
    Kind,
    Plan,
    best_grid,
    gptq,
    make_grid,
    output_error,
    plan,
    round_to_nearest,
    tune,
)

_LEAST_GROUP = 16  # smaller groups need more memory for scales than they save


class Recipe(NamedTuple):
    method: str = "gptq"  # or "rtn", or "autoround"
    bits: int = 4  # 4 or 8
    group_size: int = 64
    symmetric: bool = True
    damping: float = DAMPING
    max_error: float | None = None
    """Layers whose relative output error is larger get 8 bits. Layers that share their input are treated alike."""
    eight: frozenset[str] = frozenset()
    """Layers that get 8 bits, whatever their errors."""
    iterations: int = 200
    """Steps of "autoround" for each block."""


class Quantised(NamedTuple):
    weight: QuantizedTensor
    error: float  # relative output error on the calibration inputs


class Choice(NamedTuple):
    """Layers with the same input, which get 4 or 8 bits together."""

    names: tuple[str, ...]
    gain: float  # how much 8 bits reduce the sum of their relative output errors
    weights: int  # number of weights
    share: float  # bits of scale per weight


class _Inputs:
    """The statistics of inputs that some layers of a block share."""

    def __init__(self, layer: nn.Linear) -> None:
        self.names: list[str] = []
        inputs = layer.in_features
        self.hessian = torch.zeros(inputs, inputs, dtype=torch.float32, device=layer.weight.device)

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self.hessian.addmm_(rows.T, rows)


def quantise_block(
    block: Block,
    carried: Carried,
    recipe: Recipe,
    step: Callable[[], object],
    wanted: Sequence[Any] = (),
    config: Any = None,
) -> dict[str, Quantised]:
    """Quantises the layers of a block, and returns them by name. The block itself is not changed.

    Leaves out layers whose in_features no group size divides; see `group_size_of`.

    Args:
        step: called after each layer.
        wanted: the block's result on each sample in the original model, which "autoround" approximates. Without it, and
            for layers that AutoRound leaves out, "gptq" is used.
        config: the model's configuration, for "autoround".

    Raises:
        ValueError: an input or a weight is NaN or infinite.
    """
    layers = {name: layer for name, layer in block.linears.items() if group_size_of(layer.in_features, recipe)}
    found: dict[str, Quantised] = {}
    tuned = _tuned(block, layers, carried, recipe, wanted, config) if recipe.method == "autoround" and wanted else {}
    for inputs in _collect(block, carried, layers):
        if not bool(inputs.hessian.isfinite().all()):
            raise ValueError(f"the inputs of {inputs.names[0]} are NaN or infinite on the calibration text")
        shared = {name: layers[name].weight for name in inputs.names}
        # Computed once for all of them: it takes most of the time.
        left = shared.keys() - tuned.keys()
        rounding = plan(inputs.hessian, recipe.damping) if recipe.method != "rtn" and left else None
        kind = recipe._replace(bits=8) if recipe.eight.intersection(shared) else recipe
        quantised = {
            name: quantise(weight, inputs.hessian, kind, rounding)
            if name in left
            else _measured(tuned[name], weight, inputs.hessian)
            for name, weight in shared.items()
        }
        if recipe.max_error is not None and any(layer.error > recipe.max_error for layer in quantised.values()):
            more = recipe._replace(bits=8)
            quantised = {name: quantise(weight, inputs.hessian, more, rounding) for name, weight in shared.items()}
        found |= quantised
        for _ in quantised:
            step()
    return {name: found[name] for name in layers}


def choices_of(block: Block, carried: Carried, recipe: Recipe) -> list[Choice]:
    """Returns the gains of 8 bits, rounded to nearest, for a block's layers; those that share inputs are one choice."""
    layers = {name: layer for name, layer in block.linears.items() if group_size_of(layer.in_features, recipe)}
    found = []
    for inputs in _collect(block, carried, layers):
        weights = [layers[name].weight for name in inputs.names]
        errors = {
            bits: sum(quantise(weight, inputs.hessian, nearest).error for weight in weights)
            for bits in (4, 8)
            for nearest in [recipe._replace(method="rtn", bits=bits)]
        }
        size = group_size_of(weights[0].shape[1], recipe) or recipe.group_size
        share = weights[0].element_size() * 8 / size  # of a scale, which has the type of the weight
        count = sum(weight.numel() for weight in weights)
        found.append(Choice(tuple(inputs.names), errors[4] - errors[8], count, share))
    return found


def most_gaining(choices: Sequence[Choice], bits_per_weight: float) -> frozenset[str]:
    """Returns the layers that get 8 bits: those that gain most per byte, while the average stays within the budget.

    Raises ValueError if 4 bits with their scales already exceed it.
    """
    weights = sum(choice.weights for choice in choices)
    used = sum(choice.weights * (4 + choice.share) for choice in choices)
    budget = bits_per_weight * weights
    if used > budget:
        raise ValueError(
            f"4 bits with their scales are {used / weights:.2f} bits per weight, of {bits_per_weight} asked for"
        )
    chosen: list[str] = []
    for choice in sorted(choices, key=lambda choice: -choice.gain / choice.weights):
        if choice.gain > 0 and used + 4 * choice.weights <= budget:
            used += 4 * choice.weights
            chosen += choice.names
    return frozenset(chosen)


@torch.no_grad()
def quantise(weight: Tensor, hessian: Tensor, recipe: Recipe, rounding: Plan | None = None) -> Quantised:
    """Quantises a weight, [N, K], by the recipe, ignoring its `max_error`.

    With "gptq", takes the best of three: GPTQ on the grid that covers all weights, GPTQ on the grid of the least
    weighted error, and rounding to nearest. So the error on the calibration inputs is never larger than that of the
    last.

    Args:
        rounding: GPTQ's plan for this Hessian, if there is one already.

    Raises:
        ValueError: no group size divides K, or a weight is NaN or infinite.
    """
    kind = _kind(weight, recipe)
    grid = make_grid(weight, kind)
    candidates = [round_to_nearest(weight, grid)]
    if recipe.method != "rtn":
        diagonal = hessian.diagonal()
        importance = diagonal if bool(diagonal.any()) else torch.ones_like(diagonal)
        rounding = rounding or plan(hessian, recipe.damping)
        for possible in (grid, best_grid(weight, kind, importance)):
            candidates.append(gptq(weight, possible, rounding))
    return min((_measured(one, weight, hessian) for one in candidates), key=lambda quantised: quantised.error)


def _kind(weight: Tensor, recipe: Recipe) -> Kind:
    size = group_size_of(weight.shape[1], recipe) or recipe.group_size
    # In the dtype of the weight, in which compressed-tensors multiplies values and scales.
    return Kind(recipe.bits, size, recipe.symmetric, weight.dtype)


def _measured(quantised: QuantizedTensor, weight: Tensor, hessian: Tensor) -> Quantised:
    return Quantised(quantised, output_error(weight, dequantized(quantised, weight.dtype), hessian))


def _tuned(
    block: Block, layers: dict[str, nn.Linear], carried: Carried, recipe: Recipe, wanted: Sequence[Any], config: Any
) -> dict[str, QuantizedTensor]:
    """Returns the layers by name as AutoRound rounds them, without those that it leaves out."""
    own = {name: name.removeprefix(f"{block.name}.") for name in layers}
    kinds = {
        own[name]: _kind(layer.weight, recipe._replace(bits=8) if name in recipe.eight else recipe)
        for name, layer in layers.items()
    }
    calls = [Call(*carried.inputs(block, sample), returned) for sample, returned in enumerate(wanted)]
    found = tune(block.module, kinds, calls, config, recipe.iterations) if kinds else {}
    return {name: found[short] for name, short in own.items() if short in found}


def group_size_of(k: int, recipe: Recipe) -> int | None:
    """Returns the largest of the recipe's group size and its halves that divides K; None if that is too small."""
    size = recipe.group_size
    while k % size and size % 2 == 0:
        size //= 2
    return size if k % size == 0 and size >= min(_LEAST_GROUP, recipe.group_size) else None


@torch.no_grad()
def use(block: Block, quantised: dict[str, QuantizedTensor]) -> None:
    """Sets the weights of a block's layers to the dequantised values."""
    for name, weight in quantised.items():
        layer = block.linears[name]
        layer.weight.copy_(dequantized(weight, layer.weight.dtype))


def _collect(block: Block, carried: Carried, layers: dict[str, nn.Linear]) -> list[_Inputs]:
    """Collects the inputs of the layers on all samples; once for layers that get the same tensor."""
    found: dict[str, _Inputs] = {}
    leaders: dict[str, _Inputs] = {}
    latest: list[tuple[Tensor, _Inputs]] = []

    def hook(name: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if name not in found:  # first call: it shares the previous layer's input, or begins a new one
                same = bool(latest) and latest[0][0] is x
                found[name] = latest[0][1] if same else leaders.setdefault(name, _Inputs(layers[name]))
                found[name].names.append(name)
            if name in leaders:
                leaders[name].add(x)
            latest[:] = [(x, found[name])]

        return seen

    with seen_by((layer, hook(name)) for name, layer in layers.items()):
        for _ in carried.run(block):
            latest.clear()
    for name in [name for name in layers if name not in found]:  # no sample has reached it
        leaders[name] = _Inputs(layers[name])
        leaders[name].names.append(name)
    return list(leaders.values())


# ---- blocks: elements of lists of modules that a forward pass calls once. Earlier blocks than the processed one
# return what the last finished block of their list returned, which is kept for each sample. All code between the blocks
# runs unchanged, so nothing is assumed about the inputs of a block.

Forward = Callable[[int], object]
"""Runs the whole model on the sample with this number."""


class Block(NamedTuple):
    name: str
    module: nn.Module
    stack: str  # the name of its list
    linears: dict[str, nn.Linear]  # by their names in the model


class _Reached(Exception):
    """Ends a forward pass early; not an error."""


@contextlib.contextmanager
def seen_by(hooks: Iterable[tuple[nn.Module, Callable[..., object]]]) -> Iterator[None]:
    """A context in which these modules have hooks, called with the module and its arguments before its forward pass."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_blocks(model: nn.Module, forward: Forward) -> list[Block]:
    """Returns the blocks of a model that have linear layers, in the order in which the first sample reaches them.

    A linear layer is exactly an `nn.Linear`, whose weight no other module has. Raises ValueError if there are no
    blocks, or if they are not called one after the other.
    """
    candidates = _outermost(model)
    calls: list[str] = []
    hooks = ((module, lambda *_, name=name: calls.append(name)) for name, (module, _) in candidates.items())
    with seen_by(hooks), torch.no_grad():
        forward(0)
    parameters = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    shared = {key for key, count in parameters.items() if count > 1}
    blocks = []
    for name in calls:
        module, stack = candidates[name]
        linears = _linears(name, module, shared)
        if calls.count(name) == 1 and linears:
            blocks.append(Block(name, module, stack, linears))
    if not blocks:
        raise ValueError("it has no list of blocks with linear layers that are called once each")
    return blocks


def output_block(model: nn.Module, output_layer: nn.Module | None) -> Block:
    """Returns the output layer as a block of its own, which comes after all others.

    If embeddings share its weight, the layer gets the name of the first of them. Raises ValueError if there is no such
    layer that could be quantised.
    """
    for name, module in model.named_modules():
        if module is output_layer:
            if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
                raise ValueError("its output layer is not a linear layer")
            others = [other for other in sharing(model, module) if other != name]
            if not all(is_plain_embedding(model.get_submodule(other)) for other in others):
                raise ValueError("its output layer shares its weight with layers other than plain embeddings")
            if others and module.bias is not None:
                raise ValueError("its output layer shares its weight with the embeddings, and has a bias")
            return Block(name, module, name, {next(iter(others), name): module})
    raise ValueError("it has no output layer")


def sharing(model: nn.Module, layer: nn.Module) -> list[str]:
    """Returns the names of the modules with this layer's weight, in the order of the model; its own is among them."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if module._parameters.get("weight") is layer.weight]


def _outermost(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns the elements of all lists of modules that are not inside another one, with the names of their lists."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{inner}.") for inner in found):
            found |= {f"{name}.{key}": (child, name) for key, child in module.named_children()}
    return found


def _linears(name: str, module: nn.Module, shared: set[int]) -> dict[str, nn.Linear]:
    return {
        f"{name}.{inner}" if inner else name: layer
        for inner, layer in module.named_modules()
        if type(layer) is nn.Linear and id(layer.weight) not in shared
    }


class Carried:
    """The results of the finished blocks for each sample; `forward` takes the samples' numbers."""

    def __init__(self, forward: Forward, samples: int) -> None:
        self.samples = samples
        self._forward = forward
        self._finished: dict[str, list[nn.Module]] = {}
        self._returned: dict[str, list[Any]] = {}

    @contextlib.contextmanager
    def _replayed(self, sample: int) -> Iterator[None]:
        """A context in which the finished blocks return what is kept for a sample."""
        modules = [module for finished in self._finished.values() for module in finished]
        # A module may already have a forward of its own, as wrapped ones do.
        own = [vars(module).get("forward") for module in modules]
        try:
            for stack, finished in self._finished.items():
                for module in finished:
                    # Copied, because the code after a block may write into its result.
                    module.forward = lambda *_, stack=stack, **__: _copied(self._returned[stack][sample])
            yield
        finally:
            for module, forward in zip(modules, own, strict=True):
                if forward is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = forward

    @torch.no_grad()
    def inputs(self, block: Block, sample: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments that a forward pass on the sample gives the block.

        Raises ValueError if the pass does not reach the block.
        """
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append((args, kwargs))
            raise _Reached

        with seen_by([(block.module, stop)]), self._replayed(sample), contextlib.suppress(_Reached):
            self._forward(sample)
        if not given:
            raise ValueError(f"a sample does not reach {block.name}")
        return given[0]

    @torch.no_grad()
    def run(self, block: Block) -> Iterator[Any]:
        """Runs the block on each sample, and yields its results."""
        for sample in range(self.samples):
            args, kwargs = self.inputs(block, sample)
            yield block.module(*args, **kwargs)

    def finish(self, block: Block) -> list[Any]:
        """Keeps the block's present results, which are final, in place of the previous block's.

        Returns them, for each sample.
        """
        returned = list(self.run(block))
        self._finished.setdefault(block.stack, []).append(block.module)
        self._returned[block.stack] = returned
        return returned


@torch.no_grad()
def check_carried(blocks: Sequence[Block], forward: Forward) -> None:
    """Checks that blocks get the same inputs whether the blocks before them are replayed or computed.

    Raises ValueError if a block gets anything that does not come from the block before it.
    """
    given: dict[str, Any] = {}

    def keep(block: Block) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[block.name] = _copied((args, kwargs))

        return hook

    with seen_by((block.module, keep(block)) for block in blocks):
        forward(0)
    carried = Carried(forward, 1)
    for block in blocks:
        if not _same(carried.inputs(block, 0), given[block.name]):
            raise ValueError(f"{block.name} is given more than what the block before it returns")
        carried.finish(block)


def _copied(value: Any) -> Any:
    return tree_map(lambda part: part.clone() if isinstance(part, Tensor) else part, value)


def _same(one: Any, other: Any) -> bool:
    """Whether all tensors of two values are equal."""
    (parts, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(
        torch.equal(part, twin) if isinstance(part, Tensor) and isinstance(twin, Tensor) else type(part) is type(twin)
        for part, twin in zip(parts, others, strict=True)
    )
