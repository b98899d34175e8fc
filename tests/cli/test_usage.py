"""Words that a command does not understand, or cannot work with: one line says so, and nothing is written."""

from __future__ import annotations

import pytest

from fastgen_cli import encode, generate, quantize

COMMANDS = {
    "generate": generate.main, "embed": encode.embed, "classify": encode.classify, "quantize": quantize.main,
}  # fmt: skip
OVER_A_FILE = [
    ("", "required: MODEL, INPUT, OUTPUT"),
    ("m i o.jsonl --batch-size many", "a whole number or 'auto'"),
    ("m i - --resume", "standard output cannot be continued"),
    ("m /none/i.txt o.jsonl", "no such file"),
    ("./none i.txt o.jsonl", "no such directory"),
]
ENCODE = [
    *OVER_A_FILE,
    ("m i o.jsonl --max-length x", "invalid int value"),
    ("m i o.jsonl --num-beams 3", "unrecognized arguments: --num-beams 3"),
    ("m i o", "no format"),
]
GENERATE = [
    *OVER_A_FILE,
    ("m i o --num-beam 3", "unknown option --num-beam: did you mean --num-beams?"),
    ("m i o extra", "unexpected argument 'extra'"),
    ("m i o --num-beams three", "'three' is not a value of type int"),
    ("m i o --bad-words-ids [[1", "not valid JSON"),
    ("m i o --batch-size 0", "at least 1"),
    ("m i o --metrics meteor --reference r", "metrics is 'meteor'"),
    ("m i o --metrics bleu", "need references"),
    ("m i o --reference r --reference-column c", "or a reference column, not both"),
    ("m i o --batching continuous --max-tokens 9", "max-tokens cuts static batches"),
]
QUANTIZE = [
    ("", "required: MODEL, OUT"),
    ("m o", "give a file of calibration text: --calibration FILE"),
    ("m o --bit 4", "unrecognized arguments: --bit 4"),
    ("m o --bits 3 --calibration f", "bits is 3: choose from 4, 8"),
    ("m o --bits four", "invalid int value: 'four'"),
    ("m o --method awq --calibration f", "method is 'awq': choose from gptq, rtn, autoround"),
    ("m o --iterations 0 --calibration f", "iterations is 0: it must be at least 1"),
    ("m o --method autoround --bits 8 --asymmetric --calibration f", "autoround has no zero points with 8 bits"),
    ("m o --method autoround --max-error 0.1 --calibration f", "max-error is for gptq and rtn"),
    ("m o --group-size 12 --calibration f", "group-size is 12: it must be a multiple of 8"),
    ("m o --group-size -1 --calibration f", "group-size is -1"),
    ("m o --samples 0 --calibration f", "samples is 0: it must be at least 1"),
    ("m o --damping nan --calibration f", "damping is nan: it must be more than 0"),
    ("m o --max-error 0.1 --bits 8 --calibration f", "use it with 4 bits"),
    ("m o --max-error 0.1 --asymmetric --calibration f", "max-error needs symmetric weights"),
    ("m o --method rtn --max-error 0.1", "max-error measures layers on calibration text: --calib"),
    ("m o --max-error 0.1 --bits-per-weight 5 --calibration f", "both say which layers have 8 bits"),
    ("m o --calibration f --reference r", "references need --evaluate FILE"),
    ("m o --calibration -", "give files and a directory"),
    ("m - --calibration f", "give files and a directory"),
    ("m o --calibration /none/i.txt", "no such file"),
    ("/none/model o --calibration i.txt", "no such directory"),
    ("m /none/o --calibration i.txt", "does not exist"),
]
WRONG = {"generate": GENERATE, "embed": ENCODE, "classify": ENCODE, "quantize": QUANTIZE}


@pytest.mark.parametrize(("name", "words", "message"), [(name, *each) for name in WRONG for each in WRONG[name]])
def test_wrong_words_are_one_line(name, words, message, one_line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "i.txt").write_text("light\n")
    assert COMMANDS[name](words.split()) == 2
    assert message in one_line()
    assert [path.name for path in tmp_path.iterdir()] == ["i.txt"]
