"""From a recipe to what the planner takes: facts, machine and request. No torch, no weights."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune.errors import ConfigError
from finetune.model.config import known_folder, published_form, read_config
from finetune.planning.ranks import LAUNCHED
from finetune.recipe.adapters import AdapterSection
from finetune.recipe.capabilities import (
    DEVICE,
    MLPS,
    MODEL,
    OF_MODEL,
    OF_SHARED_WEIGHTS,
    PLACED,
    PROCESSES,
    PUBLISHED,
    READ,
    TOWERS,
    WEIGHTS,
    require,
    setting,
)
from finetune.recipe.extensions import ObjectiveSection
from finetune.recipe.load import shape_of, shipped_facts
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import ModelSection, OffloadSection
from offload.errors import MachineError
from offload.plan.facts.facts import (
    AdapterSpec,
    ModelFacts,
    adapted_linears,
    linear_names,
    with_classifier_head,
)
from offload.plan.facts.images import Images
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import all_weights, prefix_spec, virtual_shapes
from offload.plan.facts.workload import (
    TILED_GROUPS,
    LayerCode,
    WeightPlace,
    Workload,
    why_head_on_device,
    why_on_device,
)
from offload.plan.machine.machine import (
    DTYPE_BYTES,
    Dtype,
    Implementation,
    Machine,
    described_machine,
    is_described,
    named_machine,
)
from offload.plan.request import (
    HEAD_CHUNK_TOKENS,
    ObjectiveCost,
    PlanRequest,
    Probe,
    Reduction,
    with_images,
)

if TYPE_CHECKING:
    from finetune.data.order import StepSizes

MAX_MACHINE_BYTES = 2**20
ASSUMED_IMAGE_TOKENS = 1024
"""Tokens of an image before rows are known, where a recipe has no limit to them."""
ASSUMED_TOP = 20
"""A teacher's tokens at each token before rows are known: the most that vLLM gives by default."""


def facts_of(
    model: ModelSection, *, note: Callable[[str], object] = lambda _text: None
) -> ModelFacts:
    """Return the model's facts, if it is a model that can be trained.

    Those of a shipped shape are shipped too. Any other model is built without weights, as
    `finetune` builds it, so that what that refuses is refused here. This loads torch and
    transformers, as a reward head does, and is reported to `note` first.

    Raises:
        ModelError: transformers builds no causal language model from the config, or its weights are
            quantised by a method that is not read.
        UnsupportedModelError: It cannot be trained layer by layer.
    """
    config, published, form = read_config(model), published_form(model), None
    if published:
        from finetune.model.form import require_form

        form = require_form(model)
    name = shape_of(config, form=form)
    if model.head == "tokens" and name is not None:
        facts = ModelFacts.from_json(shipped_facts()[name])
        return facts if form else replace(facts, published=published)
    note("Building the model without its weights ...")
    from finetune.model.facts import facts_from

    facts = facts_from(config, folder=known_folder(model), is_published=bool(published))
    if model.head == "tokens":
        return facts
    from finetune.model.classifier_head import require_classifier
    from finetune.model.empty import config_of

    of_tokens = model.head == "token_classes"
    require_classifier(config_of(model), of_tokens=of_tokens)
    return with_classifier_head(facts, model.num_outputs, has_bias=of_tokens)


def find_machine(
    name_or_file: str,
    *,
    dtype: Dtype,
    ram_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
    is_headless: bool = False,
) -> Machine:
    """Return a named card, a card of four numbers, or what `sluice probe --save FILE` wrote.

    Args:
        name_or_file: A card's name, or a path.
        dtype: What layers compute in; a file holds the rates that were measured.
        ram_bytes: Installed host memory, if not the assumed one.
        link_bytes_per_s: The link of a named card, if not the assumed one.
        is_headless: Whether no desktop uses the card.

    Raises:
        MachineError: Neither exists, a measured memory or link is to be another, or the card does
            not compute in this dtype.
    """
    file = Path(name_or_file)
    if file.is_file():
        return _machine_in(
            file,
            dtype=dtype,
            ram_bytes=ram_bytes,
            link_bytes_per_s=link_bytes_per_s,
            is_headless=is_headless,
        )
    if file.suffix == ".json":
        raise MachineError(
            f"there is no machine file {file}",
            limit="`--machine` takes a named card or a file",
            hint=f"`sluice probe --save {file}` writes one for this machine",
        )
    return named_machine(
        name_or_file,
        dtype=dtype,
        ram_bytes=ram_bytes,
        link_bytes_per_s=link_bytes_per_s,
        is_headless=is_headless,
    )


