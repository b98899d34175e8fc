"""A call after its prefill, as captured steps see it: its prompt, its processors, and the key of its step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fastgen import releases
from fastgen.decoding.captured import graph
from fastgen.decoding.kv.rows import rows_of
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.call import Call
from fastgen.optimizer.transformers.captured import graph_cache, processors
from fastgen.optimizer.transformers.captured.choice import Host, HostCode
from fastgen.optimizer.transformers.captured.key import (
    AXES,
    Key,
    Prompt,
    Sizes,
    prefilled,
    room_for_ends,
    round_up,
    rounded_sizes,
)
from fastgen.optimizer.transformers.captured.pays import certain_tokens
from fastgen.optimizer.transformers.captured.rewritten_processors import CapturedProcessor
from fastgen.optimizer.transformers.captured.step import DecodeStep
from fastgen.optimizer.transformers.models import STATES, positions_of_step
from fastgen.optimizer.transformers.special_models import PLAIN, Codebooks

# Combines two rows of scores into one.
GUIDANCE = logits_process.ClassifierFreeGuidanceLogitsProcessor
# Numbers of inputs that steps are made for, unless a step can be made for any number.
BATCHES = (1, 2, 4, 8, 16, 24, 32)
# By whether beams are searched, and whether the model has an encoder.
_OUTPUTS = {
    (False, False): GenerateDecoderOnlyOutput,
    (False, True): GenerateEncoderDecoderOutput,
    (True, False): GenerateBeamDecoderOnlyOutput,
    (True, True): GenerateBeamEncoderDecoderOutput,
}


class PrefilledCall:
    """What a captured step needs from a call. Subclasses run the call, or pass its inputs to slots.

    Attributes:
        host: what the host does in each step.
        may_pad: the prompt may be preceded by padding.
        own_key: the key of the call's own step. The call may run on another step, for more inputs or longer sequences.

    Raises:
        CannotBeCaptured: no captured step can begin from the prefill.
    """

    _code_type: type[HostCode] = HostCode
    _enters_slots = False

    def __init__(self, call: Call, arguments: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
        assert call.store is not None, "the prefill was accelerated"
        self._call, self.model, self._store = call, call.model, call.store
        self.config, self._processors = arguments["generation_config"], arguments["logits_processor"]
        self._input_ids, self._model_kwargs = arguments["input_ids"], model_kwargs
        self._per_input = max(self.config.num_beams, self.config.num_return_sequences)
        self._code = self._code_type(call, arguments)
        self.host = Host(self._code.process, self._code.stops, self._code.keep)
        criteria = arguments["stopping_criteria"]
        ends = (criterion.eos_token_id.tolist() for criterion in criteria if type(criterion) is EosTokenCriteria)
        given = call, self._input_ids, self._per_input, model_kwargs, self.config.max_length
        self.prompt, self._windows = prefilled(*given, tuple(itertools.chain.from_iterable(ends)))
        if self.prompt.states and call.returns_cache and not graph.is_recorded(self.model.device):
            # On a GPU, steps beyond the last one that counts may be under way already.
            raise CannotBeCaptured("a returned cache with states")
        self._adapter = row_adapters.chosen(self.model)
        if self._enters_slots:
            self._prepare_for_slots()
        self._lengths = processors.Lengths(
            self._input_ids.shape[1], self.config.max_length, self.model.device.type != "cpu", len(self._input_ids)
        )
        self._signed = self._sign(self._processors)
        self._lengths = self._lengths._replace(rows=None)  # some rows may leave the batch
        self._needed, self.may_pad = _needed_sizes(self.model, self.prompt, model_kwargs)
        self._codebooks = Codebooks.of(self.model, model_kwargs)
        self._check_guidance()
        self._key = self.own_key = self._make_key()

    def _prepare_for_slots(self) -> None:
        """Adapts the prompt to a step with slots."""
        if self.prompt.cross:  # in slots, a source has no padding
            self.prompt.tensors.pop("attention_mask", None)
        if row_adapters.layers_of(self.model):
            number = row_adapters.number_of(self._adapter)
            self.prompt.tensors[row_adapters.NUMBERS] = torch.full_like(self.prompt.tokens[:, :1], number)

    def _check_guidance(self) -> None:
        """Raises `CannotBeCaptured` if anything but guidance gets the scores of both copies of an input."""
        known = processors.all_known(self._signed)
        where = None if known is None else [n for n, each in enumerate(known) if each.signature[1:2] == (GUIDANCE,)]
        if (self._codebooks.copies > 1 and where != [0]) or (self._codebooks.copies == 1 and where):
            raise CannotBeCaptured("guidance that does not come first of what processes scores")

    @property
    def certain_tokens(self) -> int:
        """Number of tokens that the call generates whatever the model predicts."""
        if self._call.runs_user_code:
            return 1
        return certain_tokens(self.config, self._input_ids.shape[1], self.prompt.new_tokens)

    @property
    def output(self) -> Any:
        """The class of the result with `return_dict_in_generate`."""
        return _OUTPUTS[self.config.num_beams > 1, bool(self.model.config.is_encoder_decoder)]

    @property
    def _count(self) -> int:
        """Sequences that each input returns."""
        return self.config.num_return_sequences if self.config.num_beams > 1 else self._per_input

    # ---- its processors

    def _sign(self, given: Sequence[Any]) -> list[processors.Signed | None]:
        return [processors.signed(each, self._lengths) for each in given]

    def bucket(self, key: Key) -> processors.Bucket:
        """Returns the device, sizes and types that processors of a step of this key are made for."""
        vocabulary, is_float32 = self.prompt.logits.shape[-1], self.model.dtype is torch.float32
        return processors.Bucket(self.model.device, key.batch, key.per_input, vocabulary, key.slots, is_float32)

    def _refresh(self, made: Sequence[CapturedProcessor], inputs: Sequence[int] | None = None) -> bool:
        """Has captured processors do what this call's processors do, for `inputs` in this order, or for all inputs.

        Returns:
            whether they can.
        """
        given = self._signed
        if inputs is not None:
            given = self._sign(processors.of_rows(self._processors, rows_of(torch.tensor(inputs), self._per_input)))
        known = processors.all_known(given)
        return not made or (known is not None and processors.refresh(made, known))

    def fill(self) -> int:
        """Returns the token that fills sequences after their ends."""
        pad = 0 if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        if self.config.num_beams == 1:
            return pad
        eos = self.prompt.eos
        return (pad or eos[0]) if eos else -1

    # ---- the key of its step

    def _rounded_sizes(self, at_once: bool = False) -> Sizes:
        on_gpu = not graph.is_recorded(self.model.device)
        found = rounded_sizes(self._needed, self.may_pad, on_gpu, at_once)
        # A source before the prompt shares the KV cache of self-attention, and its length is not rounded.
        return found if self.prompt.cross else found._replace(source=self._needed.source)

    def _batch(self, inputs: int) -> int:
        """Returns the number of inputs that the step is made for. On a CPU, an idle row costs time."""
        if graph.is_recorded(self.model.device) or self._codebooks != PLAIN:
            return inputs
        return next((n for n in BATCHES if n >= inputs), round_up(inputs, 16))

    def _make_key(self) -> Key:
        prompt, config = self.prompt, self.config
        encoded, states = (self._model_kwargs.get(name) for name in ("encoder_outputs", STATES))
        of_states = None if states is None or not prompt.cross else (None, states.shape[2])
        known = processors.all_known(self._signed)
        key = Key(
            batch=self._batch(prompt.inputs),
            per_input=self._per_input,
            sizes=self._rounded_sizes(),
            width=positions_of_step(self.model),
            encoder=of_states if encoded is None else (type(encoded), encoded[0].shape[2]),
            source_in_front=encoded is not None and not prompt.cross,
            early_stopping=_early_stopping(config.early_stopping) if config.num_beams > 1 else None,
            samples=bool(config.do_sample),
            ends=len(prompt.eos) if config.num_beams > 1 else room_for_ends(prompt.eos),
            processors=None if known is None else tuple(each.signature for each in known),
            has_criteria=bool(self._code.criteria),
            kept=tuple(self._code.kept),
            tensors=tuple(sorted(prompt.tensors)),
            constants=self._constants(),
            kv=tuple((kv[0].shape[1], kv[0].shape[3], kv[1].shape[3], kv[0].dtype) for kv in prompt.own),
            windows=self._windows_of_key(),
            axes=prompt.tensors[AXES].shape[1] if AXES in prompt.tensors else 0,
            adapters=(self._adapter,),
            forms=prompt.forms,
            codebooks=self._codebooks,
        )
        return self._open(key)

    def _constants(self) -> tuple[tuple[str, Any], ...]:
        """Returns the model's inputs that are not tensors."""
        ignored = (*releases.CACHE_NAMES, *releases.read_in_prefill())
        given = ((name, value) for name, value in self._model_kwargs.items() if name not in ignored)
        return tuple(sorted(each for each in given if isinstance(each[1], (bool, int, float, str))))

    def _windows_of_key(self) -> tuple[int | None, ...]:
        """Returns the sliding windows; None for a window that is as long as all positions of the call."""
        positions = self._needed.cached + self._needed.new
        return tuple([window if window and positions > window else None for window in self._windows])

    def _open(self, key: Key) -> Key:
        """Returns the key of a step with buffers that grow, if the call can run on one; otherwise `key`."""
        if not graph.is_recorded(self.model.device) or key.source_in_front:
            return key
        key_of_any = self.of_any_sizes(key)
        return key if graph_cache.is_bound(self.model, key_of_any) else key_of_any

    def of_any_sizes(self, key: Key) -> Key:
        """Returns the key of a step with buffers that grow."""
        prompt = self._needed
        exact = Sizes(0, 0, 0, 0) if self.may_pad else Sizes(prompt.prompt, prompt.cached, 0, 0)
        return replace(key, sizes=exact)

    # ---- its step

    def _sizes(self) -> Sizes:
        """Returns the sizes of the buffers that the call begins with."""
        return self._key.sizes if self._key.sizes.new else self._rounded_sizes()

    def _new_step(self) -> DecodeStep:
        known = processors.all_known(self._signed)
        return self._step_with(None if known is None else processors.all_made(known, self.bucket(self._key)))

    def _step_with(self, made: list[CapturedProcessor] | None) -> DecodeStep:
        return DecodeStep(self._key, self.prompt, made, self._sizes())


def _early_stopping(option: Any) -> bool | str:
    """Returns the option as the library's beam search understands it: it tests `is True`, but 1 equals True."""
    return "never" if option == "never" else option is True


def _needed_sizes(model: Any, prompt: Prompt, model_kwargs: dict[str, Any]) -> tuple[Sizes, bool]:
    """Returns the sizes that the call needs, and whether its prompt may be preceded by padding."""
    length = prompt.tokens.shape[1]
    encoded = model_kwargs.get("encoder_outputs")
    source = prompt.sizes.source if encoded is None else encoded[0].shape[1]
    cached = prompt.cached if encoded is None else length
    if encoded is not None and not prompt.cross:  # the source comes before the prompt
        source = source if length > 1 else round_up(source)
        cached = source + length - 1
    # Padding is possible if the prompt's mask excludes it and its positions are given, or if no layer attends.
    says = not prompt.own or {"attention_mask", "position_ids"} <= prompt.tensors.keys()
    may_pad = says and not model.config.is_encoder_decoder
    return Sizes(length, cached, prompt.new_tokens, source), may_pad
