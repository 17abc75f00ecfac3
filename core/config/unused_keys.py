"""Keys that have no effect in a configuration, with the reason: they are listed at start."""

from core.config import registry
from core.config.schema import Config
from core.config.section import Section, key_option
from core.config.training_keys import ACTOR

ROLLOUT = "actor_rollout_ref.rollout"


def unused(config: Config, key: str) -> str:
    """Return why a key, or a section around it, has no effect; nothing if it has one."""
    section: Section = config
    section_key = ""
    for name in key.split("."):
        if name not in type(section).model_fields:
            return ""
        condition = key_option(type(section), name, "used_if")
        if condition is not None and not condition.holds(config, section):
            return condition.because.format(section=section_key)
        section = getattr(section, name)
        section_key = f"{section_key}.{name}".lstrip(".")
        if not isinstance(section, Section):
            break
    _, _, argument = key.partition(f"{ROLLOUT}.engine_kwargs.")
    engine = config.actor_rollout_ref.rollout.name
    if argument and argument.split(".")[0] != engine:
        return f"the engine is {engine}"
    return _unread(config, key)


def _unread(config: Config, key: str) -> str:
    """Return why the chosen estimator, loss or engine does not read a key; nothing if it does."""
    models = config.actor_rollout_ref
    estimator = config.algorithm.adv_estimator
    loss = models.actor.policy_loss.loss_mode
    for section, choice, name, table, reads in (
        ("algorithm", "adv_estimator", estimator, registry.ESTIMATORS, registry.estimator),
        (ACTOR, "policy_loss.loss_mode", loss, registry.POLICY_LOSSES, registry.policy_loss),
        (ROLLOUT, "name", models.rollout.name, registry.ENGINES, registry.ENGINES.get),
    ):
        setting = key.removeprefix(f"{section}.")
        readers = [other for other, entry in table.items() if setting in entry.reads]
        if readers and setting not in reads(name).reads:
            return f"{section}.{choice}={name} does not read it, only {', '.join(readers)}"
    return ""
