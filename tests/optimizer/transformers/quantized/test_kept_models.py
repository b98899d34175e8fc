"""What else a program does with a model.

With low-bit weights that are kept, it works as with the library's own model, or fails with one line before anything is
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastgen
from fastgen import settings
from fastgen.quantization.layers import QuantizedEmbedding, QuantizedWeight, Unpacked
from tests.optimizer.transformers.quantized.checkpoints import CASES, VOCABULARY, inputs_of, llama, quantize, save
from tests.optimizer.transformers.quantized.test_gguf import write_gpt2, write_llama  # which may skip
from tests.optimizer.transformers.quantized.test_stored import check_logits

Both = tuple[PreTrainedModel, PreTrainedModel]


def read(folder: Path, **named: Any) -> Both:
    """With bits kept, and as the library reads it."""

    def load(**more: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", **named, **more).eval()

    return load(quantization_config=fastgen.KeepBits()), load()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    {"llama": write_llama, "gpt2": write_gpt2}[request.param](found / "model.gguf")
    return found


@pytest.fixture(scope="module")
def as_read(folder: Path) -> Both:
    return read(folder)


@pytest.fixture
def both(as_read: Both) -> Both:
    """Copies of the test's own."""
    return copy.deepcopy(as_read)


def kept(model: nn.Module) -> int:
    return sum(isinstance(module, QuantizedWeight) for module in model.modules())


def refused(work: Callable[[], object], model: nn.Module) -> str:
    """The line that says why something is refused, which has changed nothing."""
    before, parameters = copy.deepcopy(model), dict(model.named_parameters())
    with pytest.raises(Exception) as error:
        work()
    message = str(error.value)
    assert "\n" not in message
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(torch.equal(tensor, before.get_parameter(name)) for name, tensor in after.items())
    check_logits(model, before, rtol=0.0, atol=0.0)
    return message


def test_state_dict(both: Both) -> None:
    ours, theirs = both
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(expected)
    name = next(name for name, tensor in found.items() if type(tensor) is Unpacked)
    other = expected | {name: expected[name] + 1.0}
    with pytest.raises(RuntimeError, match="take no other values: call model.dequantize"):
        ours.load_state_dict(other)
    check_logits(ours, theirs)


def test_saving(both: Both, tmp_path: Path) -> None:
    ours, theirs = both
    for model in both:  # the library refuses, too
        assert "GGUF" in refused(lambda model=model: model.save_pretrained(tmp_path / "saved"), model).upper()
    assert not (tmp_path / "saved").exists()
    plain = ours.dequantize()
    plain.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_another_type(both: Both, dtype: torch.dtype) -> None:
    ours, theirs = both
    exact = copy.deepcopy(theirs)
    numbers = {name: m.packed_qweight for name, m in ours.named_modules() if isinstance(m, QuantizedWeight)}
    assert ours.to(dtype) is ours and theirs.to(dtype) is theirs
    assert all(ours.get_submodule(name).packed_qweight is tensor for name, tensor in numbers.items())
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {dtype}
    inputs = inputs_of(theirs)
    with torch.no_grad():
        expected = exact(**inputs).logits
        errors = [float((model(**inputs).logits.float() - expected).norm()) for model in both]
    assert errors[0] <= 1.05 * errors[1]
    ours.to(torch.float32)
    check_logits(ours, exact, rtol=0.1, atol=0.05)  # norms have been rounded


@pytest.mark.parametrize("cast", ["half", "float"])
def test_casts_that_the_library_refuses(both: Both, cast: str) -> None:
    for model in both:
        assert "is not supported for quantized model" in refused(getattr(model, cast), model)


def test_deepcopy(as_read: Both) -> None:
    ours, theirs = as_read
    twin = copy.deepcopy(ours)
    check_logits(twin, theirs)
    embedding, head = twin.get_input_embeddings(), twin.get_output_embeddings()
    assert embedding.packed_qweight.data_ptr() == head.packed_qweight.data_ptr()
    assert embedding.packed_qweight.data_ptr() != ours.get_input_embeddings().packed_qweight.data_ptr()
    assert kept(twin.dequantize()) == 0 and kept(ours)
    inputs = inputs_of(theirs)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(twin.generate(**inputs, **options), theirs.generate(**inputs, **options))


