"""A plan as rows: first what a user acts on, then all that was counted and predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, get_args

from finetune.recipe.sections import ReportSection
from finetune.report.energy import plan_energy, plan_energy_line
from finetune.report.format import free_streaming, shown_count, shown_gib, shown_time
from finetune.report.rows import Row, Table, as_json, heading
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import LOW_HALVES, host_update_bytes
from offload.plan.facts.trainable import adapter_parameters, trained_parameters
from offload.plan.facts.workload import FusedPart
from offload.plan.machine.machine import DRIVER_BYTES, Implementation, Machine, Rate
from offload.plan.place_cost import PlaceCost
from offload.plan.plan import Plan
from offload.plan.schedule.op import RECOMPUTE, Route
from offload.plan.schedule.schedule import NUM_STAGING, Residency
from offload.plan.time.costs import Grade
from offload.plan.time.roofline import Bound, Count, layer_flops

REFERENCE_FLOPS_PER_S = 250e12
MATRIX_CLASSES = ("attention", "mlp", "experts", "shared_experts")
COUNTS: dict[Count, str] = {
    "causal": "attention counted exactly",
    "lecture": "attention as 3 S x h products",
}
SOURCES: dict[Grade, str] = {
    "spec": "published rates",
    "probed": "measured rates",
    "calibrated": "timed steps",
}
STASHED = "in RAM until the backward (`offload.stash: host`)"
LEAST_WAIT_FRAC = 0.02  # of a step: below it, waits for weights are not what limits it
DETAILS: dict[str, dict[str, tuple[str, str]]] = {
    "The model": {
        "model.num_active_parameters": ("active per token", "parameters"),
        "per_layer.weight_bytes": ("weights of layer 0", "bytes"),
        "per_layer.norm_bytes": ("its norms", "bytes"),
        "per_layer.router_bytes": ("its router", "bytes"),
        "per_layer.other_bytes": ("its others", "bytes"),
        "per_layer.cargo_bytes": ("its slot", "bytes"),
        "per_layer.forward_s": ("its forward, a micro-batch", "s"),
        "per_layer.backward_s": ("its backward", "s"),
        "per_layer.recompute_s": ("of it recomputed", "s"),
        "per_layer.h2d_s": ("its load", "s"),
        "per_layer.bound": ("its forward is bound by", ""),
    },
    "How a step is run": {
        "schedule.num_slots": ("slots", ""),
        "schedule.num_micro_batches": ("micro-batches", ""),
        "schedule.order": ("order", ""),
        "schedule.num_loads": ("loads", ""),
        "schedule.h2d_bytes": ("to the device", "bytes"),
        "schedule.d2h_bytes": ("back from it", "bytes"),
        "schedule.kept_graphs": ("kept graphs", ""),
        "schedule.sent_graphs": ("sent graphs", ""),
        "schedule.kept_outputs": ("kept attention outputs", ""),
        "schedule.sent_outputs": ("sent attention outputs", ""),
        "schedule.recompute_saved_s": ("recompute that they save", "s"),
        "embeddings.saved_vram_bytes": ("embedding in RAM: device memory saved", "bytes"),
        "embeddings.h2d_bytes": ("embedding in RAM: rows to the device, at most", "bytes"),
        "embeddings.added_s": ("embedding in RAM: longer by", "s"),
        "head.saved_vram_bytes": ("head in RAM: device memory saved", "bytes"),
        "head.num_loads": ("head in RAM: more loads", ""),
        "head.added_s": ("head in RAM: longer by", "s"),
        "objective.has_reference": ("rows are scored by a reference", ""),
        "objective.time_frac": ("longer by scoring rows first", "error"),
        "objective.num_loads": ("more loads for it", ""),
        "probe.num_features": ("features", ""),
        "probe.one_pass_s": ("features of a step's rows", "s"),
        "probe.pass_s": ("features of all rows", "s"),
        "probe.feature_bytes": ("RAM of a feature", "bytes"),
        "probe.num_parameters": ("head on them", "parameters"),
        "images.step_vram_bytes": ("features of images", "bytes"),
        "images.step_bytes": ("features that a step reads, at most", "bytes"),
        "images.step_disk_s": ("from disk, where RAM has none of them", "s"),
        "network.num_ranks": ("ranks", ""),
        "network.num_bytes": ("sent by each rank", "bytes"),
        "network.bytes_per_s": ("network", "Gb/s"),
        "network.source": ("network's rate", ""),
        "network.hidden_frac": ("of it during compute", "%"),
        "network.needed_bytes_per_s": ("network that would add at most 1 %", "Gb/s"),
    },
    "Images, before step 1": {
        "images.num_images": ("images", ""),
        "images.num_tokens": ("tokens of all", ""),
        "images.feature_bytes": ("features on disk", "bytes"),
        "images.host_s": ("decoded and resized", "s"),
        "images.compute_s": ("by the tower", "s"),
        "images.load_s": ("its weights copied", "s"),
        "images.disk_s": ("features written", "s"),
        "images.peak_vram_bytes": ("peak of device memory", "bytes"),
    },
    "Predicted step": {
        "predicted.phases_s.forward": ("forward", "s"),
        "predicted.phases_s.decode": ("decoding of weights", "s"),
        "predicted.phases_s.head and loss": ("head and loss", "s"),
        "predicted.phases_s.backward": ("backward", "s"),
        "predicted.phases_s.stall": ("waits for weights", "s"),
        "predicted.phases_s.optimizer": ("optimizer", "s"),
        "predicted.phases_s.exposed network": ("waits for the network", "s"),
        "predicted.phases_s.exposed updates": ("waits for updates", "s"),
        "predicted.phases_s.h2d": ("meanwhile: copies to the device", "s"),
        "predicted.phases_s.d2h": ("meanwhile: copies to the host", "s"),
        "predicted.phases_s.reads": ("meanwhile: reads into page-locked buffers", "s"),
        "predicted.phases_s.updates": ("meanwhile: updates of weights", "s"),
        "predicted.phases_s.network": ("meanwhile: the network", "s"),
        "predicted.bound_s": ("bound R3", "s"),
    },
}
"""What people read of a plan's figures, by their place in JSON: a label and a unit."""


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Return predicted seconds by phase; all but `h2d` and `d2h` make up `step`."""
    phases = plan.predict().phases()
    phases["step"] += plan.costs.optimizer_s
    return phases | {"optimizer": plan.costs.optimizer_s, "data wait": 0.0}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for programs; sizes in bytes, times in seconds."""
    return as_json(rows_of(plan))


