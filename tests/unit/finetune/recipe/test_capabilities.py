"""What cannot be combined in a recipe: what is said of it, and what is written instead."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from finetune.errors import ConfigError
from finetune.recipe.capabilities import (
    LENGTHS,
    PAIRS,
    STREAMED,
    SUMS,
    Breach,
    broken_with,
    require_images_allowed,
)
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import Settings

PLAIN = (
    "model.path=Qwen/Qwen3-0.6B data.path=rows.jsonl train.steps=10 train.grad_accum_steps=4"
    " train.seq_len=512 output.name=small"
)
BY_SERVER = (
    "objective.method=grpo objective.rewards=rewards.py"
    " objective.sampler=http://127.0.0.1:8000 data.format=prompt"
)
CLASSIFY = "objective.method=classify model.num_classes=3 data.too_long=drop"


def values(words: str) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = {}
    for word in f"{PLAIN} {words}".split():
        path, _, value = word.partition("=")
        section, _, field = path.partition(".")
        content.setdefault(section, {})[field] = yaml.safe_load(value)
    return content


def breaches(words: str) -> list[Breach]:
    """Return what settings over a plain recipe break."""
    try:
        Recipe.model_validate(values(words))
    except ValidationError as error:
        (problem,) = error.errors()
        found: list[Breach] = problem["ctx"]["breaches"]
        return found
    return []


# Settings that rows with images cannot have, what they are, and what to write instead.
OF_TEXT = (
    (
        "objective.method=reward data.too_long=drop",
        "objective.method is reward",
        "`objective.method: sft`",
    ),
    ("objective.method=distill", "objective.method is distill", "`objective.method: sft`"),
    (
        "objective.method=grpo objective.rewards=rewards.py data.format=prompt",
        "objective.rewards is rewards.py",
        "leave `objective.rewards` out",
    ),
    ("adapter.method=prompt", "adapter.method is prompt", "`adapter.method: lora`"),
    ("train.what=all", "train.what is all", "`train.what: adapter`"),
    ("train.parallel=auto", "train.parallel is auto", "`train.parallel: stream`"),
    ("train.compile=true", "train.compile is true", "`train.compile: false`"),
    ("train.neftune_alpha=5.0", "train.neftune_alpha is 5.0", "`train.neftune_alpha: null`"),
)

# Settings over a plain recipe, what is wrong with them, and what to write instead.
CASES = (
    *(
        (f"{words} image.max_tokens=256", f"{what} and image.max_tokens is 256", hint)
        for words, what, hint in OF_TEXT
    ),
    (
        "model.config=tiny-qwen3",
        "model.config is tiny-qwen3 and model.path is Qwen/Qwen3-0.6B",
        "leave out `model.config`, or `model.path`",
    ),
    (
        "train.tokens_per_step=2048",
        "train.tokens_per_step is 2048 and train.grad_accum_steps is 4",
        "leave out `train.tokens_per_step`, or `train.grad_accum_steps`",
    ),
    (
        "train.epochs=2.0",
        "train.epochs is 2.0 and train.steps is 10",
        "leave out `train.epochs`, or `train.steps`",
    ),
    (
        'data.mix=[{"path":"a.jsonl"}]',
        "data.mix is a.jsonl and data.path is rows.jsonl",
        "leave out `data.mix`, or `data.path`",
    ),
    (
        "data.eval_frac=0.1 data.eval_path=e.jsonl",
        "data.eval_frac is 0.1 and data.eval_path is e.jsonl",
        "leave out `data.eval_frac`, or `data.eval_path`",
    ),
    (
        "train.warmup_ratio=0.1 train.warmup_steps=2",
        "train.warmup_ratio is 0.1 and train.warmup_steps is 2",
        "leave out `train.warmup_ratio`, or `train.warmup_steps`",
    ),
    (
        "model.path=null model.config=tiny-qwen3 model.init=random model.revision=v1",
        "model.revision is v1 and model.path is not set",
        "leave out `model.revision`, or `model.path: OWNER/NAME`",
    ),
    (
        "model.tokenizer_revision=v1",
        "model.tokenizer_revision is v1 and model.tokenizer is not set",
        "leave out `model.tokenizer_revision`, or `model.tokenizer: OWNER/NAME`",
    ),
    (
        'data.path=null data.mix=[{"path":"a.jsonl"}] data.revision=v1',
        "data.revision is v1 and data.path is not set",
        "leave out `data.revision`, or `data.path: OWNER/NAME`",
    ),
    (
        "data.eval_revision=v1",
        "data.eval_revision is v1 and data.eval_path is not set",
        "leave out `data.eval_revision`, or `data.eval_path: OWNER/NAME`",
    ),
    (
        "model.path=null",
        "model.path is not set and model.config is not set",
        "`model.path: Qwen/Qwen3-0.6B`",
    ),
    (
        "data.path=null",
        "data.path is not set and data.mix is not set",
        "`data.path: data/train.jsonl`, or `data.mix` with a list of files",
    ),
    (
        "train.grad_accum_steps=null",
        "train.grad_accum_steps is not set and train.tokens_per_step is not set",
        "`train.grad_accum_steps: 8`",
    ),
    (
        "train.steps=null",
        "train.steps is not set and train.epochs is not set",
        "`train.steps: 500`, or `train.epochs: 1`",
    ),
    (
        "model.config=tiny-qwen3 model.path=null",
        "model.config is tiny-qwen3 and model.init is pretrained",
        "`model.init: random`, or `model.path` in place of `model.config`",
    ),
    (
        "adapter.targets=[q_proj,visual]",
        "adapter.targets is q_proj, visual",
        "`adapter.targets: [q_proj]`",
    ),
    (
        "adapter.modules_to_save=[multi_modal_projector,norms]",
        "adapter.modules_to_save is multi_modal_projector, norms",
        "`adapter.modules_to_save: [norms]`",
    ),
    (
        "offload.tier=disk model.init=random",
        "offload.tier is disk and model.init is random",
        "`offload.tier: ram`, or `model.init: pretrained`",
    ),
    (
        "adapter.targets=[]",
        "adapter.targets is empty and adapter.experts is false",
        "`adapter.targets: all-linear`",
    ),
    (
        "adapter.dora=true adapter.experts=true",
        "adapter.dora is true and adapter.experts is true",
        "`adapter.dora: false`, or `adapter.experts: false`",
    ),
    (
        "adapter.dropout=0.1 adapter.experts=true",
        "adapter.dropout is 0.1 and adapter.experts is true",
        "`adapter.dropout: 0.0`, or `adapter.experts: false`",
    ),
    (
        "adapter.dora=true adapter.dtype=bfloat16",
        "adapter.dora is true and adapter.dtype is bfloat16",
        "`adapter.dora: false`, or `adapter.dtype: float32`",
    ),
    (
        "adapter.compute_dtype=float32 adapter.dtype=bfloat16",
        "adapter.compute_dtype is float32 and adapter.dtype is bfloat16",
        "`adapter.compute_dtype: auto`, or `adapter.dtype: float32`",
    ),
    (
        "model.dtype=float16 adapter.dtype=bfloat16",
        "model.dtype is float16 and adapter.dtype is bfloat16",
        "`model.dtype: bfloat16`, or `adapter.dtype: float32`",
    ),
    (
        "objective.method=dpo adapter.method=prompt",
        "objective.method is dpo and adapter.method is prompt",
        "`objective.method: sft`, or `adapter.method: lora`",
    ),
    (
        "data.packing=on adapter.method=prompt",
        "data.packing is on and adapter.method is prompt",
        "`data.packing: off`, or `adapter.method: lora`",
    ),
    (
        "train.neftune_alpha=5.0 adapter.method=prompt",
        "train.neftune_alpha is 5.0 and adapter.method is prompt",
        "`train.neftune_alpha: null`, or `adapter.method: lora`",
    ),
    (
        "report.samples=3 adapter.method=prompt data.eval_frac=0.1",
        "report.samples is 3 and adapter.method is prompt",
        "`report.samples: 0`, or `adapter.method: lora`",
    ),
    (
        "train.compile=true adapter.method=ia3",
        "train.compile is true and adapter.method is ia3",
        "`train.compile: false`, or `adapter.method: lora`",
    ),
    (
        "offload.mlp_chunk=512 adapter.method=ia3",
        "offload.mlp_chunk is 512 and adapter.method is ia3",
        "`offload.mlp_chunk: whole`, or `adapter.method: lora`",
    ),
    (
        "adapter.modules_to_save=[norms,embed_tokens] offload.embeddings=host",
        "adapter.modules_to_save is norms, embed_tokens and offload.embeddings is host",
        "`adapter.modules_to_save: [norms]`, or `offload.embeddings: device`",
    ),
    (
        "adapter.method=prompt offload.embeddings=host",
        "adapter.method is prompt and offload.embeddings is host",
        "`adapter.method: lora`, or `offload.embeddings: device`",
    ),
    (
        "adapter.modules_to_save=[norms,lm_head] offload.head=host",
        "adapter.modules_to_save is norms, lm_head and offload.head is host",
        "`adapter.modules_to_save: [norms]`, or `offload.head: device`",
    ),
    (
        "offload.codec=bf16_packed model.dtype=float16",
        "offload.codec is bf16_packed and model.dtype is float16",
        "`offload.codec: native`, or `model.dtype: bfloat16`",
    ),
    (
        "offload.codec=bf16 model.dtype=float16",
        "offload.codec is bf16 and model.dtype is float16",
        "`offload.codec: native`, or one of `int8`, `fp8`, `nf4`",
    ),
    (
        "adapter.modules_to_save=[norms,o_proj] offload.codec=fp8",
        "adapter.modules_to_save is norms, o_proj and offload.codec is fp8",
        "`adapter.modules_to_save: [norms]`, or `offload.codec: native`",
    ),
    (
        "output.eval_every=5",
        "output.eval_every is 5 and data.eval_frac is not set",
        "`data.eval_frac: 0.05`",
    ),
    (
        "report.samples=3",
        "report.samples is 3 and data.eval_frac is not set",
        "`data.eval_frac: 0.05`",
    ),
    (
        "output.best_checkpoint=use",
        "output.best_checkpoint is use and output.eval_every is not set",
        "`output.eval_every: 50`",
    ),
    (
        "train.early_stopping_patience=2",
        "train.early_stopping_patience is 2 and output.eval_every is not set",
        "`output.eval_every: 50`",
    ),
    (
        "train.early_stopping_min_delta=0.5",
        "train.early_stopping_min_delta is 0.5 and train.early_stopping_patience is not set",
        "`train.early_stopping_min_delta: 0.0`, or `train.early_stopping_patience: 3`",
    ),
    (
        "train.micro_batch_size=auto",
        "train.micro_batch_size is auto and train.grad_accum_steps is 4",
        "`train.micro_batch_size: 1`, or `train.tokens_per_step` in place of"
        " `train.grad_accum_steps`",
    ),
    (
        "train.schedule=cosine_with_restarts",
        "train.num_cycles is not set and train.schedule is cosine_with_restarts",
        "`train.num_cycles: 4`, or `train.schedule: cosine`",
    ),
    (
        "train.num_cycles=3",
        "train.num_cycles is 3 and train.schedule is cosine",
        "`train.num_cycles: null`, or `train.schedule: cosine_with_restarts`",
    ),
    (
        "model.layer_kernels=fused offload.device=cpu",
        "model.layer_kernels is fused and offload.device is cpu",
        "`model.layer_kernels: auto`",
    ),
    (
        "model.experts_implementation=triton offload.device=cpu",
        "model.experts_implementation is triton and offload.device is cpu",
        "`model.experts_implementation: auto`",
    ),
    (
        "train.optimizer=paged_adamw_8bit offload.device=cpu",
        "train.optimizer is paged_adamw_8bit and offload.device is cpu",
        "`train.optimizer: adamw_8bit`",
    ),
    (
        "model.layer_kernels=fused train.compile=true",
        "model.layer_kernels is fused and train.compile is true",
        "`model.layer_kernels: auto`, or `train.compile: false`",
    ),
    (
        "data.packing=on train.compile=true",
        "data.packing is on and train.compile is true",
        "`data.packing: auto`, or `train.compile: false`",
    ),
    (
        "offload.mlp_chunk=512 train.compile=true",
        "offload.mlp_chunk is 512 and train.compile is true",
        "`offload.mlp_chunk: whole`, or `train.compile: false`",
    ),
    (
        "offload.kept_graphs=2 train.gradient_checkpointing=true",
        "offload.kept_graphs is 2 and train.gradient_checkpointing is true",
        "`offload.kept_graphs: auto`, or `train.gradient_checkpointing: auto`",
    ),
    (
        "report.currency=EUR",
        "report.currency is EUR and report.price_per_kwh is not set",
        "`report.currency: null`, or `report.price_per_kwh: 0.32`",
    ),
    (
        "output.card_system=true",
        "output.card_system is true and data.system is not set",
        "`output.card_system: false`",
    ),
    (
        "train.optimizer=adamw_bf16",
        "train.optimizer is adamw_bf16 and train.what is adapter",
        "`train.optimizer: adamw`, or `train.what: all`",
    ),
    (
        "train.optimizer=lion_bf16",
        "train.optimizer is lion_bf16 and train.what is adapter",
        "`train.optimizer: lion`, or `train.what: all`",
    ),
    (
        "offload.codec=fp8 train.what=all",
        "offload.codec is fp8 and train.what is all",
        "`offload.codec: native`",
    ),
    (
        "offload.tier=disk train.what=all",
        "offload.tier is disk and train.what is all",
        "`offload.tier: ram`",
    ),
    (
        "train.optimizer=paged_adamw_8bit train.what=all",
        "train.optimizer is paged_adamw_8bit and train.what is all",
        "`train.optimizer: adamw_8bit`",
    ),
    (
        "train.compile=true train.what=all",
        "train.compile is true and train.what is all",
        "`train.compile: false`",
    ),
    (
        "model.experts_implementation=triton train.what=all",
        "model.experts_implementation is triton and train.what is all",
        "`model.experts_implementation: grouped_mm`",
    ),
    (
        "model.layer_kernels=fused train.what=all",
        "model.layer_kernels is fused and train.what is all",
        "`model.layer_kernels: plain`",
    ),
    *(
        (
            f"{objective} {words}",
            f"objective.reference is base and {other}",
            f"{known}, or {instead}",
        )
        for words, other, instead in (
            ("train.what=all", "train.what is all", "`train.what: adapter`"),
            (
                "adapter.init_from=runs/a",
                "adapter.init_from is runs/a",
                "`adapter.init_from: null`",
            ),
        )
        for objective, known in (
            (
                "objective.method=dpo",
                "`objective.reference: precomputed`",
            ),
            (
                "objective.method=kto",
                "`objective.loss: apo_zero_unpaired` with `objective.reference: precomputed`",
            ),
            ("objective.method=grpo objective.beta=0.1", "`objective.beta: 0`"),
        )
    ),
    (
        "objective.method=grpo objective.rewards=exact_match data.format=prompt train.what=all",
        "train.what is all and objective.rewards is exact_match",
        "`train.what: adapter`, or leave `objective.rewards` out",
    ),
    *(
        (
            f"{BY_SERVER} {field}={value}",
            f"{field} is {shown} and objective.sampler is http://127.0.0.1:8000",
            f"`{field}: {fix}`, or leave `objective.sampler` out",
        )
        for field, value, shown, fix in (
            ("adapter.method", "vera", "vera", "lora"),
            ("adapter.dora", "true", "true", "false"),
            ("adapter.experts", "true", "true", "false"),
            ("adapter.modules_to_save", "[norms]", "norms", "[]"),
            ("adapter.rank_pattern", '{"q_proj":4}', "{'q_proj': 4}", "{}"),
            ("adapter.alpha_pattern", '{"q_proj":4.0}', "{'q_proj': 4.0}", "{}"),
        )
    ),
    (
        "train.what=head",
        "objective.method is sft and train.what is head",
        "`train.what: adapter`, or `objective.method: classify`",
    ),
    (
        f"train.probe_steps=9 train.what=head {CLASSIFY}",
        "train.probe_steps is 9 and train.what is head",
        "`train.probe_steps: null`, or `train.what: adapter`",
    ),
    (
        f"train.gradient_checkpointing=true train.what=head {CLASSIFY}",
        "train.gradient_checkpointing is true and train.what is head",
        "`train.gradient_checkpointing: auto`, or `train.what: adapter`",
    ),
    (
        f"offload.kept_graphs=2 train.what=head {CLASSIFY}",
        "offload.kept_graphs is 2 and train.what is head",
        "`offload.kept_graphs: auto`, or `train.what: adapter`",
    ),
    (
        "train.probe_lr=0.1",
        "train.probe_lr is 0.1 and train.probe_steps is not set",
        "`train.probe_lr: null`, or `train.probe_steps: 200`",
    ),
    (
        "train.probe_steps=9",
        "objective.method is sft and train.probe_steps is 9",
        "`train.probe_steps: null`, or `objective.method: classify`",
    ),
    (
        f"adapter.init_from=runs/a train.probe_steps=9 {CLASSIFY}",
        "adapter.init_from is runs/a and train.probe_steps is 9",
        "`adapter.init_from: null`, or `train.probe_steps: null`",
    ),
    (
        "data.too_long=split objective.method=dpo",
        "data.too_long is split and objective.method is dpo",
        "`data.too_long: truncate`",
    ),
    (
        "data.loss_on=all objective.method=dpo",
        "data.loss_on is all and objective.method is dpo",
        "`data.loss_on: assistant`",
    ),
    (
        "train.neftune_alpha=5.0 objective.method=dpo",
        "train.neftune_alpha is 5.0 and objective.method is dpo",
        "`train.neftune_alpha: null`",
    ),
    (
        "report.samples=3 objective.method=dpo data.eval_frac=0.1",
        "report.samples is 3 and objective.method is dpo",
        "`report.samples: 0`",
    ),
    (
        "model.head=tokens objective.method=reward data.too_long=drop",
        "model.head is tokens and objective.method is reward",
        "`model.head: reward`",
    ),
    (
        f"model.head=tokens {CLASSIFY}",
        "model.head is tokens and objective.method is classify",
        "`model.head: classes`",
    ),
    (
        "model.head=tokens objective.method=classify_tokens model.num_classes=3 data.too_long=drop",
        "model.head is tokens and objective.method is classify_tokens",
        "`model.head: token_classes`",
    ),
    (
        "model.head=reward",
        "model.head is reward and objective.method is sft",
        "`model.head: tokens`",
    ),
    (
        "objective.method=classify data.too_long=drop",
        "model.num_classes is not set and objective.method is classify",
        "`model.num_classes: 2`, or as many as there are",
    ),
    (
        "model.num_classes=3",
        "model.num_classes is 3 and objective.method is sft",
        "`model.num_classes: null`",
    ),
    (
        "objective.method=reward",
        "data.too_long is truncate and objective.method is reward",
        "`data.too_long: drop`, or `error`",
    ),
    (
        "train.what=all objective.method=reward data.too_long=drop",
        "train.what is all and objective.method is reward",
        "`train.what: adapter`, or `head`",
    ),
    (
        "train.router_loss_coef=0.1 objective.method=reward data.too_long=drop",
        "train.router_loss_coef is 0.1 and objective.method is reward",
        "`train.router_loss_coef: null`",
    ),
    (
        "train.what=[]",
        "train.what is empty",
        "`train.what: all`, or patterns of the names of weights",
    ),
)

# Settings over a plain recipe that is sharded, the first of which is refused, and its fix.
SHARDED = (
    ("objective.method=dpo", "sft"),
    ("data.packing=on", "off"),
    ("model.dtype=float16", "bfloat16"),
    ("adapter.method=ia3", "lora"),
    ("train.gradient_checkpointing=false", "true"),
    ("adapter.dora=true", "false"),
    ("adapter.experts=true", "false"),
    ("adapter.dtype=bfloat16", "float32"),
    ("adapter.modules_to_save=[norms,o_proj]", "[]"),
    ("train.optimizer=lion", "adamw"),
    ("train.shares=[3,1]", "equal"),
    ("train.reduce_dtype=bf16", "fp32"),
    ("train.compile=true", "false"),
    ("train.router_loss_coef=0.1", "0"),
    ("model.layer_kernels=fused", "plain"),
    ("model.experts_implementation=triton", "grouped_mm"),
    ("offload.codec=fp8", "native"),
    ("offload.tier=disk", "auto"),
    ("output.best_checkpoint=use data.eval_frac=0.1 output.eval_every=2", "keep"),
    ("report.samples=3 data.eval_frac=0.1", "0"),
    ("offload.num_slots=4", "auto"),
    ("offload.kept_graphs=2", "auto"),
    ("offload.sent_graphs=none", "auto"),
    ("offload.attention_outputs=none", "auto"),
    ("offload.stash=host", "auto"),
    ("offload.embeddings=host", "auto"),
    ("offload.head=host", "auto"),
    ("offload.head_chunk=256", "auto"),
    ("offload.mlp_chunk=512", "auto"),
)

# Settings over a plain recipe, what is wrong, what is asked, and what to write instead.
NUMBERS = (
    (
        "train.grad_accum_steps=null train.micro_batch_size=2 train.tokens_per_step=1500",
        "train.tokens_per_step is 1500",
        "it must be a multiple of 1024 (micro_batch_size 2 x seq_len 512)",
        "`train.tokens_per_step: 1024`, or `train.tokens_per_step: 2048`",
    ),
    (
        "train.grad_accum_steps=null train.micro_batch_size=auto train.tokens_per_step=700",
        "train.tokens_per_step is 700",
        "it must be a multiple of 512 (micro_batch_size auto x seq_len 512)",
        "`train.tokens_per_step: 512`, or `train.tokens_per_step: 1024`",
    ),
    (
        "train.grad_accum_steps=null train.tokens_per_step=100",
        "train.tokens_per_step is 100",
        "it must be a multiple of 512 (micro_batch_size 1 x seq_len 512)",
        "`train.tokens_per_step: 512`",
    ),
    (
        "train.grad_accum_steps=null train.tokens_per_step=51200000",
        "train.tokens_per_step is 51200000",
        "a step can have 10,000 micro-batches, and one has 512 tokens",
        "`train.tokens_per_step: 5120000`",
    ),
    (
        'data.path=null data.mix=[{"path":"a"},{"path":"a","weight":2}] data.eval_frac=0.1',
        "data.eval_frac is 0.1 and data.mix names a twice",
        "a row that is held out of one source would be trained in the other",
        "name it once with the sum of the weights, or hold out a file by `data.eval_path`",
    ),
    (
        "image.max_tokens=512",
        "image.max_tokens is 512 and train.seq_len is 512",
        "an image is never cut, and its row has text too",
        "`image.max_tokens: 256`, or a longer `train.seq_len`",
    ),
    (
        "adapter.targets=[q_proj,v_proj] adapter.modules_to_save=[v_proj,norms]",
        "adapter.modules_to_save and adapter.targets both name v_proj",
        "a module is trained whole or has an adapter",
        "`adapter.targets: [q_proj]`",
    ),
    (
        "train.warmup_steps=10",
        "train.warmup_steps is 10 and train.steps is 10",
        "the warm-up has to end within the run: at most 9 steps",
        "`train.warmup_steps: 0`",
    ),
    (
        "train.schedule=cosine_with_restarts train.num_cycles=6",
        "train.num_cycles is 6 and 10 steps follow the warm-up, as train.steps is 10",
        "each cycle needs two steps, or the learning rate never falls in it",
        "`train.num_cycles: 5`",
    ),
    (
        "train.schedule=cosine_with_restarts train.num_cycles=2 train.steps=3",
        "train.num_cycles is 2 and 3 steps follow the warm-up, as train.steps is 3",
        "each cycle needs two steps, or the learning rate never falls in it",
        "`train.schedule: cosine` with `train.num_cycles: null`",
    ),
    (
        "output.best_checkpoint=use output.eval_every=11 data.eval_frac=0.1",
        "output.best_checkpoint is use, output.eval_every is 11 and train.steps is 10",
        "there is no best step where no loss on held-out rows is taken",
        "`output.eval_every: 10` or less",
    ),
    (
        "train.early_stopping_patience=2 output.eval_every=4 data.eval_frac=0.1",
        "train.early_stopping_patience is 2, output.eval_every is 4 and train.steps is 10",
        "the run could stop early after step 12 at the soonest",
        "`output.eval_every: 3` or less",
    ),
    (
        "train.early_stopping_patience=9 output.eval_every=1 data.eval_frac=0.1",
        "train.early_stopping_patience is 9, output.eval_every is 1 and train.steps is 10",
        "the run could stop early after step 10 at the soonest",
        "`train.early_stopping_patience: null`",
    ),
    (
        "report.profile=11",
        "report.profile is 11 and train.steps is 10",
        "the recorded step must be one of 1 to 10",
        "`report.profile: 10`",
    ),
)

# Settings over a plain recipe, the one of them that has no effect, and what to write instead.
UNREAD = (
    ("train.what=all adapter.dora=true", "adapter.dora", "`train.what: adapter`"),
    ("train.what=[norms] adapter.rank=8", "adapter.rank", "`train.what: adapter`"),
    (f"train.what=head {CLASSIFY} adapter.rank=4", "adapter.rank", "`train.what: adapter`"),
    (f"train.what=head {CLASSIFY} adapter.targets=[q_proj]", "adapter.targets", "`train.what:"),
    ("objective.method=dpo data.format=labelled", "data.format", "`data.format: preference`"),
    ("objective.method=kto data.format=preference", "data.format", "`data.format: labelled`"),
    ("objective.method=dpo data.format=ranking", "data.format", "`data.format: preference`"),
    ("objective.method=simpo data.format=text", "data.format", "`data.format: preference`"),
    ("data.format=preference", "data.format", "`data.format: auto`"),
    (
        'objective.method=dpo data.path=null data.mix=[{"path":"a","format":"text"}]',
        "data.mix",
        "`format: preference` there",
    ),
    ('data.format=text data.columns={"prompt":"q"}', "data.columns", "leave prompt out"),
    ("data.format=text data.loss_on=all", "data.loss_on", "leave out `data.loss_on`"),
)

# Settings over a plain recipe that go together.
TOGETHER = (
    "",
    "adapter.rank=4 adapter.alpha=8.0 adapter.dropout=0.1 adapter.dora=true adapter.rslora=true",
    "adapter.method=vera adapter.rank=4 adapter.dropout=0.1",
    "adapter.method=loha adapter.rank=4 adapter.alpha=8.0",
    "adapter.method=ia3 adapter.targets=[k_proj]",
    "adapter.method=prefix_mlp train.neftune_alpha=5.0 report.samples=9 data.eval_frac=0.1",
    *(f"adapter.method={method}" for method in ("prompt", "p_tuning", "prefix", "prefix_mlp")),
    "offload.embeddings=host offload.head=host",
    "adapter.modules_to_save=[norms,router,embed_tokens,lm_head] offload.codec=nf4",
    "model.dtype=float16 offload.codec=nf4",
    "train.what=[norms] offload.codec=native offload.tier=ram train.optimizer=adamw_bf16",
    "train.what=all offload.head=host",
    "train.what=all objective.method=orpo",
    "train.what=all objective.method=dpo objective.reference=precomputed",
    "objective.method=dpo data.packing=on adapter.dropout=0.1 offload.codec=nf4 offload.tier=disk",
    *(
        f"objective.method=dpo objective.loss=plackett_luce data.format={name}"
        for name in ("preference", "ranking")
    ),
    *(
        f"{CLASSIFY.replace('classify', method)} {probed}"
        for method in ("classify", "classify_tokens")
        for probed in ("train.probe_steps=9 train.probe_lr=0.1", "train.what=head")
    ),
    "objective.method=reward data.too_long=drop train.probe_steps=9",
    "image.max_tokens=256 data.packing=on offload.codec=nf4 adapter.dora=true",
    "image.max_tokens=256 objective.method=dpo",
    "image.max_tokens=256 report.samples=3 data.eval_frac=0.1",
    "train.parallel=fsdp2",
    "train.parallel=fsdp2 train.what=all",
    "train.parallel=fsdp2 offload.codec=native offload.vram_budget=20.0",
    "train.parallel=fsdp2 adapter.dropout=0.1 adapter.loraplus_ratio=16.0",
)


@pytest.mark.parametrize(("words", "what", "hint"), CASES)
def test_what_does_not_go_together_is_named_with_its_fix(words: str, what: str, hint: str) -> None:
    (breach,) = breaches(words)
    assert (breach.what, breach.hint) == (what, hint)
    assert breach.limit
    assert breach.field == what.partition(" is ")[0]


@pytest.mark.parametrize(("words", "fix"), SHARDED)
def test_what_does_not_hold_for_a_model_in_parts_is_named(words: str, fix: str) -> None:
    assert not breaches(words) or "objective" in words
    (breach,) = breaches(f"{words} train.parallel=fsdp2")
    field = words.partition("=")[0]
    assert breach.what.startswith(f"{field} is ")
    assert breach.what.endswith(" and train.parallel is fsdp2")
    assert breach.hint == f"`{field}: {fix}`, or {STREAMED}"


@pytest.mark.parametrize(("words", "what", "limit", "hint"), NUMBERS)
def test_numbers_that_do_not_add_up_are_named(words: str, what: str, limit: str, hint: str) -> None:
    (breach,) = breaches(words)
    assert (breach.what, breach.limit, breach.hint) == (what, limit, hint)


@pytest.mark.parametrize(("words", "field", "hint"), UNREAD)
def test_a_setting_that_has_no_effect_is_named(words: str, field: str, hint: str) -> None:
    (breach,) = breaches(words)
    assert breach.field == field
    assert breach.what.startswith(f"{field} ")
    assert hint in breach.hint


@pytest.mark.parametrize("words", TOGETHER)
def test_what_goes_together_is_taken(words: str) -> None:
    assert breaches(words) == []


def test_each_row_has_a_case() -> None:
    words = [case[0] for case in (*CASES, *NUMBERS)]
    words += [f"{case[0]} train.parallel=fsdp2" for case in SHARDED]
    found = [breach for word in words for breach in breaches(word)]
    for row in PAIRS:
        reads = tuple(name for name in (row.other, *(name for name, _ in row.also)) if name)
        text = row.hint or row.fix or row.instead
        assert any((b.field, b.reads) == (row.field, reads) and text in b.hint for b in found), row
    for number in (*SUMS, *LENGTHS):
        assert any((b.field, b.reads) == (number.field, number.reads) for b in found), number


@pytest.mark.parametrize(("words", "what", "hint"), OF_TEXT)
def test_rows_with_images_break_the_same_rows(words: str, what: str, hint: str) -> None:
    recipe = Recipe.model_validate(values(words))
    with pytest.raises(ConfigError) as caught:
        require_images_allowed(recipe)
    assert caught.value.what == f"{what} and what rows hold is text and images"
    assert caught.value.hint == hint


def test_rows_with_images_go_with_a_plain_recipe() -> None:
    require_images_allowed(Recipe.model_validate(values("")))


def test_all_problems_are_found_together() -> None:
    found = breaches("train.epochs=1.0 report.samples=3 model.path=null")
    assert {one.field for one in found} == {"model.path", "train.epochs", "report.samples"}


def test_what_trains_the_embedding_is_found_by_its_place_alone() -> None:
    host = Settings.model_validate(
        values("offload.embeddings=host adapter.modules_to_save=[embed_tokens] offload.codec=nf4")
    )
    assert len(list(broken_with(host, "offload.embeddings"))) == 1
    assert not list(broken_with(host, "offload.head"))
