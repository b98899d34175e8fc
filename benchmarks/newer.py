"""Models with states, with pictures and with sounds: calls as they come, in a fresh process of each side in turn.

    python -m benchmarks.newer              # all of them
    python -m benchmarks.newer lfm2 mamba2 --dtype bfloat16

Shapes are those of published models, with random weights, and every call has as many tokens as it may. The tokens of
both sides are compared where they are float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import processes

CALLS, NEW_TOKENS, LENGTH, MORE = 5, 60, 40, 9
# Inputs of each call, for models with beams.
ROWS = (4, 2, 3, 1, 4)
# For an image of 512 x 512 pixels.
PICTURE_TOKENS = 64
_ENDLESS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}


def _lfm2(library: Any) -> Any:
    """LFM2-350M."""
    config = library.Lfm2Config(
        **_ENDLESS, hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=4608, block_auto_adjust_ff_dim=False, vocab_size=65536,
        layer_types=(["conv", "conv", "full_attention"] * 6)[:16],
    )  # fmt: skip
    return library.Lfm2ForCausalLM(config)


def _qwen(library: Any) -> Any:
    """Qwen3.5-0.8B, with an eighth of its vocabulary."""
    config = library.Qwen3_5TextConfig(
        **_ENDLESS, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_value_heads=16, linear_num_key_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=32000, tie_word_embeddings=True,
    )  # fmt: skip
    return library.Qwen3_5ForCausalLM(config)


def _mamba2(library: Any) -> Any:
    """Mamba2-130M."""
    config = library.Mamba2Config(
        **_ENDLESS, hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        vocab_size=50288,
    )  # fmt: skip
    return library.Mamba2ForCausalLM(config)


def _youtu(library: Any) -> Any:
    """The widths of Youtu-LLM-2B, with a quarter of its layers and vocabulary: multi-head latent attention."""
    config = library.YoutuConfig(
        **_ENDLESS, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, vocab_size=32000, tie_word_embeddings=True,
    )  # fmt: skip
    return library.YoutuForCausalLM(config)


def _smolvlm(library: Any) -> Any:
    """SmolVLM-256M."""
    text = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49280}  # fmt: skip
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
              "image_size": 512, "patch_size": 16}  # fmt: skip
    config = library.SmolVLMConfig(
        text_config=text, vision_config=vision, image_token_id=49279, scale_factor=4, **_ENDLESS
    )
    return library.SmolVLMForConditionalGeneration(config)


def _trocr(library: Any) -> Any:
    """TrOCR-base."""
    encoder = library.ViTConfig(image_size=384)
    decoder = library.TrOCRConfig(cross_attention_hidden_size=768)
    return _of_two(library, encoder, decoder)


def _donut(library: Any) -> Any:
    """Donut-base, for images of 1280 x 960."""
    encoder = library.DonutSwinConfig(
        image_size=[1280, 960], depths=[2, 2, 14, 2], num_heads=[4, 8, 16, 32], window_size=10, embed_dim=128
    )
    decoder = library.MBartConfig(
        vocab_size=57580, decoder_layers=4, max_position_embeddings=768, scale_embedding=True, is_decoder=True,
        add_cross_attention=True,
    )  # fmt: skip
    return _of_two(library, encoder, decoder)


def _of_two(library: Any, encoder: Any, decoder: Any) -> Any:
    config = library.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = library.VisionEncoderDecoderModel(config)
    model.generation_config.update(decoder_start_token_id=2, pad_token_id=1)
    return model


def _blip(library: Any) -> Any:
    """BLIP-base for captions."""
    return library.BlipForConditionalGeneration(library.BlipConfig(vision_config={"image_size": 384}))


def _seamless(library: Any) -> Any:
    """The widths of SeamlessM4T-v2-large, with half of its decoder layers and 6 speech encoder layers."""
    config = library.SeamlessM4Tv2Config(
        encoder_layers=1, speech_encoder_layers=6, decoder_layers=12, vocab_size=64000, t2u_encoder_layers=1,
        t2u_decoder_layers=1,
    )  # fmt: skip
    model = library.SeamlessM4Tv2ForSpeechToText(config)
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 5}
    return model


# ---- inputs of a call, by its number


def _prompt(model: Any, call: int, draws: Any, length: int = LENGTH) -> dict[str, Any]:
    import torch

    ids = torch.randint(10, 30000, (1, length + MORE * call), generator=draws)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _prompt_with_picture(model: Any, call: int, draws: Any) -> dict[str, Any]:
    import torch

    ids = _prompt(model, call, draws)["input_ids"]
    ids = torch.cat([torch.full((1, PICTURE_TOKENS), model.config.image_token_id), ids], dim=1)
    pixels = torch.randn(1, 1, 3, 512, 512, generator=draws).to(model.dtype)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _pictures(size: tuple[int, int], rows: tuple[int, ...], model: Any, call: int, draws: Any) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(rows[call], 3, *size, generator=draws).to(model.dtype)}


def _speech(model: Any, call: int, draws: Any) -> dict[str, Any]:
    """Returns recordings of 8 seconds, the last of which is shorter."""
    import torch

    mask = torch.ones(ROWS[call], 400, dtype=torch.int64)
    mask[-1, 300:] = 0
    return {"input_features": torch.randn(*mask.shape, 160, generator=draws).to(model.dtype), "attention_mask": mask}


@dataclass(frozen=True)
class Shape:
    """A model, the inputs of its calls, and the number of new tokens.

    Attributes:
        make: called with Transformers.
        inputs: called with the model, the number of the call, and a random generator.
    """

    make: Callable[[Any], Any]
    inputs: Callable[[Any, int, Any], dict[str, Any]] = _prompt
    new_tokens: int = NEW_TOKENS
    options: dict[str, Any] = field(default_factory=dict)


_SMALL, _PAGE = (384, 384), (1280, 960)
MODELS = {
    "lfm2": Shape(_lfm2),
    "qwen3.5": Shape(_qwen),
    "mamba2": Shape(_mamba2),
    "youtu": Shape(_youtu, partial(_prompt, length=500)),
    "smolvlm": Shape(_smolvlm, _prompt_with_picture),
    "trocr": Shape(_trocr, partial(_pictures, _SMALL, ROWS), 20, {"num_beams": 4}),
    "donut": Shape(_donut, partial(_pictures, _PAGE, (1, 1, 1, 2, 1)), 100),
    "blip": Shape(_blip, partial(_pictures, _SMALL, ROWS), 20, {"num_beams": 4}),
    "seamless": Shape(_seamless, _speech, 30, {"num_beams": 4, "tgt_lang": "eng"}),
}


def side(name: str, dtype: str) -> dict[str, Any]:
    """Returns the seconds and tokens of this process's calls."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = MODELS[name]
    model = shape.make(transformers).to(getattr(torch, dtype)).eval()
    most = {"max_new_tokens": shape.new_tokens, "min_new_tokens": shape.new_tokens}
    draws, seconds, tokens = torch.Generator().manual_seed(1), [], []
    for call in range(CALLS):
        inputs = shape.inputs(model, call, draws)
        begin = time.perf_counter()
        made = model.generate(**inputs, **most, do_sample=False, **shape.options)
        seconds.append(time.perf_counter() - begin)
        tokens.append(made.tolist())
    return {"seconds": seconds, "tokens": tokens}


