"""Models run block by block, and the layers of a block quantised."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastgen.quantization import calibration
from fastgen.quantization.calibration import (
    Carried,
    Recipe,
    check_carried,
    find_blocks,
    group_size_of,
    output_block,
    quantise,
    quantise_block,
    sharing,
    use,
)
from fastgen.quantization.checkpoint import dequantized
from tests.quantization import tiny

BITS_4 = Recipe(group_size=16)


@pytest.fixture(params=tiny.FAMILIES)
def model(request):
    return tiny.FAMILIES[request.param]()


def run(model, recipe, given, blocks=None):
    """Quantises a model in place, as the command does; the layers by name."""
    forward = tiny.runner(model, given)
    carried, found = Carried(forward, len(given)), {}
    for block in blocks or find_blocks(model, forward):
        layers = quantise_block(block, carried, recipe, lambda: None)
        use(block, {name: layer.weight for name, layer in layers.items()})
        carried.finish(block)
        found |= layers
    return found


def test_all_blocks_are_found_in_the_order_in_which_they_are_called(model):
    forward = tiny.runner(model, tiny.samples(model))
    names = [block.name for block in find_blocks(model, forward)]
    layer = next(iter(names)).rpartition(".")[0]
    if model.config.is_encoder_decoder:
        decoder = layer.replace("encoder", "decoder")
        assert names == [f"{stack}.{number}" for stack in (layer, decoder) for number in range(2)]
    else:
        assert names == [f"{layer}.{number}" for number in range(model.config.num_hidden_layers)]
    inside = {name for block in find_blocks(model, forward) for name in block.linears}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linear - inside == {"lm_head"}


def test_the_hessian_of_every_layer_is_that_of_its_inputs_in_the_model(model, monkeypatch):
    """Of a model whose blocks before it are quantised: compared with a pass through the whole model."""
    given = tiny.samples(model)
    seen = {}

    def kept(weight, hessian, *others):
        seen[id(weight)] = hessian
        return quantise(weight, hessian, *others)

    monkeypatch.setattr(calibration, "quantise", kept)
    forward = tiny.runner(model, given)
    carried = Carried(forward, len(given))
    for block in find_blocks(model, forward):
        expected = {}

        def add(layer, args, expected=expected):
            rows = args[0].reshape(-1, layer.in_features).double()
            expected[id(layer.weight)] = expected.get(id(layer.weight), 0) + rows.T @ rows

        hooks = [layer.register_forward_pre_hook(add) for layer in block.linears.values()]
        with torch.no_grad():
            for number in range(len(given)):
                forward(number)
        for hook in hooks:
            hook.remove()
        layers = quantise_block(block, carried, BITS_4, lambda: None)
        assert layers.keys() == block.linears.keys()
        for layer in block.linears.values():
            torch.testing.assert_close(
                seen[id(layer.weight)].double(), expected[id(layer.weight)], rtol=1e-4, atol=1e-3
            )
        use(block, {name: layer.weight for name, layer in layers.items()})
        carried.finish(block)


def test_errors_are_those_of_the_outputs(model):
    given = tiny.samples(model)
    forward = tiny.runner(model, given)
    block = find_blocks(model, forward)[-1]
    name, layer = next(iter(block.linears.items()))
    inputs = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].reshape(-1, layer.in_features)))
    with torch.no_grad():
        for number in range(len(given)):
            forward(number)
    hook.remove()
    x, weight = torch.cat(inputs), layer.weight.detach()
    layers = quantise_block(block, Carried(forward, len(given)), BITS_4, lambda: None)
    off = x @ (dequantized(layers[name].weight, torch.float32) - weight).T
    assert layers[name].error == pytest.approx(float(off.norm() / (x @ weight.T).norm()), rel=1e-3)
    assert 0 < layers[name].error < 0.2


def test_gptq_changes_the_model_less_than_rounding_to_nearest():
    before = tiny.llama()
    given = tiny.samples(before, 20)

    def change(recipe):
        after = copy.deepcopy(before)
        run(after, recipe, given)
        with torch.no_grad():
            return sum(float((after(**s).logits - before(**s).logits).square().sum()) for s in given)

    assert change(BITS_4) < 0.7 * change(BITS_4._replace(method="rtn"))
    assert change(BITS_4._replace(bits=8)) < 0.02 * change(BITS_4)


@given(
    st.integers(1, 6), st.sampled_from([8, 24, 64]), st.integers(1, 80), st.sampled_from([4, 8]), st.booleans(),
    st.sampled_from([1e-6, 0.01, 1.0]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 10**6),
)  # fmt: skip
def test_the_error_on_the_calibration_inputs_is_never_more_than_that_of_rounding_to_nearest(
    outputs, inputs, rows, bits, symmetric, damping, dtype, seed
):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=source) @ torch.randn(inputs, inputs, generator=source)
    weight = torch.randn(outputs, inputs, generator=source).to(dtype)
    hessian = x.T @ x
    recipe = Recipe(bits=bits, group_size=8, symmetric=symmetric, damping=damping)
    best, nearest = (quantise(weight, hessian, recipe._replace(method=method)) for method in ("gptq", "rtn"))
    assert best.error <= nearest.error
    assert (best.weight.zeros is None) == symmetric


def test_layers_that_lose_too_much_keep_8_bits_with_those_that_share_their_input():
    given = tiny.samples(tiny.llama(), 8)
    plain = run(tiny.llama(), BITS_4, given)
    limit = sorted(layer.error for layer in plain.values())[len(plain) // 2]
    mixed = run(tiny.llama(), BITS_4._replace(max_error=limit), given)
    assert {layer.weight.bits for layer in mixed.values()} == {4, 8}
    assert all(layer.error <= limit for layer in mixed.values())
    for number in range(3):
        attention = f"model.layers.{number}.self_attn"
        assert len({mixed[f"{attention}.{name}_proj"].weight.bits for name in "qkv"}) == 1
        assert len({mixed[f"model.layers.{number}.mlp.{name}_proj"].weight.bits for name in ("gate", "up")}) == 1
    assert run(tiny.llama(), BITS_4._replace(max_error=10.0), given).keys() == plain.keys()


class Stack(nn.Module):
    """Blocks of linear layers, the last of which is given more than what the one before it returns, if asked to."""

    def __init__(self, skips: bool = False, repeats: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.skips, self.repeats = skips, repeats

    def forward(self, x):
        first = x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[2](x + first if self.skips else x)
        return self.layers[2](x) if self.repeats else self.experts[0](x)


def stack(**options):
    model, x = Stack(**options), torch.randn(3, 5, 16)
    return model, lambda number: model(x[number])


def test_a_model_whose_blocks_are_given_more_is_refused():
    model, forward = stack(skips=True)
    with pytest.raises(ValueError, match=r"layers\.2 is given more"):
        check_carried(find_blocks(model, forward), forward)
    model, forward = stack()
    blocks = find_blocks(model, forward)
    check_carried(blocks, forward)
    # Blocks that are not called, or more than once, are none.
    assert [block.name for block in blocks] == ["layers.0", "layers.1", "layers.2", "experts.0"]
    model, forward = stack(repeats=True)
    assert [block.name for block in find_blocks(model, forward)] == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match="no list of blocks"):
        find_blocks(nn.Linear(4, 4), lambda _: None)


def test_families_are_carried(model):
    forward = tiny.runner(model, tiny.samples(model))
    check_carried(find_blocks(model, forward), forward)


def test_the_model_is_as_before_when_a_pass_fails():
    model, _ = stack()
    x = torch.randn(3, 5, 16)
    forward = lambda number: model(x[number])  # noqa: E731
    blocks = find_blocks(model, forward)
    carried = Carried(forward, 3)
    carried.finish(blocks[0])
    before = model(x[0])
    with pytest.raises(ValueError, match=r"does not reach layers\.1"):
        carried._forward = lambda number: None
        carried.inputs(blocks[1], 0)
    assert "forward" not in vars(blocks[0].module)
    own = blocks[0].module.forward = blocks[0].module.forward
    with pytest.raises(ValueError, match="does not reach"):
        carried.inputs(blocks[1], 0)
    assert vars(blocks[0].module)["forward"] is own
    assert torch.equal(model(x[0]), before)


def test_the_output_layer():
    model = tiny.llama()
    given = tiny.samples(model)
    blocks = [*find_blocks(model, tiny.runner(model, given)), output_block(model, model.get_output_embeddings())]
    assert "lm_head" in run(model, BITS_4, given, blocks)
    tied = tiny.llama(tie_word_embeddings=True)
    block = output_block(tied, tied.get_output_embeddings())
    assert block.name == "lm_head" and block.linears == {"model.embed_tokens": tied.lm_head}
    assert sharing(tied, tied.lm_head) == ["model.embed_tokens", "lm_head"]
    scaled = tiny.bart()
    with pytest.raises(ValueError, match="other than plain embeddings"):
        output_block(scaled, scaled.get_output_embeddings())
    tied.lm_head.bias = nn.Parameter(torch.zeros(tiny.WORDS))
    with pytest.raises(ValueError, match="and has a bias"):
        output_block(tied, tied.get_output_embeddings())
    with pytest.raises(ValueError, match="no output layer"):
        output_block(model.model, None)


@pytest.mark.parametrize(
    ("inputs", "group", "found"),
    [(576, 64, 64), (576, 128, 64), (96, 64, 32), (40, 32, None), (40, 8, 8), (48, 64, 16), (33, 16, None)],
)  # fmt: skip
def test_the_group_size_of_a_layer(inputs, group, found):
    assert group_size_of(inputs, Recipe(group_size=group)) == found


def test_a_layer_that_no_sample_reaches_is_rounded_to_nearest():
    model = tiny.llama(num_hidden_layers=1)
    block = model.model.layers[0]
    block.mlp.spare = nn.Linear(32, 32, bias=False)
    found = run(model, BITS_4, tiny.samples(model))
    spare = found["model.layers.0.mlp.spare"]
    weight = block.mlp.spare.weight.detach()
    assert spare.error == 0
    assert float((dequantized(spare.weight, torch.float32) - weight).abs().max()) < 0.1


def test_inputs_that_are_not_numbers_are_refused():
    model = tiny.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    given = [{"input_ids": torch.tensor([[5, 6]])}]
    with pytest.raises(ValueError, match=r"inputs of model\.layers\.0\.self_attn\.q_proj are NaN"):
        run(model, BITS_4, given)
