"""The encoder runs on inputs of about the same length at a time: padding behind them costs little.

The groups are those of `fastgen.decoding.length_buckets`. Decoders never look at the positions that were left out:
they are zero.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgen import patching
from fastgen.decoding import length_buckets
from fastgen.optimizer.transformers.call import Call

# The modules of Transformers whose encoders are known to leave padding out of everything: equivalence tests run them.
# Others look at neighbouring positions, in blocks or in convolutions, or adapt to the length of the batch.
_ENCODERS = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("bart", "blenderbot", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5")
)
# Arguments of `generate` that the library does not pass to the encoder.
_DECODERS = ("decoder_", "cross_attn")


def encode(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Wrapper of `GenerationMixin._prepare_text_encoder_decoder_kwargs_for_generation(inputs_tensor, ...)`."""
    call = Call.current(model)
    if call is None or not patching.is_active():
        return wrapped(*args, **kwargs)
    return _encode(call, wrapped, *args, **kwargs)


def _encode(
    call: Call,
    wrapped: Any,
    inputs_tensor: Tensor,
    model_kwargs: dict[str, Any],
    model_input_name: str | None,
    generation_config: Any,
) -> dict[str, Any]:
    mask = model_kwargs.get("attention_mask")
    cut: list[tuple[Tensor, int]] = []
    if _can_be_cut(call, inputs_tensor, model_kwargs, model_input_name, generation_config):
        cut = length_buckets.by_length(length_buckets.lengths(mask).tolist(), inputs_tensor.shape[1])
    if len(cut) < 2:
        return wrapped(inputs_tensor, model_kwargs, model_input_name, generation_config)
    call.has_intervened = True  # until the groups are put together: the library's own encoder could have made that
    result: dict[str, Any] = {}
    encoded = None
    for rows, length in cut:
        part = {**model_kwargs, "attention_mask": mask[rows, :length]}
        result = wrapped(inputs_tensor[rows, :length], part, model_input_name, generation_config)
        state = _only_state(result["encoder_outputs"], rows.shape[0], length)
        if encoded is None:
            encoded = state.new_zeros(*inputs_tensor.shape, state.shape[-1])
        encoded[rows, :length] = state
    outputs = type(result["encoder_outputs"])(last_hidden_state=encoded)
    call.has_intervened = False
    return {**result, "attention_mask": mask, "encoder_outputs": outputs}


def _can_be_cut(call: Call, inputs: Tensor, model_kwargs: dict[str, Any], name: str | None, config: Any) -> bool:
    """Whether the encoder gives the same for an input without the padding behind it, and nothing else is seen of it."""
    mask = model_kwargs.get("attention_mask")
    others = (value for key, value in model_kwargs.items() if key != "attention_mask" and not key.startswith(_DECODERS))
    return (
        name == "input_ids"
        and inputs.dim() == 2
        and inputs.shape[0] > 1
        and not inputs.is_floating_point()
        and inputs.device.type == "cpu"  # elsewhere, looking at the lengths would wait for the device
        and isinstance(mask, Tensor)
        and mask.shape == inputs.shape
        and not any(isinstance(value, Tensor) for value in others)
        and not config.return_dict_in_generate  # its result has the K/V of the padding in it
        and _gives_states_alone(call.model.get_encoder(), config)
        and not call.rows_depend_on_each_other
    )


def _gives_states_alone(encoder: Any, config: Any) -> bool:
    """Whether the encoder is one of those that are known, and gives its last hidden states and nothing else."""
    further = ("output_attentions", "output_hidden_states")
    return (
        type(encoder).forward.__module__ in _ENCODERS
        and "forward" not in vars(encoder)
        and not any(getattr(source, name, False) for source in (config, encoder.config) for name in further)
    )


def _only_state(outputs: Any, rows: int, length: int) -> Tensor:
    """The hidden states, [rows, length, hidden], of an encoder that gives nothing else.

    Raises:
        RuntimeError: it gives something else too, of which it is not known how to put the groups together.
    """
    others = [key for key, value in outputs.items() if key != "last_hidden_state" and value is not None]
    if others:
        raise RuntimeError(f"the encoder gives {', '.join(others)} besides its hidden states")
    state = outputs.last_hidden_state
    if state.shape[:2] != (rows, length):
        raise RuntimeError(f"the encoder gives {tuple(state.shape)} for {rows} inputs of {length} positions")
    return state
