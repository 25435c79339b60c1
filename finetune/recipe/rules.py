"""Rules between the fields of a recipe, each broken one as an error in three parts.

A field's own limits are next to it in `finetune.recipe.sections`. A rule here reads several fields,
and one that is broken names the field to point at. Rules yield rather than raise, so that all of
them are reported at once.
"""

from collections.abc import Iterator

from finetune.recipe.adapter_rules import (
    broken_dtype_rules,
    broken_embedding_rules,
    broken_head_rules,
    broken_method_rules,
)
from finetune.recipe.breach import Breach
from finetune.recipe.data_section import FORMAT_COLUMNS, DataSection
from finetune.recipe.full_rules import broken_frozen_rules, broken_full_rules
from finetune.recipe.objective_rules import broken_objective_rules
from finetune.recipe.sections import MAX_MICRO_BATCHES, ModelSection, Settings, TrainSection
from finetune.recipe.sharded_rules import broken_sharded_rules

# Pairs of which at most one field may be set. One set on the command line replaces the other one
# that a recipe file sets.
RIVALS = (
    ("train.grad_accum_steps", "train.tokens_per_step"),
    ("train.steps", "train.epochs"),
    ("data.path", "data.mix"),
    ("data.eval_path", "data.eval_frac"),
    ("train.warmup_steps", "train.warmup_ratio"),
)

# What may be trained whole whatever the codec: these are on the device as published.
NEVER_ENCODED = ("norms", "router", "embed_tokens", "lm_head", "score")


