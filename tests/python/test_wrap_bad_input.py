"""What wrap refuses, in one sentence, with nothing attached; and whose word counts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from compat_twins import (
    Net,
    assert_same,
    batch,
    copy_of,
    executor_of,
    make,
    run,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import Config, InputError, replay
from memscale.calls import hook_stack
from memscale.config import AsyncOffloadConfig
from never_wrapped import assert_as_never_wrapped

# ---- bad input ----


@pytest.mark.parametrize("target", [3, None, "gpt2", Net, [Net()], lambda x: x])
def test_targets_that_are_no_models(target: Any) -> None:
    with pytest.raises(TypeError, match="target must be"):
        memscale.wrap(target)
    with pytest.raises(TypeError, match="target must be"), memscale.optimize(target):
        pass


@pytest.mark.parametrize("target", [3, None, Net])
def test_detach_of_what_is_no_model(target: Any) -> None:
    with pytest.warns(UserWarning, match="not wrapped"):
        memscale.detach(target)


@pytest.mark.parametrize("config", ["aggressive", 3, {}, Config])
@pytest.mark.parametrize("async_offload", [None, True])
def test_config_of_wrong_type(config: Any, async_offload: bool | None) -> None:
    _refused(
        make(), TypeError, "config must be", config=config, async_offload=async_offload
    )


def _refused(model: nn.Module, error: type[Exception], text: str, **how: Any) -> None:
    """wrap raises, with one sentence, and nothing is attached."""
    twin = copy_of(model) if not hasattr(model, "_no_copies") else None
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(error, match=text) as info:
        memscale.wrap(model, **how)
    assert "\n" not in str(info.value)
    assert not hasattr(model, "_memscale_executor")
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert hook_stack._num_attached == 0
    if twin is not None:
        assert_as_never_wrapped(model, twin)


def test_model_on_several_devices(sim: torch.device) -> None:
    model = make()
    model.head.to(sim)
    _refused(model, InputError, "on one device, got cpu and sim:0")


def test_model_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    _refused(model, InputError, "meta")
    model = make()
    model.head.to("meta")
    _refused(model, InputError, "meta")


def test_scripted_module() -> None:
    model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InputError, match="scripted"):
        memscale.wrap(model)
    assert not hasattr(model, "_memscale_executor")


@pytest.mark.parametrize(
    "sample", [3, "text", {1: batch()}, object(), torch.utils.data.DataLoader([1])]
)
def test_samples_of_no_kind(sample: Any) -> None:
    _refused(make(), InputError, "sample_input", sample_input=sample)


@pytest.mark.parametrize(
    "sample", [batch(width=9), (batch(), batch()), {"nonsense": batch()}, [], ["x"]]
)
def test_samples_that_the_model_rejects(sample: Any) -> None:
    _refused(make(), InputError, "Net rejects sample_input", sample_input=sample)


def test_a_batch_that_the_model_rejects() -> None:
    """The model's own error, and the next batch is a clean step."""
    plain, ours = make(), memscale.wrap(make())
    texts = []
    for model in (plain, ours):
        with pytest.raises(RuntimeError) as info:
            model(batch(width=9))
        texts.append(str(info.value))
    assert texts[0] == texts[1]
    assert_same(run(steps(), plain), run(steps(), ours))


@pytest.mark.parametrize(
    "model",
    [nn.ReLU(), nn.Sequential(), nn.Identity(), Net().requires_grad_(False)],
    ids=["no parameters", "empty", "identity", "all frozen"],
)
def test_nothing_to_train(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    twin = copy_of(model)
    memscale.wrap(model)
    assert "no parameter requires a gradient" in caplog.text
    torch.manual_seed(1)
    ours = model(batch())
    torch.manual_seed(1)
    assert torch.equal(ours, twin(batch()))
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)


# ---- what manages models itself ----


