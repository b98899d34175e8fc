"""Embeddings of tokens without padding, inside the call of an encoder whose layers run on one row.

Of a batch, most positions may be padding, and embeddings are sums of several tensors of all of them. The layers take
the row of tokens. What the model sees of it has the shape of the batch, and is NaN wherever one looks.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fastgen import releases
from fastgen.optimizer.transformers.encoders.passes import Passes
from fastgen.optimizer.transformers.encoders.stacks import COLUMNS, positions_of

# What is looked up where. A number that is not there is an error, in padding as well.
_TABLES = {
    "input_ids": "word_embeddings",
    "token_type_ids": "token_type_embeddings",
    "position_ids": "position_embeddings",
}


def embed(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of the forward pass of the embeddings."""
    passes = Passes.current.get()
    if passes is None or not passes.may_embed():
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    given = {name: value for name, value in bound.arguments.items() if value is not None}
    if "position_ids" not in given:
        given["position_ids"] = _positions(module, given, passes.longest)
    has_cache = any(given.get(name) for name in releases.CACHE_LENGTHS)
    if has_cache or not all(_is_there(module, *each) for each in given.items()):
        return wrapped(*args, **kwargs)
    row = {name: passes.packed(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    if any(value is None for value in row.values()):
        return wrapped(*args, **kwargs)
    if "input_ids" in inspect.signature(wrapped).parameters:
        row.setdefault("input_ids", None)
    return passes.embedded(wrapped(**row))


def _positions(module: Any, given: dict[str, Any], longest: int) -> Tensor:
    """Those that the embeddings have for themselves, of all columns, [1 or texts, longest]."""
    if positions_of(module) == COLUMNS:
        return module.position_ids[:, :longest]
    if "input_ids" in given:
        return module.create_position_ids_from_input_ids(given["input_ids"], module.padding_idx)
    return module.create_position_ids_from_inputs_embeds(given["inputs_embeds"], module.padding_idx)


def _is_there(module: Any, name: str, numbers: Any) -> bool:
    """Whether all numbers that are looked up in a table of the embeddings are in it."""
    if name not in _TABLES:
        return True
    table = getattr(module, _TABLES[name], None)
    if type(table) is not nn.Embedding or not numbers.numel():
        return False
    least, most = numbers.aminmax()
    return int(least) >= 0 and int(most) < table.num_embeddings
