"""How a model reads prompts: text alone, or media such as pictures beside it.

Data, learner and engines obtain the :class:`Modality` of a model once, when they start, and run the model through it.
The class itself is a model of text alone. Kinds of models that read more are entries of ``registry.MODALITIES``, whose
classes are imported when such a model is loaded; the media of a prompt (:class:`core.types.Media`) are theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core.config import code_by_path, registry
from core.types import Media

if TYPE_CHECKING:
    from torch import Tensor, nn


class MediaError(ValueError):
    """Media, or their places in a prompt, cannot be used. ``rule`` and ``fix`` are the same for all such examples."""

    def __init__(self, rule: str, fix: str, value: str = ""):
        super().__init__(f"{rule} ({value}); {fix}" if value else f"{rule}; {fix}")
        self.rule, self.fix, self.value = rule, fix, value


class MediaInputs(Protocol):
    """What a pass over sequences with media takes beside their ids."""

    def packed(self, mask_BT: Tensor) -> MediaInputs:
        """Return the same for the sequences one after another, without what the mask leaves out."""

    def position_offset(self, last_B: Tensor) -> Tensor:
        """Return [B]: positions behind index ``last_B`` less the number of tokens before them."""


class Modality:
    """A model of text alone; subclasses read media too."""

    auto_class = "AutoModelForCausalLM"  # of transformers, which loads the model
    reads_media = False

    def configured(self, config: Any, path: str, tokenizer: Any) -> Modality:
        """Return the modality ready for prompts; ``config`` is transformers' of the model's folder or hub id.

        Raises InputError where the folder lacks a file, or the tokenizer a token.
        """
        return self

    def read_media(self, stored: Sequence[bytes], *, decode: bool = False) -> Media | None:
        """Return the media of a prompt from their files; ``decode`` tries all of each file. Raises MediaError."""
        if stored:
            keys = ", ".join(f"data.{key}" for key in registry.MEDIA_COLUMNS)
            fix = f"train a model that reads them, or leave the column out ({keys})"
            raise MediaError("an example has media, and the model reads text alone", fix)
        return None

    def check_examples(self, examples: Iterable[Any], config: Any) -> None:
        """Check the training examples; ``config`` is the ``data`` section. Raises InputError."""

    def load_processor(self, module: nn.Module, path: str) -> None:
        """Set ``module.processor``, transformers' processor of the media: checkpoints and exports hold it too."""

    def inputs(self, module: nn.Module, ids_BT: Tensor, media_B: Sequence[Media | None]) -> MediaInputs | None:
        """Return what a pass over these sequences, padded on the right, takes for media; None where none has any."""
        return None

    def run_body(
        self, module: nn.Module, ids: Tensor, media: MediaInputs | None, *, every_part: bool = False, **inputs: Any
    ) -> Any:
        """Return what the model's body returns.

        ``every_part`` runs also the parts that these sequences do not need: ranks that share a model's weights must
        gather them in the same order, and other ranks may need them in this pass.
        """
        return module.base_model(input_ids=ids, **inputs)

    def vllm_arguments(self, skeleton: nn.Module, processes: int) -> dict[str, Any]:
        """Return engine arguments that vLLM needs for such a model. Raises InputError where it cannot run it."""
        return {}

    def vllm_prompt(self, token_ids: Sequence[int], media: Media) -> Any:
        """Return what vLLM's ``add_request`` takes for a prompt with media."""
        raise ValueError("SampleRequest.media: the model reads text alone")


TEXT = Modality()


def modality_of(config: Any) -> Modality:
    """Return the modality of models with this configuration of transformers."""
    path = registry.MODALITIES.get(getattr(config, "model_type", None))
    return code_by_path.load_object(path)() if path else TEXT
