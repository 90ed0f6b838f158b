"""Any configuration of transformers, made tiny.

Integers are known by their names: what is a width becomes WIDTH, what counts layers
becomes LAYERS, and so on; sub-configs are shrunk alike, so that what has to fit still
does. Fields whose default is None are left out: the config works them out itself.
The table of exceptions is for models whose fields mean something else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

WIDTH = 64
LAYERS = 3
# Heads of eight: there, torch's kernels add in another order for other strides.
HEADS = 8
HEAD = 8
VOCABULARY = 128
IMAGE = 64
PATCH = 8
# Ids below are tokens that mean something; text is drawn from the ones above.
FIRST_WORD = 48

# The first pattern that fits a field's whole name counts. None: leave it.
_SIZES: list[tuple[str, int | None]] = [
    (r"type_vocab_size|vocab_offset|additional_vocab_size", None),
    (r".*vocab_size.*|vocab_size|num_embeddings|n_token|codebook_size", VOCABULARY),
    (r".*(max_position_embeddings|n_positions|max_seq_len|context_length)", 256),
    (r"max_(source|target|speech|text)_positions|max_pos_emb|n_ctx", 256),
    (r"max_2d_position_embeddings", 256),
    (r".*(key_value|kv)_heads|n_head_kv|num_kv_heads", 2),
    (r"num_attention_groups|n_groups|num_groups|mamba_n_groups", 2),
    (r".*(rope_head_dim)|rotary_dim", 8),
    (r".*head_dim|d_kv|.*head_size|attention_head_dim|.*dim_head|.*dim_per_head", HEAD),
    (r"(.*_)?(num_|n_)?(.*_)?heads?|n_head|.*num_heads|attention_heads", HEADS),
    (r".*(num_|n_)(.*_)?(layers?|blocks)|.*_layers|layers|n_layer", LAYERS),
    (r"(.*_)?depths?", LAYERS),
    (r".*(n|num)_(.*_)?experts_per_tok|moe_topk|moe_k|top_k|.*_top_?k|topk", 2),
    (r"topk_group|n_group", 1),
    (r"full_attention_interval|attn_layer_period|layer_group_size", 2),
    (r"attn_layer_offset", 1),
    (r".*shared_experts?", 1),
    (r".*(num|n)_(.*_)?experts", 4),
    (r"expert_capacity", 64),
    (r".*lora_rank", 16),
    (r".*(intermediate|ffn|mlp|feedforward|feed_forward).*(size|dim)", 2 * WIDTH),
    (r"d_ff|d_inner|dim_ff|dim_feedforward|ffn_hidden_size|n_inner", 2 * WIDTH),
    (r"hidden_size_per_layer_input|.*embedding_dim_per_layer", 16),
    (r"(.*_)?(hidden_size|hidden_dim|hidden_channels|embedding_size|width)", WIDTH),
    (r"(.*_)?(embed_dim|emb_dim|d_model|n_embd|dim|embedding_dim|d_embed)", WIDTH),
    (r".*(codevector_dim|codebook_dim|projection_dim|latent_dim|output_dim)", WIDTH),
    (r".*_dims?|.*proj_size|.*proj_dims", WIDTH),
    (r"(.*_)?(image_size|img_size|crop_size)", IMAGE),
    (r"(.*_)?patch_size|conv_stride", PATCH),
    (r".*num_queries|num_query_tokens|num_detection_tokens|.*num_latents", 16),
    (r"num_denoising", 8),
    (r".*mel_bins|mel_dim|n_mels", 16),
    (r"sliding_window|local_attention|attention_chunk_size|attention_window", 32),
    (r"(mamba_)?chunk_size|block_size|mamba_chunk_size", 16),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size", 8),
    (r".*num_conv_pos_embeddings", 16),
    (r".*num_conv_pos_embedding_groups", 4),
    (r"num_negatives|num_parallel_samples", 4),
    (r"num_codevectors_per_group", 16),
    (r"(.*_)?(num_frames)", 4),
    (r".*(_channels|_units)|num_filters", 32),
    (r"num_channels|in_channels|in_chans|audio_channels|stem_channels", None),
]
_PATTERNS = [(re.compile(pattern), size) for pattern, size in _SIZES]

_IS_TOKEN = re.compile(r".*token_(id|index|idx)s?|.*_tokens?_id|boi|eoi|.*_token")
_IS_DROPOUT = re.compile(r".*(dropout|pdrop|drop_rate|drop_path|drop_path_rate).*")
_LIST_SIZES = {
    "depths": 1,
    "depth": 1,
    "block_sizes": 1,
    "num_block_repeats": 1,
    "stage_num_blocks": 1,
}
_IS_LIST_OF_WIDTHS = re.compile(
    r".*(hidden_sizes|conv_dim|embed_dims?|tdnn_dim|out_channels|in_channels"
    r"|mid_channels|feature_dims)"
)
_IS_LIST_OF_HEADS = re.compile(r"num_(attention_)?heads")
_IS_LIST_OF_LAYERS = re.compile(
    r".*(indexes|indices|feature_layers?|extract_layers|proj_layers)"
)


def shrunk(kind: str, exceptions: dict[str, dict[str, Any]]) -> Any:
    """The config of a model type, tiny."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    config = config_class(**_Shrinker(exceptions).fields_of(config_class))
    for each in configs_in(config):
        _complete(each)
    return config


