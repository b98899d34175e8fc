"""Damaged data, wrong models and wrong options are errors of one line."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastgen_cli import fairseq as commands
from tests.fairseq.commands.world import BASE, one_line


def _shorten(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))


def _spoil_tokens(path: Path, token: bytes = b"\xff\x7f") -> None:
    path.write_bytes(token * (path.stat().st_size // 2))


def _make_negative(data: Path) -> None:
    _spoil_tokens(data / "test.de-en.de.bin", b"\xff\xff")
    index = bytearray((data / "test.de-en.de.idx").read_bytes())
    index[17] = 3  # 16 bits with a sign
    (data / "test.de-en.de.idx").write_bytes(index)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing dictionary": (lambda data: (data / "dict.en.txt").unlink(), "dict.en.txt is missing"),
    "dictionary": (lambda data: (data / "dict.en.txt").write_text("no number\n"), "Incorrect dictionary format"),
    "smaller dictionary": (
        lambda data: [_shorten(data / f"dict.{side}.txt") for side in ("de", "en")],
        "another architecture, or of a model with other dictionaries",
    ),
    "missing subset": (lambda data: (data / "test.de-en.de.idx").unlink(), "Dataset not found: test"),
    "index": (lambda data: (data / "test.de-en.de.idx").write_bytes(b"nothing that is an index" * 9), "be read: "),
    "tokens": (lambda data: _spoil_tokens(data / "test.de-en.de.bin"), "source data hold token 32767, but the dict"),
    "negative tokens": (_make_negative, "source data hold token -1, but the dict"),
}


def refusal(capsys: pytest.CaptureFixture[str], data: Path, model: Path, *words: str) -> str:
    """The line with which `fastgen-generate-for-fairseq` ends."""
    assert commands.generate([str(data), "--path", str(model), *BASE, *words]) == 2
    return one_line(capsys, commands.GENERATE)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_are_one_line(world, tmp_path, capsys, damage):
    data = shutil.copytree(world.data, tmp_path / "data")
    harm, message = DAMAGES[damage]
    harm(data)
    assert message in refusal(capsys, data, world.model)


def test_wrong_models_are_one_line(world, tmp_path, capsys):
    other = torch.load(world.model, weights_only=False)
    other["model"] = {name: weight for name, weight in other["model"].items() if "encoder" not in name}
    torch.save(other, tmp_path / "other.pt")
    other["cfg"]["model"] = Namespace(arch="unheard_of", _name="unheard_of")
    torch.save(other, tmp_path / "unknown.pt")
    # What an encoder of FairSeq 0.12.2 is to fairseq-fixed.
    other = torch.load(world.model, weights_only=False)
    other["model"]["encoder.layers.0.fused.in_proj_weight"] = torch.zeros(1)
    torch.save(other, tmp_path / "release.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("a text\n")
    (tmp_path / "damaged.pt").write_bytes(b"\x80\x02 and nothing that a pickle has")
    for path, message in (
        (tmp_path / "text.pt", "text.pt is nothing that torch has saved"),
        (tmp_path / "damaged.pt", "damaged.pt is damaged, or nothing that FairSeq has saved"),
        (tmp_path / "none.pt", "none.pt"),
        (tmp_path / "empty.pt", "cannot be used for task translation"),
        (tmp_path / "other.pt", "another architecture"),
        (tmp_path / "release.pt", "its encoder was saved by another release of FairSeq"),
        (tmp_path / "unknown.pt", "does not know its architecture 'unheard_of'"),
        (world.data / "dict.en.txt", "cannot be used for task translation"),
    ):
        assert message in refusal(capsys, world.data, path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "translaton"], "invalid choice: 'translaton'; did you mean translation"),
        (["--beams", "3"], "unrecognized arguments: --beams 3"),
        (["--beam", "three"], "invalid int value: 'three'"),
        (["--sampling"], "give --nbest the number that --beam has"),
        (["--replace-unk", "x"], "--dataset-impl raw"),
        (["--print-step"], "--print-step"),
        (["--postprocess-workers", "-1"], "not a number of processes"),
        (["--user-dir", "/none"], "/none"),
        (["--model-overrides", "{"], "--model-overrides"),
        (["--lm-path", "none.pt"], "none.pt"),
        (["--tokenizer", "moses"], "--source-lang"),
        (["--remove-bpe", "nonsense"], "--post-process: Unknown post_process option: nonsense"),
        (["--constraints"], "--constraints: the data have none"),
    ],
)
def test_wrong_options_are_one_line(world, words, message, capsys):
    assert message in refusal(capsys, world.data, world.model, *words)


def test_what_is_no_language_model_is_one_line(world, capsys):
    said = refusal(capsys, world.data, world.model, "--lm-path", str(world.model))
    assert "checkpoint_last.pt is not a language model" in said


def test_a_model_of_another_kind_is_one_line(world, language, capsys):
    said = refusal(capsys, language.data, world.model, "--task", "language_modeling")
    assert "or for another task: 'TransformerModel' object has no" in said


def test_scores_that_are_no_numbers_are_one_line(world, tmp_path, capsys):
    spoilt = torch.load(world.model, weights_only=False)
    spoilt["model"]["decoder.layers.0.fc2.bias"].fill_(float("nan"))
    torch.save(spoilt, tmp_path / "spoilt.pt")
    assert "its scores are no numbers" in refusal(capsys, world.data, tmp_path / "spoilt.pt")


def test_a_text_that_is_not_in_utf8_is_one_line(world, tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"and he said\n\xff\xfe\n")
    assert commands.interactive([str(world.data), "--path", str(world.model), "--input", str(tmp_path / "text")]) == 2
    assert "the input cannot be read: 'utf-8' codec" in one_line(capsys, commands.INTERACTIVE)
