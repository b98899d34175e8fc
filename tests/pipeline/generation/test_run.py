"""The model stage: padding, scores, memory that runs out, rows that the model refuses."""

from __future__ import annotations

import sys

import pytest
import torch

from fastgen import memory
from fastgen import settings as process_settings
from fastgen.pipeline.batches import MOST_FAILURES, Batch, free_captured_steps
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import depends_on_padding, load
from fastgen.pipeline.generation.model import ModelStage, token_count
from fastgen.pipeline.generation.run import Decoder, Encoder
from fastgen.pipeline.inputs import Record
from tests.pipeline import tiny


def settings(model, output="out.jsonl", **options):
    generation = {"max_new_tokens": 6} | options.pop("generation", {})
    return RunOptions(model=str(model), input="-", output=output, device="cpu", generation=generation, **options)


def loaded_for(model, **options):
    asked = settings(model, **options)
    return load(asked), asked


def batch(loaded, asked, texts):
    records = [Record(position, position + 1, position, text) for position, text in enumerate(texts)]
    rows = [row for row in Encoder(loaded, asked)(records) if not row.problem]
    return Batch(0, 0, sorted(rows, key=lambda row: -len(row.ids)))


def outputs(loaded, asked, generated):
    """Per record: texts of its sequences and the rest of the result."""
    decoded = Decoder(loaded, asked)(generated)
    return {result["position"]: (texts, result) for result, texts, _ in decoded}


