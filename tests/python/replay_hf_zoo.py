"""Hugging Face's architectures from tiny configurations, dropout on everywhere.

As in replay_torch_zoo: a module's forward takes a batch and returns its loss.
"""

from __future__ import annotations

import torch
from torch import nn

from memscale.benchmarks.models import BENCHMARK_MODELS
from replay_torch_zoo import Architecture, Batch

VOCABULARY = 48
LENGTH = 8
# Wide enough that "cheap" keeps the products over it, and only those.
INNER = 160


class Keywords(nn.Module):
    """Gives a batch to a model under the names that it wants; returns its loss."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(
            **dict(zip(self.names, batch, strict=True))
        ).loss
        return loss


def tokens() -> Batch:
    ids = torch.randint(5, VOCABULARY, (2, LENGTH))
    return ids, ids.clone()


def masked_tokens() -> Batch:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return (*tokens(), mask)


def pixels() -> Batch:
    return torch.randn(2, 3, 16, 16), torch.randint(2, (2,))


def speech() -> Batch:
    return torch.randn(1, 80, 24), torch.randint(5, VOCABULARY, (1, 4))


def sound() -> Batch:
    return torch.randn(2, 400), torch.randint(5, VOCABULARY, (2, 4))


def _text(name: str, **fields: object) -> nn.Module:
    model = BENCHMARK_MODELS[name].build(vocab_size=VOCABULARY, **fields)
    return Keywords(model, "input_ids", "labels")


def _from_config(model: str, config: str, **fields: object) -> nn.Module:
    """A class that the benchmarks do not have; imported late, as they do."""
    import transformers

    built: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**fields)
    )
    return built


def _sizes(hidden: str, inner: str, layers: str, heads: str) -> dict[str, object]:
    """Width, inner width, layers and heads under a model's own names."""
    return {hidden: 16, inner: INNER, layers: 2, heads: 2}


_BERT = _sizes(
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
)
_ENDS: dict[str, object] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def gpt2(**fields: object) -> nn.Module:
    return _text(
        "gpt2", n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **_ENDS, **fields
    )


def gpt2_lora() -> nn.Module:
    """Adapters on a frozen model: no layer's input requires a gradient at first."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = get_peft_model(gpt2().get_submodule("model"), adapters)
    return Keywords(model, "input_ids", "labels")


def bert() -> nn.Module:
    model = _text("bert-base", max_position_embeddings=LENGTH, **_BERT)
    inner = model.get_submodule("model")
    return Keywords(inner, "input_ids", "labels", "attention_mask")


def bert_open_attention() -> nn.Module:
    """Scores, softmax and dropout as ops of their own."""
    return _text(
        "bert-base",
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
        **_BERT,
    )


def distilbert() -> nn.Module:
    sizes = _sizes("dim", "hidden_dim", "n_layers", "n_heads")
    return _text("distilbert", max_position_embeddings=LENGTH, **sizes)


def llama() -> nn.Module:
    return _text("llama-1b", num_key_value_heads=1, attention_dropout=0.1, **_BERT)


def qwen2() -> nn.Module:
    return _text(
        "qwen2-0.5b", num_key_value_heads=1, attention_dropout=0.1, **_ENDS, **_BERT
    )


def mixtral() -> nn.Module:
    return _text(
        "mixtral-small",
        num_key_value_heads=1,
        num_local_experts=3,
        attention_dropout=0.1,
        output_router_logits=True,
        **_BERT,
    )


def t5() -> nn.Module:
    sizes = _sizes("d_model", "d_ff", "num_layers", "num_heads")
    return _text("t5-small", d_kv=8, **sizes)


def bart() -> nn.Module:
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": INNER}.items()
    }
    return _text(
        "bart-base",
        d_model=16,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        activation_dropout=0.1,
        **halves,
    )


def vit() -> nn.Module:
    model = BENCHMARK_MODELS["vit-base"].build(
        image_size=16,
        patch_size=8,
        num_labels=2,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **_BERT,
    )
    return Keywords(model, "pixel_values", "labels")


def whisper() -> nn.Module:
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": INNER}.items()
    }
    model = BENCHMARK_MODELS["whisper-tiny"].build(
        vocab_size=VOCABULARY,
        d_model=16,
        max_source_positions=12,
        max_target_positions=8,
        decoder_start_token_id=2,
        dropout=0.1,
        apply_spec_augment=False,
        **_ENDS,
        **halves,
    )
    return Keywords(model, "input_features", "labels")


def opt() -> nn.Module:
    model = _from_config(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        word_embed_proj_dim=16,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        **_sizes("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"),
    )
    return Keywords(model, "input_ids", "labels")


def albert() -> nn.Module:
    """All its layers are one layer, called again and again."""
    model = _from_config(
        "AlbertForMaskedLM",
        "AlbertConfig",
        vocab_size=VOCABULARY,
        embedding_size=8,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **_BERT,
    )
    return Keywords(model, "input_ids", "labels")


def deberta() -> nn.Module:
    model = _from_config(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **_BERT,
    )
    return Keywords(model, "input_ids", "labels")


def mamba() -> nn.Module:
    model = _from_config(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        use_cache=False,
    )
    # Mamba itself has no dropout.
    model.get_submodule("backbone.norm_f").register_forward_hook(
        lambda _, __, out: nn.functional.dropout(out, 0.1)
    )
    return Keywords(model, "input_ids", "labels")


def convnext() -> nn.Module:
    model = _from_config(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        patch_size=2,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
        drop_path_rate=0.3,
        num_labels=2,
    )
    return Keywords(model, "pixel_values", "labels")


def swin() -> nn.Module:
    """Shifted windows: rolls, permutations and masks."""
    model = _from_config(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        hidden_dropout_prob=0.1,
        num_labels=2,
    )
    return Keywords(model, "pixel_values", "labels")


def wav2vec2() -> nn.Module:
    """Weight norm on a grouped convolution, masked time steps, CTC."""
    model = _from_config(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        vocab_size=VOCABULARY,
        conv_dim=[8, 8],
        conv_stride=[5, 4],
        conv_kernel=[10, 8],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        **_BERT,
    )
    return Keywords(model, "input_values", "labels")


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(gpt2, tokens),
    "gpt2_lora": Architecture(gpt2_lora, tokens),
    "bert": Architecture(bert, masked_tokens),
    "bert_open_attention": Architecture(bert_open_attention, tokens),
    "distilbert": Architecture(distilbert, tokens),
    "llama": Architecture(llama, tokens),
    "qwen2": Architecture(qwen2, tokens),
    "mixtral": Architecture(mixtral, tokens),
    "t5": Architecture(t5, tokens),
    "bart": Architecture(bart, tokens),
    "opt": Architecture(opt, tokens),
    "albert": Architecture(albert, tokens),
    "deberta": Architecture(deberta, tokens),
    "mamba": Architecture(mamba, tokens),
    "vit": Architecture(vit, pixels),
    "convnext": Architecture(convnext, pixels),
    "swin": Architecture(swin, pixels),
    "whisper": Architecture(whisper, speech),
    "wav2vec2": Architecture(wav2vec2, sound),
}