def broken_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield every rule between fields that the recipe breaks."""
    yield from _broken_model_rules(recipe.model)
    yield from _broken_adapter_rules(recipe)
    yield from broken_method_rules(recipe)
    yield from broken_dtype_rules(recipe)
    yield from _broken_source_rules(recipe.data)
    yield from _broken_data_rules(recipe.data)
    yield from _broken_train_rules(recipe.train)
    yield from _broken_schedule_rules(recipe.train)
    yield from _broken_eval_rules(recipe)
    yield from _broken_best_rules(recipe)
    if recipe.train.steps is not None:
        yield from broken_length_rules(recipe, num_steps=recipe.train.steps)
    yield from _broken_packing_rules(recipe)
    yield from _broken_device_rules(recipe)
    yield from broken_embedding_rules(recipe)
    yield from broken_head_rules(recipe)
    if recipe.train.is_full:
        yield from broken_full_rules(recipe)
    else:
        yield from broken_frozen_rules(recipe.train)
    if recipe.train.is_sharded:
        yield from broken_sharded_rules(recipe)
    yield from broken_objective_rules(recipe)
    if recipe.report.currency is not None and recipe.report.price_per_kwh is None:
        yield Breach(
            field="report.currency",
            what=f"report.currency is {recipe.report.currency} and there is no price",
            limit="the currency is that of report.price_per_kwh",
            hint="`report.price_per_kwh: 0.32`, or leave `report.currency` out",
            reads=("report.price_per_kwh",),
        )
    prompts = (recipe.data.system, *(one.system for one in recipe.data.mix))
    if recipe.output.card_system and not any(prompts):
        yield Breach(
            field="output.card_system",
            what="output.card_system is true and there is no system prompt",
            limit="the prompts are those of data.system and of the sources in data.mix",
            hint="leave `output.card_system` out",
            reads=("data.system", "data.mix"),
        )
    checkpointing, kept = recipe.train.gradient_checkpointing, recipe.offload.kept_graphs
    if checkpointing != "auto" and kept != "auto":
        yield Breach(
            field="offload.kept_graphs",
            what=f"offload.kept_graphs is {kept} and train.gradient_checkpointing is"
            f" {str(checkpointing).lower()}",
            limit="one of them says which layers keep their graph",
            hint="`offload.kept_graphs: auto`, or `train.gradient_checkpointing: auto`",
            reads=("train.gradient_checkpointing",),
        )
    if recipe.train.compile and isinstance(recipe.offload.mlp_chunk, int):
        yield Breach(
            field="offload.mlp_chunk",
            what=f"offload.mlp_chunk is {recipe.offload.mlp_chunk} and train.compile is true",
            limit="compiled layers compute all tokens of a micro-batch at once",
            hint="`offload.mlp_chunk: whole`, or `train.compile: false`",
            reads=("train.compile",),
        )


def _broken_model_rules(model: ModelSection) -> Iterator[Breach]:
    """One source of the model: a path, or a config with random weights."""
    if model.path is None and model.config is None:
        yield Breach(
            field="model",
            what="neither model.path nor model.config is set",
            limit="a run needs one of them",
            hint="`model.path: Qwen/Qwen3-0.6B`",
        )
    if model.path is not None and model.config is not None:
        yield Breach(
            field="model.config",
            what=f"model.config is {model.config} and model.path is {model.path}",
            limit="only one of them may be set, for each names a model",
            hint="`model.config: null` keeps the path",
            reads=("model.path",),
        )
    if model.config is not None and model.path is None and model.init == "pretrained":
        yield Breach(
            field="model.config",
            what=f"model.config is {model.config} and model.init is pretrained",
            limit="a config has no weights, so they can only be random",
            hint="`model.init: random`, or `model.path` in place of `model.config`",
            reads=("model.init",),
        )


def _broken_adapter_rules(recipe: Settings) -> Iterator[Breach]:
    """An adapter has something to train, each part of it in one way."""
    adapter = recipe.adapter
    if not adapter.targets and not adapter.experts and not recipe.train.is_head_alone:
        yield Breach(
            field="adapter.targets",
            what="adapter.targets is empty and adapter.experts is false",
            limit="an adapter needs at least one target",
            hint="`adapter.targets: all-linear`",
            reads=("adapter.experts",),
        )
    if adapter.dora and adapter.experts:
        yield Breach(
            field="adapter.dora",
            what="adapter.dora is true and adapter.experts is true",
            limit="DoRA is for linear layers, and one adapter has it everywhere or nowhere",
            hint="`adapter.dora: false`, or `adapter.experts: false`",
            reads=("adapter.experts",),
        )
    twice = [name for name in adapter.modules_to_save if name in adapter.targets]
    if not isinstance(adapter.targets, str) and twice:
        left = [name for name in adapter.targets if name not in twice]
        yield Breach(
            field="adapter.modules_to_save",
            what=f"adapter.modules_to_save and adapter.targets both name {', '.join(twice)}",
            limit="a module is trained whole or has an adapter",
            hint=f"`adapter.targets: [{', '.join(left)}]`",
            reads=("adapter.targets",),
        )
    yield from _broken_codec_rules(recipe)


def _broken_codec_rules(recipe: Settings) -> Iterator[Breach]:
    """A codec supports the weights, and a trainable copy starts from weights as published."""
    adapter, codec = recipe.adapter, recipe.offload.codec
    if codec in ("auto", "native"):
        return
    if codec == "bf16_packed" and recipe.model.dtype != "bfloat16":
        yield Breach(
            field="offload.codec",
            what=f"offload.codec is {codec} and model.dtype is {recipe.model.dtype}",
            limit="it packs bfloat16 weights, without loss",
            hint="`model.dtype: bfloat16`, or `offload.codec: native`",
            reads=("model.dtype",),
        )
    if codec in ("bf16", "fp16") and recipe.model.dtype == "float16":
        yield Breach(
            field="offload.codec",
            what=f"offload.codec is {codec} and model.dtype is float16",
            limit="weights of 16 bits take as many bytes in it",
            hint="`offload.codec: native`, or `int8`, `fp8` or `nf4`",
            reads=("model.dtype",),
        )
    encoded = [name for name in adapter.modules_to_save if name not in NEVER_ENCODED]
    if encoded:
        yield Breach(
            field="adapter.modules_to_save",
            what=f"adapter.modules_to_save is {', '.join(encoded)} and offload.codec is {codec}",
            limit="what is trained whole starts from published weights, and these lie encoded",
            hint="`offload.codec: native`, or leave it out",
            reads=("offload.codec",),
        )


def _broken_source_rules(data: DataSection) -> Iterator[Breach]:
    """One path or a mix, columns that the format has, and settings that documents have."""
    if (data.path is None) == (not data.mix):
        is_both = data.path is not None
        yield Breach(
            field="data.mix" if is_both else "data",
            what=f"data.path is {data.path} and data.mix is set too"
            if is_both
            else "neither data.path nor data.mix is set",
            limit="exactly one of them must be",
            hint="make the path an entry of `data.mix`"
            if is_both
            else "`data.path: data/train.jsonl`, a hub id, or `data.mix` with a list of them",
            reads=("data.path",),
        )
    known = {name for columns in FORMAT_COLUMNS.get(data.format, ()) for name in columns}
    for column in data.columns:
        if data.format != "auto" and column not in known:
            yield Breach(
                field="data.columns",
                what=f"data.columns names {column} and data.format is {data.format}",
                limit=f"the columns of {data.format} are {', '.join(sorted(known))}",
                hint=f"leave {column} out of `data.columns`, or `data.format: auto`",
                reads=("data.format",),
            )
    for name in data.set_for_turns if data.format == "text" else ():
        yield Breach(
            field=f"data.{name}",
            what=f"data.{name} is {getattr(data, name)} and data.format is text",
            limit="documents have no turns, are joined and cut, and all of them is learned",
            hint=f"leave out `data.{name}`",
            reads=("data.format",),
        )


def _broken_data_rules(data: DataSection) -> Iterator[Breach]:
    """One held-out part."""
    if data.eval_path is not None and data.eval_frac is not None:
        yield Breach(
            field="data.eval_frac",
            what=f"data.eval_frac is {data.eval_frac} and data.eval_path is {data.eval_path}",
            limit="only one of them may be set",
            hint="`data.eval_frac: null`",
            reads=("data.eval_path",),
        )
    paths = [source.path for source in data.mix]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if data.eval_frac is not None and twice is not None:
        yield Breach(
            field="data.eval_frac",
            what=f"data.eval_frac is {data.eval_frac} and data.mix names {twice} twice",
            limit="a row that is held out of one source would be trained in the other",
            hint="name it once with the sum of the weights, or hold out a file by `data.eval_path`",
            reads=("data.mix",),
        )


def _broken_train_rules(train: TrainSection) -> Iterator[Breach]:
    """One size of the step, and one length of the run."""
    if (train.grad_accum_steps is None) == (train.tokens_per_step is None):
        yield _not_exactly_one(
            ("train.grad_accum_steps", train.grad_accum_steps, 8),
            ("train.tokens_per_step", train.tokens_per_step, 8 * _micro_tokens(train)),
        )
    elif train.tokens_per_step is not None:
        yield from _broken_tokens_rule(train, train.tokens_per_step)
    elif train.micro_batch_size == "auto":
        yield Breach(
            field="train.micro_batch_size",
            what="train.micro_batch_size is auto and train.grad_accum_steps is"
            f" {train.grad_accum_steps}",
            limit="how many sequences a step has must be known to cut it into micro-batches",
            hint=f"`train.tokens_per_step: {8 * train.seq_len}` in place of"
            " `train.grad_accum_steps`, or `train.micro_batch_size: 1`",
            reads=("train.grad_accum_steps",),
        )
    if (train.steps is None) == (train.epochs is None):
        yield _not_exactly_one(("train.steps", train.steps, 500), ("train.epochs", train.epochs, 1))


def _broken_schedule_rules(train: TrainSection) -> Iterator[Breach]:
    """A warm-up that ends within the run, and a schedule that has room to fall."""
    if train.warmup_ratio is not None and train.warmup_steps:
        yield Breach(
            field="train.warmup_ratio",
            what=f"train.warmup_ratio is {train.warmup_ratio} and train.warmup_steps is"
            f" {train.warmup_steps}",
            limit="only one of them may be set",
            hint="`train.warmup_ratio: null`, or leave out `train.warmup_steps`",
            reads=("train.warmup_steps",),
        )
    if (train.num_cycles is None) == (train.schedule == "cosine_with_restarts"):
        seen, hint = "not set", "`train.num_cycles: 4`, or `train.schedule: cosine`"
        if train.num_cycles is not None:
            seen = str(train.num_cycles)
            hint = "`train.schedule: cosine_with_restarts`, or `train.num_cycles: null`"
        yield Breach(
            field="train.num_cycles",
            what=f"train.num_cycles is {seen} and train.schedule is {train.schedule}",
            limit="cosine_with_restarts falls so many times, and no other schedule reads it",
            hint=hint,
            reads=("train.schedule",),
        )


def broken_length_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """Yield the broken rules that depend on the number of steps; epochs give it from the rows."""
    yield from _broken_rate_rules(recipe.train, num_steps=num_steps)
    yield from _broken_evaluation_rules(recipe, num_steps=num_steps)
    yield from _broken_profile_rules(recipe, num_steps=num_steps)


def _broken_rate_rules(train: TrainSection, *, num_steps: int) -> Iterator[Breach]:
    """The learning rate rises and falls within the run."""
    steps = _length(train, num_steps)
    num_warmup_steps = train.num_warmup_steps(num_steps)
    if num_warmup_steps >= num_steps:
        name = "warmup_steps" if train.warmup_ratio is None else "warmup_ratio"
        value, fix = str(train.warmup_steps), str(num_steps // 20)
        if train.warmup_ratio is not None:
            value, fix = str(train.warmup_ratio), "0.05" if num_steps > 1 else "null"
        yield Breach(
            field=f"train.{name}",
            what=f"train.{name} is {value} and {steps}",
            limit=f"the warm-up has to end within the run: at most {num_steps - 1} steps",
            hint=f"`train.{name}: {fix}`",
            reads=("train.steps",),
        )
    elif train.num_cycles is not None and num_steps - num_warmup_steps < 2 * train.num_cycles:
        num_falling = num_steps - num_warmup_steps
        yield Breach(
            field="train.num_cycles",
            what=f"train.num_cycles is {train.num_cycles} and {num_falling} steps follow the"
            f" warm-up, as {steps}",
            limit="each cycle needs two steps, or the learning rate never falls in it",
            hint=f"`train.num_cycles: {num_falling // 2}`"
            if num_falling >= 4
            else "`train.schedule: cosine`, without `train.num_cycles`",
            reads=("train.steps", "train.warmup_steps", "train.warmup_ratio"),
        )


def _broken_tokens_rule(train: TrainSection, tokens_per_step: int) -> Iterator[Breach]:
    """A step is a whole number of micro-batches."""
    unit = _micro_tokens(train)
    if tokens_per_step > MAX_MICRO_BATCHES * unit:
        yield Breach(
            field="train.tokens_per_step",
            what=f"train.tokens_per_step is {tokens_per_step}",
            limit=f"a step can have {MAX_MICRO_BATCHES:,} micro-batches, and one has {unit} tokens",
            hint=f"`train.tokens_per_step: {8 * unit}`",
            reads=("train.micro_batch_size", "train.seq_len"),
        )
        return
    if tokens_per_step % unit == 0:
        return
    below = tokens_per_step // unit * unit
    nearest = [str(tokens) for tokens in (below, below + unit) if tokens > 0]
    yield Breach(
        field="train.tokens_per_step",
        what=f"train.tokens_per_step is {tokens_per_step}",
        limit=(
            f"it must be a multiple of {unit} (seq_len)"
            if train.micro_batch_size == "auto"
            else f"it must be a multiple of {unit}"
            f" (micro_batch_size {train.micro_batch_size} x seq_len {train.seq_len})"
        ),
        hint=" or ".join(f"`train.tokens_per_step: {tokens}`" for tokens in nearest),
        reads=("train.micro_batch_size", "train.seq_len"),
    )


def _broken_eval_rules(recipe: Settings) -> Iterator[Breach]:
    """Settings that read held-out rows need some."""
    if recipe.data.has_eval:
        return
    readers = {
        "output.eval_every": recipe.output.eval_every,
        "report.samples": recipe.report.samples,
    }
    for field, value in readers.items():
        if value:
            yield Breach(
                field=field,
                what=f"{field} is {value} and no rows are held out",
                limit="it needs data.eval_path or data.eval_frac",
                hint="`data.eval_frac: 0.05`",
                reads=("data.eval_path", "data.eval_frac"),
            )


def _broken_best_rules(recipe: Settings) -> Iterator[Breach]:
    """Settings that compare held-out losses need them measured, and a checkpoint of the best."""
    train, output = recipe.train, recipe.output
    readers = {
        "output.best_checkpoint": output.best_checkpoint,
        "train.early_stopping_patience": train.early_stopping_patience,
    }
    for field, value in readers.items():
        if value and output.eval_every is None:
            yield Breach(
                field=field,
                what=f"{field} is {value} and output.eval_every is not set",
                limit="losses on held-out rows are compared, and none is taken",
                hint="`output.eval_every: 50`",
                reads=("output.eval_every",),
            )
    if train.early_stopping_min_delta and train.early_stopping_patience is None:
        yield Breach(
            field="train.early_stopping_min_delta",
            what=f"train.early_stopping_min_delta is {train.early_stopping_min_delta} and"
            " train.early_stopping_patience is not set",
            limit="only early stopping reads it",
            hint="`train.early_stopping_patience: 3`",
            reads=("train.early_stopping_patience",),
        )


def _broken_evaluation_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """A run measures as many held-out losses as are compared."""
    every, patience = recipe.output.eval_every, recipe.train.early_stopping_patience
    steps = _length(recipe.train, num_steps)
    if every is None:
        return
    best = recipe.output.best_checkpoint
    if best is not None and every > num_steps:
        yield Breach(
            field="output.best_checkpoint",
            what=f"output.best_checkpoint is {best}, output.eval_every is {every} and {steps}",
            limit="there is no best step where no loss on held-out rows is taken",
            hint=f"`output.eval_every: {max(1, num_steps // 10)}`",
            reads=("output.eval_every", "train.steps"),
        )
    if patience is not None and every * (patience + 1) >= num_steps:
        fix = (num_steps - 1) // (patience + 1)
        yield Breach(
            field="train.early_stopping_patience",
            what=f"train.early_stopping_patience is {patience}, output.eval_every is {every} and"
            f" {steps}",
            limit=f"the run could stop early after step {every * (patience + 1)} at the soonest",
            hint=f"`output.eval_every: {fix}` or less"
            if fix
            else "`train.early_stopping_patience: null`",
            reads=("output.eval_every", "train.steps"),
        )


def _broken_profile_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """A setting that names a step names one of the run's."""
    profile = recipe.report.profile
    if profile is not None and profile > num_steps:
        yield Breach(
            field="report.profile",
            what=f"report.profile is {profile} and {_length(recipe.train, num_steps)}",
            limit=f"the recorded step must be one of 1 to {num_steps}",
            hint=f"`report.profile: {min(3, num_steps)}`",
            reads=("train.steps",),
        )


