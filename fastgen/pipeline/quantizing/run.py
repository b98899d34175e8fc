"""A run of `fastgen-quantize`, from the options to OUT: loads the model, quantises it block by block, and saves it."""

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
from fastgen.pipeline.journal import content
from fastgen.pipeline.layouts import read_back
from fastgen.pipeline.loading import base_of, check_path
from fastgen.pipeline.quantizing.settings import REPORT, QuantizeOptions, Work, check_output, own_text, saving
from fastgen.pipeline.quantizing.texts import PlainTexts, Text, Texts, check_texts, samples, speed
from fastgen.pipeline.quantizing.texts import quality as quality_of
from fastgen.pipeline.stages import Progress

if TYPE_CHECKING:
    from fastgen.quantization.calibration import Block, Carried, Forward, Recipe
    from fastgen.quantization.report import Layer, Report
import shutil

from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.loading import (
    address,
    file_of,
    is_gguf,
    processor_files_of,
    quiet_transformers,
    why_not_loaded,
)
from fastgen.pipeline.settings import DTYPES, STANDARD_STREAM, dtype_named

if TYPE_CHECKING:
    from fastgen.quantization.calibration import Block


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
    texts = check_texts(held_out, held_out.name, loaded.encoder_decoder) if held_out else None
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
            quality = quality_of(loaded, texts) if texts else None
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
        quality = quality_of(loaded, texts)._asdict() if texts else None
        measured = {"text": text, "quality": quality, "speed": speed(loaded, prompts)}
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
        return speed(load_model(options, folder), prompts), []
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


_GENERATION = "generation_config.json"
_MARK = "stands_for_conv1d"


def load_model(options: QuantizeOptions, name: str | Path | None = None) -> LoadedModel:
    """Loads the model that the options name, or another one, in the dtype that they ask for.

    The model that the options name has linear layers in place of Conv1D.

    Raises `SetupError` if it cannot be loaded, or if the model to quantise is quantised already.
    """
    quiet_transformers(options.quiet)
    settings = options.reading(options.calibration or STANDARD_STREAM, None)
    if name is None:
        settings = dataclasses.replace(settings, keep_bits=False)  # unpacks a GGUF file
    else:
        settings = dataclasses.replace(settings, model=str(name))
    loaded = load(dataclasses.replace(settings, dtype=_dtype(settings, options.dtype, of_floats=name is None)))
    if name is None:
        _forget_the_file(loaded.model)
        conv1d_as_linear(loaded.model)
    return loaded


