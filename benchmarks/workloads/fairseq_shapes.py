"""FairSeq's own models: translation in the shape of the WMT systems, and a language model after a long prefix.

All backends are FairSeq's `SequenceGenerator` on the same random weights: "fairseq" is FairSeq alone, "fastgen-fairseq"
FairSeq with FastGen, and "fastgen-fairseq-plain" the same with torch's own GEMM. The comparison covers the tokens of
all hypotheses, not only of the best ones.
"""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.backends import Backend
from benchmarks.record import Record
from benchmarks.workload import Context, Generation, Outcome

PLAIN = "fastgen-fairseq-plain"
# Random weights give all words similar probabilities; scaled by this, they prefer a few, as trained weights do.
_CONTRAST = 3.0


class Model(NamedTuple):
    """A model, and the dictionary of its target language."""

    network: Any
    dictionary: Any


def transformer_big(vocabulary: int, **changes: Any) -> Model:
    """Builds `transformer_vaswani_wmt_en_de_big` with one vocabulary for both languages: 6 + 6 layers of width 1024."""
    from fairseq.models.transformer import TransformerModel, transformer_vaswani_wmt_en_de_big

    arguments = Namespace(share_all_embeddings=True, max_source_positions=1024, max_target_positions=1024, **changes)
    transformer_vaswani_wmt_en_de_big(arguments)
    return _built(TransformerModel, arguments, vocabulary)


def transformer_lm_gpt2(vocabulary: int, **changes: Any) -> Model:
    """Builds `transformer_lm` in GPT-2's shape, 124 million parameters: 12 layers of width 768, tied embeddings."""
    from fairseq.models.transformer_lm import TransformerLanguageModel, transformer_lm_gpt

    arguments = Namespace(
        share_decoder_input_output_embed=True, decoder_learned_pos=True, max_target_positions=1024, **changes
    )
    transformer_lm_gpt(arguments)
    return _built(TransformerLanguageModel, arguments, vocabulary)


def _built(kind: Any, arguments: Namespace, vocabulary: int) -> Model:
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for number in range(len(dictionary), vocabulary):
        dictionary.add_symbol(str(number))
    network = kind.build_model(arguments, Namespace(source_dictionary=dictionary, target_dictionary=dictionary))
    with torch.no_grad():
        network.decoder.output_projection.weight.mul_(_CONTRAST)
    return Model(network.eval(), dictionary)


@dataclass(frozen=True, kw_only=True)
class InFairSeq(Generation):
    """One call of `SequenceGenerator.generate`, unpatched and patched.

    Attributes:
        shape: makes the model; takes the size of the vocabulary and changes to the architecture.
        vocabulary: number of words, special ones included.
        beams: of the search.
        longest: tokens of the longest hypothesis.
    """

    vocabulary: int
    beams: int
    longest: int

    baseline: str = "fairseq"
    subject: str = "fastgen-fairseq"
    entry_point = "fairseq.generate"

    @abstractmethod
    def sources(self) -> Tensor:
        """Returns random tokens, [batch, length]; padding is 1, the end token is 2."""

    def build(self, device: torch.device) -> tuple[Model, dict[str, Tensor]]:
        torch.manual_seed(self.seed)
        model = self.shape(self.vocabulary, **self.config)
        tokens = self.sources()
        lengths = tokens.ne(model.dictionary.pad()).sum(dim=1)
        model.network.to(device, getattr(torch, self.dtype))
        return model, {"src_tokens": tokens.to(device), "src_lengths": lengths.to(device)}

    def weights(self, model: Model) -> Iterable[Tensor]:
        return model.network.parameters()

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "vocabulary": self.vocabulary, "beams": self.beams}

    def backends_in(self, context: Context) -> list[str]:
        """Returns the library alone, FastGen, and FastGen without packed weights if it packs any; all must agree."""
        both = [self.baseline, self.subject]
        return [*both, PLAIN] if context.device.type == "cpu" else both

    def run(self, context: Context, record: Record) -> None:
        try:
            import fairseq
        except Exception as error:  # on a current Python, importing FairSeq may raise any error
            record.skipped[self.baseline] = f"FairSeq cannot be imported ({type(error).__name__}: {error})"
            return
        super().run(context, record)
        record.backends[self.baseline]["version"] = fairseq.__version__

    def check(self, record: Record, ready: Mapping[str, Backend], outcomes: Mapping[str, list[Outcome]]) -> None:
        super().check(record, ready, outcomes)
        # A measurement of less than the intended work is invalid.
        found = outcomes[self.baseline][0].tokens.shape[1]
        if found != self.longest:
            record.errors.append(f"the longest hypothesis has {found} tokens instead of {self.longest}")

    def _hypotheses(self, model: Model, inputs: dict[str, Tensor], search: dict[str, Any], **arguments: Any) -> Tensor:
        """Returns the tokens of all hypotheses, [batch * beams, longest]."""
        from fairseq.data.data_utils import collate_tokens
        from fairseq.sequence_generator import SequenceGenerator

        generator = SequenceGenerator([model.network], model.dictionary, beam_size=self.beams, **search)
        torch.manual_seed(self.seed + 1)
        found = generator.generate([], {"net_input": inputs}, **arguments)
        return collate_tokens([hypothesis["tokens"] for each in found for hypothesis in each], generator.pad)


