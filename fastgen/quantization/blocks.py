"""Runs samples through a model block by block.

A block is an element of a list of modules that a forward pass calls once. While a block is processed, earlier blocks
are not computed: they return what the last finished block of their list returned, which is kept for each sample. All
code between the blocks runs unchanged, so nothing is assumed about the inputs of a block.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastgen.quantization.layers import is_plain_embedding

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
    shared = _shared_parameters(model)
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


def _shared_parameters(model: nn.Module) -> set[int]:
    seen = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    return {key for key, count in seen.items() if count > 1}


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
