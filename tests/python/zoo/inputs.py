"""A batch for any model of transformers, from its signature and its config.

What a parameter of ``forward`` gets is looked up by its name. Which of them a model
wants is not always to be seen: ``batches`` gives several, the fullest first, and the
first one that the model takes is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zoo.shrink import FIRST_WORD, IMAGE, VOCABULARY, configs_in

ROWS = 8
LENGTH = 64
SAMPLES = 6400
FRAMES = 128

Batch = dict[str, Any]


class Sizes:
    """What a batch has to fit: sizes out of a config and its sub-configs."""

    def __init__(self, model: nn.Module, task: str) -> None:
        self.config: Any = model.config
        self.task = task
        self.parameters = inspect.signature(model.forward).parameters
        self.vocabulary = self.of("vocab_size", VOCABULARY)
        self.channels = self.of("num_channels", 3, "image_channels")
        self.labels = max(2, self.config.num_labels or 2)
        size = self.of("image_size", IMAGE)
        if isinstance(size, dict):
            size = [size["height"], size["width"]]
        self.image = [size, size] if isinstance(size, int) else list(size)[-2:]
        self.frames = self.of("num_frames", 4)

    def of(self, name: str, default: Any, *others: str) -> Any:
        """The first value that is told, by the config or one inside of it."""
        for config in configs_in(self.config):
            for each in (name, *others):
                value = getattr(config, each, None)
                if value is not None:
                    return value
        return default


def words(sizes: Sizes) -> Tensor:
    first = min(FIRST_WORD, sizes.vocabulary // 2)
    return torch.randint(first, sizes.vocabulary, (ROWS, LENGTH))


def _few_words(sizes: Sizes, rows: int) -> Tensor:
    return words(sizes)[:rows, :16].contiguous()


def mask(_: Sizes) -> Tensor:
    """Two rows are shorter than the others."""
    made = torch.ones(ROWS, LENGTH, dtype=torch.long)
    made[-2:, -5:] = 0
    return made


def image(sizes: Sizes) -> Tensor:
    if sizes.task == "video classification":
        return torch.randn(2, sizes.frames, sizes.channels, *sizes.image)
    return torch.randn(ROWS, sizes.channels, *sizes.image)


def spectrum(sizes: Sizes) -> Tensor:
    bins = sizes.of("num_mel_bins", 16, "feature_size", "input_dim", "n_mels")
    frames = 2 * sizes.of("max_source_positions", FRAMES // 2)
    return torch.randn(4, bins, frames)


def turned_spectrum(sizes: Sizes) -> Tensor:
    bins = sizes.of("num_mel_bins", 16, "input_feat_per_channel", "feature_size")
    return torch.randn(4, FRAMES, bins)


def boxes(_: Sizes) -> Tensor:
    """Left, top, right and bottom of each word."""
    corners = torch.randint(0, 100, (ROWS, LENGTH, 2))
    return torch.cat([corners, corners + torch.randint(1, 20, corners.shape)], -1)


def series(sizes: Sizes) -> Tensor:
    lags = getattr(sizes.config, "lags_sequence", None) or [0]
    length = sizes.of("context_length", LENGTH) + max(lags)
    return torch.randn(ROWS, length, sizes.of("num_input_channels", 1))


def labels(sizes: Sizes) -> Any:
    """By what the model is asked to do; None where only it knows."""
    rows = ROWS
    if sizes.task in ("next word", "masked words", "image and text", "pretraining"):
        return None if "input_ids" not in sizes.parameters else words(sizes)
    if sizes.task in ("sequence to sequence", "speech to text"):
        return _few_words(sizes, 4 if sizes.task == "speech to text" else ROWS)
    if sizes.task == "speech recognition":
        return words(sizes)[:4, :6].contiguous()
    if sizes.task == "video classification":
        rows = 2
    if sizes.task == "audio classification":
        rows = 4
    if "classification" in sizes.task and "token" not in sizes.task:
        return torch.randint(sizes.labels, (rows,))
    if sizes.task == "token classification":
        return torch.randint(sizes.labels, (ROWS, LENGTH))
    if sizes.task == "segmentation":
        return torch.randint(sizes.labels, (ROWS, *sizes.image))
    if sizes.task == "detection":
        return [_objects(sizes) for _ in range(ROWS)]
    return None


def _objects(sizes: Sizes) -> dict[str, Tensor]:
    middles, extents = torch.rand(3, 2) * 0.4 + 0.3, torch.rand(3, 2) * 0.2 + 0.1
    return {
        "class_labels": torch.randint(sizes.labels, (3,)),
        "boxes": torch.cat([middles, extents], -1),
        "masks": torch.randint(2, (3, *sizes.image)).float(),
    }


MAKERS: dict[str, Callable[[Sizes], Any]] = {
    "input_ids": words,
    "attention_mask": mask,
    "decoder_input_ids": lambda s: _few_words(s, 4 if "speech" in s.task else ROWS),
    "inputs": words,
    "pixel_values": image,
    "pixel_values_videos": lambda s: torch.randn(2, s.frames, s.channels, *s.image),
    "video": lambda s: torch.randn(2, s.frames, s.channels, *s.image),
    "pixel_mask": lambda s: torch.ones(ROWS, *s.image, dtype=torch.long),
    "input_values": lambda _: torch.randn(4, SAMPLES),
    "input_features": spectrum,
    "bbox": boxes,
    "labels": labels,
    "past_values": series,
    "return_loss": lambda _: True,
    "mask_labels": lambda s: [each["masks"] for each in _all_objects(s)],
    "class_labels": lambda s: [each["class_labels"] for each in _all_objects(s)],
    "start_positions": lambda _: torch.randint(LENGTH, (ROWS,)),
    "end_positions": lambda _: torch.randint(LENGTH, (ROWS,)),
    "next_sentence_label": lambda _: torch.randint(2, (ROWS,)),
    "encoder_hidden_states": lambda s: torch.randn(
        ROWS, LENGTH, s.of("encoder_hidden_size", s.of("hidden_size", 64))
    ),
    "hidden_states": lambda s: torch.randn(ROWS, LENGTH, s.of("hidden_size", 64)),
    "bool_masked_pos": lambda s: torch.rand(ROWS, (s.image[0] // 8) ** 2) < 0.4,
    "noise": lambda s: torch.rand(ROWS, (s.image[0] // 8) ** 2),
    "prompt_depth": lambda _: torch.rand(ROWS, 1, 16, 16),
    "task_inputs": words,
}


def _all_objects(sizes: Sizes) -> list[dict[str, Tensor]]:
    generator = torch.get_rng_state()
    torch.manual_seed(11)
    made = [_objects(sizes) for _ in range(ROWS)]
    torch.set_rng_state(generator)
    return made


# Beside what a model must be given, and its main input.
_ALSO = {"attention_mask", "bbox"}
_LOSSES = {"labels", "return_loss", "mask_labels", "class_labels"}
_POSITIONS = {"start_positions", "end_positions"}


def batches(model: nn.Module, task: str) -> Iterator[tuple[str, Batch]]:
    """What the model might take, and what that is: the fullest first."""
    sizes = Sizes(model, task)
    told = sizes.parameters
    needed = {
        name
        for name, each in told.items()
        if each.default is inspect.Parameter.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    main: Any = model.main_input_name
    mains = {main} if isinstance(main, str) else set(main)
    names = needed | mains | (_ALSO & told.keys())
    if "input_ids" not in mains and "decoder_input_ids" in told:
        names.add("decoder_input_ids")
    if mains & {"input_values", "input_features", "pixel_values", "past_values"}:
        names -= {"attention_mask"} - needed
    extra = _LOSSES & told.keys()
    if task == "question answering":
        extra |= _POSITIONS & told.keys()
    both = {"input_ids", "attention_mask", "pixel_values"} & told.keys()
    if task in ("image and text", "encoder", "pretraining") and len(both) == 3:
        with_image = _with_image(model, sizes)
        if with_image is not None:
            yield "text with an image", with_image
        yield "text and images", _made(names | both | extra, sizes)
    if task == "sequence to sequence" and "decoder_input_ids" not in told:
        yield "with labels", _made(names, sizes) | {"labels": words(sizes)}
    yield "with labels", _made((names - {"decoder_input_ids"}) | extra, sizes)
    yield "with labels and words", _made(names | extra, sizes)
    yield "", _made(names, sizes)
    if "input_features" in names:
        turned = _made(names | extra, sizes)
        turned["input_features"] = turned_spectrum(sizes)
        yield "turned", turned
        turned = {k: v for k, v in turned.items() if k not in extra}
        yield "turned, no labels", turned
    if "input_values" in names:
        yield (
            "one channel",
            _made(names, sizes) | {"input_values": torch.randn(4, 1, SAMPLES)},
        )
    if "input_ids" in told:
        yield "only words", _made({"input_ids", "attention_mask"} & told.keys(), sizes)
    if "pixel_values" in told:
        yield "only images", _made({"pixel_values"}, sizes)
        yield (
            "only a video",
            {
                "pixel_values": torch.randn(
                    2, sizes.frames, sizes.channels, *sizes.image
                )
            },
        )


def _made(names: set[str], sizes: Sizes) -> Batch:
    made = {name: MAKERS[name](sizes) for name in sorted(names) if name in MAKERS}
    batch = {name: value for name, value in made.items() if value is not None}
    if (
        "labels" in batch
        and "input_ids" in batch
        and sizes.task != "token classification"
    ):
        labels = batch["labels"]
        if isinstance(labels, Tensor) and labels.shape == batch["input_ids"].shape:
            batch["labels"] = batch["input_ids"].clone()
    return batch


def _with_image(model: nn.Module, sizes: Sizes) -> Batch | None:
    """Words with as many places for an image as it has features."""
    token = sizes.of("image_token_id", None, "image_token_index")
    features_of = getattr(model, "get_image_features", None)
    if token is None or features_of is None:
        return None
    images: Batch = {"pixel_values": torch.randn(ROWS, sizes.channels, *sizes.image)}
    if "image_grid_thw" in sizes.parameters:
        images = _patches(sizes)
    try:
        with torch.no_grad():
            features = features_of(**images)
    except Exception:
        return None
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (list, tuple)):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    if not isinstance(features, Tensor):
        return None
    per_row, rest = divmod(features.numel() // features.shape[-1], ROWS)
    if rest or per_row > 200:
        return None
    ids = words(sizes)
    ids = torch.cat([ids[:, :8], torch.full((ROWS, per_row), token), ids[:, 8:]], 1)
    batch = {"input_ids": ids, **images, "labels": ids.clone()}
    batch["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in sizes.parameters:
        batch["mm_token_type_ids"] = (ids == token).long()
    if "token_type_ids" in sizes.parameters:
        batch["token_type_ids"] = (ids == token).long()
    return {name: each for name, each in batch.items() if name in sizes.parameters}


def _patches(sizes: Sizes) -> Batch:
    """Images as rows of patches, eight by eight of them in each."""
    patch = sizes.of("patch_size", 8)
    frames = sizes.of("temporal_patch_size", 1)
    return {
        "pixel_values": torch.randn(ROWS * 64, sizes.channels * frames * patch * patch),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * ROWS),
    }
