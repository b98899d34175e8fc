"""An encoder model in its process: checks jobs, and runs batches of them.

Files, pooling and labels are read as by `fastgen-embed` and `fastgen-classify`, and the same stages run the batches:
one that does not fit in memory is halved, and an input that the model refuses fails alone.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Sequence
from typing import Any

import fastgen
from fastgen.pipeline.batches import OUT_OF_MEMORY, Batch
from fastgen.pipeline.encoding.loading import (
    LoadedClassifier,
    LoadedEmbedder,
    LoadedEncoder,
    load_classifier,
    load_embedder,
    prompt_ids,
)
from fastgen.pipeline.encoding.modules import read_prompts
from fastgen.pipeline.encoding.run import EncodingStage
from fastgen.pipeline.inputs import Record
from fastgen.pipeline.layouts import Result
from fastgen.pipeline.loading import file_of, labels_of_adapters, sentence_files_of
from fastgen.pipeline.settings import STANDARD_STREAM, ClassifyOptions, EmbedOptions
from fastgen_serve.errors import BadRequest, Failed
from fastgen_serve.jobs import MOST_TOKENS, Encode, ModelInfo
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.loading import read_config

VECTOR, LABELS = "vector", "labels"


def load_encoder(path: str, settings: ServeSettings) -> Encoder:
    """Loads the model at a path: with a classification head if its configuration names one, otherwise for vectors.

    Raises:
        SetupError: it cannot be loaded.
    """
    # The commands' options also name an input and an output, which do not exist here.
    options: dict[str, Any] = {
        "model": path,
        "input": STANDARD_STREAM,
        "output": STANDARD_STREAM,
        "device": "cpu",
        "quiet": True,
    }
    options |= {"dtype": settings.dtype, "weight_dtype": settings.weight_dtype}
    return LabelEncoder(ClassifyOptions(**options)) if classifies(path) else VectorEncoder(EmbedOptions(**options))


def classifies(path: str) -> bool:
    """Returns whether a model has a classification head, by the architecture in its configuration, or by its adapters.

    Raises:
        SetupError: its configuration cannot be read.
    """
    names = read_config(path).architectures or ()
    if file_of(sentence_files_of(path), "modules.json"):  # a sentence-transformers model makes vectors
        return False
    return any(name.endswith("ForSequenceClassification") for name in names) or labels_of_adapters(path) is not None


class Encoder(ABC):
    """An encoder model.

    Attributes:
        info: its description.
        positions: the most tokens of an input.
    """

    info: ModelInfo

    def __init__(self, path: str, loaded: LoadedEncoder, stage: EncodingStage) -> None:
        self._stage = stage
        self._stage.may_give_up = False  # the texts belong to many requests
        self._path, self.positions = path, loaded.longest or MOST_TOKENS
        self._vocabulary = int(loaded.model.get_input_embeddings().num_embeddings)
        has_types = "token_type_ids" in inspect.signature(loaded.model.forward).parameters
        self._token_types = int(getattr(loaded.model.config, "type_vocab_size", None) or 0) if has_types else 0

    def check(self, job: Encode) -> None:
        """Raises `BadRequest` for a job that the model cannot run, before memory is allocated for it."""
        if job.what not in self.info.tasks:
            made = " and ".join(self.info.tasks)
            raise BadRequest(f"the model makes {made}, not {job.what}: choose another model", param="model")
        if not job.tokens:
            raise BadRequest("the text has no tokens: send one that has some", param="input")
        if len(job.tokens) > self.positions:
            said = f"the text has {len(job.tokens)} tokens, but the model takes {self.positions}: shorten it"
            raise BadRequest(said, param="input")
        if not 0 <= min(job.tokens) <= max(job.tokens) < self._vocabulary:
            raise BadRequest(f"a token is not one of the model's, 0 to {self._vocabulary - 1}", param="input")
        types = job.token_type_ids
        if types is not None and (len(types) != len(job.tokens) or not all(0 <= t < self._token_types for t in types)):
            raise BadRequest("the token types do not fit the tokens, or the model has none", param="token_type_ids")

    def run(self, jobs: Sequence[Encode]) -> list[list[float] | Failed]:
        """Returns the vector or the label scores of each job, or its error."""
        import numpy

        with_types = any(job.token_type_ids is not None for job in jobs)
        done = self._stage.run(Batch(0, 0, [_record(*each, with_types) for each in enumerate(jobs)]))
        found: dict[int, list[float] | Failed] = {}
        for made in done.outputs:
            for row, values in zip(made.rows, made.values, strict=True):
                finite = bool(numpy.isfinite(values).all())
                found[row.position] = values.tolist() if finite else Failed("the model returned numbers not finite")
        found |= {failure["position"]: _failed(failure) for failure in done.failures}
        return [found[number] for number in range(len(jobs))]

    def run_some(self, length: int, inputs: int) -> None:
        """Runs this many inputs of one length, to measure their time."""
        self.run([self._job(length)] * inputs)

    def leaves_padding_out(self) -> bool:
        """Returns whether batches are computed without their padding. Runs one to find out."""
        before = _accelerated()
        self.run([self._job(1), self._job(min(self.positions, 16))])
        return _accelerated() > before

    def _job(self, length: int) -> Encode:
        return Encode(tuple(number % self._vocabulary for number in range(length)), self.info.tasks[0])


def _record(number: int, job: Encode, with_types: bool) -> Record:
    # A model uses zeros if it gets no token types.
    types = {"token_type_ids": job.token_type_ids or (0,) * len(job.tokens)} if with_types else {}
    return Record(number, 0, number, ids=job.tokens, others=types)


def _failed(failure: Result) -> Failed:
    if failure["error"] == OUT_OF_MEMORY:
        return Failed("there was not enough memory for this text: send a shorter one")
    return Failed(f"the model failed on this text: {failure['message']}")


def _accelerated() -> int:
    entries = fastgen.stats().items()
    return sum(int(entry["accelerated"]) for name, entry in entries if name.startswith("transformers.encoder"))


class LabelEncoder(Encoder):
    """A model with a classification head: computes a score for each label."""

    def __init__(self, options: ClassifyOptions) -> None:
        loaded: LoadedClassifier = load_classifier(options)
        super().__init__(options.model, loaded, EncodingStage(loaded, options))
        labels = tuple(loaded.labels)
        self.info = ModelInfo(options.model, "encoder", (LABELS,), self.positions, labels=labels, scores=loaded.scores)


class VectorEncoder(Encoder):
    """A model that computes a vector for each text from its hidden states."""

    def __init__(self, options: EmbedOptions) -> None:
        loaded: LoadedEmbedder = load_embedder(options)
        prompts = read_prompts(sentence_files_of(options.model))
        stage = _Vectors(loaded, options, [*prompts.values(), loaded.prompt])
        super().__init__(options.model, loaded, stage)
        self.info = ModelInfo(
            options.model,
            "encoder",
            (VECTOR,),
            self.positions,
            vector_size=stage.dimension(),
            prompt=loaded.prompt,
            prompts=prompts,
            lower_case=loaded.lower_case,
        )


class _Vectors(EncodingStage):
    """Computes vectors of texts, each of which may begin with a different prompt.

    Args:
        prompts: those that texts may begin with. Pooling excludes their tokens if the model's files say so.
    """

    _loaded: LoadedEmbedder

    def __init__(self, loaded: LoadedEmbedder, options: EmbedOptions, prompts: Sequence[str]) -> None:
        super().__init__(loaded, options)
        skipped = [] if loaded.modules.include_prompt else list(filter(str.strip, prompts))
        # The first tokens of a text with each prompt, and the prompt's number of tokens. A space at the prompt's end
        # may be a token by itself, or merge with the next word.
        self._prompts = [
            (tuple(prompt_ids(loaded.tokenizer, each.rstrip())), len(prompt_ids(loaded.tokenizer, each)))
            for each in skipped
        ]

    def _numbers(self, inputs: dict[str, Any], rows: Sequence[Record]) -> Any:
        import torch

        return self._loaded.numbers(inputs, torch.tensor([[self._prompt_length(row)] for row in rows]))

    def _prompt_length(self, row: Record) -> int:
        return max((count for begin, count in self._prompts if tuple(row.ids[: len(begin)]) == begin), default=0)
