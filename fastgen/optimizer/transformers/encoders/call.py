"""The call of an encoder: decides whether padding is skipped, and what results hold in padded positions.

Padded positions of the layers' output hold NaN, so a result without NaN does not depend on them. If there is NaN
outside padded positions, or if padded positions must be as the library computes them, the call is repeated with the
original code, and later calls of that model with the same arguments are not tried.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen import counters, interrupts, patching, releases, settings
from fastgen.decoding import guards, host_memory, library_code
from fastgen.decoding.captured.recording import is_capturing, tensors_in
from fastgen.ops._library import warn_if_missing
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import HALF
from fastgen.optimizer.transformers import models
from fastgen.optimizer.transformers.call import Call, fast_layers
from fastgen.optimizer.transformers.encoders import programs
from fastgen.optimizer.transformers.encoders.stacks import VARLEN, way_of
from fastgen.optimizer.transformers.encoders.unpadded_forward import (
    Declined,
    Unexpected,
    UnpaddedForward,
    mapped,
    override_attention,
)

ENTRY_POINT = counters.ENCODER
# Padding is skipped if it makes up at least this part of the positions.
MIN_PADDING = 0.1
# Arguments with which a call does more than encode, or returns more than the last states.
_MORE = ("encoder_hidden_states", *releases.CACHE_NAMES, "use_cache", "output_attentions", "output_hidden_states")
_FURTHER_OUTPUTS = ("output_attentions", "output_hidden_states")
_NO_PADDING = "hardly any padding that could be left out"
_READS_PADDING = "padded positions are in the results, or what these depend on"

# Set inside the call of the outermost model: other models run inside it.
_inside: ContextVar[bool] = ContextVar("fastgen_inside_encoder", default=False)
# The layers keep their faster form for longer than one forward pass.
_has_layers: ContextVar[bool] = ContextVar("fastgen_encoder_layers", default=False)
_known: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()


class _Model:
    """What is known of a model.

    Attributes:
        stack: the model's only stack; None if it has none, several, or a decoder.
        reading: by kind of arguments, why such calls are not tried again.
        gives_states: its results contain the states of all positions.
    """

    def __init__(self, model: Any) -> None:
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        stacks = [(module, way) for module in model.modules() if (way := way_of(module)) is not None]
        only_encodes = len(stacks) == 1 and "decoder_input_ids" not in self.names
        self._stack: Callable[[], Any] = weakref.ref(stacks[0][0]) if only_encodes else lambda: None
        self.way = stacks[0][1] if only_encodes else ""
        self.reading: dict[Hashable, str] = {}
        self.gives_states = model.base_model is model

    @property
    def stack(self) -> Any:
        return self._stack()


@interrupts.guarded
def call(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps the call of a `PreTrainedModel`."""
    if is_left_alone():
        return wrapped(*args, **kwargs)
    given = counters.decided(ENTRY_POINT, _given, model, args, kwargs)
    if given is None:
        return wrapped(*args, **kwargs)
    with patching.held(_inside, True):
        result = programs.run(lambda: wrapped(*args, **kwargs), wrapped, model, given)
    if result is not None:
        return result
    return run(lambda: wrapped(*args, **kwargs), model, given, settings.current().padding)