@pytest.mark.parametrize("kind", ["bart", "gpt2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_gives_what_each_text_gives_alone(kind, beams, request):
    generation = {"num_beams": beams, "num_return_sequences": beams}
    loaded, asked = loaded_for(request.getfixturevalue(kind), token_ids=True, generation=generation)
    texts = tiny.sentences(7)
    found = outputs(loaded, asked, ModelStage(loaded, asked).run(batch(loaded, asked, texts)))
    assert sorted(found) == list(range(7))
    for position, text in enumerate(texts):
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        own = loaded.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=beams,
            num_return_sequences=beams, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        new = own.sequences[:, 1 if kind == "bart" else ids.shape[1] :]
        texts_found, result = found[position]
        assert texts_found == loaded.tokenizer.batch_decode(new, skip_special_tokens=True)
        assert result["input_tokens"] == ids.shape[1]
        ends = {loaded.model.generation_config.eos_token_id}
        assert result["output_tokens"] == [token_count(row.tolist(), frozenset(ends), loaded.pad_id) for row in new]
        assert result["token_ids"] == [
            row[:count].tolist() for row, count in zip(new, result["output_tokens"], strict=True)
        ]
        if beams > 1:
            scores = own.sequences_scores.tolist()
        else:
            steps = loaded.model.compute_transition_scores(own.sequences, own.scores, normalize_logits=True)
            scores = [float(steps[0][: result["output_tokens"][0]].sum())]
        assert result["scores"] == pytest.approx(scores, abs=1e-4)


def test_the_prompt_can_be_kept(gpt2):
    loaded, asked = loaded_for(gpt2, include_prompt=True)
    plain = settings(gpt2)
    rows = batch(loaded, asked, ["in the beginning", "god"])
    kept = outputs(loaded, asked, ModelStage(loaded, asked).run(rows))
    new = outputs(loaded, plain, ModelStage(loaded, plain).run(rows))
    for position, text in enumerate(["in the beginning", "god"]):
        assert kept[position][0][0].startswith(text)
        assert new[position][0][0] in kept[position][0][0]


def failing(loaded, monkeypatch, error_for):
    """Has `generate` raise the error for its options, if there is one; returns the row counts of its calls."""
    calls, generate = [], loaded.model.generate

    def fails(**options):
        calls.append(len(options["input_ids"]))
        error = error_for(options)
        if error is not None:
            raise error
        return generate(**options)

    monkeypatch.setattr(loaded.model, "generate", fails)
    return calls


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_a_batch_that_does_not_fit_is_split_and_the_size_remembered(bart, monkeypatch):
    loaded, asked = loaded_for(bart)
    texts = [text + " and" for text in tiny.sentences(13)]
    rows = batch(loaded, asked, texts)
    expected = outputs(loaded, asked, ModelStage(loaded, asked).run(rows))
    stage = ModelStage(loaded, asked)
    calls = failing(loaded, monkeypatch, lambda options: NO_MEMORY if len(options["input_ids"]) > 3 else None)
    first = outputs(loaded, asked, stage.run(rows))
    assert {p: texts for p, (texts, _) in first.items()} == {p: texts for p, (texts, _) in expected.items()}
    assert stage.out_of_memory > 0
    tried = len(calls)
    again = stage.run(rows)
    assert max(calls[tried:]) <= 3, "the size that failed is not tried again"
    assert outputs(loaded, asked, again).keys() == expected.keys()
    assert not again.failures


@pytest.mark.parametrize(("first_failures", "tried"), [(1, [4, 4]), (2, [4, 4, 2, 2])])
def test_captured_steps_that_are_kept_are_dropped_first(bart, monkeypatch, first_failures, tried):
    """What earlier batches have left on the GPU is given back, and the batch is tried again as it is, once."""
    loaded, asked = loaded_for(bart)
    rows = batch(loaded, asked, tiny.sentences(4))
    failures = [NO_MEMORY] * first_failures
    monkeypatch.setattr("fastgen.pipeline.batches.free_captured_steps", lambda device: True)
    calls = failing(loaded, monkeypatch, lambda options: failures.pop() if failures else None)
    stage = ModelStage(loaded, asked)
    done = stage.run(rows)
    assert calls == tried and (stage.limit is None) == (first_failures == 1) and not done.failures
    assert sorted(outputs(loaded, asked, done)) == [0, 1, 2, 3]


def test_freeing_captured_steps(monkeypatch):
    from types import SimpleNamespace

    allocated = [700]
    monkeypatch.setattr(memory, "free_captured_steps", lambda: allocated.__setitem__(0, 300))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert not free_captured_steps(torch.device("cpu")) and allocated == [700]
    gpu = SimpleNamespace(type="cuda")
    assert free_captured_steps(gpu) and not free_captured_steps(gpu)


REFUSED = ValueError("a record the model refuses")


@pytest.mark.parametrize(("error", "kind"), [(NO_MEMORY, "out-of-memory"), (REFUSED, "model-error")])
def test_a_record_that_fails_alone_costs_only_itself(bart, monkeypatch, error, kind):
    """As one that is too long for the memory, or has a token that the model refuses."""
    loaded, asked = loaded_for(bart)
    rows = batch(loaded, asked, ["light", "light Z" + " god said" * 8, "day", "night"])
    bad = loaded.tokenizer.convert_tokens_to_ids("Z")
    failing(loaded, monkeypatch, lambda options: error if (options["input_ids"] == bad).any() else None)
    stage = ModelStage(loaded, asked)
    done = stage.run(rows)
    stage.finish()
    assert [(failure["position"], failure["error"]) for failure in done.failures] == [(1, kind)]
    assert sorted(outputs(loaded, asked, done)) == [0, 2, 3]


@pytest.mark.parametrize("count", [2, MOST_FAILURES + 3])
def test_a_model_that_refuses_everything_is_no_matter_of_records(bart, monkeypatch, count):
    loaded, asked = loaded_for(bart)
    failing(loaded, monkeypatch, lambda options: REFUSED)
    stage = ModelStage(loaded, asked)
    with pytest.raises(SetupError, match="every record: a record the model refuses"):
        stage.run(batch(loaded, asked, tiny.sentences(count)))
        stage.finish()


def test_a_lack_of_memory_on_the_cpu_is_known():
    """Torch has no type of its own for it."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**16)
    assert memory.is_out(raised.value)
    assert memory.is_out(torch.OutOfMemoryError("no room")) and memory.is_out(MemoryError())
    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    assert memory.is_out(RuntimeError(message))
    assert not memory.is_out(RuntimeError("size mismatch")) and not memory.is_out(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("kind", "generation", "limit"),
    [
        ("bart", {}, 64), ("unilm", {}, 58), ("unilm", {"max_new_tokens": None, "max_length": 20}, 45),
        ("gpt2", {}, 58), ("gpt2", {"max_new_tokens": None, "max_length": 20}, 19),
        ("gpt2", {"max_new_tokens": None}, 63),
    ],
)  # fmt: skip
def test_inputs_longer_than_the_model_takes(kind, generation, limit, request):
    loaded, asked = loaded_for(request.getfixturevalue(kind), generation=generation)
    assert loaded.positions == limit
    extra = 0 if kind == "gpt2" else 2
    fits = Record(0, 1, 0, "A" * (limit - extra))
    result = Encoder(loaded, asked)([fits, Record(1, 2, 1, "A" * (limit - extra + 1))])
    assert not result[0].problem
    assert result[1].problem.kind == "too-long"


def test_a_model_of_fastgens_own_is_known_without_being_imported(unilm, monkeypatch):
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    kind = load(settings(unilm)).model.config_class
    monkeypatch.delitem(sys.modules, "fastgen.models.unilm")
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "unilm")
    monkeypatch.delitem(AutoModelForSeq2SeqLM._model_mapping._extra_content, kind)
    assert load(settings(unilm)).model.config_class is kind


def test_no_positions_for_an_input_beside_the_target(unilm):
    with pytest.raises(SetupError, match="64 positions: 64 new tokens leave none for an input"):
        load(settings(unilm, generation={"max_new_tokens": 64}))


def test_truncation(bart, gpt2):
    text = "A" * 70 + "B"
    for model, keeps in ((bart, "A"), (gpt2, "B")):
        for options, length in (({"truncation": True}, 64 if model is bart else 58), ({"max_source_length": 9}, 9)):
            loaded, asked = loaded_for(model, **options)
            row = Encoder(loaded, asked)([Record(0, 1, 0, text)])[0]
            assert len(row.ids) == length
            decoded = loaded.tokenizer.decode(row.ids, skip_special_tokens=True)
            assert decoded.endswith(keeps)


def test_the_last_word_on_a_generation_option(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    model = tiny.bart(tmp_path / "model")
    GenerationConfig(
        num_beams=2, length_penalty=0.5, max_length=30, min_length=3, forced_eos_token_id=2
    ).save_pretrained(model)
    config = AutoConfig.from_pretrained(model)
    config.task_specific_params = {"summarization": {"prefix": "sum: ", "length_penalty": 2.0, "min_length": 7}}
    config.save_pretrained(model)
    (tmp_path / "g.json").write_text('{"min_length": 8, "top_k": 7}')
    loaded = load(settings(model, task="summarization", generation_config=str(tmp_path / "g.json"),
                           generation={"top_k": 9, "max_new_tokens": None, "forced_eos_token_id": None}))  # fmt: skip
    own = loaded.generation
    assert (own.num_beams, own.length_penalty, own.min_length, own.top_k) == (2, 2.0, 8, 9)
    assert (own.max_length, own.forced_eos_token_id) == (30, None)
    assert loaded.prefix == "sum: "
    assert load(settings(model)).prefix == ""
    assert load(settings(model, task="summarization", prefix="")).prefix == ""
    with pytest.raises(SetupError, match="unknown task"):
        load(settings(model, task="dance"))


def test_options_whose_effect_depends_on_padding(bart, gpt2):
    def depends(model, **generation):
        return depends_on_padding(load(settings(model, generation=generation)))

    assert not depends(gpt2)
    assert depends(gpt2, max_new_tokens=None, max_length=30)
    assert depends(gpt2, repetition_penalty=1.2)
    assert depends(gpt2, min_length=3)
    assert depends(gpt2, no_repeat_ngram_size=1)
    assert depends(gpt2, encoder_no_repeat_ngram_size=1)
    assert depends(bart, encoder_no_repeat_ngram_size=1)
    assert not depends(gpt2, no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=2)
    assert not depends(bart, no_repeat_ngram_size=1)
    assert not depends(bart, max_new_tokens=None, max_length=30, repetition_penalty=1.2)


def test_setup_errors(bart, tmp_path):
    with pytest.raises(SetupError, match="no such directory"):
        load(settings(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match="cannot be loaded"):
        load(settings(tmp_path / "empty"))
    with pytest.raises(SetupError, match="device nonsense"):
        load(RunOptions(model=str(bart), input="-", output="-", device="nonsense"))
    with pytest.raises(SetupError, match="do not fit together"):
        load(settings(bart, generation={"early_stopping": "perhaps"}))


class _Multilingual:
    """As much of a multilingual tokenizer as is asked for its languages."""

    src_lang = "en_XX"
    lang_code_to_id = {"en_XX": 5, "de_DE": 6}
    unk_token_id = 3

    def convert_tokens_to_ids(self, token):
        return 3


def test_languages():
    from fastgen.pipeline.generation.loading import _languages

    asked = RunOptions(model="m", input="-", output="-", src_lang="de_DE", tgt_lang="en_XX")
    tokenizer = _Multilingual()
    assert _languages(tokenizer, asked) == {"forced_bos_token_id": 5}
    assert tokenizer.src_lang == "de_DE"
    asked = RunOptions(model="m", input="-", output="-", src_lang="xx", tgt_lang="en_XX")
    with pytest.raises(SetupError, match="does not know the language 'xx'"):
        _languages(tokenizer, asked)


@pytest.mark.parametrize("output", ["out.jsonl", "out.txt"])
@pytest.mark.parametrize("alike", [7, 8])
def test_whether_a_step_is_captured_is_planned(bart, output, alike):
    """But where something drafts: which is for text alone, because a batch with scores runs without drafts."""
    for asked in (settings(bart, output), settings(bart, output, self_speculation="int8")):
        stage = ModelStage(load(asked), asked)
        with process_settings.changed(**asked.weights):
            planned = stage._captured_step(Batch(0, 0, [], alike))
        drafts = output == "out.txt" and asked.self_speculation != "off"
        assert planned == ({} if drafts else {"captured_step": "always" if alike == 8 else "never"})
    with process_settings.changed(captured_step="never"):
        assert stage._captured_step(Batch(0, 0, [], alike)) == {}
