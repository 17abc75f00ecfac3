"""The section ``data`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config.limits import Count, NonEmpty, OffOrCount, Size
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import FrozenDict, Open, Section, files, key


class DataConfig(Section):
    train_files: NonEmpty = files(("~/data/rlhf/gsm8k/train.parquet",), "parquet files of training examples")
    val_files: NonEmpty = files(("~/data/rlhf/gsm8k/test.parquet",), "parquet files of validation questions")
    prompt_key: str = key("prompt", "column that holds the prompt, a list of chat messages")
    image_key: str = key("images", "column that holds the pictures of a prompt, one for each <image> in it")
    reward_fn_key: str = key("data_source", "column that names the data source, which chooses the scorer")
    max_prompt_length: Count = key(512, "tokens of the prompt; in a search episode, of prompt and episode")
    max_response_length: Count = key(512, "tokens of the answer, tools' included; search episodes: of one turn")
    max_start_length: Count | None = key(None, "search episodes: tokens of the prompt; null: max_prompt_length")
    max_obs_length: Count = key(500, "search episodes: tokens of what a search returns")
    train_batch_size: Count = key(1024, "prompts a step")
    gen_batch_size: Count | None = key(None, "prompts in flight at most", follows="data.train_batch_size")
    train_max_samples: OffOrCount = key(-1, "examples of all training files together; -1: all")
    val_max_samples: OffOrCount = key(-1, "examples of each validation file; -1: all")
    shuffle: bool = key(True, "training examples in a random order, another one in each epoch")
    seed: Size | None = key(None, "decides the order of the training examples; null: trainer.seed")
    validation_shuffle: bool = key(False, "validation questions in a random order")
    filter_overlong_prompts: bool = key(False, "leave out examples whose prompt is longer than max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "what is done to a prompt that is longer; left and right name the end that is cut off"
    )
    apply_chat_template_kwargs: Open = key(FrozenDict(), "arguments of the tokenizer's apply_chat_template")


rules = RuleBook()


@rules.problem
def episodes_fit(c: View) -> Broken:
    for name in ("data.max_start_length", "data.max_obs_length"):
        if "generate" not in c.hooks and c.gives(name):
            yield (
                f"{name}",
                f"belongs to Search-R1, and the trainer of recipe {c.recipe} does not search; use the recipe whose "
                "trainer does: python -m recipes.search_r1.main_search_r1",
            )
    if c.data.max_start_length is not None and c.data.max_start_length > c.data.max_prompt_length:
        yield (
            "data.max_start_length",
            f"must be at most data.max_prompt_length={c.data.max_prompt_length}, which holds prompt and episode; "
            "lower it, or leave it out",
        )