def rows_of(
    plan: Plan,
    *,
    faster: Sequence[Row] = (),
    prices: ReportSection | None = None,
    num_steps: int | None = None,
) -> list[Row]:
    """Return all that a plan says.

    Args:
        plan: It.
        faster: What would make the step faster, the best first.
        prices: What the step's energy costs; None if that is not known.
        num_steps: Optimizer steps of the run, where they are known.
    """
    figures = dict(_flat(_figures(plan), ""))
    step_s = figures["predicted.step_s"]
    brief = _acted_on(plan, figures, faster, num_steps)
    shown = [Row("", *line) for line in _lines(plan, prices)]
    for title, named in DETAILS.items():
        known = [(key, *how) for key, how in named.items() if figures.get(key)]
        shown.append(heading(title))
        for key, label, unit in known:
            value = figures.pop(key)
            share = f"({value / step_s:.0%})" if "phases_s" in key else ""
            shown.append(Row(key, label, value, unit, share))
    for place, terms in (("device", plan.device_memory), ("host", plan.host_memory)):
        shown.append(heading(f"Predicted peak of {place} memory ({plan.memory_grade})"))
        shown += [Row("", term.name, term.num_bytes, "MiB") for term in terms if term.num_bytes]
    return [
        *brief,
        heading("Where it runs"),
        *shown,
        *(Row(key, "", value) for key, value in figures.items()),
    ]


