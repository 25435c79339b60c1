"""What goes together: one table of the settings that do not, each with the reason and the fix.

A field's own limits are next to it in `finetune.recipe.sections`. A row here is of two settings
that exclude each other, or of one with what a run is made with: a Trainer, other runs, a model,
several processes. Refusals and their hints are composed from the rows, and so is the page of the
documentation, `docs/reference/compatibility.md`. Rows that need arithmetic follow in `SUMS` and
`LENGTHS`. All rows that a recipe breaks are reported at once.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from finetune.errors import ConfigError
from finetune.recipe.adapters import ADAPTERS, Adapter, LoraSection
from finetune.recipe.extensions import FORMATS, OBJECTIVES, Head, ObjectiveSection
from finetune.recipe.sections import MAX_MICRO_BATCHES, Settings, TrainSection
from offload.plan.facts.codec import CODECS, FLOATS, NATIVE, codecs_that
from offload.plan.facts.optimizer import DEFAULT, OPTIMIZERS, optimizers_that
from offload.plan.facts.trainable import EMBEDDING, HEAD, SCORE
from offload.registry import Registry

# ---------------------------------------------------------------------------------------------
# Rows

Get = Callable[[str], Any]
"""Returns the value of a setting, by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breach:
    """A row that a recipe breaks, in the three parts of an error."""

    field: str
    """Dotted path of the field to point at."""
    what: str
    """What is wrong, with the values seen."""
    limit: str
    """What the row asks."""
    hint: str
    """The exact setting that fixes it."""
    reads: tuple[str, ...] = ()
    """The other fields that were read."""

    @property
    def error(self) -> ConfigError:
        """The breach as an error of its own."""
        return ConfigError(self.what, limit=self.limit, hint=self.hint)


@dataclass(frozen=True, slots=True)
class Values:
    """Some of the values of a setting."""

    words: str
    """Which, in words of the documentation."""
    have: Callable[[Any], object]
    """Whether a value is one of them."""
    without: Callable[[Any], Sequence[str]] | None = None
    """The names of a list that may stay, where single names are refused."""


def only(*values: object) -> Values:
    """Return these values."""
    return Values(" or ".join(f"`{shown(value)}`" for value in values), values.__contains__)


def but(*values: object) -> Values:
    """Return all values but these."""
    words = " or ".join(f"`{shown(value)}`" for value in values)
    return Values(f"other than {words}", lambda value: value not in values)


def naming(*names: str) -> Values:
    """Return the lists that have one of these names."""
    return Values(
        f"with {' or '.join(f'`{name}`' for name in names)}",
        lambda value: not set(names).isdisjoint(value or ()),
        lambda value: [name for name in value if name not in names],
    )


def beyond(*names: str) -> Values:
    """Return the lists that have another name than these."""
    return Values(
        f"with more than {', '.join(f'`{name}`' for name in names)}",
        lambda value: not set(names).issuperset(value or ()),
        lambda value: [name for name in value if name in names],
    )


SET = Values("set", bool)
ON = Values("`true`", lambda value: value is True)
OFF = Values("`false`", lambda value: not value)
UNSET = Values("not set", lambda value: not value)
NUMBER = Values("a number", lambda value: type(value) is int)
FUSED = Values("`fused` or a list", lambda value: value not in ("auto", "plain"))


def objectives(words: str, have: Callable[[type[ObjectiveSection]], object]) -> Values:
    """Return the methods of objectives that state something of themselves."""
    return Values(words, lambda method: have(OBJECTIVES[method].settings))


def adapters(words: str, have: Callable[[Adapter], object]) -> Values:
    """Return the methods of adapters that state something of themselves."""
    return Values(words, lambda method: have(ADAPTERS[method]))


def with_head(head: str) -> Values:
    """Return the methods of objectives that learn by a head."""
    return objectives(f"of {head}", lambda one: one.head == head)


STEP_LOSS = objectives("other than `sft`", lambda one: not one.is_cross_entropy)
NEW_HEAD = objectives("with a head of its own", lambda one: one.head != "tokens")
COMPARING = objectives(
    "of answers that are compared", lambda one: not one.is_cross_entropy and one.head == "tokens"
)
CLASSES = objectives("of classes", lambda one: one.has_classes)
NO_CLASSES = objectives("without classes", lambda one: not one.has_classes)
OF_TOKENS = with_head("tokens")
NEW_HEADS = [head for head in get_args(Head) if head != "tokens"]
FULL = Values("`all` or patterns", lambda value: value not in ("adapter", "head"))


@dataclass(frozen=True, slots=True)
class Row:
    """Values of a setting that are not possible: at all, or with values of another one."""

    field: str
    values: Values
    limit: str
    """Why not."""
    fix: str = ""
    """What the field can be; empty for the rest of a list, or if only `instead` is a way."""
    hint: str = ""
    """What to write in place of the field and `fix`, where that is not one value."""
    ask: str = ""
    """What is asked for the hint, by its path, where that is not the same for all."""
    other: str = ""
    others: Values = SET
    instead: str = ""
    """The change of the other setting with which the field may stay."""
    also: tuple[tuple[str, Values], ...] = ()
    """Other settings that have to be so too."""

    def breach(self, get: Get) -> Breach | None:
        """Return the breach by the settings there are; None if they do not break the row."""
        read = ((self.other, self.others), *self.also) if self.other else self.also
        value = get(self.field)
        if not self.values.have(value) or not all(some.have(get(name)) for name, some in read):
            return None
        seen = ((self.field, self.values), *read[: bool(self.other)])
        return Breach(
            field=self.field,
            what=" and ".join(f"{name} is {_seen(get(name), some)}" for name, some in seen),
            limit=self.limit,
            hint=(replace(self, hint=get(self.ask)) if self.ask else self).hint_for(value),
            reads=tuple(name for name, _ in read),
        )

    def hint_for(self, value: object) -> str:
        """Return what the field can be, and what the other setting can be."""
        rest = self.values.without
        fix = f"[{', '.join(rest(value))}]" if rest else self.fix
        ways = (self.hint or (f"`{self.field}: {fix}`" if fix else ""), self.instead)
        return ", or ".join(filter(None, ways))


def shown(value: object) -> str:
    """Return a value as it is said in a sentence."""
    if isinstance(value, tuple):
        return ", ".join(str(getattr(one, "path", one)) for one in value) or "empty"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _seen(value: object, refused: Values) -> str:
    return "not set" if refused is UNSET else shown(value)


def setting(recipe: Settings, path: str) -> Any:
    """Return the value of a setting, by its dotted path; None where the choice has none."""
    section, _, field = path.partition(".")
    return getattr(getattr(recipe, section), field, None)


def broken(rows: Iterable[Row], get: Get) -> Iterator[Breach]:
    """Yield the breach of each row that settings break."""
    return (breach for row in rows if (breach := row.breach(get)) is not None)


def broken_with(recipe: Settings, other: str) -> Iterator[Breach]:
    """Yield what a recipe sets that does not go with one of its settings, by its dotted path."""
    rows = (*PAIRS, *_stated_by_chosen(recipe))
    return broken((row for row in rows if row.other == other), partial(setting, recipe))


