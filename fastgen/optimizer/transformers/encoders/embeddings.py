"""Embeddings of tokens without padding, inside the call of an encoder whose layers run on one row.

Of a batch, most positions may be padding, and embeddings are sums of several tensors of all of them. The layers take
the row of tokens. What the model sees of it has the shape of the batch, and is NaN wherever one looks.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fastgen import releases
from fastgen.optimizer.transformers.encoders.stacks import COLUMNS, positions_of
from fastgen.optimizer.transformers.encoders.unpadded_forward import UnpaddedForward

# The tables of these arguments. An index out of range is an error, in padding as well.
_TABLES = {
    "input_ids": "word_embeddings",
    "token_type_ids": "token_type_embeddings",
    "position_ids": "position_embeddings",
}


def embed(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of the forward pass of the embeddings."""
    unpadded = UnpaddedForward.current.get()
    if unpadded is None or not unpadded.may_embed():
        return wrapped(*args, **kwargs)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    given = {name: value for name, value in bound.arguments.items() if value is not None}
    if "position_ids" not in given:
        given["position_ids"] = _positions(module, given, unpadded.longest)
    has_cache = any(given.get(name) for name in releases.CACHE_LENGTHS)
    if has_cache or not all(_has_rows(module, *each) for each in given.items()):
        return wrapped(*args, **kwargs)
    row = {name: unpadded.packed(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    if any(value is None for value in row.values()):
        return wrapped(*args, **kwargs)
    if "input_ids" in inspect.signature(wrapped).parameters:
        row.setdefault("input_ids", None)
    return unpadded.embedded(wrapped(**row))


def _positions(module: Any, given: dict[str, Any], longest: int) -> Tensor:
    """The default positions of the embeddings, of all columns, [1 or batch, longest]."""
    if positions_of(module) == COLUMNS:
        return module.position_ids[:, :longest]
    if "input_ids" in given:
        return module.create_position_ids_from_input_ids(given["input_ids"], module.padding_idx)
    return module.create_position_ids_from_inputs_embeds(given["inputs_embeds"], module.padding_idx)


def _has_rows(module: Any, name: str, indices: Any) -> bool:
    """Whether a table of the embeddings has all of these rows."""
    if name not in _TABLES:
        return True
    table = getattr(module, _TABLES[name], None)
    if type(table) is not nn.Embedding or not indices.numel():
        return False
    least, most = indices.aminmax()
    return int(least) >= 0 and int(most) < table.num_embeddings
