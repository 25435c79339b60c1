"""What all peers are given alike: a model's weights, rows, initial adapters, and how to train.

Rows and adapters are those that Sluice's command will make of its recipe: the rows as it tokenises
them, in the order in which it takes them, and the adapter that it draws from the recipe's seed.
"""

import json
import random
import shutil
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.bench.record import ROOT

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = LINEARS[:4]
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
JOB, RECIPE, ADAPTER, ROWS = "job.json", "recipe.yaml", "adapter.safetensors", "rows.json"
WRITTEN = "written"  # last: without it a model is not whole
MOST_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One comparison.

    Attributes:
        name: What it is called.
        shape: Of recipes/shapes.
        num_layers: How many of its layers; None for all.
        vocab_size: Of the model; None leaves it.
        vram_gib: What the card is made to have.
        dtype: Of weights and products.
        codec: Form in which the layers' matrices wait: native, or nf4.
        rank: Of the adapter, whose alpha is twice that.
        targets: Linear layers with an adapter.
        has_experts: Whether fused experts have one too.
        seq_len: Tokens of a row; all are this long.
        micro_batch_size: Rows per forward.
        num_micro_batches: Per step.
        num_steps: The first of which is not counted as warm.
        lr: Constant.
        num_slots: Of Sluice; None lets it choose.
        peers: Who does it, Sluice first.
        loss_tolerance: By how much a loss may differ from Sluice's, as a share of it.
        norm_tolerance: Likewise the norm of a step's gradients.
        seed: Of the adapter, and of the order of rows.
        is_resident: Whether all of it fits the card, so that no peer recomputes or offloads.
        published: Tokens per second that others publish for this job, by who and on what.
    """

    name: str
    shape: str
    num_layers: int | None
    vocab_size: int | None
    vram_gib: float | None
    dtype: str
    codec: str
    rank: int
    targets: tuple[str, ...]
    has_experts: bool
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    lr: float
    num_slots: int | None
    peers: tuple[str, ...]
    loss_tolerance: float
    norm_tolerance: float
    seed: int = 0
    is_resident: bool = False
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The folder of the model, which jobs of the same model share."""
        layers = "" if self.num_layers is None else f"-{self.num_layers}"
        vocabulary = "" if self.vocab_size is None else f"-v{self.vocab_size}"
        return f"{self.shape}{layers}{vocabulary}-{self.dtype}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on."""
        return self.seq_len * self.micro_batch_size * self.num_micro_batches

    def part(self, peer: str) -> str:
        """Return what a peer's row is called."""
        return f"{self.name} {peer}"

    def config(self) -> dict[str, Any]:
        """Return the model's config."""
        text = (ROOT / "recipes/shapes" / f"{self.shape}.yaml").read_text()
        fields: dict[str, Any] = yaml.safe_load(text)
        changes = {"num_hidden_layers": self.num_layers, "vocab_size": self.vocab_size}
        return fields | {name: value for name, value in changes.items() if value is not None}


def write(job: Job, folder: Path, *, device: str, machine: Path | None) -> Path:
    """Write what a job's programs read; return the file that names it all.

    Args:
        job: Which.
        folder: Of its own; a job that is there is not written anew.
        device: What computes.
        machine: A machine that was measured before; None lets Sluice measure it, as its user would.
    """
    file = folder / JOB
    if file.exists():
        return file
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = model_folder(job, folder.parent)
    if not (model / WRITTEN).exists():
        shutil.rmtree(model, ignore_errors=True)
        _write_model(job, model)
        (model / WRITTEN).touch()
    recipe = _write_recipe(job, folder, model, device=device)
    _write_rows(folder, recipe)
    layer_class = _write_adapter(job, folder / ADAPTER)
    given = {
        "folder": str(folder),
        "device": device,
        "model": str(model),
        "recipe": str(recipe),
        "rows": str(folder / ROWS),
        "adapter": str(folder / ADAPTER),
        "machine": None if machine is None else str(machine),
        "alpha": 2 * job.rank,
        "expert_targets": list(EXPERTS) if job.has_experts else [],
        "layer_class": layer_class,
    }
    told = asdict(job) | given | {"num_layers": job.config()["num_hidden_layers"]}
    file.write_text(json.dumps(told, indent=1))  # last: without it the job is not there
    return file


