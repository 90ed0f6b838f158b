"""The models that benchmarks train: each built from its configuration, no download.

::

    entry = BENCHMARK_MODELS["gpt2"]
    model = entry.build(n_layer=2)  # or under torch.device("meta")
    batch = entry.sample(4, 128, "cpu")

Overrides are configuration fields (Hugging Face models) or constructor arguments
(plain torch). Samples draw few token ids, so that they fit a vocabulary made small.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.benchmarks import torch_models

__all__ = ["BENCHMARK_MODELS", "BenchmarkModel", "LossFn", "Sample"]

Device = torch.device | str
# Keyword arguments, or positional ones.
Sample = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
LossFn = Callable[[Any], torch.Tensor]

# Ids below are padding and other special tokens in some vocabularies.
_FIRST_ID, _LAST_ID = 5, 100


@dataclass(frozen=True)
class BenchmarkModel:
    """A model by name. ``seq`` is the sequence's length, or the image's side."""

    name: str
    description: str
    build: Callable[..., nn.Module]
    sample: Callable[[int, int, Device], Sample]
    batch: int
    seq: int
    # Of the model's output; None: the model computes its loss itself.
    loss_fn: LossFn | None = None


def _random() -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(0)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(_FIRST_ID, _LAST_ID, shape, generator=_random(), device="cpu")


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random(), device="cpu")


def _tokens(batch: int, seq: int, device: Device) -> Sample:
    return {
        "input_ids": _ids(batch, seq).to(device),
        "labels": _ids(batch, seq).to(device),
    }


def _token_pair(batch: int, seq: int, device: Device) -> Sample:
    ids = _ids(batch, seq + 1)
    # Two tensors of their own: slices would share, and hold, one storage.
    return ids[:, :-1].clone().to(device), ids[:, 1:].clone().to(device)


def _pixels(batch: int, seq: int, device: Device) -> Sample:
    return {
        "pixel_values": _noise(batch, 3, seq, seq).to(device),
        "labels": torch.zeros(batch, dtype=torch.long, device="cpu").to(device),
    }


def _images(batch: int, seq: int, device: Device) -> Sample:
    labels = torch.zeros(batch, dtype=torch.long, device="cpu")
    return _noise(batch, 3, seq, seq).to(device), labels.to(device)


def _images_only(batch: int, seq: int, device: Device) -> Sample:
    return (_noise(batch, 3, seq, seq).to(device),)


def _speech(batch: int, seq: int, device: Device) -> Sample:
    """``seq`` encoder positions, which must be the model's max_source_positions."""
    return {
        "input_features": _noise(batch, 80, 2 * seq).to(device),
        "labels": _ids(batch, min(448, max(1, seq // 4))).to(device),
    }


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _hugging_face(
    model: str, config: str, **fields: object
) -> Callable[..., nn.Module]:
    def build(**overrides: object) -> nn.Module:
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ImportError(
                f"{model} needs transformers, which is not installed: "
                "pip install 'transformers>=5'"
            ) from error
        settings = getattr(transformers, config)(**{**fields, **overrides})
        built: nn.Module = getattr(transformers, model)(settings)
        return built.train()

    return build


def _plain(kind: type[nn.Module], **fields: object) -> Callable[..., nn.Module]:
    def build(**overrides: object) -> nn.Module:
        return kind(**{**fields, **overrides}).train()

    return build


def _gpt2(**fields: object) -> Callable[..., nn.Module]:
    return _hugging_face("GPT2LMHeadModel", "GPT2Config", **fields)


def _bert(**fields: object) -> Callable[..., nn.Module]:
    return _hugging_face("BertForMaskedLM", "BertConfig", **fields)


def _t5(**fields: object) -> Callable[..., nn.Module]:
    # The decoder's start is padding, and newer configurations do not assume it.
    fields = {"decoder_start_token_id": 0, **fields}
    return _hugging_face("T5ForConditionalGeneration", "T5Config", **fields)


_LLAMA = ("LlamaForCausalLM", "LlamaConfig")

_ALL = [
    BenchmarkModel("gpt2", "GPT-2 small, 124 M", _gpt2(), _tokens, 1, 512),
    BenchmarkModel(
        "gpt2-medium",
        "GPT-2 medium, 355 M",
        _gpt2(n_embd=1024, n_layer=24, n_head=16),
        _tokens,
        1,
        512,
    ),
    BenchmarkModel(
        "gpt2-large",
        "GPT-2 large, 774 M",
        _gpt2(n_embd=1280, n_layer=36, n_head=20),
        _tokens,
        1,
        512,
    ),
    BenchmarkModel(
        "gpt2-xl",
        "GPT-2 XL, 1.56 B",
        _gpt2(n_embd=1600, n_layer=48, n_head=25),
        _tokens,
        1,
        512,
    ),
    BenchmarkModel("bert-base", "BERT base, 110 M", _bert(), _tokens, 8, 128),
    BenchmarkModel(
        "bert-large",
        "BERT large, 335 M",
        _bert(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        _tokens,
        8,
        128,
    ),
    BenchmarkModel(
        "distilbert",
        "DistilBERT, 67 M",
        _hugging_face("DistilBertForMaskedLM", "DistilBertConfig"),
        _tokens,
        8,
        128,
    ),
    BenchmarkModel(
        "roberta-base",
        "RoBERTa base, 125 M",
        _hugging_face(
            "RobertaForMaskedLM",
            "RobertaConfig",
            vocab_size=50265,
            max_position_embeddings=514,
            type_vocab_size=1,
        ),
        _tokens,
        8,
        128,
    ),
    BenchmarkModel(
        "llama-1b",
        "like Llama 3.2 1B: grouped queries, tied embedding",
        _hugging_face(
            *_LLAMA,
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        _tokens,
        1,
        1024,
    ),
    BenchmarkModel(
        "llama-7b",
        "Llama 2 7B",
        # max_position_embeddings is 4096 in Llama 2, and takes no memory.
        _hugging_face(*_LLAMA, max_position_embeddings=4096),
        _tokens,
        1,
        1024,
    ),
    BenchmarkModel(
        "qwen2-0.5b",
        "like Qwen2 0.5B: biased queries, tied embedding",
        _hugging_face(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        _tokens,
        1,
        512,
    ),
    BenchmarkModel(
        "mistral-7b",
        "Mistral 7B",
        _hugging_face("MistralForCausalLM", "MistralConfig"),
        _tokens,
        1,
        1024,
    ),
    BenchmarkModel(
        "mixtral-small",
        "a mixture of experts: 8 experts, 2 a token, 4 layers",
        _hugging_face(
            "MixtralForCausalLM",
            "MixtralConfig",
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        ),
        _tokens,
        2,
        256,
    ),
    BenchmarkModel("t5-small", "T5 small, 60 M", _t5(), _tokens, 4, 128),
    BenchmarkModel(
        "t5-base",
        "T5 base, 223 M",
        _t5(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        _tokens,
        4,
        128,
    ),
    BenchmarkModel(
        "bart-base",
        "BART base, 139 M",
        _hugging_face(
            "BartForConditionalGeneration",
            "BartConfig",
            d_model=768,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
        ),
        _tokens,
        4,
        128,
    ),
    BenchmarkModel(
        "vit-base",
        "ViT base of 16x16 patches, 86 M",
        _hugging_face("ViTForImageClassification", "ViTConfig", num_labels=1000),
        _pixels,
        8,
        224,
    ),
    BenchmarkModel(
        "whisper-tiny",
        "Whisper tiny, 38 M",
        _hugging_face("WhisperForConditionalGeneration", "WhisperConfig"),
        _speech,
        1,
        1500,
    ),
    BenchmarkModel(
        "resnet18", "ResNet-18", _plain(torch_models.ResNet), _images, 8, 224
    ),
    BenchmarkModel(
        "resnet50",
        "ResNet-50",
        _plain(torch_models.ResNet, layers=(3, 4, 6, 3), bottleneck=True),
        _images,
        8,
        224,
    ),
    BenchmarkModel(
        "unet",
        "a U-Net of 31 M with GroupNorm",
        _plain(torch_models.UNet),
        _images_only,
        2,
        128,
        mean_square,
    ),
    BenchmarkModel(
        "lstm",
        "an LSTM language model",
        _plain(torch_models.LstmModel),
        _token_pair,
        8,
        64,
    ),
]

BENCHMARK_MODELS: dict[str, BenchmarkModel] = {entry.name: entry for entry in _ALL}
