"""A recipe's trainer with an engine and nothing that learns: no optimizer, no reference, no float32 masters.

What answers a prompt is the trainer's own ``generate``, so that an evaluation plays the episodes of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from core.cluster.workers import ray_backend
from core.config.code_by_path import load_object
from core.engines import make_engine
from core.engines.in_process_engine import InProcessEngine
from core.errors import memory_phase
from core.learner.models import check_lengths, load_tokenizer
from core.rollout.agent_loop import AgentLoop, make_agent_loop
from core.session import prepare_torch

if TYPE_CHECKING:
    from core.config.schema import Config
    from core.ray_trainer import RayPPOTrainer
    from core.types import Prompt


@contextmanager
def answering(
    config: Config,
    trainer: str,
    tokenizer: Any = None,
    agent_loop: AgentLoop | None = None,
    prompts: Sequence[Prompt] = (),
) -> Iterator[RayPPOTrainer]:
    """Yield the trainer ``module:class`` whose ``generate`` answers with the weights of the configuration's model.

    ``agent_loop`` plays the episodes of its prompts; without one the configured loop is made here.
    ``prompts`` have to fit into the model's positions. ``trainer.backend`` places the engine in this process or,
    several of them, in actors of a cluster. Raises InputError for a model, a tokenizer, an agent loop or an engine that
    cannot be had.
    """
    run = load_object(trainer)(config)
    run.tokenizer = tokenizer or load_tokenizer(config.actor_rollout_ref.model)
    if prompts:
        longest = {"data.val_files": run.room(max(len(prompt.token_ids) for prompt in prompts))}
        check_lengths(config, longest)
    run.agent_loop = agent_loop or make_agent_loop(config, run.tokenizer)
    with ExitStack() as owned:
        if run.agent_loop is not None:
            owned.callback(run.agent_loop.close)
        device = prepare_torch(config.trainer)
        with memory_phase("load"):
            if config.trainer.backend == "ray":
                processes = ray_backend("ray_pools").RayProcesses(config, run.tokenizer, device, learners=False)
                owned.callback(processes.close)
                engine = processes.engine
            else:
                engine = make_engine(config, None, run.tokenizer, device)
                owned.callback(engine.close)
        repeatable = config.actor_rollout_ref.rollout.multi_turn.repeatable
        if run.agent_loop is not None and repeatable and isinstance(engine, InProcessEngine):
            engine.before_step = run.tool_calls.add_barrier()
        run.sampler = run.make_sampler(engine)
        yield run