def _flat(figures: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yield figures with their places; a list is one."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _figures(plan: Plan) -> dict[str, Any]:
    """Return the figures as programs read them; sizes in bytes, times in seconds."""
    facts, typical, schedule = plan.facts, plan.request.typical, plan.schedule
    layer, cost, objective = facts.layers[0], plan.costs.layers[0], plan.request.objective
    classes = {
        name: count * typical.dtype_bytes for name, count in layer.parameters_by_class().items()
    }
    phases, network = predicted_phases(plan), plan.network
    kernel, num_adapter = (
        plan.machine.experts_implementation,
        adapter_parameters(facts, typical.adapter),
    )
    places = {"embeddings": PlaceCost.of(plan, "embeddings"), "head": PlaceCost.of(plan, "head")}
    figures = {name: asdict(one) for name, one in places.items() if one is not None}
    if plan.request.probe is not None:
        from offload.plan.feature_pass import feature_pass

        probe = feature_pass(plan, plan.request)
        assert probe is not None
        figures["probe"] = asdict(probe) | {"pass_s": probe.pass_s}
    if plan.request.images is not None:
        from finetune.report.images import images_json

        figures["images"] = images_json(plan)
    if network is not None:
        figures["network"] = {
            "num_ranks": plan.request.num_ranks,
            "num_bytes": schedule.network_bytes,
            "latency_s": network.latency_s.value,
            "bytes_per_s": network.bytes_per_s.value,
            "source": network.bytes_per_s.source,
            "hidden_frac": plan.network_hidden_frac,
            "needed_bytes_per_s": plan.network_needed_bytes_per_s,
        }
    if objective is not None:
        price = dict(zip(("time_frac", "num_loads"), plan.objective_price, strict=True))
        figures["objective"] = asdict(objective) | price
    return {
        "machine": plan.machine.name,
        "experts_implementation": asdict(kernel) if facts.has_experts else None,
        "grade": plan.costs.grade,
        "model": {
            "type": facts.model_type,
            "num_layers": facts.num_layers,
            "num_parameters": facts.num_parameters,
            "num_active_parameters": facts.num_active_parameters,
            "num_adapter_parameters": num_adapter,
            "num_module_parameters": trained_parameters(facts, typical.adapter) - num_adapter,
        },
        "per_layer": {
            "weight_bytes": sum(classes[name] for name in MATRIX_CLASSES),
            "norm_bytes": classes["norm"],
            "router_bytes": classes["router"],
            "other_bytes": classes["bias"] + classes["other"],
            "cargo_bytes": cost.weight_bytes,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "recompute_s": cost.recompute_s,
            "h2d_s": plan.costs.load_s(0),
            "bound": cost.bound,
            "compute_figures": compute_figures(plan),
        },
        "schedule": {
            "num_slots": plan.num_slots,
            "kept_graphs": plan.num_kept_graphs,
            **outputs_json(plan.residency),
            "recompute_saved_s": recompute_saved_s(plan),
            "num_micro_batches": plan.request.num_micro_batches,
            "order": plan.request.order.value,
            "tokens_per_step": plan.tokens_per_step,
            "num_loads": schedule.num_loads,
            "h2d_bytes": schedule.h2d_bytes,
            "d2h_bytes": schedule.d2h_bytes,
            "break_even_tokens": plan.break_even_tokens,
        },
        "objective": None,
        **figures,
        "energy": plan_energy(plan),
        "limited_by": limit_line(plan, phases),
        "predicted": {
            "step_s": phases["step"],
            "tokens_per_s": plan.tokens_per_step / phases["step"],
            "bound_s": plan.bound_s,
            "phases_s": phases,
            "peak_vram_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "device_memory": {term.name: term.num_bytes for term in plan.device_memory},
            "host_memory": {term.name: term.num_bytes for term in plan.host_memory},
            "limit_bytes": memory_limits(plan.machine),
        },
    }


def _acted_on(
    plan: Plan, figures: Mapping[str, Any], faster: Sequence[Row], num_steps: int | None
) -> list[Row]:
    """Return what trains on what, how fast, in how much memory, and what would be faster."""
    facts, request = plan.facts, plan.request
    step_s, tokens_per_s = figures["predicted.step_s"], figures["predicted.tokens_per_s"]
    trains = dict.fromkeys(trained_line(replace(plan, request=run)) for run in request.runs)
    model = f"{facts.model_type}, {facts.num_layers} layers, {shown_count(facts.num_parameters)}"
    source = SOURCES[plan.costs.grade]
    rows = [
        Row("", "model", f"{model} parameters"),
        *(Row("", "trains", line) for line in trains),
        Row(
            "",
            "a step",
            step_s,
            "s",
            f"for {plan.tokens_per_step:,} tokens, predicted from {source}",
        ),
        Row("", "speed", tokens_per_s, "tokens/s"),
        Row("", "1 M tokens", 1e6 / tokens_per_s, "s")
        if num_steps is None
        else Row("", "all steps", num_steps * step_s, "s", f"for {num_steps:,}"),
        *_peaks(plan),
        *_images(plan),
        Row("", "limited by", figures["limited_by"]),
        *faster[:1],
    ]
    return [row._replace(level="brief") for row in rows]


def _images(plan: Plan) -> list[Row]:
    """Return how many images there are, and what they cost; nothing where rows have none."""
    if plan.request.images is None:
        return []
    from finetune.report.images import images_line, pass_of, shrunk_line

    cost = pass_of(plan)
    return [Row("", "images", images_line(cost), note=shrunk_line(cost))]


def limit_line(plan: Plan, phases: Mapping[str, float]) -> str:
    """Return what a step takes its time with: computing, or waiting for weights."""
    device = "GPU" if plan.machine.device == "cuda" else "CPU"
    wait_frac, copy_s = phases["stall"] / phases["step"], max(phases["h2d"], phases["reads"])
    waits, copies = "the link: the {} waits for layers from RAM", "copies from RAM"
    if plan.request.is_on_disk:
        waits, copies = "the disk: the {} waits for layers", "reads from the disk"
    if plan.request.is_sharded:
        waits = "the network: the {} waits for layers"
    if wait_frac >= LEAST_WAIT_FRAC:
        return f"{waits.format(device)} {wait_frac:.0%} of the step"
    why: dict[Bound, str] = {
        "compute": f"computing on the {device}",
        "memory": f"the {device}'s memory: it takes longer to read weights than to compute",
        "launch": "the host: the GPU waits for its kernels to be started",
    }
    hidden = f"; {shown_time(copy_s)} of {copies} overlap with it" if copy_s else ""
    return why[plan.costs.bound if device == "GPU" else "compute"] + hidden


def memory_limits(machine: Machine) -> dict[str, int]:
    """Return the bytes of each memory by its name; a machine that computes on a CPU has one."""
    limits = {"VRAM": machine.vram_bytes, "RAM": machine.ram_bytes}
    return {"RAM": machine.ram_bytes} if machine.device == "cpu" else limits


def _peaks(plan: Plan) -> list[Row]:
    """Return the peak of each memory against what there is; a CPU has only one."""
    machine, budget_bytes = plan.machine, plan.request.vram_budget_bytes
    is_cuda, limit_bytes, limit = machine.device == "cuda", machine.vram_bytes, ""
    if budget_bytes is not None and budget_bytes < limit_bytes:
        limit_bytes, limit = budget_bytes, " (`offload.vram_budget`)"
    elif is_cuda and budget_bytes is not None and budget_bytes > limit_bytes:
        limit = ", less than `offload.vram_budget`"
    is_shared = is_cuda and plan.request.local_ranks > 1
    is_named = not machine.is_measured and machine.system_bytes > 0
    has_desktop = not (machine.is_measured or limit) and machine.desktop_bytes > 0
    of_each, of_all = (", of each card", ", of all") if is_shared else ("", "")
    ram_bytes = plan.host_bytes if is_cuda else plan.peak_bytes + plan.host_bytes
    left = f", {shown_gib(machine.system_bytes)} left to the system" if is_named else ""
    note = f"of {shown_gib(machine.ram_bytes)}{of_all}{left}"
    rows = [Row("", "RAM", ram_bytes, "bytes", note)]
    if is_cuda or limit:
        sizes = (shown_gib(machine.desktop_bytes), shown_gib(DRIVER_BYTES))
        left = ", {} left to a desktop, {} to the driver".format(*sizes) if has_desktop else ""
        note = f"of {shown_gib(limit_bytes)}{limit}{of_each}{left}"
        rows.insert(0, Row("", "VRAM" if is_cuda else "computing", plan.peak_bytes, "bytes", note))
    return rows


def trained_line(plan: Plan) -> str:
    """Return what is trained, in words."""
    spec, facts = plan.request.typical.adapter, plan.facts
    trained = f"{shown_count(trained_parameters(facts, spec))} parameters"
    if spec.whole is not None:
        return f"{shown_count(spec.whole.num_parameters)} weights of the model, and no adapter"
    if plan.request.is_on_features:
        return f"{trained}: the head alone"
    if spec.virtual:
        num = spec.virtual[0][0]
        if spec.num_past:
            return f"{trained}: prefix tuning, {num} keys and values in front of each layer's"
        name = "p-tuning" if spec.virtual[1:] else "prompt tuning"
        return f"{trained}: {name}, {num} virtual tokens in front of each row"
    places = [*spec.targets, *(["the experts"] if spec.experts else [])]
    ranks = ", ".join(f"{name} {rank}" for name, rank in spec.rank_pattern)
    name = f"{'DoRA' if spec.is_dora else 'LoRA'} rank {spec.rank}"
    return (
        f"{trained}: {name if spec.method is None else spec.method.name}"
        + (f" ({ranks})" if ranks else "")
        + f" on {', '.join(places[:-1])}{' and ' if places[1:] else ''}{places[-1]}"
        + (f", with {', '.join(spec.modules)} whole" if spec.modules else "")
    )


def _lines(plan: Plan, prices: ReportSection | None) -> Iterator[tuple[str, str]]:
    """Yield what the figures alone do not say, each with its name."""
    request, typical, schedule = plan.request, plan.request.typical, plan.schedule
    spec, num_layers, kernel = (
        typical.adapter,
        plan.facts.num_layers,
        plan.machine.experts_implementation,
    )
    if prices is not None:
        yield "energy", plan_energy_line(plan, prices)
    if spec.targets and typical.dtype_bytes < FP32_BYTES and not spec.are_branches_grouped:
        yield "adapter", "computed in float32"
    if spec.whole is not None and not request.is_sharded:
        sizes = host_update_bytes(typical.dtype_bytes, typical.optimizer, spec.whole.low_bytes)
        names = {LOW_HALVES: "fp32 masters"} if spec.whole.low_bytes else {}
        parts = ", ".join(f"{size:.3g} {names.get(n, n)}" for n, size in sizes.items() if size)
        yield "weights", f"{sum(sizes.values()):.3g} bytes each in RAM ({parts})"
    yield "layers", layers_line(plan)
    yield "layer inputs", STASHED if request.is_stashed else "on the device"
    shapes = " and ".join(dict.fromkeys(run.typical.size for run in request.runs))
    num, runs = sum(run.num_micro_batches for run in request.runs), len(request.runs)
    of_runs = f" of {runs} runs" if runs > 1 else ""
    ranks = f", at most {request.rank_micro_batches} of them on each of {request.num_ranks} ranks"
    ranks = ranks if request.num_ranks > 1 else ""
    yield "tokens", f"{plan.tokens_per_step:,} in {num} micro-batches{of_runs} of {shapes}{ranks}"
    if plan.num_slots < num_layers and not request.is_on_features:
        is_in_rounds = request.num_rounds > 1
        free = free_streaming(plan.break_even_tokens, is_in_rounds=is_in_rounds)
        yield "streaming", f"in micro-batches of this size it {free}"
    if request.num_ranks > 1 and plan.machine.device == "cuda" and schedule.num_loads:
        all_of_them = (
            f"{request.local_ranks * plan.costs.speed(Route.LOAD).bytes_per_s / 1e9:,.0f} GB/s"
        )
        yield "assumed", f"a link for each GPU, and {all_of_them} for all of them at once"
    if plan.facts.has_experts:
        rate = plan.machine.expert_gemm_flops_per_s
        yield "expert kernels", f"{kernel.value} ({kernel.source})"
        yield "experts", f"{rate.value / 1e12:,.2f} TFLOP/s ({rate.source})"
    code = typical.code_on(plan.machine.device)
    if code != "plain":
        fused = [x for x in get_args(FusedPart) if code == "fused" or x != "loss"]
        own = [part for part in fused if part in typical.plain_parts]
        rest = f"; {', '.join(own)} by the model's code" if own else ""
        trial = " (assumed until a run tries them)" if typical.layer_code == "auto" else ""
        yield "layer kernels", f"{code}: {', '.join(x for x in fused if x not in own)}{rest}{trial}"


def layers_line(plan: Plan) -> str:
    """Return where layers wait, in which form, and how many of them are on the device."""
    request, codec, num_layers = plan.request, plan.request.typical.codec, plan.facts.num_layers
    size = shown_gib(sum(cost.weight_bytes for cost in plan.costs.layers))
    if request.is_sharded:
        return (
            f"{size} over {request.num_ranks} ranks, a part of each layer on each (fsdp2): gathered"
            f" before each of {2 * request.rank_micro_batches} visits, two at a time"
        )
    rate = plan.machine.disk_bytes_per_s
    place = "in RAM"
    if request.is_on_disk:
        place = "on a disk that could not be measured (priced as if in RAM)"
        if rate is not None:
            place = f"on disk, read at {rate.value / 1e9:,.2f} GB/s ({rate.source})"
    rounding = f", each weight rounded by {CODECS[codec].rounding:.1%} RMS"
    form = "" if codec == NATIVE else f" in {codec}{rounding if CODECS[codec].rounding else ''}"
    staged = f", through {NUM_STAGING} page-locked buffers" if plan.schedule.is_staged else ""
    moved = "" if plan.schedule.num_loads else ": loaded once, then resident"
    if request.is_on_features:
        moved = ": visited for the features, and in no step"
    return f"{size} {place}{form}; slots for {plan.num_slots} of {num_layers}{moved}{staged}"


def recompute_saved_s(plan: Plan) -> float:
    """Return the time that graphs and attention outputs save which are kept, or sent and back."""
    saved, saved_s = plan.saved, 0.0
    for number, cost in enumerate(plan.costs.layers):
        save = saved.of(number)
        saved_s += cost.forth_s(RECOMPUTE) + cost.back_s(RECOMPUTE)
        saved_s -= cost.forth_s(save) + cost.back_s(save)
    return saved_s * plan.request.rank_micro_batches


def outputs_json(residency: Residency) -> dict[str, int]:
    """Return how many layers send their graph, and keep or send the output of their attention."""
    graphs = {"sent_graphs": residency.num_sent_graphs} if residency.num_sent_graphs else {}
    if not residency.has_outputs:
        return graphs
    return {
        **graphs,
        "kept_outputs": residency.num_kept_outputs,
        "sent_outputs": residency.num_sent_outputs,
    }


def compute_figures(plan: Plan) -> list[dict[str, Any]]:
    """Count a layer's forward by both methods, at the machine's rate and at a round 250 TFLOP/s.

    Neither includes adapters, norms or launches, which the plan prices too.
    """
    typical, rate = plan.request.typical, plan.machine.gemm_flops_per_s
    rates = [(rate.value, rate.source)]
    if plan.machine.device == "cuda":
        rates.append((REFERENCE_FLOPS_PER_S, "a round figure"))
    counted = {
        words: layer_flops(
            plan.facts,
            plan.facts.layers[0],
            num_tokens=typical.num_tokens,
            context_tokens=typical.seq_len,
            count=count,
        )
        for count, words in COUNTS.items()
    }
    return [
        {
            "name": f"{words}, {flops_per_s / 1e12:,.2f} TFLOP/s ({source})",
            "flops": flops,
            "seconds": flops / flops_per_s,
        }
        for words, flops in counted.items()
        for flops_per_s, source in rates
    ]


def ranks_json(plan: Plan) -> list[dict[str, Any]]:
    """Return what each rank has of the step, and how long it waits for the slowest."""
    ranks = (plan.as_other, *plan.others)
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].step_s)
    step_s = max(plan.step_s, ranks[slowest].step_s)
    return [
        {
            "machine": rank.machine.name,
            "num_micro_batches": rank.num_micro_batches,
            "num_slots": rank.num_slots,
            "kept_graphs": rank.num_kept_graphs,
            "alone_s": rank.step_s,
            "waits_s": step_s - rank.step_s,
            "waits_for": None if number == slowest else slowest,
        }
        for number, rank in enumerate(ranks)
    ]