def _with(
    other: str,
    others: Values,
    *rows: Row,
    instead: str = "",
    also: tuple[tuple[str, Values], ...] = (),
) -> Iterator[Row]:
    """Yield rows of what does not go with values of a setting."""
    for row in rows:
        way = row.instead or instead
        yield replace(row, other=other, others=others, instead=way, also=(*row.also, *also))


# ---------------------------------------------------------------------------------------------
# A setting with another one

# What may be trained whole whatever the codec: these are on the device as published.
NEVER_ENCODED = ("norms", "router", EMBEDDING, HEAD, SCORE)
TOWER_MODULES = (
    *("visual", "vision_tower", "vision_model", "vision_encoder", "embed_vision"),
    *("multi_modal_projector", "connector", "merger"),
)
"""What transformers' models call their image towers and projectors."""
_BY_PARTS = optimizers_that(lambda one: one.moments is not None)
"""Optimizers of `train.parallel: fsdp2`."""
STREAMED = "`train.parallel: stream`, with one process if weights of the model train"

_IN_ROWS = adapters("with virtual tokens in rows", lambda one: one.kind == "rows")
_VIRTUAL = adapters("with virtual tokens", lambda one: one.is_virtual)
_BY_PEFT = adapters("on linear layers, other than `lora`", lambda one: one.kind == "modules")
_OTHER = adapters("other than `lora`", lambda one: one.kind != "lora")
_NEW = "`objective.method: classify`"
_NO_STEP_BACK = "no step goes back through the layers"
_FOR_ALL = "the head that predicts tokens is trained already; a new one is of classes or rewards"
_IN_PARTS = "nothing is streamed: each process holds its part of all layers"
_WHOLE = "each micro-batch passes through the model's own head and MLPs whole"
_OWN_CODE = "layers are computed by the model's own code"

_ON_CUDA = (
    Row("model.layer_kernels", FUSED, "fused operators are Triton's, which run on CUDA", "auto"),
    Row("model.experts_implementation", only("triton"), "Triton's kernels run on CUDA", "auto"),
)
_COMPARED_WITH_BASE = Row(
    "objective.reference",
    only("base"),
    "that is the model without its adapter, and a run is compared with the model that it begins"
    " with",
    hint="`objective.reference: precomputed`",
    ask="objective.without_reference",
)

RIVALS = (
    ("train.grad_accum_steps", "train.tokens_per_step"),
    ("train.steps", "train.epochs"),
    ("data.path", "data.mix"),
    ("data.eval_path", "data.eval_frac"),
    ("train.warmup_steps", "train.warmup_ratio"),
)
"""Pairs of which at most one field may be set. One that is set on the command line replaces the
other one that a recipe file sets."""

REVISIONS = (
    ("model.revision", "model.path"),
    ("model.tokenizer_revision", "model.tokenizer"),
    ("data.revision", "data.path"),
    ("data.eval_revision", "data.eval_path"),
)
"""Settings of revisions on the hub, and those that name their repositories."""

