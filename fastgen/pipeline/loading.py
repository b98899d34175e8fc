"""Loads a model and its tokenizer, and checks them before they are used."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError, check_installed, explained, one_line
from fastgen.pipeline.readers import quiet_hub
from fastgen.pipeline.settings import DTYPES, DataOptions

_ALL_KINDS = {"missing": "missing", "unexpected": "left over", "mismatched": "misshapen"}
# The file that describes adapters in a peft folder, and the files of their weights.
_ADAPTERS = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# The files that describe a processor, which makes inputs of more than text.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PARTS_OF_PROCESSOR = (*_PROCESSOR_FILES, "video_preprocessor_config.json", "chat_template.json")
# Names of the last layer of a classification head, of which adapters may have their own.
_LABELS = re.compile(r"(score|classifier|(classifier|classification_head)\.out_proj|logits_proj)\.weight")
# Hub names whose files could not be requested.
_out_of_reach: set[str] = set()


@dataclass
class Loaded(ABC):
    """A model in memory, with its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> Any:
        return self.model.device

    @abstractmethod
    def decisive(self) -> dict[str, Any]:
        """Returns what else decides the output, beside the model, the tokenizer and the options."""


def read_model(
    settings: DataOptions,
    kind: Callable[[Any], Any],
    seed: int = 0,
    needed: Mapping[str, str] = _ALL_KINDS,
    unused: str = "",
    folder: str = "",
) -> tuple[Any, Any]:
    """Loads the model that the settings name and its tokenizer. Raises `SetupError` if any part is damaged.

    Args:
        kind: returns the class that loads a model with a given configuration.
        seed: seed for missing weights, which are random.
        needed: the kinds of weights that must not occur, and their names in messages.
        unused: a part of the model that is not used, whose weights may be missing.
        folder: folder of the files in the model's directory.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    quiet_transformers(settings.quiet)
    check_path(settings.model, gguf=True)
    device = choose_device(settings.device)
    base = base_of(settings.model)
    local, gguf = Path(base).is_dir(), is_gguf(base)
    name, file = address(base)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, **file}
    if local and folder:
        name = str(Path(base, folder))
    elif not (local or gguf):
        options["subfolder"] = folder
    dtype = DTYPES[settings.dtype]
    with (
        explained(f"model {both_of(settings.model, base)} cannot be loaded", why_not_loaded(base)),
        process_settings.changed(keep_bits=settings.keep_bits),
        torch.random.fork_rng([]),  # later random numbers do not depend on this seed
    ):
        config = AutoConfig.from_pretrained(name, **options)
        stored = getattr(config, "quantization_config", None)
        chosen = kind(config)
        place = tokenizer_of(settings.model)
        source, of_source = (name, options) if place == base else (place, {**options, "subfolder": ""})
        tokenizer = _read_tokenizer(AutoTokenizer, source, of_source)
        _check_tokenizer(tokenizer, settings.model if gguf else source)
        torch.manual_seed(seed)  # a run with random weights can be repeated
        before = transformers_logging.get_verbosity()
        if not settings.allow_missing_weights:  # otherwise, the library shows a table of missing weights
            transformers_logging.set_verbosity_error()
        try:
            loaded: Any = chosen.from_pretrained(name, config=config, dtype=dtype, output_loading_info=True, **options)
        finally:
            transformers_logging.set_verbosity(before)
        model, found = loaded
        own = () if base == settings.model else weights_of_adapters(settings.model)
        _check_weights(found, settings, needed, unused, own)
        if base != settings.model:
            of_adapters = model.load_adapter(settings.model)
            if of_adapters is not None:  # only some releases return it: earlier ones show a table of what is missing
                _check_weights(of_adapters.to_dict(), settings, needed)
        model = model.eval().to(device)
    if not settings.quiet:
        adapters = "" if base == settings.model else f", with the adapters in {settings.model}"
        print(_how_loaded(model, "gguf" if gguf else stored) + adapters, file=sys.stderr)
    return model, tokenizer


def is_gguf(model: str) -> bool:
    """Whether a model is named by its GGUF file."""
    return model.lower().endswith(".gguf") and Path(model).is_file()


def base_of(model: str) -> str:
    """Returns the model that has the configuration and the weights: for a folder with peft adapters alone, the model
    that they were trained for; otherwise the model itself.

    Raises:
        SetupError: peft is not installed, the adapters do not name their model, or that does not exist; or adapters, of
            the model or in its folder, cannot be loaded.
    """
    values = _adapters_in(model)
    if values is None or file_of(model, "config.json"):
        return model
    check_installed("peft", f"model {model}: it has adapters alone, and", "pip install peft")
    if values.get("alora_invocation_tokens"):  # only peft's own models look for them
        raise SetupError(f"model {model} has adapters that begin at tokens of the prompt, which are not loaded")
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise SetupError(f"model {model} has adapters alone, and does not name their model (base_model_name_or_path)")
    try:
        check_path(base)
    except SetupError as error:
        raise SetupError(f"model {model} has adapters alone, of a model that is not there: {error}") from error
    _adapters_in(base)
    return base


def _adapters_in(model: str) -> dict[str, Any] | None:
    """Returns the configuration of the adapters in a model's folder; None if it has none.

    Raises:
        SetupError: they are for Megatron, for which peft would import the module that the file names; or the file is
            damaged.
    """
    path = file_of(model, _ADAPTERS)
    if path is None:
        return None
    values = read_json_object(path, "the configuration of the adapters")
    if values.get("megatron_config"):
        raise SetupError(f"model {model} has adapters for Megatron, which are not loaded")
    return values


def file_of(model: str, name: str, folder: str = "") -> Path | None:
    """Returns a file of a model: in its directory, or downloaded for a hub name; None if the model has no such file."""
    if os.path.exists(model):  # False for a name that cannot be a path
        path = Path(model, folder, name)
        return path if os.path.isfile(path) else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name = f"{folder}/{name}" if folder else name
    try:
        known = try_to_load_from_cache(model, name)
        if known is None and model not in _out_of_reach:
            known = hf_hub_download(model, name)
    except Exception as error:  # of the hub or the connection: the code that needs the file reports the problem
        is_absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if not is_absent:  # asking again may take long
            _out_of_reach.add(model)
        return None
    return Path(known) if isinstance(known, str) else None


def weights_of_adapters(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the adapters' tensors, by their names in the model that they were trained for.

    Layers that were trained as a whole have the names of that model.

    Raises:
        SetupError: the file is damaged.
    """
    import torch
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    path = next(filter(None, (file_of(model, name) for name in _ADAPTER_WEIGHTS)), None)
    with explained(f"the weights of the adapters in {model} cannot be read"):
        if path is not None and path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as weights:
                found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        elif path is not None:
            found = {name: tuple(each.shape) for name, each in torch.load(path, "meta", weights_only=True).items()}
    return {name.removeprefix("base_model.model."): shape for name, shape in found.items()}


