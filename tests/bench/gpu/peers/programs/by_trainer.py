"""Hugging Face Trainer + peft: resident, `device_map` offload, FSDP2, ZeRO-3 offload, unsloth.

Each way is set up as its documentation says: gradient checkpointing in all of them (FSDP's own
under FSDP), bf16 by autocast over bf16 weights, fused AdamW where the optimizer is on the card.
"""

import importlib
from pathlib import Path
from typing import Any

from tests.bench.gpu.peers.programs.told import Job, Result, Watch, load_adapter, rows_of, tell

NEEDS = ("torch", "transformers", "peft", "accelerate")
NEEDS_TOO = {"zero3": ("deepspeed",), "unsloth": ("unsloth",)}
CARD_RESERVE_GIB = 4.0  # for activations: `max_memory` is for weights, and its guide says so


def run(way: str, job: Job, watch: Watch) -> Result:
    """Train, and return what was trained."""
    if way == "unsloth":
        importlib.import_module("unsloth")  # patches transformers, so it comes before it
    arguments = _arguments(way, job)  # before the model: ZeRO-3 splits it while it is loaded
    model, adapted = _by_unsloth(job) if way == "unsloth" else adapted_by_peft(way, job)
    if way == "device_map":
        _bring_back(adapted, job["device"])
    num_trained = load_adapter(adapted, job)
    if way == "fsdp2" and job["device"] == "cpu":
        _shard_directly(adapted)
    trainer = _trainer(adapted, arguments, job, watch)
    trainer.train()
    return {
        "num_trained": num_trained,
        "num_tokens": trainer.num_tokens,
        "placed": _placed(way, trainer, model),
    }


def adapted_by_peft(way: str, job: Job) -> tuple[Any, Any]:
    """Return the model, and what it is with an adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=getattr(torch, job["dtype"]),
        attn_implementation="sdpa",
        **(_device_map(job) if way == "device_map" else {}),
    )
    model.config.use_cache = False
    config = LoraConfig(
        r=job["rank"],
        lora_alpha=job["alpha"],
        target_modules=job["targets"],
        target_parameters=job["expert_targets"] or None,
        task_type="CAUSAL_LM",
    )
    return model, get_peft_model(model, config)


def _by_unsloth(job: Job) -> tuple[Any, Any]:
    """Return the same as unsloth's guide has it, its own checkpointing included."""
    import torch

    language_model: Any = importlib.import_module("unsloth").FastLanguageModel
    model, _ = language_model.from_pretrained(
        model_name=job["model"],
        max_seq_length=job["seq_len"],
        dtype=getattr(torch, job["dtype"]),
        load_in_4bit=False,
    )
    adapted = language_model.get_peft_model(
        model,
        r=job["rank"],
        lora_alpha=job["alpha"],
        lora_dropout=0,
        bias="none",
        target_modules=job["targets"],
        use_gradient_checkpointing="unsloth",
        random_state=job["seed"],
    )
    return model, adapted


def _bring_back(adapted: Any, device: str) -> None:
    """Give adapters of offloaded layers memory on the card: peft leaves them on the meta device."""
    import torch
    from torch import nn

    for module in adapted.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                values = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(values))


def _placed(way: str, trainer: Any, model: Any) -> dict[str, int]:
    """Return how many parts are where, or how many are split and offloaded.

    Raises:
        RuntimeError: The way that was asked for is not the one that was taken.
    """
    if way == "fsdp2":
        from torch.distributed.fsdp import FSDPModule

        placed = {"fully_shard": sum(isinstance(m, FSDPModule) for m in trainer.model.modules())}
        placed["host"] = sum(p.device.type == "cpu" for p in trainer.model.parameters())
    elif way == "zero3":
        placed = {"stage": trainer.model_wrapped.zero_optimization_stage()}
        placed["split"] = sum(hasattr(p, "ds_id") for p in model.parameters())
    else:
        placed = _counted(getattr(model, "hf_device_map", None) or {"": trainer.args.device})
    if not all(placed.values()) or (way == "device_map" and len(placed) < 2):
        raise RuntimeError(f"{way} is not what ran: {placed}")
    return placed


