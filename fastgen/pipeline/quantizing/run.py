"""A run of `fastgen-quantize`, from the options to OUT."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.pipeline.errors import PipelineError, SetupError, check_installed, explained
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.identity import content
from fastgen.pipeline.layouts import read_back
from fastgen.pipeline.loading import base_of, check_path
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.quantizing import evaluation
from fastgen.pipeline.quantizing.options import QuantizeOptions
from fastgen.pipeline.quantizing.saving import load_model, save, stands_for_conv1d, weight_bytes
from fastgen.pipeline.quantizing.texts import PlainTexts, Text, Texts, samples
from fastgen.pipeline.quantizing.work import REPORT, Work, check_output, own_text, saving

if TYPE_CHECKING:
    from fastgen.quantization.calibration import Block, Carried, Forward, Recipe
    from fastgen.quantization.report import Layer, Report

PICTURE = "report.png"
AUTOROUND = ("auto_round", "accelerate")  # names for import
_PROMPTS = 8


def quantize_model(options: QuantizeOptions, begins: Callable[[], None] = lambda: None) -> Report | None:
    """Quantises the linear layers of a model and writes OUT.

    Args:
        options: what to quantise, and how.
        begins: called when everything is checked and loaded, before the first file is written.

    Returns:
        The report, which is also in OUT/report.json; None if a resumed run had already finished.

    Raises:
        SetupError: something given cannot work.
        PipelineError: a file cannot be written.
    """
    start = time.perf_counter()
    check_output(options)
    check_path(options.model, gguf=True)
    if base_of(options.model) != options.model:
        raise SetupError(f"model {options.model} has adapters alone: merge them into their model first, and save that")
    for package in ("rich", "matplotlib"):
        check_installed(package, "the report")
    if options.method == "autoround":
        for package in AUTOROUND:
            check_installed(package, "--method autoround", "pip install auto-round==0.16.1")
    calibration = _calibration(options)
    held_out = Texts(options.reading(options.evaluate, options.reference)) if options.evaluate else None
    say = _say if not options.quiet else lambda line: None
    say(f"loading {options.model}")
    loaded = load_model(options)
    texts = evaluation.check_texts(held_out, held_out.name, loaded.encoder_decoder) if held_out else None
    prompts = list(itertools.islice(texts or calibration, _PROMPTS))
    given = samples(loaded, calibration, options.samples, options.sample_length)
    say(f"looking for its layers, with {calibration.name}")
    blocks, forward = _blocks(loaded, given, options)
    identity = {"text": calibration.identity(), "model": content(loaded.model, loaded.tokenizer)}
    with closing(Work(options, options.decisive() | identity)) as work:
        if work.complete:
            return None
        begins()
        say("measuring the model as it is")
        before = _measured(loaded, texts, prompts, work, held_out.identity() if held_out else None)
        say(f"rounding its layers to {options.bits} bits")
        layers = _quantise(loaded.model.config, blocks, forward, len(given), work, options)
        say("measuring it again, and writing it")
        with explained(f"model {options.model} cannot be measured"):
            quality = evaluation.quality(loaded, texts) if texts else None
        before["bytes"] = weight_bytes(options.model, loaded.model)  # saving takes the weights out of the layers
        left_out = save(loaded, blocks, work, options)
        # The memory of the model is needed for the one that was saved.
        loaded.model = None
        del forward, blocks
        gc.collect()
        rate, notes = _speed_after(options, work.model, prompts)
        if not options.calibration:
            notes.append("errors of layers are on eight built-in sentences: no --calibration was given")
        after = {"bytes": weight_bytes(work.model), "quality": quality, "speed": rate}
        report = _report(options, before, after, len(given), layers, left_out, notes)
        report.seconds = time.perf_counter() - start
        _write(report, work)
        work.finish()
    return report


def _say(line: str) -> None:
    print(f"fastgen-quantize: {line}", file=sys.stderr, flush=True)


def _calibration(options: QuantizeOptions) -> Texts | PlainTexts:
    if not options.calibration:
        return PlainTexts()
    return Texts(options.reading(options.calibration, options.calibration_reference))


def _blocks(
    loaded: LoadedModel, given: Sequence[dict[str, Any]], options: QuantizeOptions
) -> tuple[list[Block], Forward]:
    """Returns the blocks of the model, and a function that runs it on a sample."""
    from fastgen.quantization.calibration import check_carried, find_blocks

    def forward(sample: int) -> object:
        return loaded.model(**given[sample], use_cache=False)

    with explained(f"model {options.model} cannot be quantised block by block"):
        blocks = find_blocks(loaded.model, forward)
        if options.output_layer:
            blocks.append(_output_block(loaded.model, blocks, options))
        check_carried(blocks, forward)
    return blocks, forward


def _output_block(model: Any, blocks: Sequence[Block], options: QuantizeOptions) -> Block:
    """Returns the output layer as a block. Raises ValueError if it cannot be one, or if nothing could load OUT."""
    from fastgen.quantization.calibration import output_block

    block = output_block(model, model.get_output_embeddings())
    if block.name in block.linears:
        return block
    beside = "its output layer shares its weight with the embeddings"
    if any(stands_for_conv1d(layer) for each in blocks for layer in each.linears.values()):
        raise ValueError(f"{beside}, and the format of GPTQ has none")
    if options.max_error is not None or options.bits_per_weight is not None:
        raise ValueError(f"{beside}, and Transformers cannot load that beside layers of other bits")
    return block


def _measured(
    loaded: LoadedModel, texts: list[Text] | None, prompts: list[Text], work: Work, text: object
) -> dict[str, Any]:
    """Measures the model before it is changed. A resumed run reuses the measurements if the text is the same."""
    text = read_back(text)
    if work.measured and work.measured["text"] == text:
        return dict(work.measured)
    with explained("the model cannot be measured"):
        quality = evaluation.quality(loaded, texts)._asdict() if texts else None
        measured = {"text": text, "quality": quality, "speed": evaluation.speed(loaded, prompts)}
    work.keep(work.measured | measured)
    return measured


def _quantise(
    config: Any, blocks: Sequence[Block], forward: Forward, count: int, work: Work, options: QuantizeOptions
) -> list[Layer]:
    """Processes block by block: quantises its layers, or reads those that an earlier run kept, and puts them to use."""
    from fastgen.quantization import calibration
    from fastgen.quantization.calibration import Carried
    from fastgen.quantization.report import Layer
    from fastgen.quantization.writing import load_block, save_block

    recipe = calibration.Recipe(
        options.method, options.bits, options.group_size, not options.asymmetric, options.damping, options.max_error,
        iterations=options.iterations,
    )  # fmt: skip
    if options.bits_per_weight is not None:
        recipe = recipe._replace(eight=_of_8_bits(blocks, Carried(forward, count), recipe, work, options))
    carried = Carried(forward, count)
    # The original model, block by block, which AutoRound approximates.
    before = Carried(forward, count) if options.method == "autoround" else None
    layers: list[Layer] = []
    progress = Progress("layers", sum(len(block.linears) for block in blocks), quiet=options.quiet)
    with closing(progress):
        step = progress.add
        for number, block in enumerate(blocks):
            path = work.block(number)
            with explained(f"{block.name} cannot be quantised"):
                # Not for the output layer, whose results are too many to keep.
                wanted = before.finish(block) if before and block.name != block.stack else ()
                if path.exists():
                    quantised = load_block(path)
                    step(len(block.linears))
                else:
                    quantised = calibration.quantise_block(block, carried, recipe, step, wanted, config)
                    with work.placed(path.name) as unfinished:
                        save_block(unfinished, quantised)
                calibration.use(block, {name: weight for name, (weight, _) in quantised.items()})
                if number + 1 < len(blocks):
                    carried.finish(block)
            layers += [Layer(name, w.bits, w.group_size, error) for name, (w, error) in quantised.items()]
    if not layers:
        raise PipelineError(f"no layer of {options.model} can be quantised in groups of {options.group_size}")
    return layers


def _of_8_bits(
    blocks: Sequence[Block], carried: Carried, recipe: Recipe, work: Work, options: QuantizeOptions
) -> frozenset[str]:
    """Returns the layers that `--bits-per-weight` gives 8 bits. A resumed run reuses them."""
    from fastgen.quantization import calibration

    assert options.bits_per_weight is not None
    if "eight" not in work.measured:
        choices = []
        with explained("the errors of the layers cannot be measured"):
            for number, block in enumerate(blocks):
                choices += calibration.choices_of(block, carried, recipe)
                if number + 1 < len(blocks):
                    carried.finish(block)
        with explained("bits-per-weight is too small"):
            chosen = calibration.most_gaining(choices, options.bits_per_weight)
        work.keep({**work.measured, "eight": sorted(chosen)})
    return frozenset(work.measured["eight"])


def _speed_after(options: QuantizeOptions, folder: Path, prompts: list[Text]) -> tuple[float | None, list[str]]:
    """Returns tokens per second of the saved model, or a note if it cannot be loaded here."""
    try:
        return evaluation.speed(load_model(options, folder), prompts), []
    except PipelineError as error:
        return None, [f"tokens per second after: not measured, because {error}"]


def _report(
    options: QuantizeOptions,
    before: dict[str, Any],
    after: dict[str, Any],
    samples: int,
    layers: list[Layer],
    left_out: list[str],
    notes: list[str],
) -> Report:
    import torch
    import transformers

    from fastgen.quantization.report import Measured, Report

    was, quality = before["quality"] or {}, after["quality"]
    return Report(
        model=options.model,
        method=options.method,
        bits=options.bits,
        group_size=options.group_size,
        symmetric=not options.asymmetric,
        samples=samples,
        bytes=Measured(before["bytes"], after["bytes"]),
        measure=was.get("measure"),
        quality=Measured(was.get("value"), quality.value if quality else None),
        measured_on=was.get("measured_on", 0),
        tokens_per_second=Measured(before["speed"], after["speed"]),
        layers=layers,
        left_out=left_out,
        seconds=0.0,
        notes=notes,
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__),
    )


def _write(report: Report, work: Work) -> None:
    """Writes the report beside the model."""
    from fastgen.quantization.report import png

    values = dataclasses.asdict(report) | {"identity": work.identity}
    with saving(work.model / REPORT):
        (work.model / REPORT).write_text(own_text(values), encoding="utf-8")
        (work.model / PICTURE).write_bytes(png(report))
