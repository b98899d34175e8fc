"""UniLM: one stack of transformer layers that reads the source bidirectionally and writes the target after it.

    import fastgen
    from fastgen.models.unilm import UniLMForSeq2SeqLM

    model = UniLMForSeq2SeqLM.from_published("unilm1-base-cased.bin")     # or from_pretrained(...)
    model.generate(**tokenizer(texts, padding=True, return_tensors="pt"), num_beams=4, max_new_tokens=48)

Importing this package registers the model with Transformers: `AutoConfig` and `AutoModelForSeq2SeqLM` know the type
"unilm".

Source: Dong et al., "Unified Language Model Pre-training for Natural Language Understanding and Generation", NeurIPS
2019.
"""

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from fastgen.models.unilm.modeling import UniLMConfig, UniLMForSeq2SeqLM

__all__ = ["UniLMConfig", "UniLMForSeq2SeqLM"]

AutoConfig.register(UniLMConfig.model_type, UniLMConfig)
AutoModelForSeq2SeqLM.register(UniLMConfig, UniLMForSeq2SeqLM)