def _measured(name: str, dtype: str, is_fast: bool) -> dict[str, Any]:
    use = "import fastgen;" if is_fast else ""
    code = f"import json; {use} from benchmarks import newer; print(json.dumps(newer.side({name!r}, {dtype!r})))"
    found: dict[str, Any] = json.loads(processes.run([sys.executable, "-c", code]).stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="by default all of them")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=2, help="processes of each side")
    arguments = parser.parse_args()
    for name in arguments.models or MODELS:
        sides = [
            [_measured(name, arguments.dtype, is_fast) for is_fast in (False, True)]
            for _ in range(arguments.repetitions)
        ]
        if arguments.dtype == "float32" and any(original["tokens"] != fast["tokens"] for original, fast in sides):
            sys.exit(f"{name}: other tokens")
        ratios = [
            statistics.median(original["seconds"][call] for original, _ in sides)
            / statistics.median(fast["seconds"][call] for _, fast in sides)
            for call in range(CALLS)
        ]
        totals = [statistics.median(sum(each[number]["seconds"]) for each in sides) for number in (0, 1)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        times = f"{totals[0]:.1f} s -> {totals[1]:.1f} s, {totals[0] / totals[1]:.2f}; by call {shown}"
        print(f"{name}, {arguments.dtype}: {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
