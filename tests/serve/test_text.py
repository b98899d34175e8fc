"""Text of tokens as they come: however they are cut into pieces, it is the text of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgen_serve.text import Detokenizer, StopStrings, TextStream, token_bytes, token_text

WORDS = ["do", "n't", "n", "t", "'", "'s", "s", "'re", ".", "!", "a", "b", "ü", "中"]


def of_bytes() -> Any:
    """Each byte is a token, as where GPT-2's vocabulary has nothing better."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_pieces() -> Any:
    """Pieces that begin with a space, and bytes, as in Llama's vocabulary. The first space of a text is left out."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁the", "b", "ing", "é"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_words() -> Any:
    """Words with a space between them, some of which is taken away again."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


MADE = {"bytes": of_bytes(), "pieces": of_pieces(), "words": of_words()}


def pieces_of(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pieces = []
    for size in sizes:
        pieces.append(tokens[:size])
        tokens = tokens[size:]
    return [*pieces, *([token] for token in tokens)]


@pytest.mark.parametrize("name", MADE)
@given(data=st.data())
def test_pieces_are_the_text(name: str, data: Any) -> None:
    tokenizer = MADE[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    tokens = tokens * data.draw(st.sampled_from([1, 1, 30]))  # so that some are forgotten
    detokenizer, text = Detokenizer(tokenizer), ""
    whole = tokenizer.decode(tokens)
    for piece in pieces_of(tokens, data.draw(st.lists(st.integers(0, 5), max_size=5))):
        text += detokenizer.push(piece)
        assert whole.startswith(text), "nothing is taken back"
    assert text + detokenizer.finish() == whole


@given(text=st.text(max_size=30), before=st.text(max_size=10))
def test_characters_are_whole_behind_a_prompt(text: str, before: str) -> None:
    tokenizer = MADE["bytes"]
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    detokenizer = Detokenizer(tokenizer, behind=encode(before))
    pieces = [detokenizer.push([token]) for token in encode(text)]
    assert all(piece.encode() for piece in pieces if piece), "each has characters"
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_space_is_kept_behind_a_prompt() -> None:
    tokenizer = MADE["pieces"]
    the, a = tokenizer.convert_tokens_to_ids(["▁the", "▁a"])
    assert Detokenizer(tokenizer).push([the]) == "the"
    assert Detokenizer(tokenizer, behind=[a]).push([the]) == " the"


def test_special_tokens_have_text_only_if_asked_for() -> None:
    tokenizer = of_words()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokens = [WORDS.index("a"), tokenizer.eos_token_id, WORDS.index("b")]
    assert TextStream(tokenizer).push(tokens) == "a b"
    assert TextStream(tokenizer, skip_special_tokens=False).push(tokens) == "a </s> b"


def definition(text: str, stops: list[str], keeps: bool) -> str:
    """What ends first counts; of two that end there, the longer one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if keeps else end - max(map(len, ending))]
    return text


@given(
    text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=4), keeps=st.booleans(),
)  # fmt: skip
def test_stop_strings(text: str, stops: list[str], sizes: list[int], keeps: bool) -> None:
    stopping, written, rest = StopStrings(stops, keeps), "", text
    whole = definition(text, stops, keeps)
    for size in [*sizes, *[1] * len(text)]:
        written += stopping.push(rest[:size])
        rest = rest[size:]
        assert whole.startswith(written), "what may be growing into a stop string is kept back"
    assert written + stopping.finish() == whole
    assert (stopping.found is not None) == any(stop in text for stop in stops)


def test_nothing_is_kept_back_without_need() -> None:
    stopping = StopStrings(["\n\n", "END"])
    assert stopping.push("a\n") == "a"
    assert stopping.push("b E") == "\nb "
    assert stopping.push("N") == ""
    assert stopping.push("X") == "ENX"


def test_bytes_of_tokens() -> None:
    for name in ("bytes", "pieces"):
        tokenizer = MADE[name]
        tokens = tokenizer("é€ a")["input_ids"] if name == "bytes" else [0xE2, 0x82, 0xAC, 257, len(tokenizer) - 1]
        joined = b"".join(token_bytes(tokenizer, token) for token in tokens)
        assert joined.decode() == ("é€ a" if name == "bytes" else "€ aé")


def test_text_of_a_token_has_its_space() -> None:
    assert token_text(MADE["pieces"], MADE["pieces"].convert_tokens_to_ids("▁the")) == " the"
    assert token_text(MADE["bytes"], MADE["bytes"](" ")["input_ids"][0]) == " "
