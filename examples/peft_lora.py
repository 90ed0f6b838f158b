"""LoRA on a frozen base (peft), with MemScale. No input needs ``requires_grad``.

    python examples/peft_lora.py --steps 5

On the CPU; nothing is downloaded. At the end, one step plain and one wrapped are
compared to the bit.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memscale

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, lora)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    # The one line. (A model this small would be left as it is, but for force_...)
    memscale.wrap(model, memscale.Config(mode="aggressive", force_optimize=True))
    ids = torch.randint(256, (4, 128))
    for step in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(model._memscale_executor.stats())
    print(memscale.verify_correctness(model, {"input_ids": ids, "labels": ids}))
    memscale.detach(model)
