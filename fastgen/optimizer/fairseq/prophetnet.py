"""ProphetNet, FastGen's model for FairSeq (`fastgen.models.prophetnet`): its K/V in a call, and whose code it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgen.models import prophetnet
from fastgen.optimizer.fairseq.call import Call, State


def extend(wrapped: Any, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Wrapper of `NgramSelfAttention.extend(keys, values, incremental_state)`.

    The streams' attention is the model's own code; here it gets K and V of the main stream from a `LayerKV`.
    """
    call = Call.current()
    return wrapped(*args, **kwargs) if call is None else _extend(call, wrapped, attention, *args, **kwargs)


def _extend(
    call: Call, wrapped: Any, attention: Any, keys: Tensor, values: Tensor, incremental_state: State | None
) -> tuple[Tensor, Tensor]:
    state = call.state(attention, incremental_state)
    if state is None:
        return wrapped(keys, values, incremental_state)
    return call.extend(attention, state, keys, values)


def give_way(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of FairSeq's `register_model(name, ...)`, `register_task(name, ...)` and `register_criterion(name, ...)`.

    Users who load the authors' own code, as with `--user-dir`, get that.
    """
    name = args[0] if args else kwargs.get("name")
    if isinstance(name, str):
        prophetnet.withdraw(name)
    return wrapped(*args, **kwargs)
