"""Models that read pictures, as the kernel runs them: :class:`core.modality.Modality` of the kinds in ``extension.py``.

How a model reads pictures stands in its folder: in ``config.json`` and in the configuration of its image processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from core.modality import Modality
from core.vision.images import PictureFormat, Pictures, read_picture
from core.vision.model_inputs import PictureInputs, run_text, run_with_pictures

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("vision_start_token_id", "image_token_id", "vision_end_token_id")  # in config.json: around a placeholder, it


@dataclass(frozen=True)
class PictureModality(Modality):
    """A model of text and pictures. ``format`` is needed for prompts alone."""

    format: PictureFormat | None = None

    auto_class = "AutoModelForImageTextToText"
    reads_media = True

    def configured(self, config: Any, path: str, tokenizer: Any) -> PictureModality:
        """Return the modality with the model's format of pictures.

        Raises InputError where the folder lacks the configuration of its image processor or the tokenizer its
        placeholder.
        """
        return PictureModality(load_format(config, path, tokenizer))

    def read_media(self, stored: Sequence[bytes], *, decode: bool = False) -> Pictures:
        return Pictures(tuple(read_picture(data, self.format, decode=decode) for data in stored), self.format)

    def check_examples(self, examples: Iterable[Any], config: Any) -> None:
        """Check that some example has a picture. Raises InputError."""
        if not any(example.media for example in examples):
            rule = "no example of the training files has a picture, and the model reads pictures"
            fix = "name their column, or train a model of text alone"
            raise InputError([f"data.image_key={config.image_key}: {rule}; {fix}"])

    def load_processor(self, module: nn.Module, path: str) -> None:
        module.processor = image_processor(path)

    def inputs(self, module: nn.Module, ids_BT: Tensor, media_B: Sequence[Pictures | None]) -> PictureInputs | None:
        return PictureInputs.of(module, ids_BT, media_B)

    def run_body(
        self, module: nn.Module, ids: Tensor, media: PictureInputs | None, *, every_part: bool = False, **inputs: Any
    ) -> Any:
        if media is None:
            return run_text(module, ids, every_part=every_part, **inputs)
        return run_with_pictures(module, ids, media, **inputs)

    def vllm_arguments(self, skeleton: nn.Module, processes: int) -> dict[str, Any]:
        from core.vision.vllm_pictures import prepare

        return prepare(skeleton, processes)

    def vllm_prompt(self, token_ids: Sequence[int], media: Pictures) -> Any:
        from core.vision.vllm_pictures import engine_input

        return engine_input(token_ids, media)


def image_processor(path: str) -> Any:
    """Load the image processor's configuration. Its Pillow form, which needs no torchvision. Raises InputError."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from core.learner.models import readable

    with readable(path):
        return Qwen2VLImageProcessorPil.from_pretrained(path)


def load_format(config: Any, path: str, tokenizer: Any) -> PictureFormat:
    """Return how the model of a folder or hub id reads pictures. Raises InputError as ``configured`` does."""
    processor = image_processor(path)
    settings = [getattr(config, name) for name in NAMES]
    tokens = tokenizer.convert_ids_to_tokens(settings)
    if tokenizer("".join(map(str, tokens)), add_special_tokens=False)["input_ids"] != settings:
        rule = f"the tokenizer lacks the placeholder of pictures ({', '.join(NAMES)})"
        raise InputError(f"actor_rollout_ref.model.path={path}: {rule}; take the model's")
    return PictureFormat(
        token=tokens[1],
        token_id=config.image_token_id,
        mark="".join(tokens),
        patch=processor.patch_size,
        merge=processor.merge_size,
        frames=processor.temporal_patch_size,
        least=processor.size["shortest_edge"],
        most=processor.size["longest_edge"],
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
    )