def _length(train: TrainSection, num_steps: int) -> str:
    """Describe how long a run is, by its setting if there is one."""
    if train.steps is not None:
        return f"train.steps is {num_steps}"
    return f"train.epochs: {train.epochs} are {num_steps} steps"


def _broken_fused_rules(recipe: Settings) -> Iterator[Breach]:
    """Fused operators run on CUDA, and take the place of what torch would compile."""
    if recipe.offload.device == "cpu":
        yield Breach(
            field="model.layer_kernels",
            what="model.layer_kernels is fused and offload.device is cpu",
            limit="fused operators are Triton's, which run on CUDA",
            hint="`model.layer_kernels: auto`",
            reads=("offload.device",),
        )
    if recipe.train.compile:
        yield Breach(
            field="model.layer_kernels",
            what="model.layer_kernels is fused and train.compile is true",
            limit="compiled layers have their norms, rotations and gates fused by torch",
            hint="`model.layer_kernels: auto`, or `train.compile: false`",
            reads=("train.compile",),
        )


def _broken_packing_rules(recipe: Settings) -> Iterator[Breach]:
    """Packed rows are kept apart while a layer computes, which compiled code does not do."""
    if recipe.data.packing == "on" and recipe.train.compile:
        yield Breach(
            field="data.packing",
            what="data.packing is on and train.compile is true",
            limit="a compiled layer cannot compute the attention of packed rows one by one",
            hint="`data.packing: auto`, or `train.compile: false`",
            reads=("train.compile",),
        )