def _shard_directly(adapted: Any) -> None:
    """Shard each layer, and what is left, by torch's own FSDP2: accelerate does it on no CPU."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    for layer in adapted.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(adapted, mesh=mesh, offload_policy=policy)


def _arguments(way: str, job: Job) -> Any:
    from transformers import TrainingArguments

    is_cuda = job["device"] == "cuda"
    is_checkpointed = way != "unsloth" and (way != "fsdp2" or not is_cuda)
    own: dict[str, Any] = {}
    if way == "fsdp2" and is_cuda:
        own["fsdp"] = True
        own["fsdp_config"] = {
            "version": 2,
            "cpu_offload": True,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": job["layer_class"],
            "activation_checkpointing": True,
            "cpu_ram_efficient_loading": False,
        }
    if way == "zero3":
        own["deepspeed"] = _zero3(job)
    return TrainingArguments(
        output_dir=str(Path(job["folder"]) / way),
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=job["num_micro_batches"],
        max_steps=job["num_steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused" if is_cuda and way != "fsdp2" else "adamw_torch",
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=is_checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False} if is_checkpointed else None,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not is_cuda,
        seed=job["seed"],
        **own,
    )


def _zero3(job: Job) -> dict[str, Any]:
    """Return ZeRO-3 with parameters and optimizer on the host, as in DeepSpeed's tutorial."""
    pinned = job["device"] == "cuda"
    return {
        "bf16": {"enabled": job["dtype"] == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": pinned},
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def _device_map(job: Job) -> dict[str, Any]:
    """Return where weights lie: the card, then the host; on a CPU host and disk."""
    if job["device"] == "cuda":
        card = max(1.0, job["vram_gib"] - CARD_RESERVE_GIB) if job["vram_gib"] else 64.0
        return {"device_map": "auto", "max_memory": {0: f"{card:.1f}GiB", "cpu": "100GiB"}}
    places: dict[str, str] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    for layer in range(job["num_layers"]):
        places[f"model.layers.{layer}"] = "disk" if layer % 2 else "cpu"
    return {"device_map": places, "offload_folder": str(Path(job["folder"]) / "offloaded")}


def _counted(places: dict[str, Any]) -> dict[str, int]:
    where = [str(place) for place in places.values()]
    return {place: where.count(place) for place in sorted(set(where))}


def _trainer(model: Any, arguments: Any, job: Job, watch: Watch) -> Any:
    import torch
    from transformers import Trainer, TrainerCallback

    class Noting(TrainerCallback):
        """Hands each step's end to the watch, and its gradients' norm when the Trainer logs it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ended(trainer.taken_loss(), None)

        def on_log(self, *_: Any, **told: Any) -> None:
            if "grad_norm" in told["logs"]:
                watch.grad_norms[-1] = float(told["logs"]["grad_norm"])

    class InOrder(Trainer):
        """Keeps the loss of each micro-batch: what the Trainer logs is rounded."""

        parts: list[Any]
        num_tokens = 0

        def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
            self.num_tokens += inputs["input_ids"].numel()
            loss = super().training_step(model, inputs, *others, **more)
            self.parts.append(loss.detach())
            return loss

        def taken_loss(self) -> float:
            parts, self.parts = self.parts, []
            return float(torch.stack(parts).double().sum())

    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=rows_of(job),
        data_collator=collate,
        callbacks=[Noting()],
    )
    trainer.parts = []
    return trainer


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Put rows of one length together."""
    import torch

    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


if __name__ == "__main__":
    import sys

    tell(run, needs=(*NEEDS, *NEEDS_TOO.get(sys.argv[1], ())))
