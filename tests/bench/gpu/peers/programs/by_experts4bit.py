"""experts4bit-qlora: experts in 4 bits in RAM, fused kernels, one layer's experts on the card.

Its recipe's documented fast path: `prepare_qlora_training`, attention in 4 bits too, as Sluice has
it, adapters in fp32, and its step that takes all micro-batches through a layer before the next.
"""

import importlib
from typing import Any

from tests.bench.gpu.peers.programs.told import Job, Result, Watch, rows_of, tell


def run(way: str, job: Job, watch: Watch) -> Result:
    """Train, and return what was trained."""
    import torch

    # in the peer's environment alone, where nobody checks types
    major: Any = importlib.import_module("experts4bit_qlora.engines.layer_major")
    recipe: Any = importlib.import_module("experts4bit_qlora.recipe")

    is_cuda = job["device"] == "cuda"
    setup = recipe.QLoRASetup(
        r=job["rank"],
        alpha=job["alpha"],
        adapter_dtype="fp32",
        train_experts=bool(job["expert_targets"]),
        attn_4bit=True,
        expert_residency=way,
        pin=is_cuda,
        expert_kernel="grouped_nf4" if is_cuda else "reference",
    )
    prepared = recipe.prepare_qlora_training(job["model"], setup, device=job["device"])
    model: Any = prepared.model
    _load_adapter(model, job)
    optimizer = torch.optim.AdamW(prepared.trainable, lr=job["lr"], weight_decay=0.0)
    model.train()
    rows, size, num = rows_of(job), job["micro_batch_size"], job["num_micro_batches"]
    batches = [
        {key: torch.tensor([row[key] for row in rows[at : at + size]]) for key in rows[0]}
        for at in range(0, len(rows), size)
    ]
    for at in range(0, len(batches), num):
        step = [{k: v.to(job["device"]) for k, v in b.items()} for b in batches[at : at + num]]
        for batch in step:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        losses = major.layer_major_step(model, step, [1 / num] * num)
        norm = torch.nn.utils.clip_grad_norm_(prepared.trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.ended(float(torch.stack(losses).mean()), float(norm))
    return {
        "num_trained": sum(p.numel() for p in prepared.trainable),
        "num_tokens": sum(len(row["input_ids"]) for row in rows),
        "placed": {"experts": way},
    }


def _load_adapter(model: Any, job: Job) -> None:
    """Give its adapters the job's initial A; B is zero in both.

    peft keeps the A of all experts in one matrix, experts one below the other.

    Raises:
        ValueError: A matrix of the job has no place, or has another size.
    """
    import torch
    from safetensors.torch import load_file

    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in load_file(job["adapter"]).items():
            if "lora_A" not in name:
                continue
            path = name.removeprefix("base_model.model.").split(".lora_A")[0]
            if ".experts" in path:
                path = path.removesuffix(".base_layer")
                kinds = (f"{path}.gate_up_lora_A", f"{path}.down_lora_A")
                fits = [k for k in kinds if k in own and own[k].shape[-1] == values.shape[-1]]
            else:
                fits = [k for k in (f"{path}.lora_A",) if k in own]
            if len(fits) != 1 or own[fits[0]].numel() != values.numel():
                raise ValueError(f"{name} of the job has no place in this model")
            own[fits[0]].copy_(values.view(own[fits[0]].shape))


if __name__ == "__main__":
    tell(run, needs=("torch", "experts4bit_qlora"))
