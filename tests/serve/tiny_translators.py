"""Small models of translation with random weights, in the files that such models come in."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import torch
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

TEXTS = (
    "and it came to pass in those days that there went out a decree",
    "fear not for behold I bring you good tidings of great joy",
    "The man went to the city. He saw a light, and was afraid!",
    "Am Anfang schuf Gott Himmel und Erde, und die Erde war leer.",
    "what is truth? said Pilate; and when he had said this, he went out again",
)
_PIECES = 70


def marian(folder: Path, source: str, target: str, targets: tuple[str, ...] = (), seed: int = 0) -> str:
    """The path of a model like OPUS-MT's: of one pair, or with a token for each of several targets."""
    folder.mkdir(parents=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(folder / side), vocab_size=_PIECES, minloglevel=2, num_threads=1
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    words = ["</s>", "<unk>", *(f">>{code}<<" for code in targets)]
    words += [pieces.IdToPiece(index) for index in range(pieces.GetPieceSize())]
    words = [*dict.fromkeys(words), "<pad>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = MarianTokenizer(
        str(folder / "source.spm"),
        str(folder / "target.spm"),
        str(folder / "vocab.json"),
        source_lang=source,
        target_lang=target,
    )
    tokenizer.save_pretrained(folder)
    pad = vocabulary["<pad>"]
    config = MarianConfig(
        vocab_size=len(words),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        pad_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=pad,
        init_std=1.0,
    )
    torch.manual_seed(seed)
    model = MarianMTModel(config)
    model.generation_config.update(num_beams=2, max_length=12, bad_words_ids=[[pad]])
    model.save_pretrained(folder)
    return str(folder)
