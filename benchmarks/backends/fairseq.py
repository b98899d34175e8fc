"""FairSeq's `SequenceGenerator` on the same weights, without and with FastGen.

BART is FairSeq's own architecture: the weights need nothing but the names that they have there. FastGen is what makes
FairSeq import on a current Python; apart from that, the unpatched backend runs FairSeq's code alone.

With `no_repeat_ngram_size` its tokens are not those of the others: on the CPU, FairSeq 0.12.2 takes the n-gram to look
for from the padding behind the tokens, and bans nothing. The work is the same.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.backends.base import Backend, Job, Unsupported

_KNOWN_OPTIONS = {"num_beams", "no_repeat_ngram_size", "num_return_sequences", "do_sample"}


class FairSeq(Backend):
    """FairSeq alone."""

    # FairSeq makes the last token of the longest output the end token, in the step in which others make it freely.
    forced_end = True

    def active(self) -> AbstractContextManager[Any]:
        """Inside this, FairSeq works in the way of this backend."""
        return fastgen.disabled()

    def setup(self, job: Job) -> None:
        super().setup(job)
        try:
            import fairseq
        except Exception as error:  # on a current Python an import of FairSeq may fail with anything
            raise Unsupported(f"FairSeq cannot be imported ({type(error).__name__}: {error})") from error
        self.version = fairseq.__version__
        options = job.workload.options
        unknown = sorted(set(options) - _KNOWN_OPTIONS)
        if unknown or options.get("do_sample"):
            raise Unsupported(f"no counterpart in FairSeq for {', '.join(unknown) or 'its samples'}")
        self._dictionary = _dictionary(job.model.config)
        self._model = convert(job.model, self._dictionary).to(job.model.device)
        self._source = job.inputs["input_ids"].masked_fill(job.inputs["attention_mask"] == 0, self._dictionary.pad())

    def run(self, new_tokens: int) -> Tensor:
        from fairseq.sequence_generator import SequenceGenerator

        options = self.job.workload.options
        with self.active():
            generator = SequenceGenerator(
                [self._model],
                self._dictionary,
                beam_size=options.get("num_beams", 1),
                max_len_b=new_tokens - 1,  # the end token comes on top
                min_len=new_tokens - 1,
                no_repeat_ngram_size=options.get("no_repeat_ngram_size", 0),
            )
            lengths = self._source.ne(self._dictionary.pad()).sum(dim=1)
            with torch.no_grad():
                found = generator.generate(
                    [self._model], {"net_input": {"src_tokens": self._source, "src_lengths": lengths}}
                )
        wanted = options.get("num_return_sequences", 1)
        tokens = torch.stack([hypothesis["tokens"] for each in found for hypothesis in each[:wanted]])
        return torch.cat([tokens.new_full((tokens.shape[0], 1), self._dictionary.eos()), tokens], dim=1)

    def close(self) -> None:
        self._model = None


class FastFairSeq(FairSeq):
    """FairSeq with FastGen."""

    fastgen = True
    must_equal = "fairseq"

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _dictionary(config: Any) -> Any:
    """As many words as the model has, the special ones where BART has them."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for number in range(len(dictionary), config.vocab_size):
        dictionary.add_symbol(str(number))
    if (config.pad_token_id, config.eos_token_id) != (dictionary.pad(), dictionary.eos()):
        raise Unsupported("FairSeq has other special tokens")
    return dictionary


def convert(model: Any, dictionary: Any) -> Any:
    """The model as FairSeq has it.

    Raises:
        Unsupported: it is not BART.
    """
    from fairseq.models.transformer import TransformerModel, base_architecture

    config = model.config
    if config.model_type != "bart":
        raise Unsupported(f"{type(model).__name__} is not one of FairSeq's models")
    arguments = Namespace(
        activation_fn=config.activation_function,
        no_scale_embedding=not config.scale_embedding,
        layernorm_embedding=True,
        share_all_embeddings=True,
        max_source_positions=config.max_position_embeddings,
        max_target_positions=config.max_position_embeddings,
        dropout=0.0,
    )
    for part in ("encoder", "decoder"):
        setattr(arguments, f"{part}_embed_dim", config.d_model)
        setattr(arguments, f"{part}_ffn_embed_dim", getattr(config, f"{part}_ffn_dim"))
        setattr(arguments, f"{part}_layers", getattr(config, f"{part}_layers"))
        setattr(arguments, f"{part}_attention_heads", getattr(config, f"{part}_attention_heads"))
        setattr(arguments, f"{part}_learned_pos", True)
    base_architecture(arguments)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    converted = TransformerModel.build_model(arguments, task)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("model.encoder.", "model.decoder."))
    }
    weights["decoder.output_projection.weight"] = model.lm_head.weight
    missing, unexpected = converted.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if not name.endswith((".version", "._float_tensor"))]:
        raise Unsupported(f"the weights are named otherwise: {sorted([*missing, *unexpected])[:3]}")
    return converted.eval()
