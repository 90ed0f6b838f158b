"""Small Hugging Face models, their batches and a loop, for tests of wrap."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from compat_twins import STEPS, Record

LENGTH, VOCABULARY = 96, 128


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def tokens(step: int = 0, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)


def fine_tune(model: nn.Module, record: Record) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(STEPS):
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids).loss
        record("loss", loss)
        loss.backward()
        record.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