PAIRS: tuple[Row, ...] = (
    *(
        Row(
            second,
            SET,
            "only one of them may be set",
            hint=f"leave out `{second}`, or `{first}`",
            other=first,
        )
        for first, second in (("model.path", "model.config"), *RIVALS)
    ),
    *(
        Row(
            first,
            UNSET,
            "a run needs one of them",
            fix,
            other=second,
            others=UNSET,
            instead=instead,
        )
        for first, fix, second, instead in (
            ("model.path", "Qwen/Qwen3-0.6B", "model.config", ""),
            ("data.path", "data/train.jsonl", "data.mix", "`data.mix` with a list of files"),
            ("train.grad_accum_steps", "8", "train.tokens_per_step", ""),
            ("train.steps", "500", "train.epochs", "`train.epochs: 1`"),
        )
    ),
    *(
        Row(
            revision,
            SET,
            f"it is of the repository that {owner} names",
            hint=f"leave out `{revision}`, or `{owner}: OWNER/NAME`",
            other=owner,
            others=UNSET,
        )
        for revision, owner in REVISIONS
    ),
    Row(
        "train.what",
        only(()),
        "a run trains something",
        hint="`train.what: all`, or patterns of the names of weights",
    ),
    *(
        Row(field, naming(*TOWER_MODULES), "the tower is frozen: its features are computed once")
        for field in ("adapter.targets", "adapter.modules_to_save")
    ),
    *_with(
        "model.init",
        only("pretrained"),
        Row("model.config", SET, "a config has no weights, so they can only be random"),
        instead="`model.init: random`, or `model.path` in place of `model.config`",
        also=(("model.path", UNSET),),
    ),
    *_with(
        "model.init",
        only("random"),
        Row(
            "offload.tier",
            only("disk"),
            "the disk tier keeps published weights, and random ones are made in memory",
            "ram",
        ),
        instead="`model.init: pretrained`",
    ),
    *_with(
        "adapter.experts",
        OFF,
        Row(
            "adapter.targets",
            only(()),
            "an adapter needs at least one target",
            "all-linear",
            also=(("train.what", but("head")),),
        ),
    ),
    *_with(
        "adapter.experts",
        ON,
        Row(
            "adapter.dora",
            ON,
            "DoRA is for linear layers, and one adapter has it everywhere or nowhere",
            "false",
        ),
        Row("adapter.dropout", SET, "adapters on fused experts have no dropout", "0.0"),
        instead="`adapter.experts: false`",
    ),
    *_with(
        "adapter.dtype",
        only("bfloat16"),
        Row(
            "adapter.dora",
            ON,
            "a magnitude rounded to bfloat16 is up to 0.2 % from the norm that it starts as",
            "false",
        ),
        Row(
            "adapter.compute_dtype",
            but("auto"),
            "peft, which computes in float32, multiplies in the type of A and B",
            "auto",
        ),
        Row(
            "model.dtype",
            only("float16"),
            "a model in float16 is for cards without bfloat16",
            "bfloat16",
        ),
        instead="`adapter.dtype: float32`",
    ),
    *_with(
        "adapter.method",
        _VIRTUAL,
        Row(
            "objective.method",
            STEP_LOSS,
            "rows that are compared, classified or scored by a reference have no virtual tokens",
            ObjectiveSection.default,
        ),
        Row(
            "data.packing",
            only("on"),
            "the room of a sequence is for rows without virtual tokens",
            "off",
        ),
        instead="`adapter.method: lora`",
    ),
    *_with(
        "adapter.method",
        _IN_ROWS,
        Row(
            "train.neftune_alpha",
            SET,
            "its noise is for embeddings of a row's own tokens",
            "null",
        ),
        Row("report.samples", SET, "prompts are answered without virtual tokens", "0"),
        instead="`adapter.method: lora`",
    ),
    *_with(
        "adapter.method",
        _OTHER,
        Row("train.compile", ON, "layers are compiled with LoRA alone", "false"),
        instead="`adapter.method: lora`",
    ),
    *_with(
        "adapter.method",
        _BY_PEFT,
        Row(
            "offload.mlp_chunk",
            NUMBER,
            "its modules compute on whole weights, which each tile would do again",
            "whole",
        ),
        instead="`adapter.method: lora`",
    ),
    *_with(
        "offload.embeddings",
        only("host"),
        Row("adapter.modules_to_save", naming(EMBEDDING), "an embedding in host memory is frozen"),
        Row(
            "adapter.method",
            _IN_ROWS,
            "virtual tokens train, and the embedding looks them up",
            "lora",
        ),
        instead="`offload.embeddings: device`",
    ),
    *_with(
        "offload.head",
        only("host"),
        Row("adapter.modules_to_save", naming(HEAD), "a head in host memory is frozen"),
        instead="`offload.head: device`",
    ),
    *(
        Row(
            "offload.codec",
            only(name),
            f"it takes weights in {' or '.join(CODECS[name].dtypes)}",
            NATIVE,
            other="model.dtype",
            others=but(*CODECS[name].dtypes),
            instead=f"`model.dtype: {CODECS[name].dtypes[0]}`",
        )
        for name in codecs_that(lambda codec: codec.dtypes not in ((), FLOATS))
    ),
    *_with(
        "model.dtype",
        only("float16"),
        Row(
            "offload.codec",
            only(*codecs_that(lambda codec: codec.same_as)),
            "weights of 16 bits take as many bytes in it",
            hint=f"`offload.codec: {NATIVE}`, or one of "
            + ", ".join(f"`{name}`" for name in codecs_that(lambda codec: codec.rounding)),
        ),
    ),
    *_with(
        "offload.codec",
        but("auto", NATIVE),
        Row(
            "adapter.modules_to_save",
            beyond(*NEVER_ENCODED),
            "what is trained whole starts from published weights, and these lie encoded",
        ),
        instead="`offload.codec: native`",
    ),
    *_with(
        "data.eval_frac",
        UNSET,
        Row("output.eval_every", SET, "it needs data.eval_path or data.eval_frac"),
        Row("report.samples", SET, "it needs data.eval_path or data.eval_frac"),
        instead="`data.eval_frac: 0.05`",
        also=(("data.eval_path", UNSET),),
    ),
    *_with(
        "output.eval_every",
        UNSET,
        Row(
            "output.best_checkpoint",
            SET,
            "losses on held-out rows are compared, and none is taken",
        ),
        Row(
            "train.early_stopping_patience",
            SET,
            "losses on held-out rows are compared, and none is taken",
        ),
        instead="`output.eval_every: 50`",
    ),
    *_with(
        "train.early_stopping_patience",
        UNSET,
        Row("train.early_stopping_min_delta", SET, "only early stopping reads it", "0.0"),
        instead="`train.early_stopping_patience: 3`",
    ),
    *_with(
        "train.grad_accum_steps",
        SET,
        Row(
            "train.micro_batch_size",
            only("auto"),
            "how many sequences a step has must be known to cut it into micro-batches",
            "1",
            also=(("train.tokens_per_step", UNSET),),
        ),
        instead="`train.tokens_per_step` in place of `train.grad_accum_steps`",
    ),
    *_with(
        "train.schedule",
        only("cosine_with_restarts"),
        Row("train.num_cycles", UNSET, "the schedule falls so many times", "4"),
        instead="`train.schedule: cosine`",
    ),
    *_with(
        "train.schedule",
        but("cosine_with_restarts"),
        Row("train.num_cycles", SET, "only cosine_with_restarts reads it", "null"),
        instead="`train.schedule: cosine_with_restarts`",
    ),
    *_with("offload.device", only("cpu"), *_ON_CUDA),
    *_with(
        "offload.device",
        only("cpu"),
        *(
            Row(
                "train.optimizer",
                only(name),
                "states are paged between a CUDA device and the host",
                OPTIMIZERS[name].instead,
            )
            for name in optimizers_that(lambda one: one.min_paged is not None)
        ),
    ),
    *_with(
        "train.compile",
        ON,
        Row(
            "model.layer_kernels",
            FUSED,
            "compiled layers have their norms, rotations and gates fused by torch",
            "auto",
        ),
        Row(
            "data.packing",
            only("on"),
            "a compiled layer cannot compute the attention of packed rows one by one",
            "auto",
        ),
        Row(
            "offload.mlp_chunk",
            NUMBER,
            "compiled layers compute all tokens of a micro-batch at once",
            "whole",
        ),
        instead="`train.compile: false`",
    ),
    *_with(
        "train.gradient_checkpointing",
        but("auto"),
        Row(
            "offload.kept_graphs",
            but("auto"),
            "one of them says which layers keep their graph",
            "auto",
        ),
        instead="`train.gradient_checkpointing: auto`",
    ),
    *_with(
        "report.price_per_kwh",
        UNSET,
        Row("report.currency", SET, "the currency is that of the price", "null"),
        instead="`report.price_per_kwh: 0.32`",
    ),
    *_with(
        "data.system",
        UNSET,
        Row(
            "output.card_system",
            ON,
            "the prompts are those of data.system and of the sources in data.mix",
            "false",
            also=(
                (
                    "data.mix",
                    Values("without prompts", lambda mix: not any(one.system for one in mix)),
                ),
            ),
        ),
    ),
    *_with(
        "train.what",
        only("adapter", "head"),
        *(
            Row(
                "train.optimizer",
                only(name),
                "it updates weights of the model in RAM; an adapter's states are few bytes",
                OPTIMIZERS[name].instead,
            )
            for name in optimizers_that(lambda one: one.made_by is None)
        ),
        instead="`train.what: all`",
    ),
    *_with(
        "train.what",
        FULL,
        Row(
            "offload.codec",
            but("auto", NATIVE),
            "weights that train are updated in the form that they compute in",
            NATIVE,
        ),
        Row(
            "offload.tier",
            only("disk"),
            "weights that train are updated in memory: a disk would be written in every step",
            "ram",
        ),
        *(
            Row(
                "train.optimizer",
                only(name),
                "it updates tensors on the device, and weights that train are updated in RAM",
                OPTIMIZERS[name].instead,
            )
            for name in optimizers_that(lambda one: one.update is None)
        ),
        Row("train.compile", ON, "layers are compiled for frozen weights", "false"),
        Row(
            "model.experts_implementation",
            only("triton"),
            "Triton's kernels have no gradients by the experts' own weights",
            "grouped_mm",
        ),
        Row(
            "model.layer_kernels",
            FUSED,
            "fused norms have no gradients by their weights",
            "plain",
        ),
    ),
    *_with("train.what", FULL, _COMPARED_WITH_BASE, instead="`train.what: adapter`"),
    *_with("adapter.init_from", SET, _COMPARED_WITH_BASE, instead="`adapter.init_from: null`"),
    *_with(
        "objective.rewards",
        SET,
        Row(
            "train.what",
            but("adapter"),
            "an adapter learns from the answers that it samples",
            "adapter",
        ),
        instead="leave `objective.rewards` out",
    ),
    *_with(
        "objective.sampler",
        SET,
        Row("adapter.method", _OTHER, "vLLM loads LoRA adapters alone", "lora"),
        Row("adapter.dora", ON, "vLLM loads no adapter with DoRA", "false"),
        Row("adapter.experts", ON, "vLLM reads adapters of fused experts transposed", "false"),
        Row("adapter.modules_to_save", SET, "vLLM loads no modules that are trained whole", "[]"),
        Row("adapter.rank_pattern", SET, "vLLM scales all of an adapter by one rank", "{}"),
        Row("adapter.alpha_pattern", SET, "vLLM scales all of an adapter by one alpha", "{}"),
        instead="leave `objective.sampler` out",
    ),
    *_with(
        "train.what",
        only("head"),
        Row(
            "objective.method",
            OF_TOKENS,
            _FOR_ALL,
            hint="`train.what: adapter`",
            instead=_NEW,
        ),
        Row("train.probe_steps", SET, "all steps are of the head alone", "null"),
        Row("train.gradient_checkpointing", but("auto"), _NO_STEP_BACK, "auto"),
        Row("offload.kept_graphs", but("auto", 0), _NO_STEP_BACK, "auto"),
        instead="`train.what: adapter`",
    ),
    *_with(
        "train.probe_steps",
        UNSET,
        Row("train.probe_lr", SET, "it is the learning rate of these steps", "null"),
        instead="`train.probe_steps: 200`",
    ),
    *_with(
        "train.probe_steps",
        SET,
        Row(
            "objective.method",
            OF_TOKENS,
            _FOR_ALL,
            hint="`train.probe_steps: null`",
            instead=_NEW,
        ),
        Row(
            "adapter.init_from",
            SET,
            "the head of an adapter that is trained further is no new one",
            "null",
        ),
        instead="`train.probe_steps: null`",
    ),
    *_with(
        "objective.method",
        COMPARING,
        Row("data.too_long", only("split"), "half an answer cannot be compared", "truncate"),
    ),
    *_with(
        "objective.method",
        STEP_LOSS,
        Row(
            "data.loss_on",
            but("assistant"),
            "only what answers a prompt is compared",
            "assistant",
        ),
        Row(
            "train.neftune_alpha",
            SET,
            "log-probabilities that are compared are taken without noise",
            "null",
        ),
        Row(
            "report.samples",
            SET,
            "samples are scored against the one right answer of a row, other rows by"
            " output.eval_every",
            "0",
        ),
    ),
    *(
        row
        for head in NEW_HEADS
        for row in _with(
            "objective.method",
            with_head(head),
            Row("model.head", but(head), "what is learned is the output of its own head", head),
        )
    ),
    *_with(
        "objective.method",
        OF_TOKENS,
        Row("model.head", but("tokens"), "the loss is that of predicted tokens", "tokens"),
    ),
    *_with(
        "objective.method",
        CLASSES,
        Row(
            "model.num_classes",
            UNSET,
            "a head has an output for each class",
            hint="`model.num_classes: 2`, or as many as there are",
        ),
    ),
    *_with(
        "objective.method",
        NO_CLASSES,
        Row("model.num_classes", SET, "it has no classes", "null"),
    ),
    *_with(
        "objective.method",
        NEW_HEAD,
        Row(
            "data.too_long",
            but("drop", "error"),
            "what is learned is of whole rows",
            hint="`data.too_long: drop`, or `error`",
        ),
        Row(
            "train.what",
            FULL,
            "the head is saved with an adapter, or alone",
            hint="`train.what: adapter`, or `head`",
        ),
        Row(
            "train.router_loss_coef",
            SET,
            "transformers' classification has no router loss",
            "null",
        ),
    ),
    *_with(
        "train.parallel",
        only("fsdp2"),
        Row(
            "objective.method",
            STEP_LOSS,
            "a loss that compares rows needs all of a step's at once, and here each micro-batch"
            " passes through the model by itself",
            ObjectiveSection.default,
        ),
        Row(
            "data.packing",
            only("on"),
            "packed rows are kept apart layer by layer, as they are streamed",
            "off",
        ),
        Row(
            "model.dtype",
            only("float16"),
            "the loss is not scaled, and gradients would vanish",
            "bfloat16",
        ),
        Row(
            "adapter.method",
            _OTHER,
            "only LoRA is known to give what it gives when layers are streamed",
            "lora",
        ),
        Row(
            "train.gradient_checkpointing",
            OFF,
            "each layer is checkpointed: its backward gathers it again, and computes it again",
            "true",
        ),
        Row(
            "adapter.dora",
            ON,
            "only LoRA is known to give what it gives when layers are streamed",
            "false",
        ),
        Row(
            "adapter.experts",
            ON,
            "adapters of experts are computed as layers are streamed",
            "false",
        ),
        Row(
            "adapter.dtype",
            only("bfloat16"),
            "each process would round its part of a tensor by itself",
            "float32",
        ),
        Row(
            "adapter.modules_to_save",
            SET,
            "modules that train whole have another type than adapters, and are added up apart",
            "[]",
            also=(("objective.method", OF_TOKENS),),
        ),
        Row(
            "train.optimizer",
            but(*_BY_PARTS),
            "each process updates its part of a tensor, element by element: "
            + " or ".join(_BY_PARTS),
            DEFAULT,
        ),
        Row(
            "train.shares",
            but("auto", "equal"),
            "all processes gather each layer together, for equal numbers of micro-batches",
            "equal",
        ),
        Row("train.reduce_dtype", but("fp32"), "gradients are added up in fp32", "fp32"),
        Row("train.compile", ON, "layers that are gathered are not compiled", "false"),
        Row(
            "train.router_loss_coef",
            SET,
            "a router loss counts the tokens of the whole step",
            "0",
        ),
        Row("model.layer_kernels", FUSED, _OWN_CODE, "plain"),
        Row("model.experts_implementation", only("triton"), _OWN_CODE, "grouped_mm"),
        Row(
            "offload.codec",
            but("auto", NATIVE),
            "parts of layers are gathered in the form that they compute in",
            NATIVE,
        ),
        Row(
            "offload.tier",
            only("disk"),
            "each process holds its part of all layers, and no layer waits",
            "auto",
        ),
        Row(
            "output.best_checkpoint",
            only("use"),
            "the result is taken from the processes' parts as they are after the last step",
            "keep",
        ),
        Row(
            "report.samples",
            SET,
            "answers are generated by one process, and it has a part of the model only",
            "0",
        ),
        Row("offload.num_slots", but("auto"), _IN_PARTS, "auto"),
        Row("offload.kept_graphs", but("auto"), _IN_PARTS, "auto"),
        Row("offload.sent_graphs", but("auto"), _IN_PARTS, "auto"),
        Row("offload.attention_outputs", but("auto"), _IN_PARTS, "auto"),
        Row("offload.stash", but("auto"), _IN_PARTS, "auto"),
        Row("offload.embeddings", but("auto"), _IN_PARTS, "auto"),
        Row("offload.head", but("auto"), _IN_PARTS, "auto"),
        Row("offload.head_chunk", but("auto"), _WHOLE, "auto"),
        Row("offload.mlp_chunk", but("auto"), _WHOLE, "auto"),
        instead=STREAMED,
    ),
)

