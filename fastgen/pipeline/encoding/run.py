"""`fastgen-embed` and `fastgen-classify` from end to end."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from fastgen import settings as process_settings
from fastgen.pipeline.encoding.layouts import Labels, Vectors
from fastgen.pipeline.encoding.loading import (
    LoadedEncoder,
    load_classifier,
    load_embedder,
    prepare_classifier,
    prepare_embedder,
)
from fastgen.pipeline.encoding.model import (
    ClassificationStage,
    EmbeddingStage,
    Encoded,
    Tokens,
    label_fields,
    vector_fields,
)
from fastgen.pipeline.encoding.modules import read_modules
from fastgen.pipeline.encoding.options import ClassifyOptions, EmbedOptions, EncodeOptions
from fastgen.pipeline.errors import SetupError, explained
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.loading import check_path
from fastgen.pipeline.memory import MOST_ROWS, SHARE_OF_FREE, MemoryModel, free_memory
from fastgen.pipeline.running import Job, RunReport, open_output, run_through
from fastgen.pipeline.writers import check_free

# What a pass costs beside its tokens, in tokens: measured with all-MiniLM-L6-v2 on two cores.
PASS_COST = 128
_USUAL_LENGTH = 512  # tokens
Options = TypeVar("Options", bound=EncodeOptions)
Begins = Callable[[], None]


def embed_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Writes a vector for every text of a data set, in input order.

        embed_dataset("sentence-transformers/all-MiniLM-L6-v2", "texts.txt", "vectors.npy")

    Args:
        model: a directory or hub name, or a model in memory.
        input: a file, a data set, or "-" for standard input.
        output: the file to write. A .npy file holds [records, size] numbers in `output_dtype`, float32 by default.
        tokenizer: that of a model in memory; otherwise it is loaded with the model.
        **options: the fields of `EmbedOptions`.

    Returns:
        What the run did: counts and seconds.

    Raises:
        SetupError: something given cannot work.
        StrictError: the first bad record, under `strict`.
        PipelineError: a file cannot be written.
    """
    return _over_dataset(EmbedOptions, embed, model, tokenizer, input, output, options)


def classify_dataset(
    model: str | os.PathLike[str] | Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    **options: Any,
) -> RunReport:
    """Writes labels and scores for every text of a data set, in input order.

    Args:
        model: a directory or hub name, or a model in memory, with a classification head.
        input: a file, a data set, or "-" for standard input.
        output: the file to write.
        tokenizer: that of a model in memory; otherwise it is loaded with the model.
        **options: the fields of `ClassifyOptions`.

    Returns:
        What the run did: counts and seconds.

    Raises:
        SetupError: something given cannot work.
        StrictError: the first bad record, under `strict`.
        PipelineError: a file cannot be written.
    """
    return _over_dataset(ClassifyOptions, classify, model, tokenizer, input, output, options)


def _over_dataset(
    kind: type[Options],
    run: Callable[..., RunReport],
    model: Any,
    tokenizer: Any,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: dict[str, Any],
) -> RunReport:
    in_memory = not isinstance(model, str | os.PathLike)
    name = (getattr(model, "name_or_path", "") or type(model).__name__) if in_memory else os.fspath(model)
    settings = kind(model=name, input=os.fspath(input), output=os.fspath(output), **process_settings.renamed(options))
    if in_memory and tokenizer is None:
        raise SetupError("a model in memory needs its tokenizer")
    return run(settings, model if in_memory else None, tokenizer)


def embed(settings: EmbedOptions, model: Any = None, tokenizer: Any = None, begins: Begins = lambda: None) -> RunReport:
    """Do what the settings say.

    Args:
        model, tokenizer: in memory; otherwise those that the settings name are loaded.
        begins: called when all is checked and loaded, and the first file is about to be written.
    """
    inputs, start = _begin(settings, model)
    if model is None:
        loaded = load_embedder(settings)
    else:
        modules = read_modules(getattr(model, "name_or_path", ""), settings)
        loaded = prepare_embedder(model, tokenizer, settings, modules)
    if not (loaded.modules.said or settings.quiet):
        told = "the model's files do not say how a text becomes a vector: its tokens' vectors are averaged"
        print(f"{told} (--pooling chooses)", file=sys.stderr)
    stage = EmbeddingStage(loaded, settings)
    with explained(f"model {settings.model} gives no vector"), process_settings.changed(**settings.weights):
        size = stage.dimension()
    with_input = settings.resolved_output_format != "npy"
    post = Encoded(with_input, settings.output_dtype, vector_fields)
    begins()
    job = _job(settings, loaded, Vectors(size, settings.output_dtype), stage, post)
    with closing(open_output(settings, inputs, job)) as output:
        return run_through(settings, inputs, job, output, start)


def classify(
    settings: ClassifyOptions, model: Any = None, tokenizer: Any = None, begins: Begins = lambda: None
) -> RunReport:
    """Do what the settings say; the arguments are those of `embed`."""
    inputs, start = _begin(settings, model)
    loaded = load_classifier(settings) if model is None else prepare_classifier(model, tokenizer, settings)
    begins()
    layout = Labels(settings.top_k, settings.pair_column is not None)
    post = Encoded(True, "float32", label_fields(loaded.labels, settings.top_k))
    job = _job(settings, loaded, layout, ClassificationStage(loaded, settings), post)
    with closing(open_output(settings, inputs, job)) as output:
        return run_through(settings, inputs, job, output, start)


def _begin(settings: EncodeOptions, model: Any) -> tuple[Inputs, float]:
    """The inputs, and when the run began; what can be checked without the model is."""
    start = time.perf_counter()
    check_free(settings)
    if model is None:
        check_path(settings.model, gguf=True)
    return Inputs(settings), start


def _job(settings: EncodeOptions, loaded: LoadedEncoder, layout: Any, stage: Any, post: Any) -> Job:
    def batch_size() -> tuple[int, int | None]:
        if settings.batch_size != "auto":
            return settings.batch_size, settings.max_tokens
        rows, tokens = _automatic(loaded)
        return rows, min(tokens, settings.max_tokens or tokens)

    return Job(loaded, layout, Tokens(loaded), stage, post, batch_size, {"pass_cost": PASS_COST})


def _automatic(loaded: LoadedEncoder) -> tuple[int, int]:
    """Inputs and tokens of a batch that fit into the memory of the model's device."""
    from transformers import GenerationConfig

    kind = "cuda" if loaded.device.type == "cuda" else "cpu"
    free = int(free_memory(loaded.device) * SHARE_OF_FREE[kind])
    # A model that only encodes keeps nothing from layer to layer, and has no scores over a vocabulary.
    memory = MemoryModel.of(loaded.model, GenerationConfig(max_new_tokens=1))
    memory = dataclasses.replace(memory, layers=0, vocabulary=0, captured=False)
    return memory.largest(free, MOST_ROWS[kind], loaded.longest or _USUAL_LENGTH)
