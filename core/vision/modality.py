"""How a model reads prompts: text alone, or pictures beside it.

Data, learner and engines obtain the :class:`Modality` of a model once, when they start, and run the model through it.
What works on pictures is imported where a prompt has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.config.problem import Problem
from core.config.registry import ENGINES, PICTURE_MODELS
from core.errors import InputError
from core.vision.pictures import MediaError, PictureFormat, Pictures, image_processor, read_picture

if TYPE_CHECKING:
    from torch import Tensor, nn

    from core.config.schema import Config
    from core.vision.learner_pictures import PictureInputs


@dataclass(frozen=True)
class Modality:
    """A model of text alone, or with ``reads_media`` of text and pictures. ``format`` is needed for prompts alone."""

    reads_media: bool = False
    format: PictureFormat | None = None

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the model."""
        return "AutoModelForImageTextToText" if self.reads_media else "AutoModelForCausalLM"

    def configured(self, config: Any, path: str, tokenizer: Any) -> Modality:
        """Return the modality ready for prompts. Raises InputError as :meth:`PictureFormat.of` does."""
        return Modality(True, PictureFormat.of(config, path, tokenizer)) if self.reads_media else self

    def read_media(self, stored: Sequence[bytes], *, decode: bool = False) -> Pictures | None:
        """Return the pictures of a prompt from their files; ``decode`` tries all of each file. Raises MediaError."""
        if self.reads_media:
            return Pictures(tuple(read_picture(data, self.format, decode=decode) for data in stored), self.format)
        if stored:
            fix = "train a model that reads them, or leave the column out (data.image_key)"
            raise MediaError("an example has media, and the model reads text alone", fix)
        return None

    def check_examples(self, examples: Iterable[Any], config: Any) -> None:
        """Check that some training example has a picture where the model reads them. Raises InputError."""
        if self.reads_media and not any(example.media for example in examples):
            rule = "no example of the training files has a picture, and the model reads pictures"
            fix = "name their column, or train a model of text alone"
            raise InputError([f"data.image_key={config.image_key}: {rule}; {fix}"])

    def load_processor(self, module: nn.Module, path: str) -> None:
        """Set ``module.processor``, which checkpoints and exports of models that read pictures hold too."""
        if self.reads_media:
            module.processor = image_processor(path)

    def inputs(self, module: nn.Module, ids_BT: Tensor, media_B: Sequence[Pictures | None]) -> PictureInputs | None:
        """Return what a pass over these sequences, padded on the right, takes for pictures; None without any."""
        if not any(media_B):
            return None
        from core.vision.learner_pictures import PictureInputs

        return PictureInputs.of(module, ids_BT, media_B)

    def run_body(
        self, module: nn.Module, ids: Tensor, media: PictureInputs | None, *, every_part: bool = False, **inputs: Any
    ) -> Any:
        """Return what the model's body returns.

        ``every_part`` runs the vision tower also where there is no picture: ranks that share a model's weights must
        gather them in the same order, and other ranks may need it in this pass.
        """
        if media is None and not (every_part and self.reads_media):
            return module.base_model(input_ids=ids, **inputs)
        from core.vision.learner_pictures import run_with_pictures, run_with_unused_tower

        if media is None:
            return run_with_unused_tower(module, ids, **inputs)
        return run_with_pictures(module, ids, media, **inputs)


TEXT = Modality()


def modality_of(config: Any) -> Modality:
    """Return the modality of models with this configuration of transformers."""
    return Modality(True) if getattr(config, "model_type", None) in PICTURE_MODELS else TEXT


def problems(config: Config, reads_pictures: bool | None) -> Iterator[Problem]:
    """Yield the keys that do not go together with the model; ``reads_pictures`` is None where nothing is known."""
    roles, over_ray, what = config.actor_rollout_ref, config.trainer.backend == "ray", "a model that reads pictures"
    parts, engine = (roles.actor, roles.ref), roles.rollout.name
    sequences = max(part.ulysses_sequence_parallel_size for part in parts)
    layers = max(part.tensor_model_parallel_size for part in parts)
    if reads_pictures is False and roles.actor.freeze_vision_tower:
        key = "actor_rollout_ref.actor.freeze_vision_tower"
        yield Problem(key, True, "the model reads text alone and has no vision tower", "leave it out")
    if reads_pictures and over_ray and sequences > 1:
        key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
        yield Problem(key, sequences, f"does not split the sequences of {what} yet", "set it to 1")
    if reads_pictures and over_ray and layers > 1:
        key = "actor_rollout_ref.actor.tensor_model_parallel_size"
        yield Problem(key, layers, f"does not split the layers of {what} yet", "set it to 1")
    if reads_pictures and config.critic.enable:
        key, fix = "algorithm.adv_estimator", "use an estimator without one, such as grpo"
        yield Problem(key, config.algorithm.adv_estimator, f"{what} has no critic here", fix)
    if reads_pictures and config.reward_model.enable:
        yield Problem("reward_model.enable", True, "a reward model reads text alone", "score with a function")
    if reads_pictures and config.needs_engine and not ENGINES[engine].reads_media:
        yield Problem("actor_rollout_ref.rollout.name", engine, f"sends no pictures of {what}", "use vllm")
    if reads_pictures and not config.generates:
        rule, fix = f"fine-tuning does not train {what} yet", "give a model of text alone"
        yield Problem("actor_rollout_ref.model.path", roles.model.path, rule, fix)
