"""Tokenizers and models as the configuration names them, read from Hugging Face folders or the hub.

transformers is imported where it is used: the module of the trainer stays light to import.
"""

import functools
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.config import paths, registry
from core.config.schema import Config
from core.config.section import FULL_PRECISION
from core.config.training_keys import ModelConfig
from core.errors import InputError, listed
from core.files import is_url, local_path
from core.learner.model_overrides import OVERRIDES, overridden
from core.vision.pictures import TEXT, Modality, PictureFormat, modality_of

log = logging.getLogger(__name__)
MODEL = "actor_rollout_ref.model.path"
CRITIC_CLASS = "AutoModelForTokenClassification"
# Left out of the copy of a URL where only a tokenizer or a model's shape is needed
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt*", "*.h5", "*.msgpack", "*.gguf", "*.distcp")
# Parts of names of a configuration's fields: dropout, layerdrop, router_jitter_noise
NOISE = ("drop", "jitter")
# Spaces, newlines, digits, capitals, scripts: tokenizers of one vocabulary divide them differently
TOKENIZER_SAMPLE = (
    "Tom has 12 apples\nand buys 345 more.  It's\n\n DON'T\tcafé ﬁ a\u0301 你好 "
    "Привет हिन्दी 🙂 x=1\n"
)


# -- where a model is ------------------------------------------------------------------------------


def resolve_path(path: str, key: str = MODEL, *, weights: bool = True) -> str:
    """Return a hub id as it is, a local path checked, and of a URL the copy on this node.

    Without ``weights`` the copy lacks them. Raises InputError if there is no model.
    """
    if not (paths.is_local(path) or is_url(path)):
        return path
    local = Path(local_path(path, key, without=() if weights else WEIGHT_FILES)).expanduser()
    if (local / "adapter_config.json").exists() and not key.endswith("tokenizer_path"):
        raise InputError(
            f"{key}={path}: holds adapters, not a model; merge them into their base first: "
            "python -m core.export CHECKPOINT NEW_FOLDER"
        )
    if not (local / "config.json").exists():
        raise InputError(
            f"{key}={path}: no config.json there; give a Hugging Face folder or a hub id (org/name)"
        )
    return str(local)


@contextmanager
def readable(path: str, key: str = MODEL) -> Iterator[None]:
    """Raise transformers' errors about a folder or hub id that it cannot read as an InputError."""
    from safetensors import SafetensorError

    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{key}={path}: cannot be read ({reason}); give a Hugging Face folder, or a hub id "
            "that can be reached or is in the cache"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Run a block without transformers' bars, which would write over the run's, and warnings."""
    from transformers.utils import logging as library

    verbosity = library.get_verbosity()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        library.enable_progress_bar()


# -- tokenizer, modality, lengths ------------------------------------------------------------------


def read_tokenizer(path: str, key: str = MODEL, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or hub id as its ``tokenizer.json`` has it. Raises InputError.

    AutoTokenizer decides only where there is no such file or the model brings its own code.
    Elsewhere it would build another tokenizer: most classes take the vocabulary of the file and add
    the spaces, pre-tokenizer and special tokens of the model that they are named after.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    with readable(path, key):
        file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        by_class = None
        try:
            by_class = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception:
            # The class may be unable to use this vocabulary, and it fails in its own way
            if file is None or trust_remote_code:
                raise
        if file is None or (by_class and not type(by_class).__module__.startswith("transformers.")):
            return by_class
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    vocabulary = tokenizer.get_vocab()
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        default = getattr(by_class, name, None)
        if getattr(tokenizer, name) is None and default in vocabulary:
            setattr(tokenizer, name, default)
    if by_class is None or _tokenized(by_class) != _tokenized(tokenizer):
        warn_once(
            "%s: transformers' AutoTokenizer tokenizes otherwise than the model's tokenizer.json; "
            "tokenizer.json is taken, and a deployment must take it too",
            path,
        )
    return tokenizer


def _tokenized(tokenizer: Any) -> tuple[list[int], str]:
    ids = tokenizer(TOKENIZER_SAMPLE, add_special_tokens=False)["input_ids"]
    return ids, tokenizer.decode(ids)


@functools.cache
def warn_once(text: str, model: str) -> None:
    """Log a warning of a model once: learner and engine load one each."""
    log.warning(text, model)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer with a pad token and the configured chat template. Raises InputError."""
    key = "actor_rollout_ref.model.tokenizer_path" if model.tokenizer_path else MODEL
    path = resolve_path(model.tokenizer_path or model.path, key, weights=False)
    tokenizer = read_tokenizer(path, key, trust_remote_code=model.trust_remote_code)
    if tokenizer.pad_token_id is None:  # padding never carries loss or attention, so any id serves
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"{key}={path}: the tokenizer has neither a pad nor an eos token; set one in its "
                "tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _template_of_processor(path)
    template = model.custom_chat_template
    if template is not None:
        # Without these it is a path, or a text that would be every prompt
        if "{" not in template or "messages" not in template:
            raise InputError(
                f"actor_rollout_ref.model.custom_chat_template={template}: is no Jinja template "
                "that reads messages; give the text of one, not a file's path"
            )
        tokenizer.chat_template = template
    return tokenizer


