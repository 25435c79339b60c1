"""TRL's SFTTrainer + peft with all of the model on the card: SDPA, with Liger, or compiled.

Nothing is recomputed: what the ways are compared in is speed where memory is no question. Rows are
the job's tokens, so the trainer prepares no data.
"""

from pathlib import Path
from typing import Any

from tests.bench.gpu.peers.programs.by_trainer import adapted_by_peft, collate
from tests.bench.gpu.peers.programs.told import Job, Result, Watch, load_adapter, rows_of, tell

NEEDS = ("torch", "transformers", "peft", "accelerate", "datasets", "trl")
NEEDS_TOO = {"liger": ("liger_kernel",)}


def run(way: str, job: Job, watch: Watch) -> Result:
    """Train, and return what was trained."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    _, adapted = adapted_by_peft("resident", job)
    num_trained = load_adapter(adapted, job)
    is_cuda = job["device"] == "cuda"
    losses: list[Any] = []

    class Noting(TrainerCallback):
        """Hands each step's end to the watch, and its gradients' norm when it is logged."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ended(float(torch.stack(losses).double().sum()), None)
            losses.clear()

        def on_log(self, *_: Any, **told: Any) -> None:
            if "grad_norm" in told["logs"]:
                watch.grad_norms[-1] = float(told["logs"]["grad_norm"])

    class InOrder(SFTTrainer):  # type: ignore[misc]  # trl has no types
        """Keeps the loss of each micro-batch: what is logged is rounded."""

        def training_step(self, *given: Any, **more: Any) -> Any:
            loss = super().training_step(*given, **more)
            losses.append(loss.detach())
            return loss

    arguments = SFTConfig(
        output_dir=str(Path(job["folder"]) / way),
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=job["num_micro_batches"],
        max_steps=job["num_steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=None,
        optim="adamw_torch_fused" if is_cuda else "adamw_torch",
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_liger_kernel=way == "liger",
        torch_compile=way == "compiled",
        torch_compile_backend="inductor" if is_cuda else "eager",
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not is_cuda,
        seed=job["seed"],
    )
    trainer = InOrder(
        model=adapted,
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(job)),
        data_collator=collate,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Noting()],
    )
    trainer.train()
    return {
        "num_trained": num_trained,
        "num_tokens": sum(len(row["input_ids"]) for row in rows_of(job)),
        "placed": {"way": way, "recompute": False},
    }


if __name__ == "__main__":
    import sys

    tell(run, needs=(*NEEDS, *NEEDS_TOO.get(sys.argv[1], ())))