def model_folder(job: Job, folder: Path) -> Path:
    """Return where a job's model is, among all jobs."""
    return folder / "models" / job.model_name


def _write_model(job: Job, folder: Path) -> None:
    import torch
    from transformers import AutoConfig

    from tests.checkpoints import write_checkpoint
    from tests.doubles import tiny_tokenizer

    fields = job.config()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    write_checkpoint(folder, config, dtype=getattr(torch, job.dtype), shard_bytes=MOST_SHARD_BYTES)
    tiny_tokenizer().save_pretrained(folder)


def _write_recipe(job: Job, folder: Path, model: Path, *, device: str) -> Path:
    """Write rows of letters, a token each, and the recipe that trains on them."""
    rows, file = folder / "rows.jsonl", folder / RECIPE
    letters = random.Random(job.seed)
    num_rows = job.micro_batch_size * job.num_micro_batches * job.num_steps
    texts = (
        "".join(letters.choices(string.ascii_lowercase, k=job.seq_len)) for _ in range(num_rows)
    )
    rows.write_text(
        "".join(json.dumps({"question": text[:8], "answer": text}) + "\n" for text in texts)
    )
    recipe: Mapping[str, Any] = {
        "model": {"path": str(model), "dtype": job.dtype},
        "adapter": {
            "rank": job.rank,
            "alpha": 2 * job.rank,
            "targets": list(job.targets),
            "experts": job.has_experts,
        },
        "data": {
            "path": str(rows),
            "format": "prompt_completion",
            "columns": {"prompt": "question", "completion": "answer"},
            "loss_on": "all",
            "num_workers": 0,
        },
        "train": {
            "seq_len": job.seq_len,
            "micro_batch_size": job.micro_batch_size,
            "grad_accum_steps": job.num_micro_batches,
            "steps": job.num_steps,
            "lr": job.lr,
            "schedule": "constant",
            "seed": job.seed,
        },
        "offload": {"device": device, "codec": job.codec, "num_slots": job.num_slots or "auto"},
        "output": {"name": "peer", "dir": str(folder / "sluice")},
    }
    file.write_text(yaml.safe_dump(recipe))
    return file


def _write_rows(folder: Path, recipe_file: Path) -> None:
    """Write the rows as Sluice tokenises them, in the order in which it trains on them."""
    from finetune.data.dataset import load_rows
    from finetune.data.order import BatchOrder
    from finetune.model.tokenizer import load_tokenizer
    from finetune.recipe.load import load_recipe

    recipe = load_recipe(str(recipe_file), [])
    rows = load_rows(
        recipe.data,
        load_tokenizer(recipe.model),
        seq_len=recipe.train.seq_len,
        seed=recipe.train.seed,
        cache_dir=folder / "cache" / "sluice",
    ).train
    order = BatchOrder.of(recipe.train, rows)
    taken = [
        {"input_ids": rows[row].input_ids.tolist(), "labels": rows[row].labels.tolist()}
        for step in range(order.num_steps)
        for part in order.step(step)
        for row in part
    ]
    assert {len(row["input_ids"]) for row in taken} == {recipe.train.seq_len}
    (folder / ROWS).write_text(json.dumps(taken))


def _write_adapter(job: Job, file: Path) -> str:
    """Write the adapter that Sluice begins with, and return the class of the model's layers."""
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.adapter.lora import add_lora, trained
    from finetune.recipe.adapters import LoraSection

    fields = job.config()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))
    for module in model.modules():  # a place that has no memory, but is a CPU's
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    layer_class = type(model.model.layers[0]).__name__
    adapter = LoraSection(
        rank=job.rank, alpha=2.0 * job.rank, targets=job.targets, experts=job.has_experts
    )
    adapted = add_lora(model, adapter, seed=job.seed)
    tensors = {name: p.detach().contiguous() for name, p in trained(adapted).items()}
    save_file(tensors, file)
    return layer_class