def _forget_the_file(model: Any) -> None:
    """Marks a model from a GGUF file as not quantised: it holds floats, but the library would refuse to save it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def _dtype(settings: RunOptions, wanted: str, of_floats: bool) -> str:
    from transformers import AutoConfig

    name, options = address(settings.model)
    with explained(f"model {settings.model} cannot be loaded", why_not_loaded(settings.model)):
        config = AutoConfig.from_pretrained(name, trust_remote_code=settings.trust_remote_code, **options)
    if of_floats and getattr(config, "quantization_config", None) is not None:
        raise SetupError(f"model {settings.model} is quantised already")
    if wanted != "auto":
        return wanted
    own = dtype_named(str(getattr(config, "dtype", None)).removeprefix("torch."))
    return own if own in DTYPES else "fp32"


def save(loaded: LoadedModel, blocks: Sequence[Block], work: Work, options: QuantizeOptions) -> list[str]:
    """Saves model, tokenizer and generation config in the directory that becomes OUT. The model is unusable afterwards.

    Layer by layer, the quantised weights in the work directory replace the others.

    Returns:
        The names of the linear layers that stay as they are.
    """
    import torch
    from transformers import AutoTokenizer

    from fastgen.quantization.calibration import sharing
    from fastgen.quantization.rounding import Kind
    from fastgen.quantization.writing import PackedLinear, config, gptq_config, load_block

    model: Any = loaded.model
    as_gptq = any(stands_for_conv1d(layer) for block in blocks for layer in block.linears.values())
    kinds = {}
    tied: dict[str, str] = {}  # layers that share the weight of a quantised one
    for number, block in enumerate(blocks):
        for name, (weight, _) in load_block(work.block(number)).items():
            parent, _, own = name.rpartition(".")
            layer = block.linears.pop(name)
            tied |= {other: name for other in sharing(model, layer) if other != name}
            setattr(model.get_submodule(parent), own, PackedLinear(weight, layer.bias, as_gptq))
            kinds[name] = Kind(weight.bits, weight.group_size, not options.asymmetric)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    stored = gptq_config(kinds, linear) if as_gptq else config(kinds, linear, set(tied.values()))
    model.config.quantization_config = stored
    linear_as_conv1d(model)
    shutil.rmtree(work.model, ignore_errors=True)
    with saving(work.model):
        state = {key: tensor for key, tensor in model.state_dict().items() if key.rpartition(".")[0] not in tied}
        model.save_pretrained(work.model, state_dict=_as_stored(state))
        # A new one: that of the run remembers its truncation.
        name, file = address(options.model)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=options.trust_remote_code, **file)
        tokenizer.save_pretrained(work.model)
        own_generation = file_of(options.model, _GENERATION)
        if own_generation:
            shutil.copyfile(own_generation, work.model / _GENERATION)
        for file_of_processor in processor_files_of(options.model):  # loading it may need missing packages
            shutil.copyfile(file_of_processor, work.model / file_of_processor.name)
    return [name for name in linear if name not in tied]


def _as_stored(state: dict[str, Any]) -> dict[str, Any]:
    """Converts tensors in float32 that fit into float16 to the last bit, as if stored in it, to float16.

    Scales stay as they are, because compressed-tensors multiplies in their type.
    """
    import torch

    known: dict[int, Any] = {}

    def stored(tensor: Any) -> Any:
        if tensor.dtype != torch.float32:
            return tensor
        if tensor.data_ptr() not in known:
            half = tensor.half()
            known[tensor.data_ptr()] = half if torch.equal(half.float(), tensor) else tensor
        return known[tensor.data_ptr()]  # one object for tied weights

    return {name: tensor if name.endswith(".weight_scale") else stored(tensor) for name, tensor in state.items()}


def weight_bytes(name: str | Path, model: Any = None) -> int:
    """Returns the bytes of a GGUF file, or of the weight files in a directory; for a hub model, of its parameters in
    memory.
    """
    folder = Path(name)
    if is_gguf(str(name)):
        return folder.stat().st_size
    for pattern in ("*.safetensors", "*.bin"):
        if folder.is_dir() and (files := list(folder.glob(pattern))):
            return sum(file.stat().st_size for file in files)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


# While a model is quantised, linear layers replace those of class Conv1D, whose weight is [inputs, outputs].


def conv1d_as_linear(model: Any) -> None:
    """Replaces each Conv1D by a linear layer with the same weight."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            layer = _put(model, name, module, lambda old: nn.Linear(old.nx, old.nf))
            vars(layer)[_MARK] = True


def linear_as_conv1d(model: Any) -> None:
    """Inverts `conv1d_as_linear` for the layers that still exist."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if stands_for_conv1d(module):
            _put(model, name, module, lambda old: Conv1D(old.out_features, old.in_features))


def _put(model: Any, name: str, old: Any, make: Callable[[Any], Any]) -> Any:
    """Replaces a layer by one of another class, with its weight transposed."""
    import torch

    with torch.device("meta"):
        layer = make(old)
    layer.weight = torch.nn.Parameter(old.weight.detach().t().contiguous(), requires_grad=False)
    layer.bias = old.bias
    model.set_submodule(name, layer.train(old.training))
    return layer


def stands_for_conv1d(layer: Any) -> bool:
    """Whether this layer replaces a Conv1D."""
    return _MARK in vars(layer)
