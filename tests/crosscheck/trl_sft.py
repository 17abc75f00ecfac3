"""Runs in the environment of make_env.sh: one optimizer step of TRL's SFTTrainer on chats, and its gradients.

``python trl_sft.py FOLDER`` reads ``model/`` and ``chats.json`` there and writes ``ids.json`` (what TRL trains on) and
``gradients.safetensors``; the last line that it prints is JSON with the loss. Nothing of this repository is imported.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Keep(TrainerCallback):
    """Keeps the gradients of the step, before the optimizer takes them, and the loss that is logged."""

    def __init__(self):
        self.gradients, self.loss = {}, None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {name: p.grad.detach().clone().contiguous() for name, p in model.named_parameters()}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.loss = logs.get("loss", self.loss)


def main(folder):
    torch.set_num_threads(1)
    chats = json.loads((folder / "chats.json").read_text())
    keep, tokenizer = Keep(), AutoTokenizer.from_pretrained(folder / "model")
    config = SFTConfig(
        output_dir=str(folder / "out"),
        assistant_only_loss=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=len(chats) // 3,
        max_steps=1,
        max_length=None,
        max_grad_norm=1e9,
        learning_rate=0.0,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"messages": chat} for chat in chats]),
        processing_class=tokenizer,
        callbacks=[keep],
    )
    rows = [
        {key: row[key] for key in ("input_ids", "labels", "assistant_masks") if key in row}
        for row in trainer.train_dataset
    ]
    (folder / "ids.json").write_text(json.dumps(rows))
    trainer.train()
    save_file(keep.gradients, folder / "gradients.safetensors")
    print(json.dumps({"loss": keep.loss}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
