"""Small models of translation with random weights, in the files that such models come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers

TEXTS = (
    "and it came to pass in those days that there went out a decree",
    "fear not for behold I bring you good tidings of great joy",
    "The man went to the city. He saw a light, and was afraid!",
    "Am Anfang schuf Gott Himmel und Erde, und die Erde war leer.",
    "what is truth? said Pilate; and when he had said this, he went out again",
)
_PIECES = 70
_SHAPE: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64, "init_std": 1.0,
}  # fmt: skip


def marian(folder: Path, source: str, target: str, targets: tuple[str, ...] = (), seed: int = 0) -> str:
    """The path of a model like OPUS-MT's: of one pair, or with a token for each of several targets."""
    folder.mkdir(parents=True)
    words = ["</s>", "<unk>", *(f">>{code}<<" for code in targets), *_pieces(folder, "source"), "<pad>"]
    _pieces(folder, "target")
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    vocabulary = _vocabulary(files[2], words)
    transformers.MarianTokenizer(*files, source_lang=source, target_lang=target).save_pretrained(folder)
    pad = vocabulary["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), **_SHAPE, pad_token_id=pad, eos_token_id=0, forced_eos_token_id=0,
        decoder_start_token_id=pad,
    )  # fmt: skip
    return _saved(transformers.MarianMTModel, config, folder, seed, num_beams=2, max_length=12, bad_words_ids=[[pad]])


def m2m100(folder: Path, seed: int = 0) -> str:
    """The path of a model of a hundred languages, with a token for each."""
    folder.mkdir(parents=True)
    words = ["<s>", "<pad>", "</s>", "<unk>", *_pieces(folder, "sentencepiece.bpe")]
    files = [str(folder / name) for name in ("vocab.json", "sentencepiece.bpe.spm")]
    _vocabulary(files[0], words)
    tokenizer = transformers.M2M100Tokenizer(*files)
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(
        vocab_size=max(tokenizer.lang_code_to_id.values()) + 1, **_SHAPE, decoder_start_token_id=2
    )
    return _saved(transformers.M2M100ForConditionalGeneration, config, folder, seed, num_beams=2, max_length=12)


def _pieces(folder: Path, name: str) -> list[str]:
    """Trains a model of sentencepiece. Returns its pieces."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / name), vocab_size=_PIECES, minloglevel=2, num_threads=1
    )
    path = (folder / f"{name}.model").rename(folder / f"{name}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [pieces.IdToPiece(index) for index in range(pieces.GetPieceSize())]


def _vocabulary(path: str, words: list[str]) -> dict[str, int]:
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    Path(path).write_text(json.dumps(vocabulary), encoding="utf-8")
    return vocabulary


def _saved(kind: Any, config: Any, folder: Path, seed: int, **generation: Any) -> str:
    torch.manual_seed(seed)
    model = kind(config)
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    return str(folder)