def _machine_in(
    file: Path,
    *,
    dtype: Dtype,
    ram_bytes: int | None,
    link_bytes_per_s: float | None,
    is_headless: bool,
) -> Machine:
    """Read a card of four numbers, which may be varied, or a measured machine, which may not."""
    try:
        if file.stat().st_size > MAX_MACHINE_BYTES:
            raise ValueError(f"it has {file.stat().st_size:,} bytes")
        text = file.read_text(encoding="utf-8")
        if is_described(text) and link_bytes_per_s is None:
            return described_machine(
                file.stem, text, dtype=dtype, ram_bytes=ram_bytes, is_headless=is_headless
            )
        if ram_bytes is None and link_bytes_per_s is None and not is_headless:
            return Machine.from_json(text)
    except ValueError as error:
        raise MachineError(
            f"{file} is no text of a machine file: {error}",
            limit="a machine file is JSON",
            hint=f"`sluice probe --save {file}` writes one for this machine",
        ) from error
    except MachineError as error:
        raise MachineError(f"{file}: {error.what}", limit=error.limit, hint=error.hint) from error
    raise MachineError(
        f"--ram, --link or --headless with the machine file {file}",
        limit="they vary a named card, and --ram and --headless one of four numbers; a file says"
        " the rest, and its memory is what was free",
        hint="edit ram_bytes or h2d_bytes_per_s in a copy of the file, or link_gb_per_s",
    )


def has_router_loss(recipe: Recipe) -> bool:
    """Return whether the recipe, or else the model's config, asks for the router's loss."""
    if recipe.train.router_loss_coef is not None:
        return recipe.train.router_loss_coef > 0
    if recipe.model.head != "tokens":
        return False
    config = read_config(recipe.model)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("output_router_logits") for part in parts)


def with_backend(recipe: Recipe, facts: ModelFacts, machine: Machine) -> Machine:
    """Return the machine with the expert backend that a recipe sets or needs.

    Raises:
        ConfigError: See `with_configured_backend`.
    """
    configured = with_configured_backend(recipe, facts, machine)
    is_open = configured is machine and machine.experts_implementation.value == "triton"
    if not (is_open and facts.has_experts and recipe.train.is_full):
        return configured
    way = Implementation(value="grouped_mm", source="Triton's kernels are for frozen experts")
    return replace(machine, experts_implementation=way)


def with_configured_backend(recipe: Recipe, facts: ModelFacts, machine: Machine) -> Machine:
    """Return the machine with the recipe's expert backend; unchanged if that is auto.

    Raises:
        ConfigError: The model has no experts, or the device does not support the backend, or not
            the layers' kernels.
    """
    _require_model(recipe, facts, device=machine.device)
    way = recipe.model.experts_implementation
    if way == "auto":
        return machine
    return replace(
        machine, experts_implementation=Implementation(value=way, source="as the recipe says")
    )


def adapter_spec(adapter: AdapterSection, facts: ModelFacts, *, dtype_bytes: int) -> AdapterSpec:
    """Return the adapter with its groups of targets spelled out.

    Of another method than LoRA, its modules are counted, which loads torch and peft.
    """
    stated, lora, num = adapter.stated, adapter.as_lora, adapter.num_in_front
    if stated.kind == "prefix":
        return prefix_spec(facts, num_past=num, has_encoder=stated.has_encoder)
    if stated.is_virtual:
        shapes = virtual_shapes(num, facts.hidden_size, has_encoder=stated.has_encoder)
        return AdapterSpec(rank=1, targets=(), experts=False, virtual=shapes)
    spec = AdapterSpec(
        rank=lora.rank,
        targets=lora.chosen_targets(linear_names(facts)),
        experts=lora.experts,
        rank_pattern=tuple(lora.rank_pattern.items()),
        alpha_pattern=tuple(lora.alpha_pattern),
        is_dora=lora.dora,
        modules=tuple(dict.fromkeys(lora.modules_to_save)),
        is_in_base_dtype=lora.compute_dtype == "auto",
        has_dropout=lora.dropout > 0,
        is_rounded=lora.dtype == "bfloat16",
    )
    if stated.kind != "modules":
        return spec
    from finetune.adapter.methods import counted

    adapted = (x for layer in facts.layers for x in adapted_linears(layer, spec))
    method = counted(
        adapter,
        tuple(Counter((x.name, x.d_in, x.d_out) for x in adapted).items()),
        model_type=facts.model_type,
        dtype_bytes=dtype_bytes,
    )
    return replace(spec, method=method)


