"""Runs in the environment of make_env.sh: puts a JSON document through verl's or TRL's own code.

``python published.py verl|trl < inputs.json > outputs.json``. Nothing of this repository is imported here.
"""

import contextlib
import json
import math
import sys
import tempfile
from types import SimpleNamespace

import torch


def tensor(values):
    return torch.tensor([[math.nan if x is None else x for x in row] for row in values], dtype=torch.float64)


def run_verl(given):
    """Advantages of every estimator, and each policy loss with its gradient."""
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    rewards, mask = tensor(given["rewards"]), torch.tensor(given["mask"])
    index, config = np.array(given["group"]), SimpleNamespace(gamma=given["gamma"], lam=given["lam"])
    common = {"token_level_rewards": rewards, "response_mask": mask}
    out = {"advantages": {}, "losses": {}}
    gae = core_algos.compute_gae_advantage_return(
        rewards, tensor(given["values"]), mask, torch.tensor(given["gamma"]), torch.tensor(given["lam"])
    )
    estimators = {"gae": gae}
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"):
        function = core_algos.get_adv_estimator_fn(name)
        estimators[name] = function(**common, index=index, config=config)
    estimators["dr_grpo"] = core_algos.compute_grpo_outcome_advantage(
        **common, index=index, norm_adv_by_std_in_grpo=False
    )
    estimators["remax"] = core_algos.compute_remax_outcome_advantage(
        rewards, torch.tensor(given["baseline"], dtype=torch.float64), mask
    )
    for name, (advantages, returns) in estimators.items():
        out["advantages"][name] = [(x * mask).tolist() for x in (advantages, returns)]
    for mode in given["loss_modes"]:
        for agg in given["agg_modes"]:
            log_prob = tensor(given["log_prob"]).requires_grad_()
            actor = FSDPActorConfig(
                strategy="fsdp",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=1,
                clip_ratio=0.2,
                clip_ratio_low=given["clip"][0],
                clip_ratio_high=given["clip"][1],
                clip_ratio_c=given["clip"][2],
            )
            loss, _ = core_algos.get_policy_loss_fn(mode)(
                old_log_prob=tensor(given["old_log_prob"]),
                log_prob=log_prob,
                advantages=tensor(given["advantages"]),
                response_mask=mask.bool(),
                loss_agg_mode=agg,
                config=actor,
            )
            loss.backward()
            out["losses"][f"{mode} {agg}"] = [float(loss), log_prob.grad.tolist()]
    return out


def tiny_trainer(cls, config, rewards, completions):
    """A trainer of a model of one layer whose completions and rewards are given."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(30)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=1, eos_token_id=1, pad_token_id=0, **sizes))

    class Given(cls):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return completions if cls.__name__.startswith("RLOO") else (completions, None)

    dataset = Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(8)])
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def trl_losses(trainer, given):
    """``_compute_loss`` on given log-probs, which stand in for those of the model, and its gradient in them."""
    log_prob = tensor(given["log_prob"]).requires_grad_()
    mask = torch.tensor(given["mask"])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_prob, torch.zeros_like(log_prob), None)
    inputs = {
        "prompt_ids": torch.ones(len(mask), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 2, dtype=torch.int64),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(given["row_advantages"], dtype=torch.float64),
        "old_per_token_logps": tensor(given["old_log_prob"]),
        "ref_per_token_logps": tensor(given["ref_log_prob"]),
        "old_logps": (log_prob.detach() * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return [float(loss), log_prob.grad.tolist()]


def run_trl(given):
    """Advantages of GRPO, Dr. GRPO and RLOO; GRPO's loss in its forms, and RLOO's at the old policy."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    n, rewards = given["n"], given["outcome"]
    completions = [[2] * (3 + i % 4) + [1] for i in range(len(rewards))]
    common = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "num_generations": n,
        "per_device_train_batch_size": len(rewards),
        "gradient_accumulation_steps": 1,
        "max_completion_length": given["width"],
        "disable_tqdm": True,
        "epsilon": given["clip"][0],
        "epsilon_high": given["clip"][1],
    }
    rows = [{"prompt": f"w{i // n} w1"} for i in range(len(rewards))]
    out = {"advantages": {}, "losses": {}}
    for name, scale in (("grpo", "group"), ("dr_grpo", "none")):
        trainer = tiny_trainer(GRPOTrainer, GRPOConfig(beta=0.0, scale_rewards=scale, **common), rewards, completions)
        out["advantages"][name] = trainer._generate_and_score_completions(rows)["advantages"].tolist()
    rloo = tiny_trainer(RLOOTrainer, RLOOConfig(beta=0.0, **common), rewards, completions)
    out["advantages"]["rloo"] = rloo._generate_and_score_completions(rows)["advantages"].tolist()
    out["losses"]["rloo"] = trl_losses(rloo, given)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        for level in ("token", "sequence"):
            for beta in (0.0, 0.3):
                config = GRPOConfig(beta=0.0, loss_type=loss_type, importance_sampling_level=level, **common)
                trainer = tiny_trainer(GRPOTrainer, config, rewards, completions)
                trainer.args.use_bias_correction_kl = False  # the plain k3 of the paper
                trainer.beta = beta  # in its configuration it would load a reference model from the hub
                out["losses"][f"{loss_type} {level} {beta}"] = trl_losses(trainer, given)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    document = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # progress bars and notices are not the answer
        answer = {"verl": run_verl, "trl": run_trl}[sys.argv[1]](document)
    json.dump(answer, sys.stdout)