IMAGES = "image.max_tokens"
"""The setting that says that rows have images; without it the rows themselves say so."""

OF_IMAGES: tuple[Row, ...] = (
    *_with(
        IMAGES,
        SET,
        Row(
            "objective.method",
            NEW_HEAD,
            "a head of its own is put on the text model alone",
            ObjectiveSection.default,
        ),
        Row(
            "objective.method",
            objectives("with a teacher", lambda one: one.has_teacher),
            "a teacher is asked about rows of text",
            ObjectiveSection.default,
        ),
        Row(
            "objective.rewards",
            SET,
            "answers are sampled for prompts of text",
            hint="leave `objective.rewards` out",
        ),
        Row(
            "adapter.method",
            _VIRTUAL,
            "virtual tokens and images both take the places of tokens in front of the layers",
            "lora",
        ),
        Row(
            "train.what",
            FULL,
            "an adapter learns from images; weights of the model learn from text",
            "adapter",
        ),
        Row(
            "train.parallel",
            but("stream"),
            "features of images enter a front that streams",
            "stream",
        ),
        Row("train.compile", ON, "layers are compiled for rows of text", "false"),
        Row(
            "train.neftune_alpha",
            SET,
            "its noise is for embeddings of tokens, which images have none of",
            "null",
        ),
    ),
)
"""Rows of `PAIRS` that rows with images break too."""

