"""Hugging Face Trainer, with MemScale: ``memscale.wrap(trainer)``.

    python examples/hf_trainer.py --steps 10

Trains a small byte-level GPT-2 on the CPU; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memscale

TEXT = (Path(__file__).parent / "data" / "alice.txt").read_bytes()
LENGTH = 128


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.tensor(list(TEXT[: count * LENGTH])).view(count, LENGTH)
    return [{"input_ids": row, "labels": row} for row in ids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, use_cpu=True, report_to=[], save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=rows(48))
        # The one line. (A model this small would be left as it is, but for force_...)
        memscale.wrap(trainer, memscale.Config(force_optimize=True))
        result = trainer.train()
    print(f"loss {result.training_loss:.4f}")
    print(trainer.model._memscale_executor.stats())
    memscale.detach(trainer)
