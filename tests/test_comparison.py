"""`fastgen.compare` and `fastgen.status` as a user sees them."""

import copy
import dataclasses
import itertools
import json

import pytest
import torch

import fastgen
from fastgen import comparison, counters, patching, settings
from fastgen.comparison import Comparison, Run, _Generate
from fastgen.decoding.captured import graph
from fastgen.decoding.speculation import draft_length
from fastgen.ops import _library
from fastgen.optimizer.transformers.speculation import decoding

transformers = pytest.importorskip("transformers")
# Patches are applied when their target is imported.
pytest.importorskip("transformers.generation.utils")
pytest.importorskip("transformers.models.prophetnet.modeling_prophetnet")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(autouse=True)
def enabled(request, monkeypatch):
    """Later calls, of which times are taken, are few where no test looks at them."""
    fastgen.enable(strict=False)
    if "calls" not in request.node.name:
        monkeypatch.setattr(comparison, "_LATER", 1)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_identical_and_accelerated(model, options):
    prompt = torch.randint(3, 60, (2, 12))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} if "do_sample" in options else prompt
    result = fastgen.compare(model, inputs, max_new_tokens=10, return_dict_in_generate=True, **options)
    assert result.identical and result.accelerated and result.first_difference is None
    text = str(result)
    assert "tokens: identical" in text and "accelerated: yes" in text
    assert "first call" in text and "later calls" in text


def letters(padding_side):
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 2, **{chr(ord("a") + i): 3 + i for i in range(26)}}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", padding_side=padding_side
    )


def calls_made(monkeypatch):
    """What each call, or warm-up, was: whether FastGen was active, how many graphs it made, and its arguments."""
    calls, generate, warm_up = [], comparison._Generate.call, comparison._Generate.warm_up

    def counted(self, arguments):
        made = graph.made
        result = generate(self, arguments)
        calls.append((patching.is_active(), graph.made - made, arguments))
        return result

    def warmed_up(self):
        warm_up(self)
        calls.append((patching.is_active(), 0, {}))

    monkeypatch.setattr(comparison._Generate, "call", counted)
    monkeypatch.setattr(comparison._Generate, "warm_up", warmed_up)
    return calls


@pytest.fixture
def records(request, monkeypatch):
    """Steps are recorded where that pays, or always; short calls are not given the time that real ones take."""
    monkeypatch.setattr(graph.operators, "is_interpreted", lambda: False)
    # The clock says whether calls of few tokens are drafted, and whether others pause: it is not for these tests.
    monkeypatch.setattr(decoding, "can_begin", lambda *_: True)
    monkeypatch.setattr(draft_length, "MOST_CALLS", 0)
    with settings.changed(captured_step=getattr(request, "param", "auto")):
        yield


always_recorded = pytest.mark.parametrize("records", ["always"], indirect=True)


def test_later_calls_capture_nothing(model, records, monkeypatch):
    """Short calls are captured once there were many: later calls begin after that, both sides in turn."""
    calls = calls_made(monkeypatch)
    result = fastgen.compare(copy.deepcopy(model), torch.randint(3, 60, (1, 12)), max_new_tokens=20, min_new_tokens=20)
    assert result.identical and result.accelerated
    sides = [side for side, *_ in calls]
    assert sides[:4] == [False, False, True, True], "each side has a warm-up and a first call"
    assert sides[-10:] == [False, True] * 5
    made = [number for number, (_, made, _) in enumerate(calls) if made]
    assert made and max(made) < len(calls) - 10, "nothing is captured any more when later calls are measured"


@pytest.fixture
def slow(monkeypatch):
    """Each call takes half a minute."""
    clock = itertools.count(step=30.0)
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: float(next(clock)))


def test_calls_that_take_long_are_few(model, slow, monkeypatch):
    calls = calls_made(monkeypatch)
    fastgen.compare(model, torch.randint(3, 60, (1, 12)), max_new_tokens=4)
    assert [side for side, *_ in calls] == [False, False, True, True, True, False, True]


def test_texts_with_a_tokenizer(model, monkeypatch):
    tokenizer = letters(padding_side="right")
    calls = calls_made(monkeypatch)
    texts = ["a b c d", "b"]
    assert fastgen.compare(model, texts, tokenizer=tokenizer, max_new_tokens=4).identical
    ids, mask = calls[1][2]["input_ids"], calls[1][2]["attention_mask"]
    assert ids.shape == (2, 4) and mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]], "padded on the left"
    assert tokenizer.pad_token is None and tokenizer.padding_side == "right", "the tokenizer is left as it is"
    assert fastgen.compare(model, "a b", tokenizer=tokenizer, max_new_tokens=4).identical
    with pytest.raises(TypeError, match="needs tokenizer="):
        fastgen.compare(model, texts)
    with pytest.raises(ValueError, match="at least one text"):
        fastgen.compare(model, [], tokenizer=tokenizer)


