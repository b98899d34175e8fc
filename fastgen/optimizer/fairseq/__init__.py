"""FairSeq: compatibility and safety patches (`compat`), and the hooks that make generation fast.

`SequenceGenerator._generate` opens a call, and repeats it with the original code if anything fails. Inside the call,
`MultiheadAttention` uses FastGen's KV cache, the ensemble leaves the encoder output unexpanded and reorders that cache,
and a language model's prefix is computed in one pass. The loop, the searches and the models stay FairSeq's.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.optimizer.fairseq import compat
from fastgen.patching import Patch, takes

# Tested releases of FairSeq; fairseq-fixed calls itself 0.12.3.
TESTED_VERSIONS = ("0.12", "0.12")


def patches() -> list[Patch]:
    """Returns every patch that FastGen applies to FairSeq."""
    return [*compat.patches(), *_prophetnet(), *_generation()]


def _prophetnet() -> list[Patch]:
    """Returns the patches for ProphetNet, which FairSeq lacks."""
    model = "fastgen.models.prophetnet"
    return [
        Patch("fairseq.models", "register_model", f"{model}:give_way"),
        Patch("fairseq.tasks", "register_task", f"{model}:give_way"),
        Patch("fairseq.criterions", "register_criterion", f"{model}:give_way"),
        Patch(f"{model}.pretrained", "read", f"{__name__}.compat.repairs:load"),
        Patch(f"{model}.attention", "NgramSelfAttention.extend", f"{__name__}.hooks:extend"),
        _Registration("fairseq", "ngram_transformer_prophet", f"{model}:register"),
    ]


def _generation() -> list[Patch]:
    """Returns the hooks for `SequenceGenerator`: module, target, wrapper, and the parameters that it expects."""
    generator = "sequence_generator"
    attention = "query key value key_padding_mask incremental_state need_weights static_kv attn_mask before_softmax"
    with_heads = f"{attention} need_head_weights"
    ngrams = "tokens lprobs bsz beam_size step"
    search = "step lprobs scores prev_output_tokens original_batch_idxs"
    tokens = "tokens encoder_outs incremental_states temperature"
    prefix = "step lprobs scores tokens prefix_tokens beam_size"
    states = "incremental_states new_order"
    call = "sample prefix_tokens constraints bos_token"
    return [
        _hook("modules.multihead_attention", "MultiheadAttention.forward", "hooks:attention", with_heads),
        _hook("ngram_repeat_block", "NGramRepeatBlock.forward", "hooks:no_repeat_ngram", ngrams),
        _hook("search", "BeamSearch.step", "hooks:step", search, optional="candidate_multiple"),  # of fairseq-fixed
        _hook(generator, "EnsembleModel.forward_encoder", "generate:encode", "net_input"),
        _hook(generator, "EnsembleModel.reorder_encoder_out", "generate:reorder_encoder_out", "encoder_outs new_order"),
        _hook(generator, "EnsembleModel.reorder_incremental_state", "generate:reorder_incremental_state", states),
        _hook(generator, "EnsembleModel.forward_decoder", "generate:forward_decoder", tokens),
        _hook(generator, "SequenceGenerator._prefix_tokens", "generate:prefix_tokens", prefix),
        # Last: without the other hooks it would open calls that nothing serves.
        _hook(generator, "SequenceGenerator._generate", "generate:generate", call),
    ]


def _hook(module: str, target: str, wrapper: str, parameters: str, optional: str = "") -> Patch:
    """Makes a patch whose target must take these parameters after `self`, with or without the `optional` one."""
    condition = takes(f"self {parameters}", optional=optional)
    return Patch(f"fairseq.{module}", target, f"{__name__}.{wrapper}", condition)


@dataclass(eq=False)
class _Registration(Patch):
    """Registers a missing model through `wrapper`. It stays when FastGen is disabled, on FairSeq's own code."""

    def apply(self) -> None:
        try:
            if self._installed is None:
                function = self._find()
                function()
                self._installed = function
            self.state = "applied"
        except (ImportError, AttributeError) as error:  # the user's own import must not fail
            self.state = f"not applied: {error}"

    def remove(self) -> None:
        self.state = "not enabled (stays registered)" if self._installed is not None else "not enabled"