def _template_of_processor(path: str) -> str | None:
    """Return the template of ``chat_template.json``, which only processors and vLLM read."""
    from transformers.utils import cached_file

    file = cached_file(
        path,
        "chat_template.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    return json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template")


def load_modality(model: ModelConfig, tokenizer: Any) -> Modality:
    """Return how the model reads prompts. Raises InputError for an unknown way of pictures."""
    path = resolve_path(model.path, weights=False)
    config = _model_config(model, path, overrides=False)
    modality = modality_of(config)
    if modality.reads_media:
        return Modality(True, PictureFormat.of(config, path, tokenizer))
    if getattr(config, "vision_config", None) is not None:
        known = ", ".join(registry.PICTURE_MODELS)
        raise InputError(
            f"{MODEL}={model.path}: its model_type {config.model_type} reads pictures in its own "
            f"way; known are {known}"
        )
    return modality


def same_positions(config: Any) -> int | None:
    """Return the longest sequence that leaves the positions of others as they are, or None.

    Dynamic and longrope choose the frequencies of a whole pass, and of all that follows in a cache,
    by its longest sequence: beyond this length log-probs would depend on what shares the pass.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    by_kind_of_layer = [each for each in rope.values() if isinstance(each, Mapping)]
    limits = []
    for parameters in by_kind_of_layer or [rope]:
        rope_type = parameters.get("rope_type") or ""
        if "dynamic" in rope_type:
            limits.append(text.max_position_embeddings)
        elif rope_type == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    return min(limits, default=None)


def positions(config: Any) -> int:
    """Return the longest sequence that a model of this configuration can read."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(longest, same_positions(config) or longest)


def check_lengths(config: Config, longest: Mapping[str, tuple[int, int]]) -> None:
    """Raise InputError if the model has too few positions for the sequences of any files.

    ``longest`` maps the key of the files to the tokens of the longest prompt, and of what may
    follow it.
    """
    model = config.actor_rollout_ref.model
    data = config.data
    shape = _model_config(model, resolve_path(model.path, weights=False))
    limit = positions(shape)
    reason = ""
    if limit == same_positions(shape):
        reason = (
            " before its positions depend on the longest sequence of a pass (dynamic, longrope)"
        )
    fix = "lower them"
    if not data.filter_overlong_prompts:
        fix += " (data.filter_overlong_prompts=True leaves out the prompts that are then too long)"
    problems = [
        f"data.max_prompt_length={data.max_prompt_length}, "
        f"data.max_response_length={data.max_response_length}: the longest prompt of {key} has "
        f"{prompt} tokens and {following} may follow, and {model.path} has "
        f"max_position_embeddings={limit}{reason}; {fix}"
        for key, (prompt, following) in longest.items()
        if prompt + following > limit
    ]
    if problems:
        raise InputError(problems)


# -- models ----------------------------------------------------------------------------------------


