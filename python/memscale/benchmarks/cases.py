"""What the prediction benchmark trains: models, shapes, optimizers, ways to train."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from memscale.benchmarks.measure import OptimizerFactory
from memscale.benchmarks.models import BENCHMARK_MODELS, LossFn, Sample

__all__ = ["CASES", "OPTIMIZERS", "Case"]

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False),
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    batch: int
    seq: int
    optimizer: str = "adamw"
    overrides: Mapping[str, object] = field(default_factory=dict)
    # Applied to the built model: freezing, adapters, autocast.
    prepare: Callable[[nn.Module], nn.Module] | None = None
    padded: bool = False
    quick: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = BENCHMARK_MODELS[self.model].build(**self.overrides)
        return model if self.prepare is None else self.prepare(model)

    def sample(self, device: torch.device | str) -> Sample:
        batch = BENCHMARK_MODELS[self.model].sample(self.batch, self.seq, device)
        if not self.padded:
            return batch
        assert isinstance(batch, dict)
        mask = torch.ones(self.batch, self.seq, dtype=torch.long, device="cpu")
        mask[-1, -self.seq // 4 :] = 0
        return {**batch, "attention_mask": mask.to(device)}

    @property
    def loss_fn(self) -> LossFn | None:
        return BENCHMARK_MODELS[self.model].loss_fn

    @property
    def optimizer_argument(self) -> str | OptimizerFactory:
        """For ``memscale.estimate``: the plain name, or a factory with settings."""
        factory = self.optimizer_factory
        return self.optimizer if isinstance(factory, type) else factory

    @property
    def optimizer_factory(self) -> OptimizerFactory:
        return OPTIMIZERS[self.optimizer]


def _only(*kept: str) -> Callable[[nn.Module], nn.Module]:
    """Freeze all parameters but those whose name has one of ``kept`` in it."""

    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in kept))
        return model

    return freeze


def _lora(model: nn.Module) -> nn.Module:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ImportError("the LoRA cases need peft: pip install peft") from error
    config = peft.LoraConfig(
        r=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()


def _checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def _bfloat16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        kind = next(iter(batch.values())).device.type
        with torch.autocast(kind, torch.bfloat16):
            loss: torch.Tensor = self.model(**batch).loss
        return loss


# Special tokens must lie within the smaller vocabulary.
_GPT2 = {
    "vocab_size": 8192,
    "n_embd": 384,
    "n_layer": 4,
    "n_head": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2_DRY = {**_GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_BERT = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}
_BERT_DRY = {**_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTIL = {
    "vocab_size": 8192,
    "dim": 384,
    "n_layers": 3,
    "n_heads": 6,
    "hidden_dim": 1536,
}
_LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_MOE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_T5 = {
    "vocab_size": 8192,
    "d_model": 384,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 3,
    "num_heads": 6,
}
_BART = {
    "vocab_size": 8192,
    "d_model": 384,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
}
_VIT = {
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "image_size": 160,
}
_WHISPER = {
    "vocab_size": 8192,
    "max_source_positions": 400,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
}
_UNET = {"width": 32, "depth": 3}
_LSTM = {"vocabulary": 8192, "width": 512}


def _with(fields: Mapping[str, object], **more: object) -> Mapping[str, object]:
    return {**fields, **more}


CASES: list[Case] = [
    # Decoders.
    Case("gpt2 4x128", "gpt2", 4, 128, "adamw", _GPT2, quick=True),
    Case("gpt2 1x512", "gpt2", 1, 512, "adamw", _GPT2),
    Case("gpt2 8x128 no dropout", "gpt2", 8, 128, "adam", _GPT2_DRY),
    Case("gpt2 4x256 sgd", "gpt2", 4, 256, "sgd", _GPT2, quick=True),
    Case("gpt2 2x128 momentum", "gpt2", 2, 128, "sgd-momentum", _GPT2),
    Case("gpt2 2x128 adafactor", "gpt2", 2, 128, "adafactor", _GPT2),
    Case("gpt2 2x128 loop", "gpt2", 2, 128, "adamw-loop", _GPT2),
    Case("gpt2 2x128 fused", "gpt2", 2, 128, "adamw-fused", _GPT2),
    Case("gpt2 4x128 no cache", "gpt2", 4, 128, "adamw", _with(_GPT2, use_cache=False)),
    Case(
        "gpt2 2x256 eager attention",
        "gpt2",
        2,
        256,
        "adamw",
        _with(_GPT2, attn_implementation="eager"),
    ),
    Case("gpt2 full vocabulary", "gpt2", 2, 64, "sgd", _with(_GPT2, vocab_size=50257)),
    Case(
        "gpt2 untied",
        "gpt2",
        4,
        128,
        "adamw",
        _with(_GPT2, tie_word_embeddings=False),
    ),
    Case("gpt2 padded", "gpt2", 4, 128, "adamw", _GPT2, padded=True),
    Case(
        "gpt2 checkpointed",
        "gpt2",
        2,
        256,
        "adamw",
        _with(_GPT2, use_cache=False),
        _checkpointed,
    ),
    Case("gpt2 LoRA", "gpt2", 4, 256, "adamw", _GPT2, _lora, quick=True),
    Case("gpt2 last layer only", "gpt2", 8, 128, "adam", _GPT2, _only("h.3.", "ln_f")),
    Case("gpt2 autocast", "gpt2", 2, 128, "adamw", _GPT2, _Autocast),
    Case("gpt2 bfloat16", "gpt2", 2, 128, "adamw", _GPT2, _bfloat16),
    Case("llama 2x256", "llama-1b", 2, 256, "adamw", _LLAMA, quick=True),
    Case(
        "llama 4x128 no cache",
        "llama-1b",
        4,
        128,
        "sgd-momentum",
        _with(_LLAMA, use_cache=False),
    ),
    Case("llama untied 1x256", "llama-7b", 1, 256, "rmsprop", _LLAMA),
    Case("qwen2 2x256", "qwen2-0.5b", 2, 256, "adamw", _LLAMA),
    Case("mistral 2x256", "mistral-7b", 2, 256, "sgd", _LLAMA),
    # A mixture of experts.
    Case("mixtral 2x128", "mixtral-small", 2, 128, "adamw", _MOE, quick=True),
    Case("mixtral 4x128 sgd", "mixtral-small", 4, 128, "sgd", _MOE),
    # Encoders.
    Case("bert 8x64", "bert-base", 8, 64, "adamw", _BERT, quick=True),
    Case("bert 4x128 no dropout", "bert-base", 4, 128, "sgd", _BERT_DRY),
    Case("bert 8x128 padded", "bert-base", 8, 128, "adam", _BERT, padded=True),
    Case("bert head only", "bert-base", 8, 128, "adamw", _BERT, _only("cls.")),
    Case("distilbert 8x128", "distilbert", 8, 128, "adagrad", _DISTIL),
    Case("roberta 8x64", "roberta-base", 8, 64, "adamw", _BERT),
    Case("vit 8x160", "vit-base", 8, 160, "adamw", _VIT, quick=True),
    Case("vit head only", "vit-base", 16, 160, "sgd", _VIT, _only("classifier")),
    # Encoder and decoder.
    Case("t5 4x128", "t5-small", 4, 128, "adamw", _T5, quick=True),
    Case("t5 4x64 adafactor", "t5-small", 4, 64, "adafactor", _T5),
    Case("bart 4x128", "bart-base", 4, 128, "adamw", _BART),
    Case(
        "bart 2x128 no cache", "bart-base", 2, 128, "sgd", _with(_BART, use_cache=False)
    ),
    Case("whisper 2x400", "whisper-tiny", 2, 400, "adamw", _WHISPER),
    # Convolutions.
    Case("resnet18 8x96", "resnet18", 8, 96, "sgd-momentum", {}, quick=True),
    Case("resnet18 4x128 adamw", "resnet18", 4, 128, "adamw", {}),
    Case("resnet50 4x96", "resnet50", 4, 96, "sgd", {}),
    Case("resnet50 head only", "resnet50", 4, 128, "adam", {}, _only("head")),
    Case("unet 2x96", "unet", 2, 96, "adamw", _UNET, quick=True),
    Case("unet 1x128 dropout", "unet", 1, 128, "sgd", _with(_UNET, dropout=0.1)),
    # Recurrent.
    Case("lstm 8x64", "lstm", 8, 64, "adamw", _LSTM, quick=True),
    Case("lstm 16x32 tied", "lstm", 16, 32, "rmsprop", _with(_LSTM, tied=True)),
]