def _broken_device_rules(recipe: Settings) -> Iterator[Breach]:
    """A file of weights is made from published ones; Triton computes on CUDA."""
    if recipe.model.experts_implementation == "triton" and recipe.offload.device == "cpu":
        yield Breach(
            field="model.experts_implementation",
            what="model.experts_implementation is triton and offload.device is cpu",
            limit="Triton's kernels run on CUDA",
            hint="`model.experts_implementation: auto`",
            reads=("offload.device",),
        )
    if recipe.model.kernels == "fused":
        yield from _broken_fused_rules(recipe)
    if recipe.train.optimizer == "paged_adamw_8bit" and recipe.offload.device == "cpu":
        yield Breach(
            field="train.optimizer",
            what="train.optimizer is paged_adamw_8bit and offload.device is cpu",
            limit="states are paged between a CUDA device and the host",
            hint="`train.optimizer: adamw_8bit`",
            reads=("offload.device",),
        )
    if recipe.offload.tier == "disk" and recipe.model.init == "random":
        yield Breach(
            field="offload.tier",
            what="offload.tier is disk and model.init is random",
            limit="the disk tier keeps published weights, and random ones are made in memory",
            hint="`offload.tier: ram`, or `model.init: pretrained`",
            reads=("model.init",),
        )


def _not_exactly_one(
    first: tuple[str, float | None, int], second: tuple[str, float | None, int]
) -> Breach:
    """Describe a pair of settings of which both or neither is set, with values to suggest."""
    (a, a_value, a_example), (b, b_value, b_example) = first, second
    if a_value is None:
        return Breach(
            field=a.partition(".")[0],
            what=f"neither {a} nor {b} is set",
            limit="exactly one of them must be",
            hint=f"`{a}: {a_example}` or `{b}: {b_example}`",
        )
    return Breach(
        field=b,
        what=f"{b} is {b_value} and {a} is {a_value}",
        limit="exactly one of them must be set",
        hint=f"`{b}: null` or `{a}: null`",
        reads=(a,),
    )


def _micro_tokens(train: TrainSection) -> int:
    """Tokens of one micro-batch of full sequences; if the size is open, of the smallest."""
    return (1 if train.micro_batch_size == "auto" else train.micro_batch_size) * train.seq_len
