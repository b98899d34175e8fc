"""Vectors of a file, from end to end, against the library's model on one text after the other."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fastgen
from fastgen.pipeline import SetupError, StrictError
from fastgen.pipeline.encoding import embed_dataset, modules
from fastgen.pipeline.encoding.run import EncodingStage
from tests.pipeline import tiny
from tests.pipeline.children import interrupted_after
from tests.pipeline.reading import rows_of

TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def run(model, source, output, **options):
    return embed_dataset(model, source, output, **({"device": "cpu", "quiet": True, "batch_size": 4} | options))


@functools.lru_cache(maxsize=2)
def loaded(model: Path):
    from transformers import AutoModel, AutoTokenizer

    return AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


def states_of(folder: Path, text: str, longest: int = 64):
    """The last hidden states of one text, without any of the pipeline."""
    model, tokenizer = loaded(folder)
    tokens = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens).last_hidden_state[0]


def means_of(model: Path, texts, **options):
    return np.stack([states_of(model, text, **options).mean(dim=0).numpy() for text in texts])


def test_vectors_are_those_of_each_text_alone_in_input_order(bert, inputs, tmp_path):
    report = run(bert, inputs, tmp_path / "out.npy")
    texts = inputs.read_text().splitlines()
    found = np.load(tmp_path / "out.npy")
    assert found.dtype == np.float32 and found.shape == (40, 32)
    np.testing.assert_allclose(found, means_of(bert, texts), **TOLERANCE)
    assert (report.samples, report.skipped, report.truncated, report.batches > 1) == (40, 0, 0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


@pytest.mark.parametrize("options", [{"max_tokens": 30}, {"batch_size": "auto"}])
def test_batches_do_not_show(bert, inputs, tmp_path, options):
    run(bert, inputs, tmp_path / "a.npy")
    run(bert, inputs, tmp_path / "b.npy", **options)
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"), rtol=1e-5, atol=1e-6)


def test_padding_is_left_out(bert, inputs, tmp_path):
    """The modules mask it, so that nothing depends on it."""
    fastgen.reset_stats()
    run(bert, inputs, tmp_path / "out.npy", batch_size=64, max_tokens=100000, report=str(tmp_path / "report.json"))
    stats = json.loads((tmp_path / "report.json").read_text())["fastgen"]["stats"]
    assert stats["transformers.encoder, padding zero"]["accelerated"] >= 1
    # The pass that finds out how long vectors are has one text.
    reasons = [entry.get("not used", {}) for name, entry in stats.items() if name.startswith("transformers.encoder")]
    assert [reason for reason in reasons if reason] == [{"hardly any padding that could be left out": 1}]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_side_of_the_padding_is_the_tokenizers(fresh, inputs, tmp_path, side, monkeypatch):
    config = json.loads((fresh / "tokenizer_config.json").read_text())
    (fresh / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": side}))
    seen, pool = [], modules._pool
    monkeypatch.setattr(modules, "_pool", lambda *given: seen.append(given[2]) or pool(*given))  # the mask
    run(fresh, inputs, tmp_path / "out.npy", pooling="max", batch_size=64, max_tokens=100000)
    # With padding in front, positions are others than those of the text alone: the library counts columns.
    texts = inputs.read_text().splitlines()
    expected = np.stack([states_of(fresh, text).amax(dim=0).numpy() for text in texts])
    if side == "right":
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, **TOLERANCE)
    padded = [mask for mask in seen if not mask.all()]
    assert padded and all((mask[:, 0] == 1).all() == (side == "right") for mask in padded)


def test_every_format_has_the_same_vectors(bert, tmp_path):
    source = tmp_path / "in.jsonl"
    rows = [{"text": "let there be light", "n": "a"}, {"text": " ", "n": "b"}, {"text": "the earth\u2028", "n": "c"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from pyarrow import parquet

    for form in ("npy", "jsonl", "parquet"):
        report = run(bert, source, tmp_path / f"out.{form}", input_column="text", id_column="n")
        assert (report.samples, report.skipped) == (2, 1)
        error = json.loads((tmp_path / f"out.{form}.errors.jsonl").read_text())
        assert (error["line"], error["id"], error["error"]) == (2, "b", "empty")
    array = np.load(tmp_path / "out.npy")
    assert np.isnan(array[1]).all() and np.isfinite(array[[0, 2]]).all()
    lines = rows_of(tmp_path / "out.jsonl")
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert lines == table
    assert [row["id"] for row in lines] == ["a", "c"] and [row["input"] for row in lines] == [
        rows[0]["text"],
        rows[2]["text"],
    ]
    np.testing.assert_array_equal(np.array([row["vector"] for row in lines], np.float32), array[[0, 2]])


def test_float16(bert, inputs, tmp_path):
    run(bert, inputs, tmp_path / "a.npy")
    for form in ("npy", "parquet"):
        run(bert, inputs, tmp_path / f"b.{form}", output_dtype="float16")
    found = np.load(tmp_path / "b.npy")
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, np.load(tmp_path / "a.npy").astype(np.float16))
    from pyarrow import parquet

    column = parquet.read_table(tmp_path / "b.parquet")["vector"].to_pylist()
    np.testing.assert_array_equal(np.array(column, np.float16), found)


def test_an_input_without_good_records(bert, tmp_path):
    (tmp_path / "in.txt").write_text("\n\n")
    assert run(bert, tmp_path / "in.txt", tmp_path / "out.npy").skipped == 2
    found = np.load(tmp_path / "out.npy")
    assert found.shape == (2, 32) and np.isnan(found).all()
    (tmp_path / "none.txt").write_text("")
    for form in ("npy", "jsonl", "parquet"):
        assert run(bert, tmp_path / "none.txt", tmp_path / f"none.{form}").samples == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 32)


def test_long_texts_are_cut_and_counted(bert, tmp_path):
    texts = ["A" * 62, "A" * 63, "light", "A" * 500]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    report = run(bert, tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert (report.truncated, report.skipped) == (2, 0)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["truncated"] for row in rows] == [False, True, False, True]
    assert [row["input_tokens"] for row in rows] == [64, 64, rows[2]["input_tokens"], 64]
    report = run(bert, tmp_path / "in.txt", tmp_path / "out.npy", max_length=10)
    assert report.truncated == 3
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), means_of(bert, texts, longest=10), **TOLERANCE)


def test_what_the_files_of_the_model_say(fresh, inputs, tmp_path):
    tiny.sentence_files(
        fresh, ("Pooling", {"pooling_mode": "cls", "include_prompt": True}), ("Normalize", {}),
        settings={"max_seq_length": 8, "do_lower_case": True}, prompts={"prompts": {"q": "SAID "}},
    )  # fmt: skip
    report = run(fresh, inputs, tmp_path / "out.npy", prompt_name="q")
    states = [states_of(fresh, "said " + text.lower(), longest=8)[0] for text in inputs.read_text().splitlines()]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, **TOLERANCE)
    assert report.truncated > 0
    (tmp_path / "upper.txt").write_text(inputs.read_text().upper())
    run(fresh, tmp_path / "upper.txt", tmp_path / "upper.npy", prompt_name="q")
    np.testing.assert_array_equal(np.load(tmp_path / "upper.npy"), np.load(tmp_path / "out.npy"))


def test_a_prompt_that_is_left_out_of_the_pooling(fresh, inputs, tmp_path):
    tiny.sentence_files(fresh, ("Pooling", {"pooling_mode": "mean", "include_prompt": False}))
    run(fresh, inputs, tmp_path / "out.npy", prompt="said let there ")
    from transformers import AutoTokenizer

    # With the token before it, and without the one after it.
    skipped = len(AutoTokenizer.from_pretrained(fresh)("said let there ")["input_ids"]) - 1
    texts = inputs.read_text().splitlines()
    states = [states_of(fresh, "said let there " + text, longest=48)[skipped:] for text in texts]
    expected = np.stack([state.mean(dim=0).numpy() for state in states])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, **TOLERANCE)


def test_a_model_in_a_folder_of_its_own(tmp_path, inputs):
    (tmp_path / "m").mkdir()
    tiny.bert(tmp_path / "m" / "0_Transformer")
    tiny.sentence_files(tmp_path / "m", ("Pooling", {}))
    listed = json.loads((tmp_path / "m" / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (tmp_path / "m" / "modules.json").write_text(json.dumps(listed))
    run(tmp_path / "m", inputs, tmp_path / "out.npy")
    texts = inputs.read_text().splitlines()
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy"), means_of(tmp_path / "m" / "0_Transformer", texts), **TOLERANCE
    )


def test_the_library_of_the_files_gives_the_same(fresh, inputs, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    tiny.sentence_files(
        fresh, ("Pooling", {"pooling_mode": "weightedmean", "embedding_dimension": 32, "include_prompt": False}),
        ("Normalize", {}),
    )  # fmt: skip
    run(fresh, inputs, tmp_path / "out.npy", prompt="said let ")
    model = library.SentenceTransformer(str(fresh), device="cpu")
    expected = model.encode(inputs.read_text().splitlines(), prompt="said let ")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_the_encoder_of_a_model_that_has_a_decoder_and_a_decoder_only_one(kind, inputs, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    folder = getattr(tiny, kind)(tmp_path / "model")
    model = AutoModel.from_pretrained(folder).eval()
    model = model.get_encoder() if kind == "bart" else model
    tokens = AutoTokenizer.from_pretrained(folder)
    texts = inputs.read_text().splitlines()
    with torch.no_grad():
        found = [model(**tokens(text, return_tensors="pt")).last_hidden_state[0, -1].numpy() for text in texts]
    run(folder, inputs, tmp_path / "out.npy", pooling="lasttoken")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), np.stack(found), **TOLERANCE)


def test_positions_that_begin_after_the_padding(tmp_path):
    from transformers import RobertaConfig, RobertaModel

    tokens = tiny.tokenizer(encoder_decoder=True)
    config = RobertaConfig(vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                           intermediate_size=64, max_position_embeddings=34, pad_token_id=1)  # fmt: skip
    tiny.saved(RobertaModel(config), tokens, tmp_path / "m")
    (tmp_path / "in.txt").write_text("A" * 100 + "\nlight\n")
    report = run(tmp_path / "m", tmp_path / "in.txt", tmp_path / "out.jsonl", pooling="cls")
    rows = rows_of(tmp_path / "out.jsonl")
    assert rows[0]["input_tokens"] == 32 and report.skipped == 0


def test_a_notice_where_nothing_says_how_a_text_becomes_a_vector(bert, fresh, inputs, tmp_path, capsys):
    run(bert, inputs, tmp_path / "a.npy", quiet=False)
    assert "tokens' vectors are averaged" in capsys.readouterr().err
    run(bert, inputs, tmp_path / "b.npy", quiet=False, pooling="mean")
    tiny.sentence_files(fresh, ("Pooling", {}))
    run(fresh, inputs, tmp_path / "c.npy", quiet=False)
    assert "averaged" not in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_errors(bert, inputs, tmp_path, monkeypatch):
    original = EncodingStage._numbers

    def poisoned(self, given, rows):
        found = original(self, given, rows)
        return found if len(found) == 1 else found.index_fill(0, torch.tensor([0]), torch.inf)

    monkeypatch.setattr(EncodingStage, "_numbers", poisoned)
    report = run(bert, inputs, tmp_path / "out.npy")
    assert report.skipped > 0 and report.samples + report.skipped == 40
    lines = (tmp_path / "out.npy.errors.jsonl").read_text().splitlines()
    assert {json.loads(line)["error"] for line in lines} == {"not-finite"}
    assert np.isnan(np.load(tmp_path / "out.npy")).all(axis=1).sum() == report.skipped
    with pytest.raises(StrictError, match="not finite"):
        run(bert, inputs, tmp_path / "strict.npy", strict=True)


def test_numbers_beyond_float16_are_errors(bert, inputs, tmp_path, monkeypatch):
    original = EncodingStage._numbers
    monkeypatch.setattr(EncodingStage, "_numbers", lambda self, *given: original(self, *given) * 1e6)
    assert run(bert, inputs, tmp_path / "a.npy").skipped == 0
    assert run(bert, inputs, tmp_path / "b.npy", output_dtype="float16").skipped == 40


def test_relative_positions_have_no_end(tmp_path):
    from transformers import T5Config, T5EncoderModel

    tokens = tiny.tokenizer(encoder_decoder=True)
    config = T5Config(vocab_size=len(tokens), d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=64, pad_token_id=1)
    tiny.saved(T5EncoderModel(config), tokens, tmp_path / "m")
    (tmp_path / "in.txt").write_text("A" * 700 + "\nlight\n")
    for options, longest in (({}, 702), ({"max_length": 600}, 600), ({"max_length": 10**30}, 702)):
        run(tmp_path / "m", tmp_path / "in.txt", tmp_path / "out.jsonl", pooling="mean", overwrite=True, **options)
        rows = rows_of(tmp_path / "out.jsonl")
        assert rows[0]["input_tokens"] == longest
    tiny.sentence_files(tmp_path / "m", ("Pooling", {"pooling_mode": "mean"}), settings={"max_seq_length": 10**30})
    report = run(tmp_path / "m", tmp_path / "in.txt", tmp_path / "out.jsonl", overwrite=True)
    assert (report.samples, report.skipped, report.truncated) == (2, 0, 0)


def test_weights_of_a_head_may_be_left_over_and_those_of_a_pooler_missing(classifier, inputs, tmp_path):
    from transformers import BertForMaskedLM

    run(classifier, inputs, tmp_path / "a.npy")
    masked = BertForMaskedLM.from_pretrained(classifier)
    masked.save_pretrained(tmp_path / "masked")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "masked" / file).write_bytes((classifier / file).read_bytes())
    run(tmp_path / "masked", inputs, tmp_path / "b.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "out.txt"}, "no format: choose one of .npy, .jsonl, .parquet"),
        ({"output": "-", "output_format": "npy"}, "npy cannot be written to standard output"),
        ({"pooling": "median"}, "pooling is 'median'"),
        ({"output_dtype": "int8"}, "output-dtype is 'int8'"),
        ({"prompt": "a", "prompt_name": "b"}, "either a prompt or the name of one"),
        ({"max_length": 0}, "max-length is 0"),
        ({"max_length": 65}, "takes at most 64 tokens"),
        ({"max_length": 2}, "the tokenizer adds 2 tokens"),
        ({"prompt_name": "query"}, "no prompt 'query': it has none"),
    ],
)
def test_options_that_cannot_be(bert, inputs, tmp_path, options, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=message):
        run(bert, inputs, options.pop("output", "out.npy"), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt"]


def test_resuming_with_other_settings_is_refused(fresh, inputs, tmp_path):
    tiny.sentence_files(fresh, ("Pooling", {"pooling_mode": "mean"}))
    with pytest.raises(KeyboardInterrupt), interrupted_after(2, EncodingStage):
        run(fresh, inputs, tmp_path / "out.npy")
    for change, message in (
        ({"pooling": "cls"}, "pooling was"),
        ({"normalize": True}, "modules was|normalize was"),
        ({"prompt": "x"}, "prompt was"),
        ({"max_length": 9}, "longest was|max_length was"),
        ({"output_dtype": "float16"}, "output_dtype was float32|output_dtype was"),
    ):
        with pytest.raises(SetupError, match=message):
            run(fresh, inputs, tmp_path / "out.npy", resume=True, **change)
    tiny.sentence_files(fresh, ("Pooling", {"pooling_mode": "cls"}))
    with pytest.raises(SetupError, match="pooling was"):
        run(fresh, inputs, tmp_path / "out.npy", resume=True)
    tiny.sentence_files(fresh, ("Pooling", {"pooling_mode": "mean"}))
    report = run(fresh, inputs, tmp_path / "out.npy", resume=True)
    assert report.resumed_samples > 0
    run(fresh, inputs, tmp_path / "whole.npy")
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