def configs_in(config: Any) -> Iterator[Any]:
    """The config itself, then its sub-configs, text before others."""
    yield config
    names = sorted(config.sub_configs, key=lambda name: "text" not in name)
    for name in names:
        if getattr(config, name, None) is not None:
            yield from configs_in(getattr(config, name))


def _complete(config: Any) -> None:
    """What checkpoints bring along, and what depends on the size of a head."""
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    if getattr(config, "vocab_size", 0) is None:
        config.vocab_size = VOCABULARY
    try:
        head_dim = getattr(config, "head_dim", 0)
    except Exception:
        return  # whose heads differ from layer to layer
    if head_dim is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    _share_positions(config)


def _share_positions(config: Any) -> None:
    """Rotary positions in time, height and width: half a head, in three shares."""
    rope = getattr(config, "rope_parameters", None) or {}
    width = getattr(config, "hidden_size", WIDTH)
    heads = getattr(config, "num_attention_heads", HEADS)
    if not isinstance(width, int) or not isinstance(heads, int):
        return
    head = getattr(config, "head_dim", None) or width // heads
    for each in [rope, *rope.values()]:
        if isinstance(each, dict) and ("rope_theta" in each or "rope_type" in each):
            half = int(head * each.get("partial_rotary_factor", 1.0)) // 2
            third = half * 3 // 8
            each["mrope_section"] = [half - 2 * third, third, third]


class _Shrinker:
    def __init__(self, exceptions: dict[str, dict[str, Any]]) -> None:
        self._exceptions = exceptions
        self._num_tokens = 3  # padding, begin and end come first

    def fields_of(self, config_class: type[Any]) -> dict[str, Any]:
        """What to make a config of this class with."""
        own = dict(self._exceptions.get(config_class.model_type, {}))
        fields = {
            **self._plain_fields(config_class),
            **self._sub_configs(config_class, own),
        }
        fields |= own
        return {name: value for name, value in fields.items() if value is not ...}

    def _plain_fields(self, config_class: type[Any]) -> dict[str, Any]:
        shrunk = {}
        for field in dataclasses.fields(config_class):
            default = _default(field)
            if default is None or isinstance(default, (bool, str)):
                continue
            value = self._shrunk(field.name, default)
            if value is not default:
                shrunk[field.name] = value
        if "num_key_value_heads" in shrunk and (
            "kv_lora_rank" in shrunk or _as_many_heads(config_class)
        ):
            shrunk["num_key_value_heads"] = HEADS
        return shrunk

    def _shrunk(self, name: str, default: Any) -> Any:
        if _IS_DROPOUT.fullmatch(name) and "layer" not in name:
            if isinstance(default, (int, float)):
                return 0.1
            if isinstance(default, (list, tuple)):
                return [0.1 for _ in default]
        if _IS_TOKEN.fullmatch(name):
            return self._token(name, default)
        if isinstance(default, int):
            return _size(name, default)
        if isinstance(default, (list, tuple)) and default:
            return _list(name, default)
        return default

    def _token(self, name: str, default: Any) -> Any:
        if isinstance(default, (list, tuple)):
            return [self._token(name, each) for each in default]
        if not isinstance(default, int) or default < 3:
            return default
        self._num_tokens += 1
        assert self._num_tokens <= FIRST_WORD
        return self._num_tokens - 1

    def _sub_configs(
        self, config_class: type[Any], own: dict[str, Any]
    ) -> dict[str, Any]:
        from transformers import PreTrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        made = {}
        for name, spec in (config_class.sub_configs_defaults or {}).items():
            if name in own or spec.optional:
                continue
            sub_class = spec.config_class
            if not issubclass(sub_class, PreTrainedConfig):
                sub_class = CONFIG_MAPPING[spec.model_type]
            told = spec.init_kwargs.items()
            made[name] = {
                **self.fields_of(sub_class),
                **{key: self._shrunk(key, value) for key, value in told},
                **self._exceptions.get(sub_class.model_type, {}),
                "model_type": sub_class.model_type,
            }
        return made


def _as_many_heads(config_class: type[Any]) -> bool:
    """Whether keys and values have as many as queries, by default."""
    told = {f.name: _default(f) for f in dataclasses.fields(config_class)}
    return bool(told["num_key_value_heads"] == told.get("num_attention_heads"))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _size(name: str, default: int) -> int:
    for pattern, size in _PATTERNS:
        if pattern.fullmatch(name):
            if size == HEADS and default in (3, 5, 6, 7):
                return 4  # which divides WIDTH
            return default if size is None or default <= size else size
    return default


def _list(name: str, default: list[Any] | tuple[Any, ...]) -> Any:
    if not all(isinstance(each, int) for each in default):
        return default
    if name in _LIST_SIZES:
        return [_LIST_SIZES[name] for _ in default]
    if _IS_LIST_OF_WIDTHS.fullmatch(name):
        return _scaled(list(default))
    if _IS_LIST_OF_HEADS.fullmatch(name):
        return [min(each, 2) for each in default]
    if name in ("image_size", "patch_size"):
        size = IMAGE if name == "image_size" else PATCH
        return [min(size, each) for each in default]
    return default


def _scaled(widths: list[int]) -> list[int]:
    """Widths in the same order, the largest WIDTH, each a multiple of 8."""
    distinct = sorted(set(widths))
    step = {
        w: max(16, WIDTH - 16 * (len(distinct) - 1 - i)) for i, w in enumerate(distinct)
    }
    return [step[w] for w in widths]