def _given(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call by name; None for a model that is not encoder-only."""
    known = known_of(model)
    return None if known.stack is None else {**dict(zip(known.names, args, strict=False)), **kwargs}


def is_left_alone() -> bool:
    """Whether the call is part of another one, or FastGen must not change it."""
    if _inside.get() or not patching.is_active() or Call.current() is not None:
        return True
    # Compiled, traced or captured code must not read values.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_capturing():
        return True
    unusual = guards.unusual()
    if unusual is not None:
        counters.count_not_used(ENTRY_POINT, unusual)
    return unusual is not None


def known_of(model: Any) -> _Model:
    """Returns what is known of the model."""
    known = _known.get(model)
    if known is None:
        known = _known[model] = _Model(model)
    return known


@dataclass
class _Plan:
    """How a forward pass runs.

    Attributes:
        many_rows: context of the layers' faster form; closed before the pass is repeated without it.
        unpadded: the forward pass without padding; None for one with padding.
        key: kind of the call's arguments, if it has padding.
        has_layers: in a pass without padding to skip, whether the layers are the faster ones.
    """

    known: _Model
    many_rows: ExitStack = field(default_factory=ExitStack)
    unpadded: UnpaddedForward | None = None
    key: Hashable = None
    has_layers: bool = False


def run(forward: Callable[[], Any], model: Any, given: dict[str, Any], padding: str) -> Any:
    """Runs a forward pass of a model with these inputs, without padding if possible.

    `padding` is as in `Settings`, or "unseen": the consumer of the result masks padded positions.
    """
    with patching.held(_inside, True), ExitStack() as context:
        plan = counters.decided(ENTRY_POINT, _planned, context, model, given, padding)
        if plan is None:
            return forward()
        if plan.unpadded is None:
            result = forward()
            if plan.has_layers:
                counters.count_accelerated(f"{ENTRY_POINT}, layers")
            elif plan.key is None:  # with a key, the reason has been counted
                counters.count_not_used(ENTRY_POINT, _NO_PADDING)
            return result
        unpadded = plan.unpadded
        try:
            with plan.many_rows, patching.held(UnpaddedForward.current, unpadded):
                result = forward()
            if not unpadded.has_run:
                raise Unexpected("the layers of the model have not been called")
            if padding != "unseen":
                result = _result(result, given["attention_mask"], padding == "zero", unpadded)
        except Declined as declined:
            counters.count_not_used(ENTRY_POINT, str(declined))
            if isinstance(declined, Unexpected):
                releases.note_encoder(model, str(declined))
            result = forward()
            _note_declined(plan, str(declined), result)
            return result
        except Exception as failure:
            interrupts.pass_on(failure)
            result = forward()  # raises if the call itself is at fault
            counters.count_failure(ENTRY_POINT, failure)
            return result
        counters.count_accelerated(ENTRY_POINT if padding == "exact" else f"{ENTRY_POINT}, padding {padding}")
        warn_if_missing(model.device)
        return result


def _note_declined(plan: _Plan, reason: str, result: Any) -> None:
    """Records, from the library's result with padding, whether later passes without padding will be given up, too."""
    if any(bool(each.isnan().any()) for each in tensors_in(result)):
        return  # it has NaN, too, which tells nothing about padding
    plan.known.reading[plan.key] = reason


def _planned(context: ExitStack, model: Any, given: dict[str, Any], padding: str) -> _Plan:
    """Decides how `run` proceeds. `context` receives the pass's contexts; it stays empty if this raises."""
    with ExitStack() as entered:
        known, mask, reason = known_of(model), _padding_mask(given), None
        plan = _Plan(known)
        entered.enter_context(host_memory.kept(model.device))
        layers = entered.enter_context(_layers_of_pass(model))
        entered.enter_context(plan.many_rows)
        if mask is not None:  # without a mask, there is no padding to skip
            plan.key = _key(given, mask, padding)
            reads_padding = _READS_PADDING if known.gives_states and padding == "exact" else None
            reason = known.reading.get(plan.key) or reads_padding or _unsupported(model, known, given, mask, padding)
        if reason is not None:
            counters.count_not_used(ENTRY_POINT, reason)
        else:
            are_many = plan.many_rows.enter_context(_many_rows(model, given))
            if mask is None:
                plan.has_layers = are_many or layers is not None or _has_layers.get()
            else:
                fill = 0.0 if padding == "unseen" else math.nan
                plan.unpadded = UnpaddedForward(known.stack, known.way, mask, fill)
        context.enter_context(entered.pop_all())
        return plan


@contextlib.contextmanager
def layers_of_passes(model: Any) -> Iterator[None]:
    """A context in which several forward passes share packed weights, and the memory that they free."""
    with host_memory.kept(model.device):
        if settings.current().weight_dtype == "fp32":  # with many rows, no linear op needs a packed weight
            yield
            return
        with fast_layers(model), patching.held(_has_layers, True):
            yield


def _layers_of_pass(model: Any) -> AbstractContextManager[Any]:
    """Returns the context of the layers' faster form for one forward pass, if a single pass makes it worth having.

    A pass is too short to pack weights for it.
    """
    now = settings.current()
    if _has_layers.get() or now.packed_weights == "never":
        return contextlib.nullcontext()
    if now.weight_dtype == "fp32":
        # With many rows, torch's linear op is as fast, and checking all layers takes longer than few rows gain.
        return fast_layers(model) if model.dtype in HALF else contextlib.nullcontext()
    if now.packed_weights == "keep":
        return fast_layers(model)
    counters.count_not_used(f"{now.weight_dtype} weights", 'a forward pass of an encoder without packed_weights="keep"')
    return contextlib.nullcontext()


@contextlib.contextmanager
def _many_rows(model: Any, given: dict[str, Any]) -> Iterator[bool]:
    """Gives layers and attention their faster form in float32, if checking all layers takes little of the pass's time.

    Passes on the original code run outside this context. Yields whether the faster form is used.
    """
    now = settings.current()
    is_float32 = now.weight_dtype == "fp32" and model.dtype is torch.float32
    may_choose = now.packed_weights != "never"
    is_eager = model._compiled_call_impl is None and not torch.is_grad_enabled()
    is_wanted = is_eager and is_float32 and may_choose and _positions(given) > programs.MOST_TOKENS
    if not is_wanted or not choose.is_available():
        yield False
        return
    with fast_layers(model), override_attention():
        yield True


def _positions(given: dict[str, Any]) -> int:
    """Returns the positions of the batch, padding included; 0 if unknown."""
    found = [given[name] for name in ("input_ids", "inputs_embeds") if type(given.get(name)) is Tensor]
    return found[0].shape[:2].numel() if found else 0


def _key(given: dict[str, Any], mask: Tensor, padding: str) -> Hashable:
    """Returns what may affect which positions the results depend on."""
    names = frozenset(name for name, value in given.items() if value is not None and value is not False)
    return padding, names, bool(mask[:, 0].all()), bool(mask[:, -1].all())


def _padding_mask(given: dict[str, Any]) -> Tensor | None:
    """Returns where the tokens are, [batch, longest], bool; None with little padding or another kind of mask."""
    mask = given.get("attention_mask")
    if type(mask) is not Tensor or mask.device.type != "cpu" or mask.dim() not in (2, 3) or not mask.numel():
        return None
    found = mask.reshape(-1, mask.shape[-1]).bool()
    tokens = int(found.sum())
    return found if tokens <= (1 - MIN_PADDING) * mask.numel() else None


def _unsupported(model: Any, known: _Model, given: dict[str, Any], mask: Tensor, padding: str) -> str | None:
    """Returns why a call with padding runs on the original code; None if it need not."""
    config, values = model.config, given["attention_mask"]
    inputs = [given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
    if len(inputs) != 1 or inputs[0].shape[: values.dim()] != values.shape or inputs[0].device.type != "cpu":
        return "inputs that are not a token for each element of the mask"
    if values.dtype is not torch.bool and not bool(((values == 0) | (values == 1)).all()):
        return "a mask of other values than 0 and 1"
    if not bool(mask.any(dim=1).all()):
        return "a sequence that is all padding"
    if known.way != VARLEN and bool(((mask[:, 1:] != mask[:, :-1]).sum(dim=1) > 1).any()):
        return "a mask with holes"
    # compared by identity, because a tensor compares its elements
    more = [name for name in _MORE if given.get(name) is not None and given[name] is not False]
    more += [name for name in _FURTHER_OUTPUTS if given.get(name) is None and getattr(config, name, False)]
    if more and not (more == ["output_hidden_states"] and padding == "zero"):
        return f"arguments that ask for more ({', '.join(more)})"
    if getattr(config, "is_decoder", False):
        return "the model is a decoder"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attention implementation {config._attn_implementation}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "feed-forward layers in chunks of positions"
    tensors = (*tensors_in(given), *model.parameters())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "gradients are enabled (torch.no_grad, torch.inference_mode)"
    if models.rows_depend_on_each_other(model):
        return "rows of the batch depend on each other"
    reason = models.modules_unsupported(model)
    if reason is not None:
        return reason
    # Inside the stack, third-party code may read other tokens than attention does. After it, such code may read padding
    # without NaN in its result: by a comparison, for example. Only with "zero", the user has said that it does not.
    found = library_code.foreign(known.stack if padding == "zero" else model)
    return found and f"code that is not the library's: {found}"


def _result(result: Any, mask: Tensor, zeros: bool, unpadded: UnpaddedForward) -> Any:
    """Returns the model's result after checking it; with `zeros`, padded positions are zero.

    Pads the states of all layers, which the library records packed. Raises Declined if the result depends on padded
    positions, or may depend on them.
    """
    return mapped(result, lambda tensor: _checked(tensor, mask, zeros, unpadded))


def _checked(result: Tensor, mask: Tensor, zeros: bool, unpadded: UnpaddedForward) -> Tensor:
    if not result.is_floating_point():
        return result
    result = unpadded.padded(result)
    if mask.dim() > 2 and result.shape[: mask.dim()] != mask.shape:  # multiple choice: one row of states per choice
        mask = mask.flatten(0, -2)
    if zeros and result.shape[: mask.dim()] == mask.shape:
        if unpadded.has_made(result):
            return _with_zeros(result, mask)
        padding = mask.bool().logical_not().view(*mask.shape, *[1] * (result.dim() - mask.dim()))
        result = torch.where(padding & result.isnan(), 0.0, result)
    if bool(result.isnan().any()):
        raise Declined(_READS_PADDING)
    return result


def _with_zeros(states: Tensor, mask: Tensor) -> Tensor:
    """Sets padded positions of the layers' states, [batch, longest, size], to zero in place, and returns the tensor.

    Does not read padding, which may be most of a batch. Raises Declined if there is NaN at tokens.
    """
    positions, is_token = states.flatten(0, 1), mask.flatten().bool()
    if bool(positions[is_token].isnan().any()):
        raise Declined(_READS_PADDING)
    positions.index_fill_(0, is_token.logical_not().nonzero().squeeze(1), 0.0)
    return states
