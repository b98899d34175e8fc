"""Models that only encode: the padding of a batch is left out of what their layers compute."""

from __future__ import annotations

from fastgen.optimizer.transformers.encoders.stacks import EMBEDDINGS, STACKS
from fastgen.patching import Patch, has


def patches() -> list[Patch]:
    """The patches for encoders: the call of a model, its embeddings and layers, and the attention function of these."""
    package = __name__
    return [
        Patch("transformers.modeling_utils", "PreTrainedModel.__call__", f"{package}.call:call", is_inherited=True),
        Patch(
            "transformers.modeling_utils",
            "AttentionInterface.get_interface",
            f"{package}.unpadded_forward:get_interface",
            has("attn_implementation default"),
        ),
        Patch(
            "sentence_transformers.sentence_transformer.model",
            "SentenceTransformer.encode",
            f"{package}.sentences:encode",
            has("output_value"),
        ),
        Patch(
            "sentence_transformers.base.modules.transformer",
            "Transformer.forward",
            f"{package}.sentences:forward",
            has("features"),
        ),
        *(
            Patch(
                f"transformers.models.{module}",
                f"{name}.forward",
                f"{package}.unpadded_forward:stack",
                has(" ".join(given)),
            )
            for (module, name), (_, given) in STACKS.items()
        ),
        *(
            Patch(
                f"transformers.models.{module}",
                f"{name}.forward",
                f"{package}.unpadded_forward:embed",
                has("input_ids position_ids inputs_embeds"),
            )
            for module, name in sorted(EMBEDDINGS)
        ),
    ]
