"""soup-cli: its layer streaming, set up by its own config, its trainer given the job's rows.

Its command makes rows from text by its own templates. So that the rows are the job's, its trainer
is made as the command makes it, then handed the rows, one after the other, at a constant rate.
"""

import importlib
from pathlib import Path
from typing import Any

from tests.bench.gpu.peers.programs.told import Job, Result, Watch, load_adapter, rows_of, tell

CONFIG = """
base: {model}
task: sft
backend: transformers
data: {{train: {folder}/rows.jsonl, format: chatml, max_length: {seq_len}}}
training:
  epochs: 1
  lr: {lr}
  batch_size: {micro_batch_size}
  gradient_accumulation_steps: {num_micro_batches}
  quantization: none
  stream_layers: true
  lora: {{r: {rank}, alpha: {alpha}, dropout: 0.0, target_modules: [{names}]}}
output: {folder}/soup
"""


def run(_way: str, job: Job, watch: Watch) -> Result:
    """Train, and return what was trained."""
    import torch
    from transformers import TrainerCallback

    loader: Any = importlib.import_module("soup_cli.config.loader")
    sft: Any = importlib.import_module("soup_cli.trainer.sft")
    file = Path(job["folder"]) / "soup.yaml"
    file.write_text(CONFIG.format(**job, names=", ".join(job["targets"])))
    wrapper = sft.SFTTrainerWrapper(loader.load_config(file), device=job["device"])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wrapper.setup({"train": [{"messages": turns}] * len(rows_of(job))})
    trainer = wrapper.trainer
    num_trained = load_adapter(trainer.model, job)
    losses: list[Any] = []
    own_step = trainer.training_step

    def step(*given: Any, **more: Any) -> Any:
        loss = own_step(*given, **more)
        losses.append(loss.detach())
        return loss

    class Noting(TrainerCallback):
        """Hands each step's end to the watch, and its gradients' norm when it is logged."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ended(float(torch.stack(losses).double().sum()), None)
            losses.clear()

        def on_log(self, *_: Any, **told: Any) -> None:
            if "grad_norm" in told["logs"]:
                watch.grad_norms[-1] = float(told["logs"]["grad_norm"])

    trainer.training_step = step
    trainer.train_dataset, trainer.data_collator = rows_of(job), _collate
    for name, value in {
        "max_steps": job["num_steps"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "remove_unused_columns": False,
    }.items():
        assert hasattr(trainer.args, name)
        setattr(trainer.args, name, value)
    trainer.add_callback(Noting())
    trainer.train()
    return {
        "num_trained": num_trained,
        "num_tokens": sum(len(row["input_ids"]) for row in rows_of(job)),
        "placed": {"optimizer": trainer.args.optim},
    }


def _collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Put rows of one length together."""
    import torch

    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


if __name__ == "__main__":
    tell(run, needs=("torch", "soup_cli"))
