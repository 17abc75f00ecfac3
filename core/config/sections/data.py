"""The section ``data`` with its rules."""

from __future__ import annotations

from typing import Literal

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.rulebook import Broken, RuleBook, View
from core.config.section import Open, Section


class DataConfig(Section):
    train_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/train.parquet",)  # parquet files of training examples
    val_files: limits.NonEmpty = ("~/data/rlhf/gsm8k/test.parquet",)  # parquet files of validation questions
    dataset_weights: tuple[limits.Positive, ...] | None = None  # one a training file; None: by number of examples
    curriculum: tuple[Open, ...] | None = None  # stages {files, prompts, weights} in place of train_files
    prompt_key: str = "prompt"  # column that holds the prompt, a list of chat messages
    image_key: str = "images"  # column that holds the pictures of a prompt, one for each <image> in it
    reward_fn_key: str = "data_source"  # column that names the data source, which chooses the scorer
    max_prompt_length: limits.Count = 512  # tokens of the prompt; in a search episode, of prompt and episode
    max_response_length: limits.Count = 512  # tokens of the answer, tools' included; search episodes: of one turn
    max_start_length: limits.Count | None = None  # search episodes: tokens of the prompt; None: max_prompt_length
    max_obs_length: limits.Count = 500  # search episodes: tokens of what a search returns
    train_batch_size: limits.Count = 1024  # prompts a step
    gen_batch_size: limits.Count | None = None  # prompts in flight at most; None: train_batch_size
    train_max_samples: limits.OffOrCount = -1  # examples of all training files together; -1: all
    val_max_samples: limits.OffOrCount = -1  # examples of each validation file; -1: all
    shuffle: bool = True  # training examples in a random order, another one in each epoch
    seed: limits.Size | None = None  # decides the order of the training examples; None: trainer.seed
    validation_shuffle: bool = False  # validation questions in a random order
    filter_overlong_prompts: bool = False  # leave out examples whose prompt is longer than max_prompt_length
    # what is done to a prompt that is longer; left and right name the end that is cut off
    truncation: Literal["error", "left", "right", "middle"] = "error"
    apply_chat_template_kwargs: Open = FrozenDict()  # arguments of the tokenizer's apply_chat_template


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


@rules.problem
def files_and_stages(c: View) -> Broken:
    if (
        c.data.curriculum is None
        and c.data.dataset_weights is not None
        and (len(c.data.dataset_weights) != len(c.data.train_files))
    ):
        yield (
            "data.dataset_weights",
            "must have one weight a file of data.train_files; give a weight to each, or null for the number of rows",
        )
    if c.data.curriculum is not None and c.data.dataset_weights is not None:
        yield (
            "data.dataset_weights",
            "has no meaning with data.curriculum; give each stage its weights: {files: [...], weights: [...]}",
        )
    if c.data.curriculum is not None and not c.data.curriculum:
        yield ("data.curriculum", "must have a stage; give [{files: [...], prompts: N}, ...], or null")
    if c.data.curriculum is not None and c.data.train_max_samples != -1:
        yield ("data.train_max_samples", "has no meaning with data.curriculum; leave it at -1")
