"""transformers' Trainer on CUDA torch."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from cuda_models import LanguageModel
from torch.utils.data import Dataset

import memscale


class Tokens(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(128, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def test_trainer(tmp_path: Path) -> None:
    model = LanguageModel().model
    memscale.wrap(model, memscale.Config(enable_logging=False))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=8,
        bf16=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    executor = model._memscale_executor
    assert next(model.parameters()).is_cuda
    assert executor.plan.device == "cuda:0"
    stats = executor.stats()
    assert stats.saves_dropped > 0
    assert stats.calls_unlike_keep_set == 0
    trainer.accelerator.free_memory()
