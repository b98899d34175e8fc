"""CTranslate2: the same weights, converted in a temporary folder, on the same tokens.

Its converter is used as it comes. What it reads beyond the weights is set here: a vocabulary in which the token of id 7
is the word "7", and those attributes of BART's configuration that Transformers no longer writes.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends.base import Backend, Job, Unsupported

# What is known to mean the same in both. Anything else would compare different work.
_KNOWN_OPTIONS = {"num_beams", "no_repeat_ngram_size", "num_return_sequences", "do_sample"}
# In older configurations of BART: layer norm after the attention, one after the embeddings and none at the end.
_BART = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
}


class CTranslate2(Backend):
    """Args:
    name, rival: of the backend.
    compute_type: what CTranslate2 computes in; the weights are converted to it when they are loaded.
    """

    def __init__(self, name: str, compute_type: str, rival: str = "fastgen") -> None:
        super().__init__(name, rival)
        self._compute_type = compute_type
        self._engine: Any = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        try:
            import ctranslate2
        except ImportError as error:
            raise Unsupported(f"CTranslate2 is not installed ({error})") from error
        self.version = ctranslate2.__version__
        self._check(job)
        self._encoder_decoder = job.model.config.is_encoder_decoder
        kind = ctranslate2.Translator if self._encoder_decoder else ctranslate2.Generator
        with tempfile.TemporaryDirectory(prefix="ctranslate2-") as folder:
            convert(job.model, folder)
            self._engine = kind(
                folder, device="cpu", compute_type=self._compute_type, inter_threads=1, intra_threads=job.threads
            )
        if self._engine.compute_type not in (self._compute_type, f"{self._compute_type}_float32"):
            raise Unsupported(f"CTranslate2 computes {self._compute_type} as {self._engine.compute_type} here")
        # Padding is not part of what it gets; it packs the batch itself.
        self._prompts = [
            [str(token) for token in tokens[mask.bool()].tolist()]
            for tokens, mask in zip(job.inputs["input_ids"].cpu(), job.inputs["attention_mask"].cpu(), strict=True)
        ]

    @staticmethod
    def _check(job: Job) -> None:
        options = job.workload.options
        if options.get("do_sample"):
            raise Unsupported("CTranslate2 draws other samples")
        unknown = sorted(set(options) - _KNOWN_OPTIONS)
        if unknown:
            raise Unsupported(f"no counterpart in CTranslate2 for {', '.join(unknown)}")
        if job.model.device.type != "cpu":
            raise Unsupported(f"CTranslate2 is compared on the CPU, not on {job.model.device}")

    def run(self, new_tokens: int) -> Tensor:
        options = self.job.workload.options
        common = {
            "beam_size": options.get("num_beams", 1),
            "no_repeat_ngram_size": options.get("no_repeat_ngram_size", 0),
            "num_hypotheses": options.get("num_return_sequences", 1),
            "max_batch_size": len(self._prompts),
        }
        if self._encoder_decoder:
            results = self._engine.translate_batch(
                self._prompts,
                min_decoding_length=new_tokens,
                max_decoding_length=new_tokens,
                max_input_length=0,
                **common,
            )
            found = [tokens for result in results for tokens in result.hypotheses]
            start = [[self.job.model.generation_config.decoder_start_token_id]] * len(found)
            return _tensor(start, found)
        results = self._engine.generate_batch(
            self._prompts, min_length=new_tokens, max_length=new_tokens, include_prompt_in_result=False, **common
        )
        found = [tokens for result in results for tokens in result.sequences]
        prompts = self.job.inputs["input_ids"].cpu().repeat_interleave(common["num_hypotheses"], dim=0)
        return _tensor(prompts.tolist(), found)

    def close(self) -> None:
        self._engine = None


def _tensor(before: list[list[int]], words: list[list[str]]) -> Tensor:
    """The tokens as `generate` returns them.

    Raises:
        RuntimeError: the outputs are not of one length.
    """
    lengths = {len(line) for line in words}
    if len(lengths) != 1:
        raise RuntimeError(f"CTranslate2 generated between {min(lengths)} and {max(lengths)} tokens")
    return torch.tensor([[*prefix, *map(int, line)] for prefix, line in zip(before, words, strict=True)])


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
