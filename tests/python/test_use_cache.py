"""``use_cache`` stays as the user has it: the same bits, and nothing held for it."""

from __future__ import annotations

import copy
import gc
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

import memscale
from compat_huggingface import LENGTH, VOCABULARY, gpt2, llama, tokens
from compat_twins import (
    Record,
    assert_same,
    config_of,
    each_mode,
    executor_of,
    make,
    run,
    untouched_process,  # noqa: F401
)
from memscale import Config, replay
from memscale import OptimizationMode as Mode
from memscale.techniques.use_cache import ForgottenError

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def of(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = getattr(transformers, config)(**fields)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return build


MODELS = {
    "gpt2": gpt2,
    "llama": of("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **_SIZES),
    "mistral": of(
        "MistralForCausalLM",
        "MistralConfig",
        num_key_value_heads=2,
        sliding_window=32,
        **_SIZES,
    ),
    "gemma": of(
        "GemmaForCausalLM",
        "GemmaConfig",
        num_key_value_heads=2,
        head_dim=32,
        **_SIZES,
    ),
    "qwen3_moe": of(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **_SIZES,
    ),
    "gpt_neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_dropout=0.1, **_SIZES),
    "falcon": of("FalconForCausalLM", "FalconConfig", hidden_dropout=0.1, **_SIZES),
    "opt": of(
        "OPTForCausalLM",
        "OPTConfig",
        word_embed_proj_dim=64,
        ffn_dim=128,
        dropout=0.1,
        **_SIZES,
    ),
    "t5": of(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": of(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
}


def train(model: nn.Module, record: Record) -> None:
    """As a loop that keeps the output through backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids = tokens(step)
        output = model(input_ids=ids, labels=ids)
        record("loss", output.loss)
        record("logits", output.logits)
        output.loss.backward()
        record.gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def forgotten(cache: Any) -> list[bool]:
    """Of each entry of a cache, whether its keys and values were let go."""
    if not isinstance(cache, DynamicCache):  # an encoder's and a decoder's
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        return [each for part in parts for each in forgotten(part)]
    return [
        type(layer.keys) is not torch.Tensor and type(layer.values) is not torch.Tensor
        for layer in cache.layers
    ]


# ---- the same bits ----


@each_mode
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_as_plain(mode: Mode, name: str) -> None:
    plain, ours = make(MODELS[name]), make(MODELS[name])
    expected = run(train, plain)
    memscale.wrap(ours, config_of(mode))
    assert_same(expected, run(train, ours))
    executor = executor_of(ours)
    assert executor.stats().saves_dropped > 0
    assert len(executor.plans) == 1
    assert ours.config.use_cache is True


@pytest.mark.parametrize("name", MODELS)
def test_same_bits_when_all_is_recomputed(name: str) -> None:
    plain, ours = make(MODELS[name]), make(MODELS[name])
    expected = run(train, plain)
    replay.attach(ours, "block", min_bytes=1)
    assert_same(expected, run(train, ours))


# ---- what is held ----


def held_after_forward(model: nn.Module) -> int:
    """While the output is held, as in ``output = model(...)``."""
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()  # a plan is made, once
    model.zero_grad()
    gc.collect()
    with memscale.memory.track("cpu") as memory:
        output = model(input_ids=ids, labels=ids)
        held = memory.current - memory.before
        del output
    return held


@each_mode
@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_held_than_without_a_cache(mode: Mode, name: str) -> None:
    with_cache, without = make(MODELS[name]), make(MODELS[name])
    without.config.use_cache = False
    held = []
    for model in (with_cache, without):
        memscale.wrap(model, config_of(mode))
        held.append(held_after_forward(model))
    # A window's entry holds its length; plans differ, by one hidden state at most.
    window = 8 * 3 if name == "mistral" else 0
    hidden = 4 * LENGTH * 64 * 4 if name == "gpt_neox" else 0
    assert held[0] <= held[1] + window + hidden


# ---- what the user sees ----


def test_a_cache_that_nobody_asked_for_is_let_go() -> None:
    for name, build in MODELS.items():
        model = memscale.wrap(make(build), config_of())
        cache = model(**inputs(name)).past_key_values
        assert len(cache) == model.config.num_hidden_layers, name
        assert cache.get_seq_length() == LENGTH, name
        assert all(forgotten(cache)), name


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Without labels, for which some models go without a cache."""
    texts = ["input_ids", "decoder_input_ids"]
    return dict.fromkeys(texts[: 2 if name in ("t5", "bart") else 1], tokens())


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_reading_what_was_let_go_raises(name: str) -> None:
    model = memscale.wrap(make(MODELS[name]), config_of())
    batch = inputs(name)
    cache = model(**batch).past_key_values
    keys = (cache if name != "t5" else cache.cross_attention_cache).layers[0].keys
    assert keys.shape[0] == 4
    for read in (
        lambda: keys + 1,
        lambda: keys[0],
        lambda: keys.clone(),
        lambda: torch.cat([keys, keys]),
        keys.tolist,
        keys.numpy,
        lambda: pickle.dumps(keys),
        lambda: copy.deepcopy(keys),
        lambda: model(**batch, past_key_values=cache),
    ):
        with pytest.raises(ForgottenError, match="call the model with use_cache=True"):
            read()
    assert "let go" in repr(keys)


def continue_from(cache_of: Callable[[nn.Module], dict[str, Any]]) -> Any:
    """A step on two halves of a text, the second with what the first cached."""

    def drive(model: nn.Module, record: Record) -> None:
        ids = tokens()
        for _ in range(3):
            first = model(input_ids=ids[:, :64], **cache_of(model))
            cache = first.past_key_values
            assert not any(forgotten(cache))
            for keys, values, *_ in cache:
                record("keys", keys)
                record("values", values)
            second = model(input_ids=ids[:, 64:], past_key_values=cache)
            record("logits", second.logits)
            assert not any(forgotten(second.past_key_values))
            (first.logits.square().mean() + second.logits.square().mean()).backward()
            record.gradients(model)
            model.zero_grad()

    return drive


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_a_cache_that_was_asked_for_is_left_alone(name: str) -> None:
    drive = continue_from(lambda model: {"use_cache": True})
    plain, ours = make(MODELS[name]), make(MODELS[name])
    memscale.wrap(ours, config_of())
    assert_same(run(drive, plain), run(drive, ours))


class Carries(nn.Module):
    """From its second call on, it reads what it cached before in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = gpt2(), 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first, second = ids.split(LENGTH // 2, dim=1)
        output = self.inner(first)
        cache = output.past_key_values if self.calls > 1 else None
        return output.logits + self.inner(second, past_key_values=cache).logits


def test_a_users_model_that_reads_a_cache_later() -> None:
    plain, ours = make(Carries), make(Carries)
    memscale.wrap(ours, config_of())
    assert_same(run(logits_of_chunks, plain), run(logits_of_chunks, ours))


class Outer(nn.Module):
    """A user's own model around a library's."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments = gpt2(), arguments

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids, **self.arguments)


class Chunks(nn.Module):
    """Makes a cache itself, and reads it again in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        parts = [
            self.inner(part, past_key_values=cache).logits
            for part in ids.split(LENGTH // 2, dim=1)
        ]
        return torch.cat(parts, dim=1)


def test_whose_cache_it_is_inside_of_a_users_model() -> None:
    for arguments, is_let_go in (({}, True), ({"use_cache": True}, False)):
        model = memscale.wrap(make(partial(Outer, **arguments)), config_of())
        cache = model(tokens()).past_key_values
        assert all(forgotten(cache)) is is_let_go
        assert any(forgotten(cache)) is is_let_go


def logits_of_chunks(model: nn.Module, record: Record) -> None:
    for step in range(3):
        loss = model(tokens(step)).square().mean()
        record("loss", loss)
        loss.backward()
        record.gradients(model)


def test_a_users_model_that_makes_a_cache() -> None:
    plain, ours = make(Chunks), make(Chunks)
    memscale.wrap(ours, config_of())
    assert_same(run(logits_of_chunks, plain), run(logits_of_chunks, ours))


class SharingBlock(nn.Module):
    """Attention whose later layers take the first one's keys, from the cache."""

    def __init__(self, index: int, shares: bool) -> None:
        super().__init__()
        self.index, self.shares = index, shares
        self.project = nn.Linear(64, 3 * 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, dim=-1)
        k, v = cache.update(k, v, self.index)
        if self.shares and self.index > 0:
            k = cache.layers[0].keys
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v)


def sharing(shares: bool) -> Callable[[], nn.Module]:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(SharingBlock(i, shares) for i in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            cache = DynamicCache()
            for block in self.blocks:
                x = block(x, cache)
            return transformers.modeling_outputs.BaseModelOutputWithPast(
                last_hidden_state=x, past_key_values=cache
            )

    # As if it were the library's.
    Sharing.forward = types.FunctionType(
        Sharing.forward.__code__,
        {**globals(), "__name__": "transformers.models.sharing"},
    )
    return Sharing


@pytest.mark.parametrize("shares", [False, True])
def test_layers_that_read_what_others_cached(shares: bool) -> None:
    """Then it is let go after the call, and the plan says nothing of it."""

    def drive(model: nn.Module, record: Record) -> None:
        for step in range(3):
            torch.manual_seed(step)
            output = model(torch.randn(4, LENGTH, 64))
            record("output", output.last_hidden_state)
            output.last_hidden_state.square().mean().backward()
            record.gradients(model)
            if hasattr(model, "_memscale_executor"):
                assert all(forgotten(output.past_key_values))

    plain, ours = make(sharing(shares)), make(sharing(shares))
    memscale.wrap(ours, config_of())
    assert_same(run(drive, plain), run(drive, ours))
    plan = executor_of(ours).plan
    assert plan is not None
    rules = [verdict.rule for verdict in plan.verdicts]
    assert ("forget_cache" in rules) is not shares


# ---- nothing of ours is left ----


def test_the_library_is_patched_in_training_calls_only() -> None:
    methods = Cache.update, DynamicCache.__init__
    inside = []
    model = memscale.wrap(make(gpt2), config_of())
    model.transformer.h[1].register_forward_pre_hook(
        lambda *_: inside.append(Cache.update)
    )
    model(input_ids=tokens()).logits.sum().backward()
    assert inside[-1] is not methods[0]
    assert (Cache.update, DynamicCache.__init__) == methods
    with torch.no_grad():
        model(input_ids=tokens())
    assert inside[-1] is methods[0]


def test_caches_of_other_models_after_an_interrupt() -> None:
    """Ctrl-C ends a call without a hook: what comes then is not part of it."""
    model = memscale.wrap(make(gpt2), config_of())
    other = make(gpt2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=tokens())
    handle.remove()
    cache = other(input_ids=tokens()).past_key_values
    assert all(forgotten(model(input_ids=tokens()).past_key_values))
    assert not any(forgotten(cache))


# ---- plans ----


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_peak_is_of_the_model_as_it_is(name: str) -> None:
    """One plain peak: with its cache, as the estimate has it."""
    model, ids = make(MODELS[name]), tokens()
    batch = {"input_ids": ids, "labels": ids}
    plan = memscale.plan(model, batch, config=Config(force_optimize=True))
    assert plan.plain_peak_bytes == memscale.estimate(model, batch).peak_bytes


def test_a_plan_that_is_told_lets_go_as_early() -> None:
    model, ids = make(llama), tokens()
    plan = memscale.plan(
        model, {"input_ids": ids, "labels": ids}, config=config_of(Mode.AGGRESSIVE)
    )
    assert [each.rule for each in plan.verdicts].count("forget_cache") == 1
    memscale.wrap(model, Config(plan=plan.to_json()))
    held = []
    model.lm_head.register_forward_pre_hook(
        lambda *_: held.append([type(each.keys) for each in caches[-1].layers])
    )
    caches: list[Any] = []
    model.model.register_forward_hook(
        lambda m, a, output: caches.append(output.past_key_values)
    )
    model(input_ids=ids, labels=ids).loss.backward()
    assert held
    assert torch.Tensor not in held[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_plans_are_followed_with_a_cache(dropout: float) -> None:
    def build() -> nn.Module:
        model = gpt2()
        model.config.attn_pdrop = dropout
        for block in model.transformer.h:
            block.attn.attn_dropout.p = dropout
        return model

    model = memscale.wrap(make(build), config_of())
    run(train, model)
    executor = executor_of(model)
    stats = executor.stats()
    memscale.detach(model)
    assert stats.calls_unlike_keep_set == 0
