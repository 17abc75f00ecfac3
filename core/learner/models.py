"""Tokenizers and models as the configuration names them, read from Hugging Face folders or the hub.

transformers is imported where it is used: the module of the trainer stays light to import.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.config import paths, registry
from core.config.section import FULL_PRECISION, thaw
from core.errors import InputError
from core.files import is_url, local_path
from core.vision.pictures import TEXT, Modality, PictureFormat, modality_of

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.config.section import Section
    from core.config.training_keys import ModelConfig


log = logging.getLogger(__name__)
MODEL, REWARD_MODEL = "actor_rollout_ref.model.path", "reward_model.model.path"
# Who needs a tokenizer or a model's shape leaves these out of the copy of a URL.
WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.distcp",
)
# In names of a configuration's fields: dropout, layerdrop, router_jitter_noise
NOISE = ("drop", "jitter")
# Spaces, newlines, digits, capitals and scripts, which tokenizers of one vocabulary divide
# differently
TOKENIZER_SAMPLE = (
    "Tom has 12 apples\nand buys 345 more.  It's\n\n DON'T\tcafé ﬁ a\u0301 你好 "
    "Привет हिन्दी 🙂 x=1\n"
)
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
CLASSIFIERS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}


# -- where a model is ------------------------------------------------------------------------------


def resolve_path(path: str, key: str = MODEL, *, weights: bool = True) -> str:
    """Return a hub id as it is, a local path expanded and checked, and of a URL the copy on this
    node.

    Without ``weights`` the copy lacks them. Raises InputError where there is no model.
    """
    if not (paths.is_local(path) or is_url(path)):
        return path
    local = Path(local_path(path, key, without=() if weights else WEIGHT_FILES)).expanduser()
    if (local / "adapter_config.json").exists() and not key.endswith("tokenizer_path"):
        fix = "merge them into their base first: python -m core.export CHECKPOINT NEW_FOLDER"
        raise InputError(f"{key}={path}: holds adapters, not a model; {fix}")
    if not (local / "config.json").exists():
        raise InputError(
            f"{key}={path}: no config.json there; give a Hugging Face folder or a hub id (org/name)"
        )
    return str(local)


@contextmanager
def readable(path: str, key: str = MODEL) -> Iterator[None]:
    """Raise what transformers raises for a folder or hub id that it cannot read as an InputError of
    one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        fix = "give a Hugging Face folder, or a hub id that can be reached or is in the cache"
        raise InputError(f"{key}={path}: cannot be read ({reason}); {fix}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Run a block without transformers' own bars, which would write over the run's, and its table
    of a new head."""
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
        _warn_of_tokenizer_class(path)
    return tokenizer


def _tokenized(tokenizer: Any) -> tuple[list[int], str]:
    ids = tokenizer(TOKENIZER_SAMPLE, add_special_tokens=False)["input_ids"]
    return ids, tokenizer.decode(ids)


@functools.cache
def _warn_of_tokenizer_class(path: str) -> None:
    rule = "transformers' AutoTokenizer tokenizes otherwise than the model's tokenizer.json"
    log.warning("%s: %s; tokenizer.json is taken, and a deployment must take it too", path, rule)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer, with a pad token in any case and the configured chat template. Raises
    InputError."""
    key = "actor_rollout_ref.model.tokenizer_path" if model.tokenizer_path else MODEL
    path = resolve_path(model.tokenizer_path or model.path, key, weights=False)
    tokenizer = read_tokenizer(path, key, trust_remote_code=model.trust_remote_code)
    if tokenizer.pad_token_id is None:  # padding never carries loss or attention, so any id serves
        if tokenizer.eos_token_id is None:
            rule = "the tokenizer has neither a pad nor an eos token"
            raise InputError(f"{key}={path}: {rule}; set one in its tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _template_of_processor(path)
    if (template := model.custom_chat_template) is not None:
        # A path, or a text that would be every prompt
        if "{" not in template or "messages" not in template:
            rule = (
                "is no Jinja template that reads messages; give the text of one, not a file's path"
            )
            raise InputError(f"actor_rollout_ref.model.custom_chat_template={template}: {rule}")
        tokenizer.chat_template = template
    return tokenizer


def _template_of_processor(path: str) -> str | None:
    """Return the template of ``chat_template.json``, which only processors and vLLM read."""
    from transformers.utils import cached_file

    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quietly = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    file = cached_file(path, "chat_template.json", **quietly)
    return file and json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template")


def load_modality(model: ModelConfig, tokenizer: Any) -> Modality:
    """Return how the model reads prompts. Raises InputError for a model that reads media in an
    unknown way."""
    path = resolve_path(model.path, weights=False)
    config = _model_config(model, path, overrides=False)
    modality = modality_of(config)
    if getattr(config, "vision_config", None) is not None and not modality.reads_media:
        known = ", ".join(registry.PICTURE_MODELS) or "none"
        rule = (
            f"its model_type {config.model_type} reads pictures in its own way; known are {known}"
        )
        raise InputError(f"{MODEL}={model.path}: {rule}")
    return (
        Modality(True, PictureFormat.of(config, path, tokenizer))
        if modality.reads_media
        else modality
    )


def same_positions(config: Any) -> int | None:
    """Return the longest sequence that leaves the positions of others alone; None for models
    without such a bound.

    Dynamic and longrope choose the frequencies of a whole pass, and of all that follows in a cache,
    by the longest sequence in it: beyond this length log-probs would depend on what shares the
    pass.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    types = [each.get("rope_type") or "" for each in kinds]
    limits = [text.max_position_embeddings for each in types if "dynamic" in each]
    pairs = zip(types, kinds, strict=True)
    limits += [
        each["original_max_position_embeddings"] for name, each in pairs if name == "longrope"
    ]
    return min(limits, default=None)


def positions(config: Any) -> int:
    """Return the longest sequence that a model of this configuration can read."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(most, same_positions(config) or most)


def check_lengths(config: Config, longest: Mapping[str, tuple[int, int]]) -> None:
    """Check that the model has positions for the longest sequence that each key's files may lead
    to.

    ``longest`` maps a key to the tokens of its longest prompt and those that may follow it. Raises
    InputError.
    """
    model, data = config.actor_rollout_ref.model, config.data
    shape = _model_config(model, resolve_path(model.path, weights=False))
    most, why = positions(shape), ""
    if most == same_positions(shape):
        why = " before its positions depend on the longest sequence of a pass (dynamic, longrope)"
    fix = "lower them"
    if not data.filter_overlong_prompts:
        fix += " (data.filter_overlong_prompts=True leaves out the prompts that are then too long)"
    keys = (
        f"data.max_prompt_length={data.max_prompt_length}, "
        f"data.max_response_length={data.max_response_length}"
    )
    problems = [
        f"{keys}: the longest prompt of {key} has {prompt} tokens and {more} may follow, and "
        f"{model.path} has "
        f"max_position_embeddings={most}{why}; {fix}"
        for key, (prompt, more) in longest.items()
        if prompt + more > most
    ]
    if problems:
        raise InputError(problems)


# -- models ----------------------------------------------------------------------------------------


def load_policy(
    model: ModelConfig, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> nn.Module:
    """Load the language model, which may read media. ``on_meta`` builds it without reading or
    allocating a weight."""
    return _load(TEXT.auto_class, model, dtype, on_meta)


def load_critic(
    model: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> nn.Module:
    """Load a copy of the policy's body with a fresh one-number head on every token (PPO's value
    function)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the head is new: the run's seed decides it, not what ran before
        return _load(
            CLASSIFIERS["ForTokenClassification"],
            model,
            dtype,
            on_meta,
            num_labels=1,
            classifier_dropout=0.0,
        )


def load_classifier(model: Section) -> tuple[nn.Module, bool]:
    """Load a trained classifier with one label in eval mode; return it and whether it labels tokens
    (else sequences).

    Its weights have the number format of the passes. Raises InputError for a folder that holds
    anything else.
    """
    import transformers

    path = resolve_path(model.path, REWARD_MODEL)
    with readable(path, REWARD_MODEL):
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=model.trust_remote_code
        )
    names = " ".join(config.architectures or ())
    kind = next((kind for end, kind in CLASSIFIERS.items() if end in names), None)
    if kind is None or config.num_labels != 1:
        has = f"{names or 'no architecture'} with {config.num_labels} labels"
        rule = f"it has {has}; a reward model is a sequence or token classifier with one label"
        raise InputError(f"{REWARD_MODEL}={model.path}: {rule}")
    auto = getattr(transformers, kind)
    dtype = compute_dtype(model.fsdp_config.dtype) or torch.float32
    options = {"config": config, "dtype": dtype, "trust_remote_code": model.trust_remote_code}
    with quiet():
        module = auto.from_pretrained(path, **options)
    return module.eval().requires_grad_(False), "TokenClassification" in kind


def auto_class(config: Any, auto: str = TEXT.auto_class) -> Any:
    """Return transformers' class that loads a language model of this configuration, with the parts
    that read media."""
    import transformers

    return getattr(
        transformers, modality_of(config).auto_class if auto == TEXT.auto_class else auto
    )


def tied(module: nn.Module) -> nn.Module:
    """Tie the head to the embeddings where the model's configuration ties them, whatever the files
    hold.

    transformers leaves apart what the files hold as two matrices; engines tie them, and so does who
    reads an export.
    """
    inputs, head = module.get_input_embeddings(), module.get_output_embeddings()
    if (
        module.config.get_text_config().tie_word_embeddings
        and head is not None
        and head.weight is not inputs.weight
    ):
        _warn_of_own_head(module.config.name_or_path)
        head.weight = inputs.weight
    return module


@functools.cache
def _warn_of_own_head(model: str) -> None:  # once: learner and engine load a model each
    rule = "tie_word_embeddings is true, and the files hold a head of its own"
    log.warning(
        "%s: %s, which is not used: the head is the embeddings, in training and in what is saved",
        model,
        rule,
    )


def freeze_parts(module: nn.Module, config: Config) -> nn.Module:
    """Freeze the parts of the policy that the configuration excludes from training."""
    if config.actor_rollout_ref.actor.freeze_vision_tower:
        from core.vision.learner_pictures import freeze_vision_tower

        freeze_vision_tower(module)
    return module


def compute_dtype(name: str) -> torch.dtype | None:
    """Return the autocast dtype, or None for none: masters and reductions stay float32."""
    return None if name in FULL_PRECISION else torch.bfloat16


def _load(
    auto: str, model: ModelConfig, dtype: torch.dtype, on_meta: bool, **head: Any
) -> nn.Module:
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
            with suppress(OSError):  # not every model has one; it names all ids that end a response
                module.generation_config = transformers.GenerationConfig.from_pretrained(path)
        else:
            module = tied(auto_class(config, auto).from_pretrained(path, config=config, **options))
    module.noise = noise
    modality_of(config).load_processor(module, path)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Gradient checkpointing works in training mode only; with dropout off they agree
    return module.train()


def _switch_off_noise(config: Any) -> list[tuple[str, str, float]]:
    """Switch off what is random in training: a ratio between two passes must be the policies'
    alone.

    Returns the part of the configuration ("" for itself), field and value of each.
    """
    noise = []
    for part in ("", *getattr(config, "sub_configs", ())):
        target = getattr(config, part, None) if part else config
        for name, value in list(vars(target).items()) if target is not None else ():
            if any(word in name for word in NOISE) and type(value) in (int, float) and value:
                setattr(target, name, 0.0)
                noise.append((part, name, value))
    return noise


@contextmanager
def base_settings(module: nn.Module) -> Iterator[None]:
    """Give a model's configuration the dropout of its base for a block: checkpoints and exports
    keep it."""
    noise = [
        (getattr(module.config, part) if part else module.config, name, value)
        for part, name, value in getattr(module, "noise", ())
    ]
    for target, name, value in noise:
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, _ in noise:
            setattr(target, name, 0.0)


def _model_config(model: ModelConfig, path: str, *, overrides: bool = True) -> Any:
    """Return transformers' configuration of a model, with ``override_config``. Raises InputError
    for unknown fields."""
    import transformers

    with readable(path):
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=model.trust_remote_code
        )
    changes = thaw(model.override_config) if overrides else {}
    return _overridden(config, path, changes) if changes else config


def config_changes(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model's configuration that ``override_config`` changes, derived ones
    included."""
    if not model.override_config:
        return {}
    path = resolve_path(model.path, weights=False)
    before = _model_config(model, path, overrides=False).to_dict()
    after = _model_config(model, path).to_dict()
    return {name: value for name, value in after.items() if before.get(name) != value}


def _overridden(config: Any, path: str, changes: dict[str, Any]) -> Any:
    """Return the configuration that a ``config.json`` with these changes would give. Raises
    InputError."""
    key = "actor_rollout_ref.model.override_config"
    kind, rope = type(config), getattr(config, "rope_parameters", None)
    known = ROPE_FIELDS if rope else ()
    for name in changes:
        if not (hasattr(config, name) or name in known):
            raise InputError(f"{key}.{name}: {kind.__name__} has no such field")
    fields, _ = kind.get_config_dict(path)
    pattern = fields.pop("layer_types", None)
    if pattern and getattr(kind.from_dict(dict(fields)), "layer_types", None) != pattern:
        # Of the model's own; elsewhere it follows from the window's fields
        fields["layer_types"] = pattern
    of_rope = {name: value for name, value in changes.items() if name in known}
    changes = {name: value for name, value in changes.items() if name not in of_rope}
    if of_rope:
        fields = {name: value for name, value in fields.items() if name not in ROPE_FIELDS}
        fields["rope_parameters"] = _rope_parameters(rope, of_rope, key)
    for name, value in changes.items():
        part = fields.get(name)
        fields[name] = (
            {**part, **value} if isinstance(part, dict) and isinstance(value, dict) else value
        )
    try:
        result = kind.from_dict(fields)
    except Exception as error:  # each class checks its fields in its own way
        rule = f"{kind.__name__} refuses it ({' '.join(str(error).split())[:200]})"
        raise InputError(
            f"{key}={changes | of_rope}: {rule}; give what its config.json may hold"
        ) from error
    result.name_or_path = path
    for name, value in changes.items():
        if not isinstance(value, dict) and getattr(result, name, value) != value:
            rule = f"{kind.__name__} makes {getattr(result, name)} of it"
            fix = "set the field that it depends on too (sliding_window needs use_sliding_window)"
            raise InputError(f"{key}.{name}={value}: {rule}; {fix}")
    kinds = getattr(result, "layer_types", None)
    if changes.get("sliding_window") and kinds and "sliding_attention" not in kinds:
        rule = f"no layer of {kind.__name__} has a window"
        raise InputError(
            f"{key}.sliding_window={changes['sliding_window']}: {rule}; lower max_window_layers too"
        )
    return result


def _rope_parameters(rope: Mapping[str, Any], changes: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the parameters of rotary positions: ``rope_scaling`` replaces all but the base and the
    share of a head."""
    whole = changes.get("rope_parameters", changes.get("rope_scaling", rope))
    whole = dict(whole or {"rope_type": "default"})
    if any(isinstance(value, Mapping) for value in rope.values()):
        if whole.keys() != rope.keys() or "rope_theta" in changes:
            rule = f"positions differ by kind of layer here ({', '.join(rope)})"
            raise InputError(f"{key}: {rule}; give rope_parameters with each of them")
        return whole
    if "type" in whole:  # its name in older files
        whole["rope_type"] = whole.pop("type")
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    theta = {"rope_theta": changes["rope_theta"]} if "rope_theta" in changes else {}
    return {**kept, **whole, **theta}