class DeepSpeedEngine(nn.Module):
    """Known by its name: the library need not be installed."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


class Engine(DeepSpeedEngine):
    pass


@pytest.mark.parametrize("engine", [DeepSpeedEngine, Engine])
def test_deepspeed_is_refused(engine: type[nn.Module]) -> None:
    _refused(engine(), InputError, "DeepSpeedEngine.*itself")


def test_data_parallel_is_refused() -> None:
    _refused(nn.DataParallel(Net()), InputError, "DataParallel.*Distributed")
    _refused(nn.Sequential(nn.DataParallel(Net())), InputError, "DataParallel")


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    """A process group of one, for what cannot be made without."""
    import torch.distributed as dist

    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module, version: int) -> nn.Module:
    from torch.distributed import fsdp

    if version == 1:
        return fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_refused(version: int, one_process: Any) -> None:
    model = shard(make(), version)
    model._no_copies = True
    before = dict(vars(model))
    _refused(model, InputError, "itself")
    assert vars(model) == before
    model(batch()).square().mean().backward()


@pytest.mark.parametrize("version", [1, 2])
def test_sharded_after_wrap_is_refused_at_the_first_batch(
    version: int, one_process: Any
) -> None:
    inner = memscale.wrap(make())
    model = shard(inner, version)
    with pytest.raises(InputError, match=r"FSDPModule|FullySharded"):
        model(batch())
    assert not hasattr(inner, "_memscale_executor")  # nothing stays half attached
    model(batch()).square().mean().backward()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "planned", ["by a sample", "by a plan", "in a step", "by hand"]
)
def test_sharded_after_a_plan_was_made_is_refused(
    version: int, planned: str, one_process: Any
) -> None:
    """Also a part of it; the plan was made before, so nobody looks at the model."""
    inner = make()
    if planned == "by a plan":
        config = Config(plan=memscale.plan(make(), batch()).to_json())
        memscale.wrap(inner, config)
    elif planned == "by hand":
        replay.attach(inner, "block", min_bytes=1)
    else:
        memscale.wrap(inner, sample_input=batch() if "sample" in planned else None)
    if planned == "in a step":
        inner(batch()).sum().backward()
        inner.blocks[0] = shard(inner.blocks[0], version)
        model = inner
    else:
        model = shard(inner, version)
    buffers = {name: b.clone() for name, b in inner.named_buffers()}
    with pytest.raises(InputError, match=r"(FSDPModule|FullySharded).*shard it"):
        model(batch())
    for name, buffer in inner.named_buffers():  # it did not run
        assert torch.equal(buffer, buffers[name])
    assert not replay.is_attached(inner)
    assert not hasattr(inner, "_memscale_executor")
    model(batch()).square().mean().backward()


# ---- async offloading: whose word counts ----


@pytest.mark.parametrize(
    ("argument", "environment", "config", "expected"),
    [
        (None, None, None, False),
        (None, None, True, True),
        (None, "1", None, True),
        (None, "1", False, True),
        (None, "0", True, False),
        (None, "true", None, True),
        (None, "off", True, False),
        (None, "", True, True),
        (True, "0", False, True),
        (False, "1", True, False),
    ],
)
def test_async_offload_by_argument_environment_config(
    argument: bool | None,
    environment: str | None,
    config: bool | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment is not None:
        monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", environment)
    given = None if config is None else Config(async_offload=config)
    model = make()
    memscale.wrap(model, given, async_offload=argument)
    assert executor_of(model).config.async_offload is expected
    if given is not None:
        assert given.async_offload is config  # the caller's own is not changed
    if argument is None:
        memscale.detach(model)
        with memscale.optimize(model, config=given) as executor:
            assert executor.config.async_offload is expected


def test_async_config_replaces_the_configs() -> None:
    wanted = AsyncOffloadConfig(prefetch_depth=5)
    model = memscale.wrap(make(), async_config=wanted)
    assert executor_of(model).config.async_config.prefetch_depth == 5


def test_async_environment_of_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "perhaps")
    _refused(make(), memscale.ConfigError, "MEMSCALE_ASYNC_OFFLOAD")
    assert "MEMSCALE_ASYNC_OFFLOAD" in os.environ
