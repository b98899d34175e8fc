"""Hooks in the library's decoding loops: they let finished inputs leave the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import wrapt
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from fastgen import patching, releases
from fastgen.decoding.kv.rows import rows_of
from fastgen.optimizer.transformers.cache import ExchangedLayers
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.models import TOKEN_TYPES, axis_of_rows, reads_padding

# The methods through which finished inputs leave. A model that overrides them may pass on, or read, anything.
_HOOKED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# The parts of the loops that see all rows. The loops themselves are checked before a call is accelerated.
_SEARCH = (
    "_get_logits_processor",
    "_get_stopping_criteria",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
)


class HookedModel(wrapt.CallableObjectProxy):
    """A model for one of the library's loops: some of its methods have hooks, whatever its class has."""

    def __init__(self, model: Any, hooks: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(model)
        self._self_hooks = hooks

    @property
    def __call__(self) -> Any:  # also one that the user has set on the model
        return self.__wrapped__.__call__

    def __getattr__(self, name: str) -> Any:
        model = self.__wrapped__
        value, hook = getattr(model, name), self._self_hooks.get(name)
        return value if hook is None else lambda *args, **kwargs: hook(value, model, args, kwargs)


def may_leave(call: Call, config: Any, batch: int) -> bool:
    """Whether nothing outside the library's loop sees the rows of finished inputs."""
    kind, librarys = type(call.model), vars(GenerationMixin)
    return (
        batch > 1
        and config.eos_token_id is not None  # otherwise, all inputs end together
        and call.model.device.type == "cpu"  # on other devices, reading which inputs have finished would synchronize
        and reads_padding(call.model, config)
        and not call.runs_user_code
        and not config.return_dict_in_generate
        and not call.cache_is_the_users
        and all(patching.stands_for(f"GenerationMixin.{name}") for name in _HOOKED)
        and all(inspect.getattr_static(kind, name, None) is librarys.get(name) for name in (*_HOOKED, *_SEARCH))
        and not call.rows_depend_on_each_other
    )


def _compaction(call: Call | None) -> BatchCompaction | None:
    return call.compaction if call is not None and patching.is_active() else None


def prepare_inputs(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin.prepare_inputs_for_generation`, which returns the inputs of the next step."""
    if releases.has_former_names(kwargs):  # given by a model's own method, which calls this one
        wrapped = patching.on_behalf(wrapped)
    inputs = wrapped(*args, **kwargs)
    compaction = _compaction(Call.current(model))
    return inputs if compaction is None else compaction.select(inputs)


def update_kwargs(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `GenerationMixin._update_model_kwargs_for_generation(outputs, ...)`, called after each step."""
    compaction = _compaction(Call.current(model))
    if compaction is not None:
        outputs = kwargs["outputs"] if "outputs" in kwargs else args[0]
        outputs.logits = compaction.spread(outputs.logits)
    return wrapped(*args, **kwargs)


def stopping_criteria(wrapped: Any, criteria: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `StoppingCriteriaList.__call__`."""
    done = wrapped(*args, **kwargs)
    call = Call.current()
    compaction = _compaction(call)
    if call is not None and compaction is not None and not compaction.note_criteria(criteria, done):
        call.compaction = None  # happens in the first step, before anything has left
    return done


def early_stop(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Wraps `GenerationMixin._check_early_stop_heuristic`, which ends each step of a beam search."""
    may_improve = wrapped(*args, **kwargs)
    compaction = _compaction(Call.current())
    if compaction is not None and {"is_sent_finished", "beam_scores", "early_stopping"} <= kwargs.keys():
        compaction.note_search(may_improve, kwargs["is_sent_finished"], kwargs["beam_scores"], kwargs["early_stopping"])
    return may_improve


# ---- batch compaction: finished inputs leave the model's batch, while the library's loop goes on with all rows
#
# Results of a finished input are not used: a greedy or sampled row gets padding, and a full beam search accepts no
# further hypothesis. Each of its rows can therefore get the logits of another input in the loop. That is invisible
# unless something reads those rows; if something may, all rows stay (`may_leave`).

# Compaction copies the K and V of the remaining inputs, so it waits until at least this part of the inputs is finished.
_MIN_PART = 0.25
# Model inputs that have a row per sequence, if they are matrices.
_PER_ROW = frozenset(("input_ids", "attention_mask", "position_ids", *TOKEN_TYPES))
_ENCODER_OUTPUTS = "encoder_outputs"
# The library uses -1e9 for missing hypotheses; real scores are far above.
_NO_SCORE = -1e8
# The first ends single rows, which then get padding; the others end all rows at once.
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class BatchCompaction:
    """The rows that the model still runs on.

    A beam search (`searches`) itself tells when an input is done (`note_search`); otherwise the criteria do.
    """

    def __init__(self, store: ExchangedLayers, batch: int, per_input: int, searches: bool) -> None:
        self._store = store
        self._per_input = per_input
        self._searches = searches
        self._inputs = torch.arange(batch)  # the inputs in the model's batch
        self._ended = torch.zeros(batch * per_input, dtype=torch.bool)  # by row, of all inputs
        self._has_changed = False
        self._criteria: bool | None = None  # whether their meaning is known
        self._rows: Tensor | None = None  # index, among all rows, of each row in the model's batch
        self._numbers = torch.arange(batch * per_input)  # the inverse; 0 for a row that has left
        self._slices: dict[int, tuple[Any, Any]] = {}
        self._translated: tuple[Tensor, Tensor] | None = None

    def note_criteria(self, criteria: Any, done: Tensor) -> bool:
        """Takes [rows] flags of the stopping criteria; returns False if their meaning is unknown."""
        if self._criteria is None:
            self._criteria = all(type(criterion) in _CRITERIA for criterion in criteria)
        if self._criteria and not self._searches:
            self._end(done)
        return self._criteria

    def note_search(self, may_improve: Tensor, is_finished: Tensor, scores: Tensor, early_stopping: Any) -> None:
        """Takes the state of a beam search: [batch, 1] and [batch, beams] flags, and [batch, beams] finished scores.

        An input accepts no more hypotheses if either kind of flag says that it is over. But in every step, the library
        sorts its finished hypotheses again, together with the current candidates of its rows. If finished scores are
        equal, the rows must stay, because they affect the order of the equal ones.
        """
        over = ~may_improve.squeeze(1)
        if early_stopping is True:
            over |= is_finished.all(dim=1)
        if bool(over.any()):
            over &= (scores[:, :-1] > scores[:, 1:]).all(dim=1) & (scores[:, -1] > _NO_SCORE)
            self._end(over.repeat_interleave(self._per_input))

    def _end(self, rows: Tensor) -> None:
        ended = self._ended | rows
        self._has_changed |= not torch.equal(ended, self._ended)
        self._ended = ended

    def select(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Selects the remaining rows from the model's inputs, which have all rows."""
        self._leave(inputs)
        if self._rows is None:
            return inputs
        # Inputs that recur in the next step, such as the encoder's output, are not sliced again.
        self._slices = {
            id(value): self._slices.get(id(value)) or (value, self._slice(name, value))
            for name, value in inputs.items()
        }
        return {name: self._slices[id(value)][1] for name, value in inputs.items()}

    def spread(self, logits: Tensor) -> Tensor:
        """Expands the logits of the remaining rows to all rows: a row that has left gets those of the first row.

        If these are not finite it gets 0: a search would take NaN for the best hypothesis, even of a finished input.
        """
        if self._rows is None:
            return logits
        spread = logits.index_select(0, self._numbers)
        if not bool(logits[0].max().isfinite()):
            gone = torch.ones_like(self._ended)  # by row: whether it has left
            gone[self._rows] = False
            spread[gone] = 0.0
        return spread

    def translate(self, index: Tensor) -> Tensor:
        """Translates a reorder of all rows into one of the remaining rows."""
        if self._rows is None:
            return index
        if self._translated is None or self._translated[0] is not index:
            # All layers get the same object, by which `Beams` recognizes that it is one reorder.
            self._translated = index, self._numbers[index.long()[self._rows]]
        return self._translated[1]

    def _leave(self, inputs: dict[str, Any]) -> None:
        if not self._has_changed:
            return
        self._has_changed = False
        ended = self._ended.view(-1, self._per_input).all(dim=1)[self._inputs]
        staying = (~ended).nonzero().squeeze(1)
        present = self._inputs.shape[0]
        if not 0 < staying.shape[0] <= (1 - _MIN_PART) * present:
            return
        if not all(self._has_rows(name, value) for name, value in inputs.items()):
            return
        self._store.keep(staying, self.translate)
        self._inputs = self._inputs[staying]
        self._rows = rows_of(self._inputs, self._per_input)
        self._numbers = torch.zeros_like(self._numbers)
        self._numbers[self._rows] = torch.arange(self._rows.shape[0])
        self._slices, self._translated = {}, None

    def _slice(self, name: str, value: Any) -> Any:
        if name == _ENCODER_OUTPUTS and isinstance(value, ModelOutput):
            fields = {key: part[self._rows] if isinstance(part, Tensor) else part for key, part in value.items()}
            return type(value)(**fields)
        if isinstance(value, Tensor):
            if not self._has_rows(name, value):
                raise RuntimeError(f"{name} has become an input of the model after rows have left")
            return value[:, self._rows] if axis_of_rows(name, value) else value[self._rows]
        return value

    def _has_rows(self, name: str, value: Any) -> bool:
        """Whether it is known how to slice a model input when rows leave."""
        rows = self._numbers.shape[0]
        if isinstance(value, Tensor):
            axis = axis_of_rows(name, value)
            return name.removeprefix("decoder_") in _PER_ROW and value.dim() == axis + 2 and value.shape[axis] == rows
        if isinstance(value, ModelOutput):
            parts = [part for part in value.values() if isinstance(part, Tensor)]
            return name == _ENCODER_OUTPUTS and all(part.shape[0] == rows for part in parts)
        return value is None or isinstance(value, (bool, int, float, str)) or releases.is_cache(name)