def load_policy(
    model: ModelConfig, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> nn.Module:
    """Load the language model; with ``on_meta`` without reading or allocating a weight."""
    return _load(TEXT.auto_class, model, dtype, on_meta)


def load_critic(
    model: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> nn.Module:
    """Load PPO's value function: a model's body and a new one-number head on every token."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the run's seed decides the head, not what ran before
        return _load(
            CRITIC_CLASS,
            model,
            dtype,
            on_meta,
            num_labels=1,
            classifier_dropout=0.0,
        )


def auto_class(config: Any, auto: str = TEXT.auto_class) -> Any:
    """Return transformers' class that loads this model, with the parts that read pictures."""
    import transformers

    if auto == TEXT.auto_class:
        auto = modality_of(config).auto_class
    return getattr(transformers, auto)


def tied(module: nn.Module) -> nn.Module:
    """Tie the head to the embeddings if the model's configuration does, whatever the files hold.

    transformers leaves apart two matrices of the files. Engines tie them, and so do readers of an
    export.
    """
    embeddings = module.get_input_embeddings()
    head = module.get_output_embeddings()
    # Where pictures are read too the field stands outside of text_config, and transformers reads it
    is_tied = getattr(module.config, "tie_word_embeddings", False)
    if is_tied and head is not None and head.weight is not embeddings.weight:
        warn_once(
            "%s: tie_word_embeddings is true, and the files hold a head of its own, which is not "
            "used: the head is the embeddings, in training and in what is saved",
            module.config.name_or_path,
        )
        head.weight = embeddings.weight
    return module


def compute_dtype(name: str) -> torch.dtype | None:
    """Return the autocast dtype, or None for none: masters and reductions stay float32."""
    return None if name in FULL_PRECISION else torch.bfloat16


def _load(
    auto: str, model: ModelConfig, dtype: torch.dtype, on_meta: bool, **head: Any
) -> nn.Module:
    """Load a model of an auto class; ``head`` are fields of its configuration."""
    import transformers

    path = resolve_path(model.path, weights=not on_meta)
    config = _model_config(model, path)
    noise = _switch_off_noise(config)
    for name, value in head.items():
        setattr(config, name, value)
    options = {"dtype": dtype, "trust_remote_code": model.trust_remote_code}
    with quiet(), readable(path):
        if on_meta:
            with torch.device("meta"):
                module = auto_class(config, auto).from_config(config, **options)
            # It names all ids that end a response; not every model has one
            with suppress(OSError):
                module.generation_config = transformers.GenerationConfig.from_pretrained(path)
        else:
            module = tied(_with_weights(auto_class(config, auto), model, path, config, options))
    module.noise = noise
    modality_of(config).load_processor(module, path)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Gradient checkpointing works in training mode only; with dropout off they agree
    return module.train()


def _with_weights(
    kind: Any, model: ModelConfig, path: str, config: Any, options: Mapping[str, Any]
) -> nn.Module:
    """Return the model with the weights of its files.

    Raises InputError: the files lack weights, which transformers would draw at random, or have them
    in another shape. A critic's head is new, so only what its body lacks counts.
    """
    try:
        module, info = kind.from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, with their names
            **options,
        )
    except (KeyError, TypeError, RuntimeError) as error:  # each class fails in its own way
        if not model.override_config or isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            f"{OVERRIDES}={model.override_config}: no {kind.__name__} can be built with it "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); give what the "
            "config.json of such a model may hold"
        ) from error
    body = f"{module.base_model_prefix}."
    is_critic = kind.__name__ == CRITIC_CLASS

    def of_model(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if name.startswith(body) or not is_critic)

    shapes = {name: (there, here) for name, there, here in info["mismatched_keys"]}
    if odd := of_model(shapes):
        there, here = (tuple(shape) for shape in shapes[odd[0]])
        problem = f"{odd[0]} is {there} in the files, and config.json makes it {here}"
    elif missing := of_model(info["missing_keys"]):
        problem = f"the files lack {len(missing)} weights ({listed(missing, 3)})"
        if unread := sorted(info["unexpected_keys"]):
            problem += f" and have {len(unread)} of other names ({listed(unread, 3)})"
    else:
        if (unread := of_model(info["unexpected_keys"])) and not model.override_config:
            warn_once(f"%s: has weights that are not read: {listed(unread, 5)}", path)
        return module
    fix = "give the files of this model"
    if model.override_config:
        fix = f"take {OVERRIDES}={model.override_config} back, or {fix}"
    raise InputError(f"{MODEL}={path}: {problem}; {fix}")


def _switch_off_noise(config: Any) -> list[tuple[str, str, float]]:
    """Set what is random in training to 0: a ratio of two passes must be the policies' alone.

    Returns the sub-configuration ("" for the configuration itself), field and value of each.
    """
    noise = []
    for name in ("", *getattr(config, "sub_configs", ())):
        section = _sub_config(config, name)
        fields = {} if section is None else dict(vars(section))
        for field, value in fields.items():
            is_noise = any(word in field for word in NOISE)
            if is_noise and type(value) in (int, float) and value:
                setattr(section, field, 0.0)
                noise.append((name, field, value))
    return noise


def _sub_config(config: Any, name: str) -> Any:
    return getattr(config, name, None) if name else config


@contextmanager
def base_settings(module: nn.Module) -> Iterator[None]:
    """Give a configuration the dropout of its base for a block: checkpoints and exports keep it."""
    noise = getattr(module, "noise", ())
    for name, field, value in noise:
        setattr(_sub_config(module.config, name), field, value)
    try:
        yield
    finally:
        for name, field, _ in noise:
            setattr(_sub_config(module.config, name), field, 0.0)


# -- override_config -------------------------------------------------------------------------------


def _model_config(model: ModelConfig, path: str, *, overrides: bool = True) -> Any:
    """Return transformers' configuration of a model with ``override_config``. Raises InputError."""
    import transformers

    with readable(path):
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=model.trust_remote_code
        )
    changes = deepcopy(model.override_config) if overrides else {}
    return overridden(config, path, changes) if changes else config


def config_changes(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that ``override_config`` changes, derived ones included."""
    if not model.override_config:
        return {}
    path = resolve_path(model.path, weights=False)
    before = _model_config(model, path, overrides=False).to_dict()
    after = _model_config(model, path).to_dict()
    return {name: value for name, value in after.items() if before.get(name) != value}
