"""Which models there are: one class for each model type of transformers.

The class is the one with the most to train: with a head, and a loss of its own
where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Auto mappings, best first, and what their models are asked to do.
_MAPPINGS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "sequence to sequence",
    "SPEECH_SEQ_2_SEQ": "speech to text",
    "MASKED_LM": "masked words",
    "IMAGE_TEXT_TO_TEXT": "image and text",
    "CAUSAL_LM": "next word",
    "MULTIMODAL_LM": "image and text",
    "CTC": "speech recognition",
    "RNNT": "speech recognition",
    "TDT": "speech recognition",
    "OBJECT_DETECTION": "detection",
    "UNIVERSAL_SEGMENTATION": "segmentation",
    "INSTANCE_SEGMENTATION": "segmentation",
    "SEMANTIC_SEGMENTATION": "segmentation",
    "IMAGE_SEGMENTATION": "segmentation",
    "IMAGE_CLASSIFICATION": "image classification",
    "VIDEO_CLASSIFICATION": "video classification",
    "AUDIO_CLASSIFICATION": "audio classification",
    "DEPTH_ESTIMATION": "depth",
    "NORMAL_ESTIMATION": "depth",
    "POINTMAP_ESTIMATION": "depth",
    "MASKED_IMAGE_MODELING": "masked image",
    "CAUSAL_IMAGE_MODELING": "next pixel",
    "IMAGE_TO_IMAGE": "image to image",
    "IMAGE_MATTING": "matting",
    "KEYPOINT_DETECTION": "keypoints",
    "POSE_ESTIMATION": "keypoints",
    "ZERO_SHOT_OBJECT_DETECTION": "detection from text",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "image and text",
    "VISUAL_QUESTION_ANSWERING": "image and text",
    "TABLE_QUESTION_ANSWERING": "tables",
    "TABLE_RECOGNITION": "tables",
    "TEXT_RECOGNITION": "text in images",
    "TIME_SERIES_PREDICTION": "time series",
    "TIME_SERIES_REGRESSION": "time series",
    "TEXT_TO_SPECTROGRAM": "text to speech",
    "TEXT_TO_WAVEFORM": "text to speech",
    "MASK_GENERATION": "masks",
    "PRETRAINING": "pretraining",
    "SEQUENCE_CLASSIFICATION": "text classification",
    "TOKEN_CLASSIFICATION": "token classification",
    "QUESTION_ANSWERING": "question answering",
    "RETRIEVAL": "retrieval",
    "TEXT_ENCODING": "encoder",
    "": "encoder",
}


@dataclass(frozen=True)
class Architecture:
    """A model type and the class that is made of its config."""

    kind: str
    class_name: str
    task: str


def architectures() -> dict[str, Architecture]:
    """All of them, by model type; classes that two types share only once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Architecture] = {}
    by_class: dict[str, str] = {}
    for mapping, task in _MAPPINGS.items():
        name = (
            f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        )
        for kind, names in getattr(modeling_auto, name, {}).items():
            class_name = names if isinstance(names, str) else names[0]
            other = by_class.get(class_name)
            if kind in found or (other and not _is_named_after(class_name, kind)):
                continue
            if other:
                del found[other]
            by_class[class_name] = kind
            found[kind] = Architecture(kind, class_name, task)
    return dict(sorted(found.items()))


def _is_named_after(class_name: str, kind: str) -> bool:
    plain = kind.replace("_", "").replace("-", "")
    return class_name.lower().startswith(plain)


def build(architecture: Architecture, config: Any) -> Any:
    import transformers

    return getattr(transformers, architecture.class_name)(config)
