"""CTranslate2: the same weights, converted in a temporary folder, on the same tokens.

Its converter is used as it comes. What it reads beyond the weights is set here: a vocabulary in which the token of id 7
is the word "7", and those attributes of BART's configuration that Transformers no longer writes.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import Job, Unsupported
from benchmarks.backends.elsewhere import Elsewhere

# What is known to mean the same in both. Anything else would compare different work.
_KNOWN_OPTIONS = {"num_beams", "no_repeat_ngram_size", "num_return_sequences", "do_sample"}
# In older configurations of BART: layer norm after the attention, one after the embeddings and none at the end.
_BART = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}


class CTranslate2(Elsewhere):
    """In this environment. `compute_type` is what it computes in: it converts weights when it loads them."""

    library = "CTranslate2"
    script = Path(__file__).with_name("ctranslate2_process.py")

    def python(self) -> Path:
        try:
            import ctranslate2  # noqa: F401
        except ImportError as error:
            raise Unsupported(f"CTranslate2 is not installed ({error})") from error
        return Path(sys.executable)

    def check(self, job: Job) -> None:
        super().check(job)
        unknown = sorted(set(job.workload.options) - _KNOWN_OPTIONS)
        if unknown:
            raise Unsupported(f"no counterpart in CTranslate2 for {', '.join(unknown)}")

    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        model, options = folder / "model", job.workload.options
        model.mkdir()
        convert(job.model, str(model))
        return {
            "folder": str(model),
            **self.settings,
            "encoder_decoder": job.model.config.is_encoder_decoder,
            "start": job.model.generation_config.decoder_start_token_id,
            "options": {
                "beam_size": options.get("num_beams", 1),
                "no_repeat_ngram_size": options.get("no_repeat_ngram_size", 0),
                "num_hypotheses": options.get("num_return_sequences", 1),
            },
        }


class _Vocabulary:
    """What the converter asks of a tokenizer, for a vocabulary of numbers."""

    def __init__(self, model: Any) -> None:
        config = model.generation_config
        self._size = model.get_output_embeddings().weight.shape[0]
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        self.eos_token = str(end)
        self.bos_token = str(end if config.bos_token_id is None else config.bos_token_id)
        self.pad_token = str(end if config.pad_token_id is None else config.pad_token_id)
        # Of Marian's models its converter drops the last token, if that has the name of padding.
        is_marian = type(model.config).__name__ == "MarianConfig"
        self._names = {config.pad_token_id: "<pad>"} if is_marian else {}
        # Every token of the inputs is in the vocabulary, so this is never used; it has to be one of them.
        self.unk_token = str(self._size - 2)

    def get_vocab(self) -> dict[str, int]:
        return {self._names.get(number, str(number)): number for number in range(self._size)}

    @staticmethod
    def convert_ids_to_tokens(number: int) -> str:
        return str(number)


def convert(model: Any, folder: str) -> None:
    """Writes the model as CTranslate2 reads it.

    Raises:
        Unsupported: its converter knows no such model.
    """
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    loader = _MODEL_LOADERS.get(type(model.config).__name__)
    if loader is None:
        raise Unsupported(f"CTranslate2 has no converter for {type(model).__name__}")
    # Some loaders take modules out of the model as they go. They get a copy, which shares the weights.
    shared = {id(tensor): tensor for tensor in model.parameters()}
    model = copy.deepcopy(model, shared)
    for name, value in _BART.items():
        if not hasattr(model.config, name):
            setattr(model.config, name, value)
    with torch.no_grad():
        spec = loader(model, _Vocabulary(model))
        spec.validate()
        spec.optimize(quantization=None)
        spec.save(folder)