PAIRS = (*PAIRS, *OF_IMAGES)

CHOICES: Mapping[str, Registry[Any]] = {
    "objective.method": OBJECTIVES,
    "data.format": FORMATS,
    "offload.codec": CODECS,
    "train.optimizer": OPTIMIZERS,
}
"""Settings that choose an extension."""


def stated(choice: str, name: str) -> Iterator[Row]:
    """Yield the rows that an extension states of itself.

    Args:
        choice: The setting that chooses it.
        name: The extension.
    """
    for one in CHOICES[choice][name].clashes:
        values = (but if one.is_all_but else only)(*one.values)
        yield Row(one.field, values, one.limit, one.fix, other=choice, others=only(name))


def _stated_by_chosen(recipe: Settings) -> Iterator[Row]:
    for choice, extensions in CHOICES.items():
        name = setting(recipe, choice)
        yield from stated(choice, name) if name in extensions else ()
    for name in {one.format for one in recipe.data.mix if one.format in FORMATS}:
        for row in stated("data.format", str(name)):
            yield replace(row, other="data.mix", others=SET)


# ---------------------------------------------------------------------------------------------
# What needs arithmetic


@dataclass(frozen=True, slots=True)
class Numbers:
    """A recipe, and the numbers that follow from it."""

    recipe: Settings
    num_steps: int

    @property
    def train(self) -> TrainSection:
        """The step and the number of them."""
        return self.recipe.train

    @property
    def length(self) -> str:
        """How long the run is, by its setting if there is one."""
        epochs = f"train.epochs: {self.train.epochs} are {self.num_steps} steps"
        return epochs if self.train.steps is None else f"train.steps is {self.num_steps}"

    @property
    def tokens(self) -> int:
        """Tokens of a step; 0 where it has a number of micro-batches."""
        return (self.train.grad_accum_steps is None and self.train.tokens_per_step) or 0

    @property
    def unit(self) -> int:
        """Tokens of a micro-batch of full sequences; if its size is open, of the smallest."""
        size = self.train.micro_batch_size
        return self.train.seq_len * (1 if size == "auto" else size)

    @property
    def nearest(self) -> str:
        """The settings of `train.tokens_per_step` that are whole micro-batches, in words."""
        most = MAX_MICRO_BATCHES * self.unit
        below = min(self.tokens, most) // self.unit * self.unit
        both = (tokens for tokens in (below, below + self.unit) if 0 < tokens <= most)
        return ", or ".join(f"`train.tokens_per_step: {tokens}`" for tokens in both)

    @property
    def falling(self) -> int:
        """Steps after the warm-up."""
        return self.num_steps - self.train.num_warmup_steps(self.num_steps)

    @property
    def every(self) -> int:
        """Steps between evaluations; 0 if there are none."""
        return self.recipe.output.eval_every or 0

    @property
    def num_until_stop(self) -> int:
        """Evaluations after which a run can stop early; 0 if it never does."""
        return (self.train.early_stopping_patience or -1) + 1

    @property
    def twice(self) -> str:
        """A source that a mix names twice; empty if there is none."""
        paths = [source.path for source in self.recipe.data.mix]
        return next((path for path in paths if paths.count(path) > 1), "")

    @property
    def listed(self) -> tuple[str, ...]:
        """Targets that are listed one by one."""
        targets = self.recipe.adapter.as_lora.targets
        return () if isinstance(targets, str) else targets

    @property
    def both_ways(self) -> list[str]:
        """Modules that train whole and with an adapter."""
        return [name for name in self.recipe.adapter.as_lora.modules_to_save if name in self.listed]


@dataclass(frozen=True, slots=True)
class Sum:
    """Numbers of a recipe that do not add up."""

    field: str
    reads: tuple[str, ...]
    limit: str
    """What is asked, in words of the documentation."""
    fix: str
    """What the field can be, in words of the documentation."""
    is_broken: Callable[[Numbers], object]
    texts: Callable[[Numbers], tuple[str, str, str]]
    """What is wrong, what is asked and what to write, with the numbers."""

    def breach(self, numbers: Numbers) -> Breach:
        """Return the breach by a recipe that breaks the row."""
        what, limit, hint = self.texts(numbers)
        return Breach(field=self.field, what=what, limit=limit, hint=hint, reads=self.reads)


_STEP = ("train.micro_batch_size", "train.seq_len")
_STEPS = ("train.steps",)
_EVALUATIONS = ("train.steps", "output.eval_every")
_WARM_UP = "the warm-up has to end within the run"

