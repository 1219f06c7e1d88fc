"""Small sizes for every configuration of transformers' causal-LM classes."""

from __future__ import annotations

from typing import Any

HEADS = 4
VOCABULARY = 128

_HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "n_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
)
_LOW_RANK = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)


def sizes(hidden: int, layers: int) -> dict[str, Any]:
    head = hidden // HEADS
    """Settings by the names that configurations have for them; each takes what it knows."""
    return {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "dim_model"), hidden),
        **dict.fromkeys(
            ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), layers
        ),
        **dict.fromkeys(
            _HEAD_COUNTS,
            HEADS,
        ),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff"), 2 * hidden),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), hidden),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "dim_head"), head),
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "num_encoder_layers": layers,
        "num_decoder_layers": layers,
    }


LEAVE = object()
"""In :data:`SPECIAL`: leave this setting as the class has it."""
_LEAVE_HEAD = {"head_dim": LEAVE}
_WHOLE = {"kv_heads": HEADS, "num_key_value_heads": HEADS}
_GEMMA_3N = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
_GEMMA_4 = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {},
}
_ASSISTANT = {
    **_GEMMA_4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}
_QWEN_4 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_TEXT = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "head_dim",
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "use_cache",
)


def _text(hidden: int, **more: Any) -> dict[str, Any]:
    """The language part of a model that has others."""
    every = sizes(hidden, 4)
    return {**{name: every[name] for name in _TEXT}, **more}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_AUDIO = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_MIXED = ["sliding_attention", "full_attention"] * 2
_TOKENS = {"image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2, "audio_token_id": VOCABULARY - 3}


def _bytes(hidden: int, blocks: int, **more: Any) -> dict[str, Any]:
    """One of the four stacks of a byte latent transformer."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": hidden // HEADS}
    return {
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "intermediate_size": 2 * hidden,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        **heads,
        **more,
    }


_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": lambda hidden: hidden // 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DOTS_3 = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "shared_experts_intermediate_size": 32,
    "per_layer_config": {
        block: {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
            **dict.fromkeys(("head_dim", "v_head_dim"), 16),
        }
        for block in (1, 3)
    },
}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        _LOW_RANK,
        _WHOLE,
    ),
    "bamba": _MAMBA,
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        "patcher_config": lambda hidden: _bytes(hidden, 2),
        "encoder_config": lambda hidden: _bytes(hidden, 1, hidden_size_global=2 * hidden),
        "decoder_config": lambda hidden: _bytes(hidden, 2, hidden_size_global=2 * hidden),
        "global_config": lambda hidden: _bytes(2 * hidden, 4),
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "codegen": {"rotary_dim": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": lambda hidden: {
            "hidden_size": hidden,
            "ffn_hidden_size": 2 * hidden,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": _DOTS_3,
    "dots3_note_text": _DOTS_3,
    "falcon": _LEAVE_HEAD,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": lambda hidden: 2 * hidden},
    "fuyu": {"text_config": lambda hidden: _text(hidden, model_type="persimmon")},
    "gemma3": {
        "text_config": lambda hidden: _text(hidden, layer_types=_MIXED),
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": VOCABULARY - 1,
    },
    "gemma3n_text": _GEMMA_3N,
    "gemma4": {"text_config": lambda hidden: _text(hidden, **_GEMMA_4), **_TOKENS},
    "gemma4_assistant": {"text_config": lambda hidden: _text(hidden, **_ASSISTANT), "backbone_hidden_size": 32},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": {
        "text_config": lambda hidden: _text(hidden, layer_types=_MIXED, per_layer_config={}),
        **_TOKENS,
    },
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_unified_assistant": {
        "text_config": lambda hidden: _text(hidden, layer_types=_MIXED, per_layer_config={}, num_kv_shared_layers=4),
        "backbone_hidden_size": 32,
    },
    "git": {"vision_config": _VISION},
    "got_ocr2": {
        "text_config": lambda hidden: _text(hidden, model_type="qwen2"),
        "vision_config": {
            **_VISION,
            "output_channels": 16,
            "mlp_dim": 64,
            "global_attn_indexes": [1],
            "window_size": 2,
        },
        "image_token_index": VOCABULARY - 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA,
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": HEADS},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": lambda hidden: hidden // 4, "n_groups": 2, "state_size": 8},
    "moss_transcribe_diarize": {
        "text_config": lambda hidden: _text(hidden, model_type="qwen3"),
        "audio_config": {**_AUDIO, "num_hidden_layers": 2, "num_mel_bins": 8},
        "audio_token_id": VOCABULARY - 1,
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": lambda hidden: hidden // 2, "n_groups": 2, "chunk_size": 8},
    "phi4_multimodal": {
        "vision_config": {**_VISION, "crop_size": 16, "image_token_id": VOCABULARY - 1},
        "audio_config": {
            **_AUDIO,
            "num_blocks": 1,
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32),
            "input_size": 16,
            "audio_token_id": VOCABULARY - 2,
        },
    },
    "prophetnet": {"num_hidden_layers": LEAVE, "num_layers": LEAVE},
    "qwen4_exp": _QWEN_4,
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": lambda hidden: [8, hidden - 8],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 3,
    },
    "xlnet": {"max_position_embeddings": LEAVE},
    "xlstm": {"v_head_dim": LEAVE, "head_dim": LEAVE},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single architectures that the common sizes do not fit; functions of the hidden size where it matters."""