def trained_spec(recipe: Recipe, facts: ModelFacts) -> AdapterSpec:
    """Return what trains: an adapter, or weights of the model, counted by their names."""
    what = recipe.train.what
    if what in ("adapter", "head"):
        return adapter_spec(recipe.adapter, facts, dtype_bytes=DTYPE_BYTES[recipe.model.dtype])
    low_bytes = FP32_BYTES if recipe.model.dtype == "float16" else None
    if what == "all":
        return AdapterSpec.none(replace(all_weights(facts), low_bytes=low_bytes))
    from finetune.full.weights import counted

    return AdapterSpec.none(replace(counted(recipe.model, what), low_bytes=low_bytes))


def _layer_code(recipe: Recipe) -> LayerCode:
    if recipe.train.is_full:
        return "plain"  # fused norms have no gradients by their weights
    return "compiled" if recipe.train.compile else recipe.model.kernels


def request_for(
    recipe: Recipe, facts: ModelFacts, sizes: "StepSizes", *, num_ranks: int
) -> PlanRequest:
    """Return what the recipe asks of the plan, for rows of these sizes.

    Open settings get their simplest value; `finetune.planning.candidates` has the alternatives.
    """
    width, packing = sizes.typical_width, sizes.packing
    typical = _workload(recipe, facts, width, label_tokens=sizes.label_tokens)
    largest = _workload(recipe, facts, sizes.largest_width, label_tokens=sizes.most_label_tokens)
    if packing is not None:
        typical = replace(typical, seq_len=packing.row_tokens, packed_tokens=width)
        # as many tokens in equal rows, none of which is shorter than the longest
        num_rows = max(1, sizes.largest_width // packing.longest_row)
        row_tokens = -(-sizes.largest_width // num_rows)
        largest = replace(largest, micro_batch_size=num_rows, seq_len=row_tokens)
    request = _request(recipe, facts, typical=typical, largest=largest, num_ranks=num_ranks)
    if request.objective is not None:
        request = replace(request, objective=replace(request.objective, num_top=sizes.num_top))
    return replace(
        request,
        num_micro_batches=sizes.num_micro_batches,
        most_tokens=packing.most_tokens if packing is not None else None,
    )


def full_request(recipe: Recipe, facts: ModelFacts, *, num_ranks: int = 1) -> PlanRequest:
    """Return the request before the rows are known: all are full, every token has a loss."""
    num_labels = recipe.train.seq_len * recipe.train.sequences
    longest = recipe.train.seq_len + recipe.adapter.num_in_rows
    full = _workload(recipe, facts, longest, label_tokens=num_labels)
    return _request(recipe, facts, typical=full, largest=full, num_ranks=num_ranks)


def _workload(recipe: Recipe, facts: ModelFacts, seq_len: int, *, label_tokens: int) -> Workload:
    chunk, tile = recipe.offload.head_chunk, recipe.offload.mlp_chunk
    embeddings, head = _places(recipe.offload, facts)
    return Workload(
        micro_batch_size=recipe.train.sequences,
        seq_len=seq_len,
        label_tokens=label_tokens,
        head_chunk_tokens=HEAD_CHUNK_TOKENS if chunk == "auto" else chunk,
        adapter=trained_spec(recipe, facts),
        optimizer=recipe.train.optimizer,
        dtype_bytes=DTYPE_BYTES[recipe.model.dtype],
        codec=recipe.offload.layer_codec,
        has_router_loss=has_router_loss(recipe),
        leaves_out=not recipe.train.compile,  # compiled layers are computed whole
        layer_code=_layer_code(recipe),
        plain_parts=recipe.model.plain_parts,
        mlp_chunk_tokens=tile if isinstance(tile, int) else None,
        embeddings=embeddings,
        head=head,
    )


def _places(offload: OffloadSection, facts: ModelFacts) -> tuple[WeightPlace, WeightPlace]:
    """Return where embedding and head are by a recipe; `auto` is first tried on the device.

    If they have one weight, `auto` is where the other of the two is.
    """
    embeddings, head = offload.embeddings, offload.head
    if facts.tie_word_embeddings:
        embeddings = head if embeddings == "auto" else embeddings
        head = embeddings if head == "auto" else head
    return "host" if embeddings == "host" else "device", "host" if head == "host" else "device"


def _request(
    recipe: Recipe, facts: ModelFacts, *, typical: Workload, largest: Workload, num_ranks: int
) -> PlanRequest:
    num = recipe.adapter.num_in_front
    if recipe.train.seq_len + num > facts.max_position_embeddings:
        raise ConfigError(
            f"train.seq_len: {recipe.train.seq_len}"
            + (f" and {num} virtual tokens" if num else "")
            + f" for a {facts.model_type} model",
            limit=f"it was made for at most {facts.max_position_embeddings} positions",
            hint=f"`train.seq_len: {facts.max_position_embeddings - num}`",
        )
    _require_model(recipe, facts, adapter=typical.adapter, num_ranks=num_ranks)
    has_backward = not recipe.train.is_head_alone
    request = PlanRequest(
        typical=typical,
        largest=largest,
        num_micro_batches=recipe.train.num_micro_batches,
        num_slots=_num_slots(recipe, facts),
        num_kept_graphs=_num_kept_graphs(recipe, facts) if has_backward else 0,
        vram_budget_bytes=recipe.offload.vram_budget_bytes,
        num_workers=recipe.data.num_workers,
        is_stashed=recipe.offload.stash == "host",
        is_on_disk=recipe.offload.load_tier == "disk",
        num_ranks=num_ranks,
        is_slab_shared=recipe.model.init == "pretrained",  # random layers are not loaded into one
        is_masked=has_router_loss(recipe),  # it does not count padding
        may_be_on_disk=recipe.model.init == "pretrained",
        # compiled layers are computed whole
        has_outputs=recipe.offload.attention_outputs == "auto"
        and not recipe.train.compile
        and has_backward,
        has_sent_graphs=recipe.offload.sent_graphs == "auto"
        and recipe.train.gradient_checkpointing is not True
        and not recipe.train.compile
        and has_backward,
        objective=_objective_cost(recipe.objective),
        probe=Probe(is_alone=recipe.train.is_head_alone) if recipe.train.takes_features else None,
        reduction=Reduction(
            element_bytes=2 if recipe.train.reduce_dtype == "bf16" else FP32_BYTES,
        ),
    )
    most = recipe.image.max_tokens
    return request if most is None else with_images(request, Images(most_tokens=most))


def _require_model(
    recipe: Recipe,
    facts: ModelFacts,
    *,
    device: str = "",
    adapter: AdapterSpec | None = None,
    num_ranks: int = 1,
) -> None:
    """Check that a recipe goes with the model, and with what else is known of the run.

    Raises:
        ConfigError: It does not.
    """
    has_tiles = any(x.group in TILED_GROUPS for layer in facts.layers for x in layer.linears)
    whys = [adapter and why(facts, adapter) for why in (why_on_device, why_head_on_device)]
    given = {
        DEVICE: device,
        PROCESSES: num_ranks,
        MODEL: "a mixture of experts" if facts.has_experts else "dense",
        PUBLISHED: facts.published or "plain",
        TOWERS: 0 if facts.tower is None else 1,
        MLPS: "dense" if has_tiles else "a mixture of experts",
        WEIGHTS: 1 if facts.tie_word_embeddings else 2,
        READ: "more than keys and values"
        if facts.num_carried_indices
        or (facts.carried_features and (facts.has_fp32_inputs or facts.num_streams > 1))
        else "keys and values",
        **{
            name: why and f"for the device alone: {why}"
            for name, why in zip(PLACED.values(), whys, strict=True)
        },
    }
    require(
        (*OF_MODEL, *OF_SHARED_WEIGHTS),
        lambda name: given[name] if name in given else setting(recipe, name),
        option=LAUNCHED,
    )


def _objective_cost(objective: ObjectiveSection) -> ObjectiveCost | None:
    """Return what a loss over a whole step adds to it; None for the cross-entropy."""
    if objective.is_cross_entropy:
        return None
    return ObjectiveCost(
        has_reference=objective.computes_reference,
        scored_frac=1.0 if objective.scores_mismatched else 0.0,
        num_top=ASSUMED_TOP if objective.has_teacher else 0,
        is_tempered=dict(objective).get("temperature") not in (None, 1),
    )


def _num_slots(recipe: Recipe, facts: ModelFacts) -> int | None:
    wanted: int | Literal["auto", "all"] = recipe.offload.num_slots
    if wanted == "auto":
        return None
    return facts.num_layers if wanted == "all" else wanted


def _num_kept_graphs(recipe: Recipe, facts: ModelFacts) -> int | None:
    wanted: int | Literal["auto", "all"] = recipe.offload.kept_graphs
    if recipe.train.gradient_checkpointing != "auto":
        return 0 if recipe.train.gradient_checkpointing else facts.num_layers
    if wanted == "auto":
        return None
    if wanted == "all":
        return facts.num_layers
    if wanted > facts.num_layers:
        raise ConfigError(
            f"offload.kept_graphs: {wanted} for a model of {facts.num_layers} layers",
            limit="it counts layers, from the last one",
            hint="`offload.kept_graphs: all`",
        )
    return wanted