SUMS = (
    Sum(
        "train.tokens_per_step",
        _STEP,
        f"a step can have {MAX_MICRO_BATCHES:,} micro-batches",
        "the most that it can have",
        lambda n: n.tokens > MAX_MICRO_BATCHES * n.unit,
        lambda n: (
            f"train.tokens_per_step is {n.tokens}",
            f"a step can have {MAX_MICRO_BATCHES:,} micro-batches, and one has {n.unit} tokens",
            n.nearest,
        ),
    ),
    Sum(
        "train.tokens_per_step",
        _STEP,
        "it must be a multiple of micro_batch_size x seq_len",
        "the nearest multiple",
        lambda n: n.tokens <= MAX_MICRO_BATCHES * n.unit and n.tokens % n.unit,
        lambda n: (
            f"train.tokens_per_step is {n.tokens}",
            f"it must be a multiple of {n.unit} (micro_batch_size {n.train.micro_batch_size} x"
            f" seq_len {n.train.seq_len})",
            n.nearest,
        ),
    ),
    Sum(
        "data.eval_frac",
        ("data.mix",),
        "a row that is held out of a source would be trained in another with the same path",
        "name it once with the sum of the weights, or hold out a file by `data.eval_path`",
        lambda n: n.recipe.data.eval_frac and n.twice,
        lambda n: (
            f"data.eval_frac is {n.recipe.data.eval_frac} and data.mix names {n.twice} twice",
            "a row that is held out of one source would be trained in the other",
            "name it once with the sum of the weights, or hold out a file by `data.eval_path`",
        ),
    ),
    Sum(
        "image.max_tokens",
        ("train.seq_len",),
        "an image is never cut, and its row has text too",
        "fewer tokens than a sequence has",
        lambda n: (n.recipe.image.max_tokens or 0) >= n.train.seq_len,
        lambda n: (
            f"image.max_tokens is {n.recipe.image.max_tokens} and train.seq_len is"
            f" {n.train.seq_len}",
            "an image is never cut, and its row has text too",
            f"`image.max_tokens: {n.train.seq_len // 2}`, or a longer `train.seq_len`",
        ),
    ),
    Sum(
        "adapter.modules_to_save",
        ("adapter.targets",),
        "a module is trained whole or has an adapter",
        "`adapter.targets` without it",
        lambda n: n.both_ways,
        lambda n: (
            f"adapter.modules_to_save and adapter.targets both name {', '.join(n.both_ways)}",
            "a module is trained whole or has an adapter",
            f"`adapter.targets: [{', '.join(t for t in n.listed if t not in n.both_ways)}]`",
        ),
    ),
)
LENGTHS = (
    Sum(
        "train.warmup_steps",
        _STEPS,
        _WARM_UP,
        "a twentieth of the steps",
        lambda n: n.falling <= 0,
        lambda n: (
            f"train.warmup_steps is {n.train.warmup_steps} and {n.length}",
            f"{_WARM_UP}: at most {n.num_steps - 1} steps",
            f"`train.warmup_steps: {n.num_steps // 20}`",
        ),
    ),
    Sum(
        "train.num_cycles",
        (*_STEPS, "train.warmup_steps", "train.warmup_ratio"),
        "each cycle needs two steps, or the learning rate never falls in it",
        "half of the steps after the warm-up",
        lambda n: 0 < n.falling < 2 * (n.train.num_cycles or 0),
        lambda n: (
            f"train.num_cycles is {n.train.num_cycles} and {n.falling} steps follow the warm-up, as"
            f" {n.length}",
            "each cycle needs two steps, or the learning rate never falls in it",
            f"`train.num_cycles: {n.falling // 2}`"
            if n.falling >= 4
            else "`train.schedule: cosine` with `train.num_cycles: null`",
        ),
    ),
    Sum(
        "output.best_checkpoint",
        _EVALUATIONS,
        "there is no best step where no loss on held-out rows is taken",
        "`output.eval_every` of at most the steps",
        lambda n: n.recipe.output.best_checkpoint and n.every > n.num_steps,
        lambda n: (
            f"output.best_checkpoint is {n.recipe.output.best_checkpoint}, output.eval_every is"
            f" {n.every} and {n.length}",
            "there is no best step where no loss on held-out rows is taken",
            f"`output.eval_every: {n.num_steps}` or less",
        ),
    ),
    Sum(
        "train.early_stopping_patience",
        _EVALUATIONS,
        "a run can stop early before its last step",
        "a shorter `output.eval_every`",
        lambda n: 0 < n.num_steps <= n.every * n.num_until_stop,
        lambda n: (
            f"train.early_stopping_patience is {n.train.early_stopping_patience},"
            f" output.eval_every is {n.every} and {n.length}",
            f"the run could stop early after step {n.every * n.num_until_stop} at the soonest",
            f"`output.eval_every: {(n.num_steps - 1) // n.num_until_stop}` or less"
            if n.num_steps > n.num_until_stop
            else "`train.early_stopping_patience: null`",
        ),
    ),
    Sum(
        "report.profile",
        _STEPS,
        "the recorded step must be one of the run",
        "the last step",
        lambda n: (n.recipe.report.profile or 0) > n.num_steps,
        lambda n: (
            f"report.profile is {n.recipe.report.profile} and {n.length}",
            f"the recorded step must be one of 1 to {n.num_steps}",
            f"`report.profile: {n.num_steps}`",
        ),
    ),
)