@dataclass(frozen=True, kw_only=True)
class Translation(InFairSeq):
    """Sources from `shortest` to `length` tokens; the search makes each output about as long as its source.

    Sentences end at different times, as with a trained model, and then leave the batch.
    """

    def sources(self) -> Tensor:
        tokens = torch.randint(4, self.vocabulary, (self.batch, self.length))
        # As in batches of FairSeq's datasets: the longest first, padding on the left.
        lengths = self._lengths()
        assert lengths is not None
        for row, length in zip(tokens, lengths.flip(0).tolist(), strict=True):
            row[-1] = 2
            row[: self.length - length] = 1
        return tokens

    def generate(self, model: Model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
        from fairseq.search import LengthConstrainedBeamSearch

        # The search counts the words of a source without its end token; outputs get one in addition.
        whole = new_tokens == self.new_tokens
        factor, words = (1, 0) if whole else (0, new_tokens - 1)
        strategy = LengthConstrainedBeamSearch(model.dictionary, factor, words, factor, words)
        return self._hypotheses(model, inputs, {"max_len_b": new_tokens - 1, "search_strategy": strategy})


@dataclass(frozen=True, kw_only=True)
class Continuation(InFairSeq):
    """A language model that continues a prefix of `length` tokens, as in its FairSeq task."""

    def sources(self) -> Tensor:
        return torch.randint(4, self.vocabulary, (self.batch, self.length))

    def generate(self, model: Model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
        # FairSeq alone takes a step for each token of the prefix: a short one suffices for the warm-up.
        if new_tokens < self.new_tokens:
            inputs = {"src_tokens": inputs["src_tokens"][:, :8], "src_lengths": inputs["src_lengths"].clamp(max=8)}
        longest = inputs["src_tokens"].shape[1] + new_tokens - 1
        search = {"max_len_b": longest, "min_len": longest}
        return self._hypotheses(model, inputs, search, prefix_tokens=inputs["src_tokens"])


WORKLOADS = [
    Translation(
        name="fairseq-wmt-b64",
        title="FairSeq, WMT shape, batch 64, 5 beams, sources and outputs of 12 to 48 tokens",
        shape=transformer_big,
        vocabulary=32768,
        batch=64,
        beams=5,
        shortest=12,
        length=48,
        new_tokens=48,
        longest=48,
    ),
    Continuation(
        name="fairseq-gpt2-b4-p512",
        title="FairSeq, GPT-2 shape, batch 4, 4 beams, prefix 512",
        shape=transformer_lm_gpt2,
        vocabulary=50257,
        batch=4,
        beams=4,
        length=512,
        new_tokens=64,
        longest=576,
    ),
]