def ranks_table(plan: Plan) -> Table:
    """Return the same for people; the plan is that of rank 0."""
    columns = ["rank", "card", "micro-batches", "slots"]
    lines = [
        (
            *(number, row["machine"], row["num_micro_batches"], row["num_slots"], row["alone_s"]),
            ""
            if row["waits_for"] is None
            else f"{shown_time(row['waits_s'])} for rank {row['waits_for']}",
        )
        for number, row in enumerate(ranks_json(plan))
    ]
    title = "Ranks: each one's share, and its step before it waits for others; above is rank 0"
    return Table(title, [*columns, "step|s", "waits"], lines, level="brief")


def gpus_json(plan: Plan) -> dict[str, Any]:
    """Return how GPUs of a machine share the step; memory of the device is that of each."""
    return {
        "num_gpus": plan.request.num_ranks,
        "most_micro_batches": plan.request.rank_micro_batches,
    }


def machine_table(machine: Machine) -> Table:
    """Return a machine's rates and capacities, each with its source."""
    named = {field.name: getattr(machine, field.name) for field in fields(machine)}
    if machine.network is not None:
        between = f"network, {machine.network.world_size} ranks"
        named[f"{between}: latency_s"] = machine.network.latency_s
        named[f"{between}: bytes_per_s"] = machine.network.bytes_per_s
    lines = [
        (name, f"{value.value:.4g}" if isinstance(value, Rate) else value.value, value.source)
        if isinstance(value, Rate | Implementation)
        else (name, shown_gib(value), "")
        for name, value in named.items()
        if isinstance(value, Rate | Implementation) or name.endswith("_bytes")
    ]
    title = f"{machine.name} ({machine.device}, {machine.dtype})"
    return Table(title, ["", "value", "source"], lines)
