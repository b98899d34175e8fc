"""Translation and summarisation with the dictionaries of BERT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask
from fairseq.tokenizer import tokenize_line


class BertDictionary(Dictionary):
    """A vocabulary with the special tokens [CLS], [PAD], [SEP] and [UNK] wherever they are among its tokens.

    Args:
        tokens: each with its count, in their order. Special tokens that are not among them come last.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]] = ()) -> None:
        super().__init__(bos="[CLS]", pad="[PAD]", eos="[SEP]", unk="[UNK]")
        self.symbols: list[str] = []
        self.count: list[int] = []
        self.indices: dict[str, int] = {}
        for token, count in tokens:
            self.add_symbol(token, n=count)
        special = self.bos_word, self.pad_word, self.eos_word, self.unk_word
        indices = [self.indices[word] if word in self.indices else self.add_symbol(word) for word in special]
        self.bos_index, self.pad_index, self.eos_index, self.unk_index = indices

    @classmethod
    def load_from_file(cls, path: str) -> BertDictionary:
        """The dictionary of a file that has `TOKEN COUNT` in each line.

        Raises:
            ValueError: a line is not of this form.
        """
        with open(path, encoding="utf-8", errors="ignore") as file:
            return cls(_read(line.rstrip("\n"), f"{path}, line {number}") for number, line in enumerate(file, start=1))

    def save(self, f: Any) -> None:
        """Writes all tokens, special ones included, to a file or path."""
        self._save(f, zip(self.symbols, self.count, strict=True))


def _read(line: str, where: str) -> tuple[str, int]:
    token, _, count = line.rpartition(" ")
    if not token or not count.isdecimal():
        raise ValueError(f"{where}: expected a token and its count, found {line!r}")
    return token, int(count)


class TranslationProphetNetTask(TranslationTask):
    """FairSeq's translation with `BertDictionary`."""

    @classmethod
    def load_dictionary(cls, filename: str) -> BertDictionary:
        """Reads a dictionary."""
        return BertDictionary.load_from_file(filename)

    @classmethod
    def build_dictionary(
        cls, filenames: list[str], workers: int = 1, threshold: int = -1, nwords: int = -1, padding_factor: int = 8
    ) -> BertDictionary:
        """The dictionary of a text, for a model that is not pre-trained; the arguments are `fairseq-preprocess`'s."""
        made = BertDictionary()
        for filename in filenames:
            Dictionary.add_file_to_dictionary(filename, made, tokenize_line, workers)
        made.finalize(threshold=threshold, nwords=nwords, padding_factor=padding_factor)
        return made
