"""Models that have captured steps although the library does not run them with a static cache, by names of classes."""

from __future__ import annotations

from typing import Any

from fastgen.decoding import library_code

# The library does not run these with a static cache, because they read its length on the host, or because nobody has
# checked them yet. In a captured step the host knows the length (`SymbolicLength`). Any other model that the library
# excludes may compute positions from the number of keys, which is the buffers' capacity:
# GPT-Neo would without its hook (captured/key_positions.py).
CAPTURABLE = frozenset(
    """
    AriaForConditionalGeneration AriaTextForCausalLM AriaTextModel AudioFlamingo3ForConditionalGeneration
    AyaVisionForConditionalGeneration BarkCoarseModel BarkSemanticModel BertLMHeadModel BlipTextLMHeadModel
    CTRLLMHeadModel CamembertForCausalLM Cohere2VisionForConditionalGeneration Data2VecTextForCausalLM
    ElectraForCausalLM EncoderDecoderModel Ernie4_5_VLMoeForConditionalGeneration Ernie4_5_VLMoeTextModel
    ErnieForCausalLM FSMTForConditionalGeneration FalconH1ForCausalLM FalconMambaForCausalLM FuyuForCausalLM
    GitForCausalLM GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration
    Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration Kosmos2TextForCausalLM
    LEDForConditionalGeneration Lfm2VlForConditionalGeneration LongT5ForConditionalGeneration
    M2M100ForConditionalGeneration MambaForCausalLM MegatronBertForCausalLM MusicgenForCausalLM
    MusicgenForConditionalGeneration MusicgenMelodyForCausalLM MusicgenMelodyForConditionalGeneration
    MvpForConditionalGeneration PLBartForConditionalGeneration PaliGemmaForConditionalGeneration
    Pix2StructForConditionalGeneration Pix2StructTextModel Qwen2AudioForConditionalGeneration RobertaForCausalLM
    RobertaPreLayerNormForCausalLM SeamlessM4TForSpeechToText SeamlessM4TForTextToText SeamlessM4Tv2ForSpeechToText
    SeamlessM4Tv2ForTextToText SmolVLMForConditionalGeneration Speech2TextForConditionalGeneration
    SpeechEncoderDecoderModel SpeechT5ForSpeechToText TrOCRForCausalLM UdopForConditionalGeneration
    VideoLlama3ForConditionalGeneration VisionEncoderDecoderModel XGLMForCausalLM XLMRobertaForCausalLM
    XLMRobertaXLForCausalLM
    """.split()
)
# These count positions from the length of the cache, whatever positions they are given.
WITHOUT_POSITIONS = frozenset(
    (
        "Exaone4_5_ForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Kosmos2TextForCausalLM",
        "Kosmos2_5ForConditionalGeneration",
    )
)
KOSMOS2, GPT_NEO, MPT = "Kosmos2TextForCausalLM", "GPTNeoForCausalLM", "MptForCausalLM"
# Those that need the hooks of captured/key_positions.py and experts.py, and one of these.
WITH_HOOKS = {
    "ProphetNetForConditionalGeneration": "ProphetNetNgramSelfAttention.forward",
    GPT_NEO: "GPTNeoSelfAttention._attn",
    MPT: "MptAttention.forward",
    "JetMoeForCausalLM": "JetMoeParallelExperts.forward",
    "LongcatFlashForCausalLM": "LongcatFlashExperts.forward",
    "SwitchTransformersForConditionalGeneration": "SwitchTransformersExperts.forward",
}


def class_of(model: Any) -> str:
    """Returns the name of a model's class; for a subclass that runs a library class's code, the name of the latter.

    Returns "" if that is none of Transformers' models.
    """
    own: type = type(model)
    kind = next(filter(library_code.is_own, own.__mro__), own)
    return kind.__qualname__ if kind.__module__.startswith("transformers.models.") else ""