@pytest.mark.parametrize("asked", [{}, {"new_num_tokens": VOCABULARY}, {"pad_to_multiple_of": 8}])
def test_embeddings_that_stay_as_large(both: Both, asked: dict[str, int]) -> None:
    ours, theirs = both
    before = kept(ours)
    assert ours.resize_token_embeddings(**asked) is ours.get_input_embeddings()
    assert kept(ours) == before
    check_logits(ours, theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "asked", [{"new_num_tokens": 128}, {"new_num_tokens": 50}, {"new_num_tokens": 97, "pad_to_multiple_of": 64}]
)
def test_embeddings_of_another_size(asked: dict[str, int], tied: bool, tmp_path: Path) -> None:
    """They become ordinary ones; all other layers keep their bits."""
    write_llama(tmp_path / "model.gguf", tied=tied)
    ours, theirs = read(tmp_path)
    before = kept(ours)
    for model in (ours, theirs):
        torch.manual_seed(0)
        model.resize_token_embeddings(**asked, mean_resizing=False)
    assert kept(ours) == before - 2 and type(ours.get_input_embeddings()) is nn.Embedding
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) is tied
    assert ours.config.vocab_size == theirs.config.vocab_size == ours.get_input_embeddings().weight.shape[0]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    torch.testing.assert_close(
        ours(torch.tensor([[3, 4]])).logits, theirs(torch.tensor([[3, 4]])).logits, rtol=1e-4, atol=1e-4
    )
    assert kept(ours.dequantize()) == 0
    check_logits(ours, theirs) if ours.config.vocab_size >= VOCABULARY else None


def test_embeddings_while_fastgen_is_disabled(both: Both) -> None:
    ours, _ = both

    def resize() -> None:
        with fastgen.disabled():
            ours.resize_token_embeddings(128)

    embedding = ours.get_input_embeddings()
    with pytest.raises(RuntimeError, match=r"call model.dequantize\(\) first"):
        resize()
    assert ours.get_input_embeddings() is embedding and ours.config.vocab_size == VOCABULARY


def test_weight_of_the_output_layer(both: Both) -> None:
    ours, theirs = both
    weight, expected = ours.get_output_embeddings().weight, theirs.get_output_embeddings().weight
    assert weight.shape == expected.shape and weight.dtype is expected.dtype and weight.device == expected.device
    assert torch.equal(weight, expected) and torch.equal(weight[5], expected[5])
    assert (weight.detach().numpy() == expected.detach().numpy()).all()
    hidden = torch.randn(2, expected.shape[1])
    torch.testing.assert_close(hidden @ weight.t(), hidden @ expected.t())
    assert weight.norm() == expected.norm() and weight.mean(0).shape == expected.mean(0).shape


def write_row(model: PreTrainedModel) -> None:
    model.get_output_embeddings().weight.data[3] = 0.0


def replace_weight(model: PreTrainedModel) -> None:
    model.get_input_embeddings().weight = nn.Parameter(torch.zeros(VOCABULARY, 256))


@pytest.mark.parametrize(
    "write",
    [
        write_row,
        replace_weight,
        lambda model: model.get_input_embeddings().weight.mul_(2.0),
        lambda model: model.get_input_embeddings().requires_grad_(True),
        lambda model: nn.init.normal_(model.get_output_embeddings().weight),
    ],
)
def test_weights_cannot_be_written_to(both: Both, write: Callable[[PreTrainedModel], None]) -> None:
    ours, _ = both
    assert "call model.dequantize() first" in refused(lambda: write(ours), ours)


# What LoRA is put on, by the names of the layers.
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}


def with_lora(model: PreTrainedModel, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = TARGETS[model.config.model_type]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_lora(both: Both, tmp_path: Path) -> None:
    """Adapters are the library's: trained, saved and loaded, without a floating copy of what is below."""
    peft = pytest.importorskip("peft")
    ours, theirs = (with_lora(model) for model in both)
    check_logits(ours, theirs)
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    for model in (ours, theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    expected = dict(theirs.named_parameters())
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-2, atol=1e-4)
    ours.save_pretrained(tmp_path / "adapter")
    again, _ = read(Path(both[0].config.name_or_path))
    check_logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval(), ours.eval())


def test_saving_adapters_unpacks_nothing(both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, unpacked = with_lora(both[0]), []
    monkeypatch.setattr(QuantizedWeight, "_shown", lambda *_: unpacked.append(1))
    model.save_pretrained(tmp_path / "adapter")
    assert not unpacked


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_merging_adapters_is_refused(both: Both) -> None:
    model = with_lora(both[0])
    assert "call model.dequantize() first" in refused(model.merge_adapter, model)
    merged = with_lora(both[1])
    merged.merge_adapter()
    check_logits(merged, model)


def test_training_a_kept_layer_is_refused(both: Both) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be written to: call model.dequantize\(\) first"):
        with_lora(both[0], modules_to_save=["lm_head"])


def test_captured_steps_after_all_of_this(both: Both) -> None:
    """A model that has been changed is recorded anew."""
    ours, theirs = both
    inputs = inputs_of(theirs)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with settings.changed(captured_step="always"):
        assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))
        plain = ours.dequantize()
        assert torch.equal(plain.generate(**inputs, **options), theirs.generate(**inputs, **options))


def test_formats_that_can_be_written(tmp_path: Path) -> None:
    """The state dict holds the file's tensors there, as the layers of the library's own backends do."""
    reference, tensors = quantize(llama(), CASES["gptq"])
    save(tmp_path, reference, tensors, CASES["gptq"].config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=fastgen.KeepBits())
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    model.resize_token_embeddings(128)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert not isinstance(model.get_input_embeddings(), QuantizedEmbedding)
    found: Tensor = model.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(found + 0, reference.model.layers[0].mlp.up_proj.weight)
