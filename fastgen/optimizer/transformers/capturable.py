"""Models that have captured steps although the library does not run them with a static cache."""

from __future__ import annotations

from typing import Any

from fastgen.decoding import library_code

# The library does not run these with a static cache, because they read its length on the host, or because nobody has
# checked them yet. In a captured step the host knows the length (`SymbolicLength`). Any other model that the library
# excludes may compute positions from the number of keys, which is the buffers' capacity:
# GPT-Neo would without its hook (captured/key_positions.py).
CAPTURABLE = frozenset(
    f"transformers.models.{name}"
    for name in (
        "aria.modeling_aria.AriaForConditionalGeneration",
        "aria.modeling_aria.AriaTextForCausalLM",
        "aria.modeling_aria.AriaTextModel",
        "audioflamingo3.modeling_audioflamingo3.AudioFlamingo3ForConditionalGeneration",
        "aya_vision.modeling_aya_vision.AyaVisionForConditionalGeneration",
        "bark.modeling_bark.BarkCoarseModel",
        "bark.modeling_bark.BarkSemanticModel",
        "bert.modeling_bert.BertLMHeadModel",
        "blip.modeling_blip_text.BlipTextLMHeadModel",
        "camembert.modeling_camembert.CamembertForCausalLM",
        "cohere2_vision.modeling_cohere2_vision.Cohere2VisionForConditionalGeneration",
        "ctrl.modeling_ctrl.CTRLLMHeadModel",
        "data2vec.modeling_data2vec_text.Data2VecTextForCausalLM",
        "electra.modeling_electra.ElectraForCausalLM",
        "encoder_decoder.modeling_encoder_decoder.EncoderDecoderModel",
        "ernie.modeling_ernie.ErnieForCausalLM",
        "ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeForConditionalGeneration",
        "ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel",
        "falcon_h1.modeling_falcon_h1.FalconH1ForCausalLM",
        "falcon_mamba.modeling_falcon_mamba.FalconMambaForCausalLM",
        "fsmt.modeling_fsmt.FSMTForConditionalGeneration",
        "fuyu.modeling_fuyu.FuyuForCausalLM",
        "git.modeling_git.GitForCausalLM",
        "glmasr.modeling_glmasr.GlmAsrForConditionalGeneration",
        "granite_speech.modeling_granite_speech.GraniteSpeechForConditionalGeneration",
        "idefics2.modeling_idefics2.Idefics2ForConditionalGeneration",
        "idefics3.modeling_idefics3.Idefics3ForConditionalGeneration",
        "kosmos2.modeling_kosmos2.Kosmos2TextForCausalLM",
        "led.modeling_led.LEDForConditionalGeneration",
        "lfm2_vl.modeling_lfm2_vl.Lfm2VlForConditionalGeneration",
        "longt5.modeling_longt5.LongT5ForConditionalGeneration",
        "m2m_100.modeling_m2m_100.M2M100ForConditionalGeneration",
        "mamba.modeling_mamba.MambaForCausalLM",
        "megatron_bert.modeling_megatron_bert.MegatronBertForCausalLM",
        "musicgen.modeling_musicgen.MusicgenForCausalLM",
        "musicgen.modeling_musicgen.MusicgenForConditionalGeneration",
        "musicgen_melody.modeling_musicgen_melody.MusicgenMelodyForCausalLM",
        "musicgen_melody.modeling_musicgen_melody.MusicgenMelodyForConditionalGeneration",
        "mvp.modeling_mvp.MvpForConditionalGeneration",
        "paligemma.modeling_paligemma.PaliGemmaForConditionalGeneration",
        "pix2struct.modeling_pix2struct.Pix2StructForConditionalGeneration",
        "pix2struct.modeling_pix2struct.Pix2StructTextModel",
        "plbart.modeling_plbart.PLBartForConditionalGeneration",
        "qwen2_audio.modeling_qwen2_audio.Qwen2AudioForConditionalGeneration",
        "roberta.modeling_roberta.RobertaForCausalLM",
        "roberta_prelayernorm.modeling_roberta_prelayernorm.RobertaPreLayerNormForCausalLM",
        "seamless_m4t.modeling_seamless_m4t.SeamlessM4TForSpeechToText",
        "seamless_m4t.modeling_seamless_m4t.SeamlessM4TForTextToText",
        "seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ForSpeechToText",
        "seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ForTextToText",
        "smolvlm.modeling_smolvlm.SmolVLMForConditionalGeneration",
        "speech_encoder_decoder.modeling_speech_encoder_decoder.SpeechEncoderDecoderModel",
        "speech_to_text.modeling_speech_to_text.Speech2TextForConditionalGeneration",
        "speecht5.modeling_speecht5.SpeechT5ForSpeechToText",
        "trocr.modeling_trocr.TrOCRForCausalLM",
        "udop.modeling_udop.UdopForConditionalGeneration",
        "vision_encoder_decoder.modeling_vision_encoder_decoder.VisionEncoderDecoderModel",
        "xglm.modeling_xglm.XGLMForCausalLM",
        "xlm_roberta.modeling_xlm_roberta.XLMRobertaForCausalLM",
        "xlm_roberta_xl.modeling_xlm_roberta_xl.XLMRobertaXLForCausalLM",
    )
)
# These count positions from the length of the cache, whatever positions they are given.
WITHOUT_POSITIONS = frozenset(
    f"transformers.models.{name}"
    for name in (
        "exaone4_5.modeling_exaone4_5.Exaone4_5_ForConditionalGeneration",
        "hyperclovax_vision_v2.modeling_hyperclovax_vision_v2.HyperCLOVAXVisionV2ForConditionalGeneration",
        "kosmos2.modeling_kosmos2.Kosmos2TextForCausalLM",
    )
)
KOSMOS2 = "transformers.models.kosmos2.modeling_kosmos2.Kosmos2TextForCausalLM"
GPT_NEO = "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM"
MPT = "transformers.models.mpt.modeling_mpt.MptForCausalLM"
# Those that need the hooks of captured/prophetnet.py, captured/key_positions.py and experts.py, and one of these.
WITH_HOOKS = {
    "transformers.models.prophetnet.modeling_prophetnet.ProphetNetForConditionalGeneration": (
        "ProphetNetNgramSelfAttention.forward"
    ),
    GPT_NEO: "GPTNeoSelfAttention._attn",
    MPT: "MptAttention.forward",
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashForCausalLM": "LongcatFlashExperts.forward",
}


def class_of(model: Any) -> str:
    """Returns the name of a model's class; for a subclass that runs a library class's code, the name of the latter."""
    own: type = type(model)
    kind = next(filter(library_code.is_own, own.__mro__), own)
    return f"{kind.__module__}.{kind.__qualname__}"
