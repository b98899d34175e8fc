"""The identity of a run in the journal.

The **identity** decides what the output is: the options, the input, and the content of the model, which is its weights,
its configuration, its tokenizer and the code that came with it. A run is resumed only with the same identity.

The **environment** decides which kernels compute it. Within one environment, and with a number for the batch size, the
same command produces the same bytes, resumed or not. Between two, the order of additions may differ, and with it the
last digits of `scores` and nearly equal candidates. A run may be resumed in another environment: the report says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

from fastgen import patching
from fastgen import settings as process_settings
from fastgen._version import __version__
from fastgen.memory import processor
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.loading import Loaded
from fastgen.pipeline.settings import DataOptions
from fastgen.report import kernels

# Further options that do not change the output: the model is identified by its content, and the input by itself.
_FREE = {"model", "input", "output", "generation", "generation_config"}
# The library's notes about where a model came from.
_NOTES = {
    "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "is_local", "local_files_only",
    "base_model_name_or_path", "revision", "peft_version",
}  # fmt: skip


def identity(settings: DataOptions, inputs: Inputs, loaded: Loaded) -> dict[str, Any]:
    """Returns everything that decides what the output is."""
    decisive = [f.name for f in dataclasses.fields(settings) if f.name not in _FREE and not f.metadata.get("free")]
    return {
        **{name: getattr(settings, name) for name in decisive},
        "model": content(loaded.model, loaded.tokenizer),
        **loaded.decisive(),
        "output_format": settings.resolved_output_format,
        "device": loaded.device.type,
        **inputs.identity(),
    }


def environment(device: Any) -> dict[str, Any]:
    """Returns everything that may change the last digits of a score."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fastgen": __version__ if patching.is_active() else "off",
        "kernels": kernels(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    now = vars(process_settings.current()).items()
    return found | {"settings": {name: value for name, value in now if name not in ("strict", "explicit")}}


def content(model: Any, tokenizer: Any) -> dict[str, str]:
    """Returns a digest of each part of a model in memory."""
    adapters = [f"{name} {_plain(each.to_dict())}" for name, each in getattr(model, "peft_config", {}).items()]
    parts = {"weights": _weights(model), "configuration": [_plain(model.config.to_dict()), *adapters]}
    own = vars(model).get("generate")  # from the folder custom_generate: replaces the model's method
    code = [each for each in (model, tokenizer, getattr(own, "func", own)) if each is not None]
    parts |= {"tokenizer": _tokenizer(tokenizer), "code": _code(*code)}
    return {name: _digest(part) for name, part in parts.items()}


def _weights(model: Any) -> Iterable[str]:
    """Yields of every tensor its name, type and shape, the sum of its elements' bits, and some of them in order."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        size = tensor.element_size()
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        if tensor.is_meta or tensor.layout != torch.strided or size not in integers:
            continue
        bits = tensor.detach().contiguous().view(integers[size]).flatten()
        # The sum detects a single weight that changed, the sample detects weights that changed places.
        sample = bits[:: max(1, len(bits) // 1024)]
        yield f"{int(bits.sum(dtype=torch.int64))} {sample.tolist()}"


def _tokenizer(tokenizer: Any) -> Iterable[str]:
    """Yields what determines the tokenizer's behaviour: its vocabulary, its rules, and its options."""
    yield _plain(tokenizer.init_kwargs) + _plain(tokenizer.special_tokens_map)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are set with every call.
        yield _plain({**json.loads(backend.to_str()), "truncation": None, "padding": None})
        return
    yield _plain(tokenizer.get_vocab())
    for name in sorted(tokenizer.vocab_files_names):
        path = getattr(tokenizer, name, None) or tokenizer.init_kwargs.get(name)
        if isinstance(path, str) and os.path.isfile(path):
            yield hashlib.blake2b(Path(path).read_bytes()).hexdigest()


def _code(*objects: Any) -> Iterable[str]:
    """Yields the source that came with the model: of its classes, or a function, and of the modules beside them that
    these import.
    """
    for value in objects:
        kind = value if isinstance(value, FunctionType) else type(value)
        module = kind.__module__
        yield f"{module.rpartition('.')[2]}.{kind.__qualname__}"
        if module.startswith("transformers_modules"):
            package = module.rpartition(".")[0] + "."
            for name in sorted(name for name in sys.modules if name.startswith(package)):
                path = getattr(sys.modules[name], "__file__", None)
                yield Path(path).read_text(encoding="utf-8") if path else ""


def _plain(values: dict[str, Any]) -> str:
    kept = {name: value for name, value in values.items() if name not in _NOTES and not name.endswith("_file")}
    return json.dumps(kept, sort_keys=True, default=_as_json)


def _as_json(value: Any) -> Any:
    """Converts what JSON cannot represent. A set has another order in each process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _digest(parts: Iterable[str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()