def broken_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield every row that the recipe breaks."""
    yield from broken((*PAIRS, *_stated_by_chosen(recipe)), partial(setting, recipe))
    numbers = Numbers(recipe, recipe.train.steps or 0)
    yield from (row.breach(numbers) for row in SUMS if row.is_broken(numbers))
    if recipe.train.steps is not None:
        yield from broken_length_rules(recipe, num_steps=recipe.train.steps)
    yield from _unread(recipe)


def broken_length_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """Yield the broken rows that depend on the number of steps; epochs give it from the rows."""
    numbers = Numbers(recipe, num_steps)
    return (row.breach(numbers) for row in LENGTHS if row.is_broken(numbers))


# ---------------------------------------------------------------------------------------------
# A setting with the model, the device or the number of processes

ROWS, TEXT_AND_IMAGES = "what rows hold", "text and images"
DEVICE, MODEL, PROCESSES = "the device", "the model", "the number of processes"
MLPS, WEIGHTS = "each MLP", "the number of weights of embedding and head"
READ = "what layers read of others"
PUBLISHED = "the form of the published weights"
TOWERS = "the number of towers for images"
PLACED = {"offload.embeddings": "the embedding", "offload.head": "the head"}
"""What may have to be on the device, by the setting of its place."""
_BOTH = " with ".join(f"`{field}: device`" for field in PLACED)

OF_MODEL = (
    *_with(DEVICE, only("cpu"), *_ON_CUDA),
    *_with(TOWERS, only(0), Row(IMAGES, SET, "only a tower sees images", "null")),
    *_with(
        MODEL,
        only("dense"),
        Row("model.experts_implementation", but("auto"), "it has no experts", "auto"),
        Row(
            "train.router_loss_coef",
            but(None),
            "only a mixture of experts has a router loss",
            "null",
        ),
    ),
    *_with(
        MLPS,
        only("a mixture of experts"),
        Row(
            "offload.mlp_chunk",
            NUMBER,
            "routed experts are not computed in chunks of tokens",
            "auto",
        ),
    ),
    *_with(
        READ,
        only("more than keys and values"),
        Row("train.compile", ON, "of models that share values only Gemma 4 was compiled", "false"),
    ),
    *(
        Row(
            "offload.codec",
            only(name),
            f"it keeps weights that were published in {CODECS[name].published}, and no others",
            "auto",
            other=PUBLISHED,
            others=but(CODECS[name].published),
        )
        for name in codecs_that(lambda codec: codec.published)
    ),
    *(
        Row(
            field,
            only("host"),
            "what waits in host memory is frozen",
            hint=hint,
            other=what,
            also=((WEIGHTS, only(number)),),
        )
        for field, what in PLACED.items()
        for number, hint in ((1, _BOTH), (2, f"`{field}: device`"))
    ),
    *(
        Row(
            field,
            only("host"),
            "one weight is in one place",
            hint=f"`{other}: host`",
            other=other,
            others=only("device"),
            instead=f"`{field}: device`",
            also=((WEIGHTS, only(1)),),
        )
        for field, other in (tuple(PLACED), tuple(PLACED)[::-1])
    ),
)

_STREAMS = ("train.parallel", but("fsdp2"))

OF_PROCESSES = (
    *_with(
        PROCESSES,
        only(1),
        Row(
            "train.parallel",
            only("fsdp2"),
            "each process holds a part of the model, so there are two at least",
            hint="`{option} 2`",
        ),
        instead="`train.parallel: stream`",
    ),
    *_with(
        PROCESSES,
        but(1),
        *(
            Row(
                field,
                values,
                "features are computed and kept by one process",
                hint="`{option} 1`",
                instead=instead,
                also=(_STREAMS,),
            )
            for field, values, instead in (
                ("train.probe_steps", SET, "`train.probe_steps: null`"),
                ("train.what", only("head"), "`train.what: adapter`"),
            )
        ),
    ),
)
OF_SHARED_WEIGHTS = tuple(
    _with(
        PROCESSES,
        but(1),
        Row(
            "train.what",
            FULL,
            "weights of the model that train over several GPUs are sharded; one process alone"
            " streams and updates them",
            hint="`train.parallel: fsdp2`",
        ),
        instead="`{option} 1`",
        also=(_STREAMS,),
    )
)
"""Rows of `train.parallel: stream`; what `auto` chooses is not known yet."""


def require(rows: Iterable[Row], get: Get, *, option: str = "") -> None:
    """Check settings together with what they are to be run on.

    Args:
        rows: What is refused.
        get: Returns a setting, or what is no setting, by its name.
        option: The option that sets the number of processes.

    Raises:
        ConfigError: They do not go together.
    """
    for breach in broken(rows, get):
        raise replace(breach, hint=breach.hint.format(option=option)).error


def require_images_allowed(recipe: Settings) -> None:
    """Check that rows may have images.

    Raises:
        ConfigError: The recipe has a setting that goes with rows of text alone.
    """
    rows = (replace(row, other=ROWS) for row in OF_IMAGES)
    require(rows, lambda name: TEXT_AND_IMAGES if name == ROWS else setting(recipe, name))


# ---------------------------------------------------------------------------------------------
# Runs that train together

SHARED_SECTIONS = ("model", "offload")
SHARED = ("train.neftune_alpha", "train.router_loss_coef", IMAGES)
"""Settings of other sections that runs over one stream of the base have in common."""

OF_RUNS = (
    *(
        replace(row, instead="`sluice finetune` for each run")
        for row in (
            Row(
                "train.what",
                but("adapter"),
                "runs share the loads of a base that does not train; each trains an adapter",
                "adapter",
            ),
            Row(
                "train.parallel",
                only("fsdp2"),
                "runs share one stream of their base; here nothing is streamed",
                "stream",
            ),
            Row(
                "adapter.method",
                _OTHER,
                "runs share their steps with LoRA adapters",
                "lora",
            ),
            Row("objective.rewards", SET, "each run samples between its steps, in its own time"),
            Row(
                "train.compile",
                ON,
                "layers are compiled for one adapter; compiled anew for each, their number is"
                " limited, and nobody has shown that bits stay those of the run alone",
                "false",
            ),
        )
    ),
    Row("report.profile", SET, "a profile is of a whole process, which runs share", "null"),
    Row("report.log_to", naming("wandb"), "a process logs one run to Weights & Biases"),
)


def require_shared(runs: Sequence[tuple[str, Settings]]) -> None:
    """Check that runs agree in what is the model's and the engine's.

    Args:
        runs: The name and the recipe of each.

    Raises:
        ConfigError: They do not, or one has a setting that has no place among several.
    """
    first_name, first = runs[0]
    is_drawn = first.model.init == "random" or first.model.head != "tokens"
    fields = [
        f"{name}.{field}" for name in SHARED_SECTIONS for field in getattr(first, name).model_dump()
    ]
    for name, recipe in runs:
        for breach in broken(OF_RUNS, partial(setting, recipe)):
            raise replace(breach, what=f"{breach.what} in {name}").error
        for path in (*fields, *SHARED, *(["train.seed"] if is_drawn else [])):
            values = setting(first, path), setting(recipe, path)
            if values[0] != values[1]:
                raise ConfigError(
                    f"{path} is {values[0]} in {first_name} and {values[1]} in {name}",
                    limit="runs over one stream of the base share the sections `model` and"
                    f" `offload`, {', '.join(SHARED)}, and train.seed where the base is random or"
                    " has a new head",
                    hint=f"one value of `{path}` for all, or a sweep for each",
                )


# ---------------------------------------------------------------------------------------------
# Settings of transformers' and TRL's trainers that an engine cannot follow exactly
#
# A setting that would have no effect, or another one than in the plain Trainer, is refused before
# the model is touched: no run trains something else than its settings say.

_CAST = "the engine computes in the dtypes that the model was loaded in"
_ONE = "one process streams to one device"
_SLUICE = "`sluice finetune RECIPE`"
_SEVERAL = Values("above 1", lambda number: number is not None and number > 1)
_IN_BACKWARD = Values(
    "one that updates in the backward",
    lambda optim: any(
        word in str(getattr(optim, "value", optim)) for word in ("lomo", "layerwise")
    ),
)
_UNDERFLOW = Values(
    "`underflow_overflow`",
    lambda debug: any("underflow" in _named(one) for one in debug),
)

OF_ARGUMENTS = (
    Row(
        "label_smoothing_factor",
        SET,
        "the loss is the cross-entropy of the label tokens",
        hint="label_smoothing_factor=0",
    ),
    Row(
        "fp16",
        SET,
        f"it scales losses, and casts; {_CAST}",
        hint="fp16=False, and load the model with dtype=torch.bfloat16",
    ),
    Row(
        "bf16",
        SET,
        f"it is autocast, which casts again at each operator; {_CAST}",
        hint="bf16=False, and load the model with dtype=torch.bfloat16",
    ),
    Row("fp16_full_eval", SET, f"it casts the whole model; {_CAST}", hint="fp16_full_eval=False"),
    Row("bf16_full_eval", SET, f"it casts the whole model; {_CAST}", hint="bf16_full_eval=False"),
    Row(
        "auto_find_batch_size",
        SET,
        "a batch that does not fit is known from the plan, and not by trying",
        hint="auto_find_batch_size=False",
    ),
    Row(
        "torch_compile",
        SET,
        "a compiled model is one graph, and layers are visited one by one",
        hint=f"torch_compile=False; {_SLUICE} with `train.compile: true` compiles the layers",
    ),
    Row(
        "use_liger_kernel",
        SET,
        "it replaces the model's forward, and with it the loss",
        hint='use_liger_kernel=False, and `Streaming(layer_kernels="fused")` on CUDA',
    ),
    Row(
        "neftune_noise_alpha",
        but(None),
        "its noise is drawn in the forward that the engine replaces",
        hint=f"neftune_noise_alpha=None; {_SLUICE} has `train.neftune_alpha`",
    ),
    Row(
        "optim",
        _IN_BACKWARD,
        "it updates weights inside the backward, before a step's gradients are complete",
        hint='optim="adamw_torch", or any other that updates after the step',
    ),
    Row(
        "torch_empty_cache_steps",
        but(None),
        "slots are allocated once, so there is nothing to empty",
        hint="torch_empty_cache_steps=None",
    ),
    Row(
        "debug",
        _UNDERFLOW,
        "it hooks the forward of every module, which visits call many times",
        hint='debug=""',
    ),
    Row("fsdp", SET, f"it shards the weights; {_ONE}", hint="fsdp=None"),
    Row("deepspeed", SET, f"it shards the weights; {_ONE}", hint="deepspeed=None"),
    Row(
        "parallelism_config",
        but(None),
        f"it shards weights or sequences; {_ONE}",
        hint="parallelism_config=None",
    ),
    Row(
        "world_size",
        _SEVERAL,
        _ONE,
        hint=f"start one process; {_SLUICE} shares a step among several",
    ),
    Row(
        "n_gpu",
        _SEVERAL,
        f"DataParallel copies the model to each device; {_ONE}",
        hint="one visible device: CUDA_VISIBLE_DEVICES=0",
    ),
    Row(
        "loss_type",
        but(None, "nll"),
        "the loss is the cross-entropy of the label tokens",
        hint='loss_type="nll"',
    ),
    Row(
        "activation_offloading",
        SET,
        "the engine decides where activations wait",
        hint='activation_offloading=False, and `Streaming(stash="host")`',
    ),
    Row(
        "router_aux_loss_coef",
        SET,
        "the plain Trainer adds a router loss per micro-batch, which is not the step's",
        hint=f"router_aux_loss_coef=0.0; {_SLUICE} has `train.router_loss_coef`",
    ),
)
"""Attributes of `TrainingArguments`, and of TRL's `SFTConfig`."""

