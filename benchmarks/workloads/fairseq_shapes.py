"""FairSeq's own models: translation in the shape of the WMT systems, and a language model behind a long prefix.

All backends are FairSeq's `SequenceGenerator` on the same random weights: "fairseq" is FairSeq alone, "fastgen-fairseq"
FairSeq with FastGen, and "fastgen-fairseq-plain" the same with torch's own matrix products. The tokens that are
compared are those of all hypotheses, not of the best ones alone.
"""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import backends
from benchmarks.backends import BASELINE, SUBJECT, Backend, Job
from benchmarks.backends.generate import Patched
from benchmarks.record import Record, Target
from benchmarks.workload import (
    Context,
    Outcome,
    Workload,
    check_code,
    check_tokens,
    open_backends,
    time_backends,
)

_ALONE, _FAST, _PLAIN = "fairseq", "fastgen-fairseq", "fastgen-fairseq-plain"
# Random weights give every word about the same probability; this much larger, they prefer few, as trained ones do.
_CONTRAST = 3.0


class Model(NamedTuple):
    """A model, and the dictionary of its target language."""

    network: Any
    dictionary: Any


def transformer_big(vocabulary: int, **changes: Any) -> Model:
    """`transformer_vaswani_wmt_en_de_big` with one vocabulary for both languages: 6 + 6 layers of width 1024."""
    from fairseq.models.transformer import TransformerModel, transformer_vaswani_wmt_en_de_big

    arguments = Namespace(share_all_embeddings=True, max_source_positions=1024, max_target_positions=1024, **changes)
    transformer_vaswani_wmt_en_de_big(arguments)
    return _built(TransformerModel, arguments, vocabulary)


