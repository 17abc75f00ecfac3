"""An answer that would be longer than the model has positions is refused before a model loads."""

from __future__ import annotations

import pytest

from core.errors import InputError
from core.evaluation.engine_only import answering
from core.ray_trainer import RayPPOTrainer
from tests.core.scripted_run import configured
from tests.core.test_sequence_lengths import write_lengths


def test_answers_for_an_evaluation_have_to_fit(tmp_path):
    folder = write_lengths(tmp_path)
    config = configured(folder, "run", "data.max_prompt_length=256", f"data.val_files={folder / 'long.parquet'}")
    trainer = RayPPOTrainer(config)
    trainer.load_data()
    long = configured(folder, "run", "data.max_response_length=57")
    path, prompts = "core.ray_trainer:RayPPOTrainer", trainer.val_prompts
    refused = pytest.raises(InputError, match="data.val_files has 200 tokens and 57 may follow")
    with refused, answering(long, path, trainer.tokenizer, prompts=prompts):
        pass
