"""FairSeq: what makes it run and keeps it safe (`compat`), and the functions that are hooked to make generation fast.

`SequenceGenerator._generate` opens a call and repeats it with the original code should anything go wrong. Inside of it,
`MultiheadAttention` uses FastGen's K/V store, the ensemble leaves the encoder output as it is and reorders that store,
and a language model's prefix is run at once. The loop, the searches and the models stay FairSeq's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fastgen.optimizer.fairseq import compat
from fastgen.optimizer.fairseq.registration import Registration
from fastgen.patching import Patch

# FairSeq's releases that are tested; fairseq-fixed calls itself 0.12.3.
TESTED_VERSIONS = ("0.12", "0.12")

_ATTENTION_PARAMETERS = (
    "self query key value key_padding_mask incremental_state need_weights static_kv attn_mask before_softmax "
    "need_head_weights"
)


def patches() -> list[Patch]:
    """Every patch that FastGen applies to FairSeq."""
    return [*compat.patches(), *_prophetnet(), *_generation()]


def _prophetnet() -> list[Patch]:
    """ProphetNet, which FairSeq lacks."""
    model = "fastgen.models.prophetnet"
    give_way = f"{__name__}.prophetnet:give_way"
    return [
        Patch("fairseq.models", "register_model", give_way),
        Patch("fairseq.tasks", "register_task", give_way),
        Patch("fairseq.criterions", "register_criterion", give_way),
        Patch(f"{model}.pretrained", "read", f"{__name__}.compat.checkpoints:load"),
        Patch(f"{model}.attention", "NgramSelfAttention.extend", f"{__name__}.prophetnet:extend"),
        Registration("fairseq", "ngram_transformer_prophet", f"{model}:register"),
    ]


def _generation() -> list[Patch]:
    """What makes `SequenceGenerator` fast."""
    generator = "fairseq.sequence_generator"
    adapter = f"{__name__}.generate"

    def hook(target: str, function: str, parameters: str) -> Patch:
        return Patch(generator, target, f"{adapter}:{function}", _takes(parameters))

    return [
        Patch(
            "fairseq.modules.multihead_attention",
            "MultiheadAttention.forward",
            f"{__name__}.attention:attention",
            _takes(_ATTENTION_PARAMETERS),
        ),
        Patch(
            "fairseq.ngram_repeat_block",
            "NGramRepeatBlock.forward",
            f"{__name__}.ngrams:no_repeat_ngram",
            _takes("self tokens lprobs bsz beam_size step"),
        ),
        Patch(
            "fairseq.search",
            "BeamSearch.step",
            f"{__name__}.search:step",
            # The last one only in fairseq-fixed.
            _takes("self step lprobs scores prev_output_tokens original_batch_idxs", optional="candidate_multiple"),
        ),
        Patch(generator, "EnsembleModel.forward_encoder", f"{__name__}.sources:encode", _takes("self net_input")),
        hook("EnsembleModel.reorder_encoder_out", "reorder_encoder_out", "self encoder_outs new_order"),
        hook(
            "EnsembleModel.reorder_incremental_state", "reorder_incremental_state", "self incremental_states new_order"
        ),
        hook(
            "EnsembleModel.forward_decoder",
            "forward_decoder",
            "self tokens encoder_outs incremental_states temperature",
        ),
        hook(
            "SequenceGenerator._prefix_tokens",
            "prefix_tokens",
            "self step lprobs scores tokens prefix_tokens beam_size",
        ),
        # Last: without the others it would open calls that nobody serves.
        hook("SequenceGenerator._generate", "generate", "self sample prefix_tokens constraints bos_token"),
    ]


def _takes(parameters: str, optional: str = "") -> Callable[[Any], str | None]:
    """The condition that the target's parameters are those that the wrapper was written for, `optional` ones or not."""
    expected = parameters.split()

    def check(original: Any) -> str | None:
        found = list(inspect.signature(original).parameters)
        if found in (expected, [*expected, *optional.split()]):
            return None
        return f"{original.__qualname__} takes ({', '.join(found)}), expected ({', '.join(expected)})"

    return check