OF_OPTIONS = (
    Row(
        "compute_loss_func",
        but(None),
        "the loss is computed where the layers end, a chunk of tokens at a time",
        hint="leave `compute_loss_func` away",
    ),
    Row(
        "model_init",
        but(None),
        "a model is attached once, and this makes another one in each `train`",
        hint="leave `model_init` away",
    ),
)
"""Other keyword arguments of a Trainer."""

OF_TRAINER = (
    *(
        Row(
            name,
            but("no"),
            f"{_ONE}, uncompiled; {_CAST}",
            hint="start the script with `python`, or run `accelerate config default`",
        )
        for name in ("mixed_precision", "dynamo_backend", "distributed_type")
    ),
    Row(
        "model_accepts_loss_kwargs",
        OFF,
        "without `num_items_in_batch` the plain Trainer takes the mean of its micro-batches' means,"
        " and the engine that over the label tokens of the step",
        hint="a causal language model of transformers, whose forward takes `**kwargs`",
    ),
    Row(
        "output_router_logits",
        SET,
        "the plain Trainer adds the router loss once per micro-batch, so that it grows with their"
        " number; an engine takes it over the step",
        hint="`model.config.output_router_logits = False`, and router_aux_loss_coef=0.0 in an"
        f" SFTConfig; {_SLUICE} has `train.router_loss_coef`",
    ),
)
"""What a Trainer finds out when it is made: of accelerate's settings, and of its model."""


def require_followed(rows: Iterable[Row], get: Get) -> None:
    """Check settings of a Trainer.

    Args:
        rows: What is refused.
        get: Returns a setting by its name.

    Raises:
        ConfigError: An engine cannot do what some of them say; all such are named.
    """
    found = list(broken(rows, get))
    if found:
        named = ", ".join(f"{one.field}={_named(get(one.field))}" for one in found)
        raise ConfigError(
            f"a Trainer that streams is given {named}",
            limit="; ".join(f"{one.field}: {one.limit}" for one in found),
            hint="; ".join(one.hint for one in found),
        )


def _named(value: object) -> str:
    text = str(getattr(value, "__name__", getattr(value, "value", value)))
    return text if len(text) < 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------
# Settings that a method, a loss or a format does not read
#


def _unread(recipe: Settings) -> Iterator[Breach]:
    """Yield what is set and not read."""
    yield from _unread_of_adapter(recipe)
    yield from _unread_of_rows(recipe)


def _unread_of_adapter(recipe: Settings) -> Iterator[Breach]:
    """Yield the settings of an adapter where there is none."""
    is_replaced = recipe.train.what == "adapter" or (
        recipe.train.is_full == (recipe.objective.head != "tokens")
    )  # or the objective does not go with what trains, which is refused by itself
    plain = {name: one.default for name, one in LoraSection.model_fields.items()}
    if recipe.train.is_head_alone:
        plain |= {"targets": (), "modules_to_save": (SCORE,)}
    for name, value in () if is_replaced else recipe.adapter:
        if name not in plain or value != plain[name]:
            yield Breach(
                field=f"adapter.{name}",
                what=f"adapter.{name} is {shown(value)} and train.what is"
                f" {shown(recipe.train.what)}",
                limit="weights of the model, or a head, train in place of an adapter, so there is"
                " none",
                hint=f"leave `adapter.{name}` out, or `train.what: adapter`",
                reads=("train.what",),
            )


def _unread_of_rows(recipe: Settings) -> Iterator[Breach]:
    data, objective = recipe.data, recipe.objective
    formats = objective.read_formats
    right = "auto" if objective.is_cross_entropy else formats[0]
    of_mix = (("data.mix", one.format) for one in data.mix)
    for field, value in (("data.format", data.format), *of_mix):
        if value not in (None, "auto", *formats):
            yield Breach(
                field=field,
                what=f"{field} is {value} and objective.method is {objective.method}",
                limit=f"it reads rows of the format {' or '.join(formats)}",
                hint=f"`{field}: {right}`"
                if field == "data.format"
                else f"`format: {right}` there",
                reads=("objective.method",),
            )
    found = FORMATS.get(data.format)
    known = {*found.columns, *found.optional} if found else set[str]()
    for column in data.columns:
        if found and column not in known:
            yield Breach(
                field="data.columns",
                what=f"data.columns names {column} and data.format is {data.format}",
                limit=f"the columns of {data.format} are {', '.join(sorted(known))}",
                hint=f"leave {column} out of `data.columns`, or `data.format: auto`",
                reads=("data.format",),
            )
    for name in data.set_for_turns if found and found.is_document else ():
        yield Breach(
            field=f"data.{name}",
            what=f"data.{name} is {getattr(data, name)} and data.format is {data.format}",
            limit="documents have no turns, are joined and cut, and all of them is learned",
            hint=f"leave out `data.{name}`",
            reads=("data.format",),
        )