def labels_of_adapters(model: str) -> int | None:
    """Returns how many labels the classification head has that comes with adapters alone; None without one."""
    if base_of(model) == model:
        return None
    shapes = weights_of_adapters(model).items()
    return next((shape[0] for name, shape in shapes if _LABELS.fullmatch(name) and len(shape) == 2), None)


def both_of(model: str, base: str) -> str:
    """Returns a model's name, and that of its base model, for a message."""
    return model if base == model else f"{model} (adapters for {base})"


def source_of(model: str, file: str) -> str:
    """Returns where a file of a model is: beside its adapters, or else with the model that they were trained for."""
    base = base_of(model)
    return model if base == model or file_of(model, file) else base


def tokenizer_of(model: str) -> str:
    """Returns where the tokenizer of a model is."""
    return source_of(model, "tokenizer_config.json")


def processor_of(model: str) -> str | None:
    """Returns where the files of a model's processor (for inputs of more than text) are; None if there are none."""
    places = dict.fromkeys((model, base_of(model)))
    return next((place for place in places if any(file_of(place, name) for name in _PROCESSOR_FILES)), None)


def processor_files_of(model: str) -> list[Path]:
    """Returns the files that describe a model's processor (for inputs of more than text)."""
    place = processor_of(model)
    parts = [] if place is None else [file_of(place, name) for name in _PARTS_OF_PROCESSOR]
    return [part for part in parts if part is not None]


def sentence_files_of(model: str) -> str:
    """Returns where the sentence-transformers files of a model are."""
    return source_of(model, "modules.json")


def address(model: str) -> tuple[str, dict[str, str]]:
    """Returns the arguments of the library's `from_pretrained` for a model: a name, and options such as a GGUF file."""
    if is_gguf(model):
        return str(Path(model).parent), {"gguf_file": Path(model).name}
    return model, {}


def why_not_loaded(model: str) -> Callable[[Exception], str]:
    """Returns a function that tells why loading failed; the library's message does not if the name is no folder."""

    def reason(error: Exception) -> str:
        if isinstance(error, OSError) and not Path(model).exists() and "connect" in str(error):
            return "there is no such folder, and the hub cannot be reached to look for it there"
        return one_line(error)

    return reason


