"""The texts that models are calibrated and measured on, and what the report says."""

from __future__ import annotations

import json

import pytest
import torch

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.quantizing.run import load_model
from fastgen.pipeline.quantizing.texts import Texts, samples, sequences
from fastgen.quantization import calibration
from tests.pipeline import tiny
from tests.pipeline.quantizing.runs import options, run

pytestmark = pytest.mark.sampled(5)


def test_the_report(llama, text, tmp_path):
    report = run(llama, tmp_path / "out", text, evaluate=str(text))
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [layer["name"] for layer in written["layers"]] == [layer.name for layer in report.layers]
    assert written["measure"] == "perplexity"
    assert written["bytes"]["before"] > written["bytes"]["after"] > 0
    assert written["tokens_per_second"]["before"] > 0
    assert 1 < written["quality"]["before"] != written["quality"]["after"]
    assert all(0 < layer["error"] < 0.5 for layer in written["layers"])


def test_perplexity_is_that_of_the_text(llama, text, tmp_path):
    from transformers import AutoModelForCausalLM

    from fastgen.pipeline.quantizing.texts import quality

    given = options(llama, tmp_path / "out", text)
    loaded = load_model(given)
    found = quality(loaded, list(Texts(given.reading(str(text), None))))
    ids = loaded.tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
    model, losses = AutoModelForCausalLM.from_pretrained(llama).eval(), []
    for part in ids.split(loaded.positions):
        if len(part) > 1:
            with torch.no_grad():
                losses += [float(model(part[None], labels=part[None]).loss)] * (len(part) - 1)
    assert found.measured_on == len(losses)
    assert found.value == pytest.approx(float(torch.tensor(losses).double().mean().exp()), rel=1e-4)


def test_samples_of_a_decoder_only_model(llama, text, tmp_path):
    given = options(llama, tmp_path / "out", text)
    loaded, texts = load_model(given), Texts(given.reading(str(text), None))
    made = [sample["input_ids"][0].tolist() for sample in samples(loaded, texts, 1000, 10)]
    joined = [token for ids in made for token in ids]
    assert joined == loaded.tokenizer(text.read_text()).input_ids[: len(joined)]
    assert {len(ids) for ids in made[:-1]} == {10}
    assert len(samples(loaded, texts, 2, 10)) == 2
    assert len(next(sequences(loaded, texts, 10**6))[0]) == loaded.positions


def test_an_encoder_decoder_writes_the_targets_that_are_missing(bart, pairs, tmp_path):
    given = options(bart, tmp_path / "out", pairs)
    loaded = load_model(given)
    (tmp_path / "sources.txt").write_text(pairs.read_text().splitlines()[0].partition("\t")[0] + "\n")
    made = samples(loaded, Texts(given.reading(str(tmp_path / "sources.txt"), None)), 4, 32)
    own = loaded.model.generate(input_ids=made[0]["input_ids"])
    assert made[0]["labels"].tolist() == own[:, 1:].tolist()
    told = samples(loaded, Texts(given.reading(str(pairs), None)), 1, 32)
    target = pairs.read_text().splitlines()[0].partition("\t")[2]
    assert told[0]["labels"].tolist() == [loaded.tokenizer(target).input_ids]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "has no text"), (b"in the\n\xff\xfe\xfa\n", r"line 2: .*UTF-8"), (b"", "is empty|has no text"),
        (b"a\0b\n", "line 1: the text has a NUL"), (b"\xff\xfea\0b\0", "UTF-16"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_used(llama, tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(SetupError, match=message):
        run(llama, tmp_path / "out", tmp_path / "bad.txt")
    assert not (tmp_path / "out.partial").exists()


def test_columns_and_references(llama, bart, tmp_path):
    rows = [{"s": source, "t": source.upper()} for source in tiny.sentences(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = options(bart, tmp_path / "out", tmp_path / "rows.jsonl", input_column="s", reference_column="t")
    assert [tuple(text) for text in Texts(given.reading(given.calibration, None))] == [(r["s"], r["t"]) for r in rows]
    with pytest.raises(SetupError, match=r"choose the input column \(--input-column\)"):
        run(llama, tmp_path / "out", tmp_path / "rows.jsonl")
    (tmp_path / "sources.txt").write_text("in the beginning\n")
    with pytest.raises(SetupError, match="has sources without references"):
        run(bart, tmp_path / "out", tmp_path / "sources.txt", evaluate=str(tmp_path / "sources.txt"))


def test_the_choice_is_greedy():
    choice = calibration.Choice
    given = [choice(("a",), 1.0, 100, 0.25), choice(("b", "c"), 3.0, 200, 0.25), choice(("d",), 0.5, 10, 0.25)]
    assert calibration.most_gaining(given, 8.25) == {"a", "b", "c", "d"}
    assert calibration.most_gaining(given, 4.25) == frozenset()
    assert calibration.most_gaining(given, 4.4) == {"d"}
    assert calibration.most_gaining(given, 7.0) == {"d", "b", "c"}
    assert calibration.most_gaining(given, 6.0) == {"d", "a"}  # what does not fit is passed over
