"""Fields of model types that mean something else than their names say.

An ellipsis leaves the config's own default.
"""

from __future__ import annotations

from typing import Any

_SWIN: dict[str, Any] = {"embed_dim": 16, "window_size": 4, "image_size": 128}
# Attention in one of three layers, where the config's own pattern is longer.
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"]
}
_EFFICIENT: dict[str, Any] = {
    "in_channels": [32, 16, 24, 24, 32, 32, 40],
    "out_channels": [16, 24, 24, 32, 32, 40, 48],
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "hidden_dim": 64,
    "hidden_size": ...,
}
_SERIES: dict[str, Any] = {"prediction_length": 16, "context_length": 48}
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "focalnet": {"embed_dim": 16},
    "hiera": {"embed_dim": 16},
    "beit": _FOUR_LAYERS | {"pool_scales": [1, 2]},
    "data2vec-vision": _FOUR_LAYERS | {"pool_scales": [1, 2]},
    "diffllama": {"attention_dropout": 0.0},
    "levit": {"drop_path_rate": 0},
    "timesformer": {"drop_path_rate": 0},
    "ctrl": {"dff": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "xmod": {"default_language": "en_XX"},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh", "local"],
        "hidden_size": 64,
        "lsh_attn_chunk_length": 16,
        "local_attn_chunk_length": 16,
    },
    "cvt": {"depth": ..., "embed_dim": [16, 32, 64], "num_heads": [1, 2, 2]},
    "efficientnet": _EFFICIENT,
    "align_vision_model": _EFFICIENT,
    "mgp-str": {"num_bpe_labels": 100, "num_wordpiece_labels": 100},
    "xlstm": {"head_dim": ..., "num_heads": 4, "qk_dim_factor": 0.5},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 32, 48, 64],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [32, 48, 64, 64],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen4_exp_text": _LINEAR,
    "swin2sr": {"image_size": 32, "embed_dim": 16, "window_size": 4},
    "poolformer": {"hidden_sizes": [16, 32, 48, 64]},
    "glpn": {"hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 64},
    "mimi": {"upsample_groups": 64},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "nemotron": {"num_key_value_heads": 2},
    "tvp": {"max_img_size": 448, "image_size": ...},
    "dpt": {
        "neck_hidden_sizes": [16, 32, 48, 64],
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
    },
}