def test_a_pipeline(model, monkeypatch):
    tokenizer = letters(padding_side="left")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["a b c d", "b"]
    result = fastgen.compare(pipeline, texts, max_new_tokens=6, do_sample=True)
    assert result.identical and result.accelerated
    wrong = iter(range(100))
    postprocess = type(pipeline).postprocess

    def different(self, *args, **kwargs):
        found = postprocess(self, *args, **kwargs)
        found[0]["generated_text"] += "." if next(wrong) % 2 else ""
        return found

    monkeypatch.setattr(type(pipeline), "postprocess", different)
    result = fastgen.compare(pipeline, ["a b c d"], max_new_tokens=6)
    assert not result.identical and result.first_difference == (0, -1)


def test_a_pipeline_takes_iterators_and_data_sets(model):
    from transformers.pipelines.pt_utils import KeyDataset

    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=letters(padding_side="left"))
    texts = ["a b c d", "b c"]
    data_set = KeyDataset([{"text": text} for text in texts], "text")  # its results are computed as they are read
    for inputs in (iter(texts), data_set, (text for text in texts)):
        result = fastgen.compare(pipeline, inputs, max_new_tokens=4)
        assert result.identical and result.accelerated


def test_a_model_in_a_wrapper_gets_all_inputs(model, monkeypatch):
    """Its forward takes `*args, **kwargs`."""
    calls = calls_made(monkeypatch)
    wrapped = copy.deepcopy(model)
    forward = wrapped.forward
    monkeypatch.setattr(wrapped, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    assert fastgen.compare(wrapped, "a b c", tokenizer=letters(padding_side="left"), max_new_tokens=4).identical
    assert calls[1][2]["input_ids"].tolist() == [[3, 4, 5]]


def test_what_is_still_captured_is_said(model, slow, monkeypatch):
    made = itertools.count(1)
    monkeypatch.setattr(comparison, "graph", type("Graph", (), {"made": property(lambda self: next(made))})())
    result = fastgen.compare(model, torch.randint(3, 60, (1, 12)), max_new_tokens=4)
    assert not result.settled and "still being captured" in str(result)


def test_a_pipeline_that_does_not_generate():
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    bert = transformers.BertForSequenceClassification(config)
    pipeline = transformers.pipeline("text-classification", model=bert, tokenizer=letters(padding_side="right"))
    with pytest.raises(ValueError, match="does not"):
        fastgen.compare(pipeline, ["a"])


def test_a_fallback_is_reported(model):
    result = fastgen.compare(model, torch.randint(3, 60, (1, 5)), use_cache=False, max_new_tokens=4)
    assert result.identical and not result.accelerated
    assert result.fallback is not None and "use_cache" in result.fallback and "accelerated: no (" in str(result)


@always_recorded
def test_drafted_tokens_are_counted(model, records):
    """Those of the call alone: neither of calls before, nor of the warm-up."""
    prompt, options = torch.arange(3, 13).repeat(1, 4), {"prompt_lookup_num_tokens": 4, "max_new_tokens": 40}
    # On a busy machine the clock may say that drafts do not pay: of several models, one is drafted for.
    models = (copy.deepcopy(model) for _ in range(4))
    results = (fastgen.compare(each, prompt, **options) for each in models for _ in range(2))
    result = next(result for result in results if result.drafts is not None)
    assert result.identical and result.not_drafted is None
    drafts = result.drafts
    assert 0 <= drafts.accepted <= drafts.drafted and 0 < drafts.verifies <= 40
    assert f"drafts: {drafts.drafted} tokens drafted, " in str(result)
    plain = fastgen.compare(model, prompt, max_new_tokens=4)
    assert plain.drafts is plain.not_drafted is None and "drafts" not in str(plain)


@always_recorded
def test_why_nothing_was_drafted(model, records):
    """A model as small as this one has no weights that would be worth a low-bit copy."""
    with settings.changed(self_speculation="int8"):
        result = fastgen.compare(model, torch.arange(3, 13).repeat(1, 4), max_new_tokens=20)
    assert result.drafts is None and result.not_drafted is not None
    assert f"drafts: none ({result.not_drafted})" in str(result)


def test_low_bit_layers_are_named(model, monkeypatch):
    """The original code of these is no model that anybody has: it unpacks FastGen's own layers."""
    plain = fastgen.compare(model, torch.arange(3, 13)[None], max_new_tokens=4)
    assert not plain.keeps_bits and "low-bit" not in str(plain)
    monkeypatch.setattr(comparison, "keeps_bits", lambda model: True)
    kept = fastgen.compare(model, torch.arange(3, 13)[None], max_new_tokens=4)
    assert kept.keeps_bits and "original: low-bit layers" in str(kept)


def test_disabled_is_reported(model):
    with fastgen.disabled():
        result = fastgen.compare(model, torch.randint(3, 60, (1, 5)), max_new_tokens=4)
    assert not result.accelerated and result.fallback == "FastGen is disabled"


def test_first_difference():
    a = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert _Generate.differs(a, a.clone()) is None
    b = a.clone()
    b[1, 2] = 0
    assert _Generate.differs(a, b) == (1, 2)
    assert _Generate.differs(a, a[:, :2]) == (0, 2)
    assert _Generate.differs(a, a[:1]) == (-1, -1)
    side = Run(1.0, 1.0, None)
    assert "DIFFERENT, first at row 1, position 2" in str(Comparison(False, (1, 2), side, side, True, None))


def test_status_names_versions_patches_and_operators():
    status = fastgen.status()
    assert status.enabled and status.versions["torch"] == torch.__version__
    assert status.versions["transformers"] == transformers.__version__
    states = status.patches
    assert states["transformers.generation.utils.GenerationMixin.generate"] == "applied"
    # Those of models that this process has not imported wait. tests/equivalence/test_versions.py imports them all.
    of_library = {state for name, state in states.items() if name.startswith("transformers.")}
    assert of_library <= {"applied", "waiting for import"}
    assert status.operators["captured_step"] == graph.backend()
    assert status.operators["attention"] and status.operators["no_repeat_ngram"]
    text = str(status)
    assert "FastGen" in text and "patches:" in text and "operators:" in text


def test_the_summary_is_short_and_names_what_is_missing(monkeypatch):
    status = fastgen.status()
    text = status.summary()
    assert len(text.splitlines()) < 10 and torch.backends.cpu.get_cpu_capability() in text
    assert f"torch {torch.__version__}" in text and "patches:" in text and " applied" in text
    monkeypatch.setattr(_library, "load", lambda device: "the extension was not built")
    patches = {**status.patches, "transformers.X.y": "not applied: no such function"}
    text = dataclasses.replace(status, patches=patches, notes=["one"]).summary()
    assert "transformers.X.y: not applied: no such function" in text and "1 not applied" in text
    assert "operators: NOT compiled: the extension was not built" in text and "note: one" in text


def test_stats_print_as_a_table(model):
    fastgen.reset_stats()
    assert str(fastgen.stats()) == "no call so far" and fastgen.stats() == {}
    prompt = torch.randint(3, 60, (1, 5))
    model.generate(prompt, max_new_tokens=4)
    model.generate(prompt, max_new_tokens=4, use_cache=False)
    stats = fastgen.stats()
    assert isinstance(stats, dict) and json.loads(json.dumps(stats)) == stats == copy.deepcopy(stats)
    (reason,) = stats["transformers.generate"]["fallback"]
    lines = str(stats).splitlines()
    assert lines[0].split("  ")[-3:] == ["accelerated", "fallback", "not used"]
    row = next(number for number, line in enumerate(lines) if line.startswith("transformers.generate "))
    assert lines[row].split() == ["transformers.generate", "1", "1", "-"]
    assert lines[row + 1].split() == [*reason.split(), "1"]
    assert len({line.rstrip()[: len(lines[0])] for line in lines}) == len(lines)
    counters.add("transformers.speculation", drafted=7, verifies=3)
    assert "drafted 7, verifies 3" in str(fastgen.stats())


def test_former_names_of_counts():
    fastgen.reset_stats()
    counters.add("transformers.speculation", verifies=3)
    counters.count_accelerated("weights read in 16 bits")
    stats = fastgen.stats()
    with pytest.warns(DeprecationWarning, match="'checks' is now called 'verifies'"):
        assert stats["transformers.speculation"]["checks"] == 3
    with pytest.warns(DeprecationWarning, match="'weights read in fewer bits' is now called") as warned:
        assert stats.get("weights read in fewer bits") == {"accelerated": 1, "fallback": {}}
    assert warned[0].filename == __file__
    assert stats.get("no such name", 5) == 5 and "checks" not in stats["transformers.speculation"]
    with pytest.raises(KeyError):
        stats["no such name"]
