"""CTranslate2: the same weights, converted in a temporary folder, on the same tokens.

Uses its converter unchanged. This module supplies what the converter needs besides the weights: a vocabulary in which
the token of id 7 is the word "7", and the attributes of BART's configuration that Transformers no longer writes.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import Job, Unsupported
from benchmarks.backends.elsewhere import Elsewhere

# Options with the same meaning in both libraries. Others would compare different work.
_KNOWN_OPTIONS = {"num_beams", "no_repeat_ngram_size", "num_return_sequences", "do_sample"}
# From older configurations of BART: layer norm after the attention, one after the embeddings and none at the end.
_BART = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}


class CTranslate2(Elsewhere):
    """Runs in this environment. `compute_type` is the precision of computation: weights are converted at loading."""

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
    """The tokenizer interface that the converter uses, for a vocabulary of numbers."""

    def __init__(self, model: Any) -> None:
        config = model.generation_config
        self._size = model.get_output_embeddings().weight.shape[0]
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        self.eos_token = str(end)
        self.bos_token = str(end if config.bos_token_id is None else config.bos_token_id)
        self.pad_token = str(end if config.pad_token_id is None else config.pad_token_id)
        # Its converter drops the last token of Marian models, if that is named as padding.
        is_marian = type(model.config).__name__ == "MarianConfig"
        self._names = {config.pad_token_id: "<pad>"} if is_marian else {}
        # Never used, because the vocabulary has every token of the inputs, but it must be a token.
        self.unk_token = str(self._size - 2)

    def get_vocab(self) -> dict[str, int]:
        return {self._names.get(number, str(number)): number for number in range(self._size)}

    @staticmethod
    def convert_ids_to_tokens(number: int) -> str:
        return str(number)


def convert(model: Any, folder: str) -> None:
    """Writes the model in CTranslate2's format.

    Raises:
        Unsupported: its converter does not support this model.
    """
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    loader = _MODEL_LOADERS.get(type(model.config).__name__)
    if loader is None:
        raise Unsupported(f"CTranslate2 has no converter for {type(model).__name__}")
    # Some loaders remove modules from the model. They get a copy, which shares the weights.
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
