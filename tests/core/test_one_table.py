"""Adding an estimator, a loss, an engine, a manager, a logger or an agent loop touches two files, shown by doing it.

The first file is a module of one's own (``MINE``), the second ``core/config/registry.py``, to which ``ENTRIES`` adds a
line each. A process of its own reads a copy with these lines in place of the original: that is what an edit does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import examine, registry

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

MINE = """
from core.rollout.agent_loop import AgentLoop


def halved(inputs):
    rewards = inputs.spread(inputs.rewards_B)
    return 0.5 * rewards, rewards


def plain(inputs):
    return -inputs.advantages * inputs.log_prob, {}


def echo(config, model, tokenizer, device):
    return f"an engine on {device}"


class Lines:
    def __init__(self, run):
        self.path = run.run_dir / "lines.txt"

    def log(self, step, values):
        self.path.write_text(f"step {step}: {values['training/global_step']}")

    def close(self, failed):
        pass


class Chat(AgentLoop):
    pass
"""

ENTRIES = """
ESTIMATORS["halved"] = EstimatorEntry("mine:halved", groups=True, greedy_baseline=True, reads=("gamma",))
POLICY_LOSSES["plain"] = LossEntry("mine:plain", aggregation="seq-mean-token-sum", has_ratio=False)
ENGINES["echo"] = EngineEntry("mine:echo", package="no_such_package", reads=("max_model_len",))
LOGGERS["lines"] = LoggerEntry("mine:Lines", login="with a card")
AGENT_LOOPS["chat"] = Entry("mine:Chat")
"""

CHOSEN = {
    "algorithm.adv_estimator": "halved",
    f"{ACTOR}.policy_loss.loss_mode": "plain",
    f"{ROLLOUT}.name": "echo",
    "trainer.logger": "lines",
    f"{ROLLOUT}.agent_loop": "chat",
}

PROGRAM = """
import importlib.util
import json
import sys

spec = importlib.util.spec_from_file_location("core.config.registry", sys.argv[3])
sys.modules["core.config.registry"] = registry = importlib.util.module_from_spec(spec)
spec.loader.exec_module(registry)

from core.config import compose, examine, paths

chosen = [f"{key}={value}" for key, value in json.loads(sys.argv[1]).items()]
report = {"problems": examine("grpo", chosen).problems}
config = compose("grpo", chosen)
alone = examine("grpo", [*chosen, "actor_rollout_ref.rollout.n=1"]).problems
report["alone"] = alone
report["wrong"] = examine("grpo", [f"{key}=wrong" for key in json.loads(sys.argv[1])]).problems
known = ["algorithm.gamma=0.9", "actor_rollout_ref.rollout.max_model_len=2048"]
unknown = [
    *("algorithm.lam=0.9", "algorithm.norm_adv_by_std_in_grpo=False", "actor_rollout_ref.actor.clip_ratio_high=0.3"),
    "actor_rollout_ref.rollout.enforce_eager=True",
]
report["unused"] = {k: why for k, (_, why) in examine("grpo", [*chosen, *known, *unknown]).unused.items()}
report["at_start"] = paths.checked_at_start(config)
report["torch_until_here"] = "torch" in sys.modules

import torch

from core.algorithm.advantages import estimator, inputs_of
from core.algorithm.losses import policy_loss
from core.engines import make_engine
from core.rollout.agent_loop import make_agent_loop
from core.learner.step_needs import StepNeeds
from core.tracking.tracker import Tracker
from core.types import StepMetrics, TrainBatch

ids = torch.arange(2)
batch = TrainBatch(torch.tensor([2]), {"response_mask": ids > 0, "group": ids[:1], "reward": torch.tensor([3.0])})
batch = batch.adding(in_group_stats=torch.tensor([True]))
advantages, _ = estimator(config.algorithm.adv_estimator)(inputs_of(batch, config.algorithm))
report["advantages"] = advantages.tolist()
loss = policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
report["loss"] = loss.__module__ + ":" + loss.__name__
report["baseline"] = StepNeeds.of(config).baseline
report["engine"] = make_engine(config, None, None, torch.device("cpu"))
report["loop"] = type(make_agent_loop(config, None)).__name__
tracker = Tracker(sys.argv[2], config, recipe="grpo")
metrics = StepMetrics(1)
metrics.add({"training/global_step": 1.0})
tracker.log(metrics)
tracker.close("finished")
report["logged"] = open(sys.argv[2] + "/lines.txt").read()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """What the configuration and the run make of the additions."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    text, end_of_tables = Path(registry.__file__).read_text(), "# --- types of keys"
    assert end_of_tables in text
    (folder / "registry.py").write_text(text.replace(end_of_tables, f"{ENTRIES}\n{end_of_tables}"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CHOSEN), str(folder / "run"), str(folder / "registry.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "key, known",
    [
        ("algorithm.adv_estimator", registry.ESTIMATORS),
        (f"{ACTOR}.policy_loss.loss_mode", registry.POLICY_LOSSES),
        (f"{ROLLOUT}.name", registry.ENGINES),
        ("trainer.logger", registry.LOGGERS),
        (f"{ROLLOUT}.agent_loop", registry.AGENT_LOOPS),
    ],
)
def test_without_its_entry_a_name_is_refused_with_the_list_of_names(key, known):
    (problem,) = examine("grpo", [f"{key}={CHOSEN[key]}"]).problems
    assert problem.startswith(f"{key}=") and CHOSEN[key] not in known
    assert ", ".join(known) in problem


def test_with_its_entry_each_is_accepted_and_among_the_names(added):
    assert added["problems"] == []
    for key, value in CHOSEN.items():
        (problem,) = [line for line in added["wrong"] if line.startswith(f"{key}=")]
        assert value in problem


def test_the_rules_read_the_entry(added):
    (problem,) = added["alone"]
    assert problem.startswith(f"{ROLLOUT}.n=1: algorithm.adv_estimator=halved compares")


def test_the_unused_keys_read_the_entry(added):
    assert set(added["unused"]) == {
        *("algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"),
        *(f"{ACTOR}.clip_ratio_high", f"{ROLLOUT}.enforce_eager"),
    }
    assert added["unused"][f"{ACTOR}.clip_ratio_high"].startswith(
        f"{ACTOR}.policy_loss.loss_mode=plain does not read it"
    )
    assert added["unused"][f"{ROLLOUT}.enforce_eager"].startswith(f"{ROLLOUT}.name=echo does not read it")


def test_a_dry_run_lists_what_the_entry_needs(added):
    assert "package: lines can be imported (trainer.logger)" in added["at_start"]
    assert "login: lines, with a card" in added["at_start"]
    assert [line for line in added["at_start"] if line.startswith("package: no_such_package can be imported")]
    assert not added["torch_until_here"]


def test_the_run_uses_the_function(added):
    assert added["advantages"] == [0.0, 1.5]
    assert added["baseline"] is True
    assert added["loss"] == "mine:plain"
    assert added["engine"] == "an engine on cpu"
    assert added["loop"] == "Chat"
    assert added["logged"] == "step 1: 1.0"