def transformer_lm_gpt2(vocabulary: int, **changes: Any) -> Model:
    """`transformer_lm` in the shape of GPT-2, 124 million parameters: 12 layers of width 768, tied embeddings."""
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
class InFairSeq(Workload):
    """One call of `SequenceGenerator.generate`, unpatched and patched.

    Attributes:
        shape: makes the model; takes the size of the vocabulary and changes to the architecture.
        vocabulary: words, the special ones included.
        batch: sources.
        beams: of the search.
        dtype: of the model, by its name in torch.
        config: changes to the architecture.
    """

    shape: Callable[..., Model]
    vocabulary: int
    batch: int
    beams: int
    dtype: str = "float32"
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    group = "generation"
    entry_point = "fairseq.generate"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.dtype == "float32"

    @abstractmethod
    def sources(self) -> Tensor:
        """Random tokens, [batch, longest]; padding is 1, the end token is 2."""

    @abstractmethod
    def generate(self, model: Model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
        """The tokens of all hypotheses, [batch * beams, longest]; fewer than the workload has to warm up."""

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """For the record: lengths of sources and outputs."""

    @property
    @abstractmethod
    def new_tokens(self) -> int:
        """Of the longest output."""

    def new_record(self) -> Record:
        record = super().new_record()
        record.baseline, record.subject = _ALONE, _FAST
        return record

    def build(self, device: torch.device) -> tuple[Model, dict[str, Tensor]]:
        """The model and its sources."""
        torch.manual_seed(self.seed)
        model = self.shape(self.vocabulary, **self.config)
        tokens = self.sources()
        lengths = tokens.ne(model.dictionary.pad()).sum(dim=1)
        model.network.to(device, getattr(torch, self.dtype))
        return model, {"src_tokens": tokens.to(device), "src_lengths": lengths.to(device)}

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {
            "shape": self.shape.__name__,
            "vocabulary": self.vocabulary,
            "batch": self.batch,
            "beams": self.beams,
            **self.sizes(),
            **({"config": dict(self.config)} if self.config else {}),
            "dtype": self.dtype,
        }
        try:
            import fairseq
        except Exception as error:  # on a current Python an import of FairSeq may fail with anything
            record.skipped[_ALONE] = f"FairSeq cannot be imported ({type(error).__name__}: {error})"
            return
        context.log("building the model")
        model, inputs = self.build(context.device)
        record.parameters["model_parameters"] = sum(parameter.numel() for parameter in model.network.parameters())
        job = Job(self, model, inputs, torch.get_num_threads())
        with ExitStack() as stack:
            chosen = _backends(packed=context.device.type == "cpu")
            ready = open_backends(stack, {name: (backend, job) for name, backend in chosen.items()}, context, record)
            outcomes = time_backends(ready, self.repetitions_in(context), context, record)
            record.compare([(_ALONE, _PLAIN)])
        record.backends[_ALONE]["version"] = fairseq.__version__
        check_code(record, ready, outcomes)
        check_tokens(record, ready, outcomes)
        self._check_lengths(record, outcomes)

    def _check_lengths(self, record: Record, outcomes: dict[str, list[Outcome]]) -> None:
        """Work that is less than it should be is none to measure."""
        longest = outcomes[_ALONE][0].tokens.shape[1]
        if longest != self.new_tokens:
            record.errors.append(f"the longest hypothesis has {longest} tokens instead of {self.new_tokens}")

    def _hypotheses(self, generator: Any, inputs: dict[str, Tensor], **arguments: Any) -> Tensor:
        from fairseq.data.data_utils import collate_tokens

        torch.manual_seed(self.seed + 1)
        found = generator.generate([], {"net_input": inputs}, **arguments)
        return collate_tokens([hypothesis["tokens"] for each in found for hypothesis in each], generator.pad)


def _backends(packed: bool) -> dict[str, Backend]:
    """The library alone, FastGen, and where it packs weights FastGen without; all must make the same tokens."""
    both = {_ALONE: backends.make(BASELINE), _FAST: backends.make(SUBJECT)}
    if not packed:
        return both
    plain = Patched(SUBJECT, {"packed_weights": "never"})
    plain.must_equal = BASELINE
    return {**both, _PLAIN: plain}


@dataclass(frozen=True, kw_only=True)
class Translation(InFairSeq):
    """Sources from `shortest` to `longest` tokens, each with outputs about as long as it is; the search sees to that.

    Sentences end at different times, as they do with a trained model, and leave the batch then.
    """

    shortest: int
    longest: int

    @property
    def new_tokens(self) -> int:
        return self.longest

    def sizes(self) -> dict[str, Any]:
        return {"source": [self.shortest, self.longest], "outputs": "as long as their sources"}

    def sources(self) -> Tensor:
        tokens = torch.randint(4, self.vocabulary, (self.batch, self.longest))
        lengths = torch.linspace(self.longest, self.shortest, self.batch).round().long()
        # As FairSeq's datasets make a batch: the longest first, padding on the left.
        for row, length in zip(tokens, lengths.tolist(), strict=True):
            row[-1] = 2
            row[: self.longest - length] = 1
        return tokens

    def generate(self, model: Model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
        from fairseq.search import LengthConstrainedBeamSearch
        from fairseq.sequence_generator import SequenceGenerator

        # The search counts the words of a source without its end token; the outputs get one on top.
        whole = new_tokens == self.new_tokens
        factor, words = (1, 0) if whole else (0, new_tokens - 1)
        generator = SequenceGenerator(
            [model.network],
            model.dictionary,
            beam_size=self.beams,
            max_len_b=new_tokens - 1,
            search_strategy=LengthConstrainedBeamSearch(model.dictionary, factor, words, factor, words),
        )
        return self._hypotheses(generator, inputs)


@dataclass(frozen=True, kw_only=True)
class Continuation(InFairSeq):
    """A language model that goes on for `continuation` tokens behind a prefix of `prefix`, as its task does it."""

    prefix: int
    continuation: int

    @property
    def new_tokens(self) -> int:
        return self.prefix + self.continuation

    def sizes(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "new_tokens": self.continuation}

    def sources(self) -> Tensor:
        return torch.randint(4, self.vocabulary, (self.batch, self.prefix))

    def generate(self, model: Model, inputs: dict[str, Tensor], new_tokens: int) -> Tensor:
        from fairseq.sequence_generator import SequenceGenerator

        # FairSeq alone takes a step for each token of the prefix: a short one will do to warm up.
        if new_tokens < self.new_tokens:
            inputs = {"src_tokens": inputs["src_tokens"][:, :8], "src_lengths": inputs["src_lengths"].clamp(max=8)}
            new_tokens += 8
        generator = SequenceGenerator(
            [model.network], model.dictionary, beam_size=self.beams, max_len_b=new_tokens - 1, min_len=new_tokens - 1
        )
        return self._hypotheses(generator, inputs, prefix_tokens=inputs["src_tokens"])


def _targets(plain: float, packed: float) -> tuple[Target, ...]:
    return (
        Target("times as fast as FairSeq alone", "ratio", at_least=packed),
        Target(
            "times as fast as FairSeq alone, with torch's own matrix products", f"{_ALONE}/{_PLAIN}", at_least=plain
        ),
    )


WORKLOADS = [
    Translation(
        name="fairseq-wmt-b64",
        title="FairSeq, WMT shape, batch 64, 5 beams, sources and outputs of 12 to 48 tokens",
        shape=transformer_big,
        vocabulary=32768,
        batch=64,
        beams=5,
        shortest=12,
        longest=48,
        targets=_targets(1.05, 1.8),
    ),
    Continuation(
        name="fairseq-gpt2-b4-p512",
        title="FairSeq, GPT-2 shape, batch 4, 4 beams, prefix 512",
        shape=transformer_lm_gpt2,
        vocabulary=50257,
        batch=4,
        beams=4,
        prefix=512,
        continuation=64,
        targets=_targets(3.0, 6.0),
    ),
]