def _how_loaded(model: Any, stored: Any) -> str:
    """Returns a line about the weights of a model.

    Args:
        stored: "gguf", or the `quantization_config` of a checkpoint, or None.
    """
    from fastgen.quantization import layers

    kept = layers.described(model)
    if kept is not None:
        return f"model: {kept}"
    line = f"model: {type(model).__name__} in {str(model.dtype).removeprefix('torch.')}"
    if not stored:
        return line
    method = stored if isinstance(stored, str) else dict(stored).get("quant_method")
    return f"{line}, as Transformers loads {method} (--keep-bits keeps weights in their bits)"


# Files that a tokenizer is read from, and patterns that match the files that tokenizer classes name.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json")
_LIKE_TOKENIZER_FILES = ("*vocab*", "*merges*", "*bpe*", "*.model", "*.spm", "*.tiktoken", "token*.py")


def _read_tokenizer(reader: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Loads a model's tokenizer. Raises `SetupError` if there is none, or its files are damaged."""
    try:
        return reader.from_pretrained(name, **options)
    except (OSError, ImportError):  # of the hub, or of a missing package: these messages say what to do
        raise
    except Exception as error:
        # Without any file, the library reports a missing package.
        folder = Path(name, options.get("subfolder", ""))
        is_local = folder.is_dir() and "gguf_file" not in options
        if is_local and not any(any(folder.glob(like)) for like in (*_TOKENIZER_FILES, *_LIKE_TOKENIZER_FILES)):
            raise _without_tokenizer(name) from error
        raise SetupError(f"the tokenizer of model {name} cannot be loaded: {one_line(error)}") from error


def _without_tokenizer(name: str) -> SetupError:
    return SetupError(f"model {name} has no tokenizer: its files, such as tokenizer.json, are missing")


def _check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises `SetupError` if the library made a tokenizer without the files that belong to it."""
    # Such a tokenizer has only special tokens, or these and "▁". A byte tokenizer has no files.
    named = {*getattr(tokenizer, "vocab_files_names", {}).values()} - {"tokenizer_config.json"}
    known = {*named, *_TOKENIZER_FILES}
    ordinary = set(tokenizer.get_vocab()) - {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    has_file = is_gguf(name) or any(file_of(name, file) for file in known)
    if not ordinary or (named and not has_file):
        raise _without_tokenizer(name)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises `SetupError` if it cannot be read or is no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{what} {path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise SetupError(f"{what} {path} is not a JSON object")
    return values


def _check_weights(
    found: Mapping[str, Any],
    settings: DataOptions,
    needed: Mapping[str, str],
    unused: str = "",
    there: Container[str] = (),
) -> None:
    """Raises `SetupError` if the files have too few weights, or weights that the model has no place for.

    Args:
        there: weights that come from other files.
    """
    if settings.allow_missing_weights:
        return
    for kind, what in needed.items():
        names = sorted(str(name) for name in found.get(f"{kind}_keys") or ())
        names = [name for name in names if name not in there and not (unused and name.startswith(unused))]
        if names:
            raise SetupError(
                f"model {settings.model}: {len(names)} of its weights are {what}, {names[0]} the first of them "
                "(--allow-missing-weights runs the model all the same)"
            )


def check_path(name: str, gguf: bool = False) -> None:
    """Raises SetupError for a path that cannot be a model's. Called before anything slow is imported.

    Args:
        gguf: whether it may be a GGUF file.
    """
    path = Path(name)
    if gguf and name.lower().endswith(".gguf") and not path.exists():
        raise SetupError(f"model {name}: no such file")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise SetupError(f"model {name}: no such directory")
    if path.is_file() and not (gguf and is_gguf(name)):
        raise SetupError(f"model {name} is a file: give the directory written by save_pretrained, or a hub name")


def choose_device(name: str | None) -> Any:
    """Returns the device asked for, or the best available one."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"device {name} cannot be used"):
        device = torch.device(name)
        torch.empty(1, device=device)
    return device


def _once(told: set[str], record: logging.LogRecord) -> bool:
    """Lets a message through once: generate warns about the same options at every call."""
    message = record.getMessage()
    new = message not in told
    told.add(message)
    return new


def quiet_transformers(quiet: bool) -> None:
    """Disables the library's progress bars, and shows each of its warnings once (with `quiet`, never)."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    quiet_hub()
    if quiet:
        transformers_logging.set_verbosity_error()
    for handler in logging.getLogger("transformers").handlers:
        if not any(getattr(known, "func", None) is _once for known in handler.filters):
            handler.addFilter(functools.partial(_once, set()))
