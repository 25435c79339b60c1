"""A plan as tables for people and as JSON for programs."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from finetune.report.energy import plan_energy
from finetune.report.format import (
    shown_count,
    shown_gib,
    shown_gigabits,
    shown_mib,
    shown_time,
    table_of,
)
from offload.plan.facts.facts import WholeWeights
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import LOW_HALVES, host_update_bytes
from offload.plan.facts.trainable import adapter_parameters, trained_parameters
from offload.plan.feature_pass import FeaturePass, feature_pass
from offload.plan.machine.machine import Implementation, Machine, Network, Rate
from offload.plan.place_cost import EmbeddingCost, HeadCost
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Residency
from offload.plan.step import FREE_FRAC
from offload.plan.time.roofline import Count, layer_flops

REFERENCE_FLOPS_PER_S = 250e12
MATRIX_CLASSES = ("attention", "mlp", "experts", "shared_experts")
COUNTS: dict[Count, str] = {
    "causal": "attention counted exactly",
    "lecture": "attention as 3 S x h products",
}

FACTS_GRADES = {
    "config": "from the config alone",
    "built": "off the model, built without weights",
}


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Return predicted seconds by phase; all but `h2d` and `d2h` make up `step`."""
    phases = plan.predict().phases()
    phases["step"] += plan.costs.optimizer_s
    return phases | {"optimizer": plan.costs.optimizer_s, "data wait": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeFigure:
    """The matrix products and attention of one layer's forward, by one counting method."""

    name: str
    flops: float
    seconds: float


def compute_figures(plan: Plan) -> list[ComputeFigure]:
    """Count a layer's forward by both methods, at the machine's rate and at a round 250 TFLOP/s.

    Neither includes adapters, norms or launches, which the plan prices too.
    """
    typical = plan.request.typical
    rate = plan.machine.gemm_flops_per_s
    figures = []
    for count, words in COUNTS.items():
        flops = layer_flops(
            plan.facts,
            plan.facts.layers[0],
            num_tokens=typical.num_tokens,
            context_tokens=typical.seq_len,
            count=count,
        )
        rates = [(rate.value, rate.source)]
        if plan.machine.device == "cuda":
            rates.append((REFERENCE_FLOPS_PER_S, "a round figure"))
        for flops_per_s, source in rates:
            name = f"{words}, {flops_per_s / 1e12:,.2f} TFLOP/s ({source})"
            figures.append(ComputeFigure(name=name, flops=flops, seconds=flops / flops_per_s))
    return figures


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for programs; sizes in bytes, times in seconds."""
    facts, typical = plan.facts, plan.request.typical
    layer, cost = facts.layers[0], plan.costs.layers[0]
    classes = {
        name: count * typical.dtype_bytes for name, count in layer.parameters_by_class().items()
    }
    phases, head, embedding = predicted_phases(plan), HeadCost.of(plan), EmbeddingCost.of(plan)
    return {
        "machine": plan.machine.name,
        "experts_implementation": asdict(plan.machine.experts_implementation)
        if facts.has_experts
        else None,
        "grade": plan.costs.grade,
        "model": {
            "type": facts.model_type,
            "facts_grade": facts.grade,
            "num_layers": facts.num_layers,
            "num_parameters": facts.num_parameters,
            "num_active_parameters": facts.num_active_parameters,
            "num_adapter_parameters": adapter_parameters(facts, typical.adapter),
            "num_module_parameters": trained_parameters(facts, typical.adapter)
            - adapter_parameters(facts, typical.adapter),
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
            "compute_figures": [
                {"name": figure.name, "flops": figure.flops, "seconds": figure.seconds}
                for figure in compute_figures(plan)
            ],
        },
        "schedule": {
            "num_slots": plan.num_slots,
            "kept_graphs": plan.num_kept_graphs,
            **outputs_json(plan.residency),
            "num_micro_batches": plan.request.num_micro_batches,
            "order": plan.request.order.value,
            "tokens_per_step": plan.tokens_per_step,
            "num_loads": plan.schedule.num_loads,
            "h2d_bytes": plan.schedule.h2d_bytes,
            "d2h_bytes": plan.schedule.d2h_bytes,
            "break_even_tokens": plan.break_even_tokens,
        },
        **({} if embedding is None else {"embeddings": asdict(embedding)}),
        **({} if head is None else {"head": asdict(head)}),
        **({} if plan.network is None else {"network": _network_json(plan, plan.network)}),
        "objective": _objective_json(plan),
        **_probe_json(plan),
        "energy": plan_energy(plan),
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


def embeddings_line(cost: EmbeddingCost, *, is_tied: bool) -> str:
    """Return what an input embedding in host memory saves and costs, for people."""
    saved = cost.saved_vram_bytes
    size = f"{shown_gib(abs(saved))} {'less' if saved > 0 else 'more'} of device memory"
    one = ", one weight with the head" if is_tied else ""
    return (
        f"in RAM (`offload.embeddings: host`{one}): {size}, and at most"
        f" {shown_mib(cost.most_h2d_bytes)} of rows to it per step, which is"
        f" {shown_time(cost.added_s)} longer"
    )


def head_line(cost: HeadCost) -> str:
    """Return what a head in host memory saves and costs, for people."""
    loads = "1 load" if cost.num_loads == 1 else f"{cost.num_loads} loads"
    return (
        f"in RAM (`offload.head: host`): {shown_gib(cost.saved_vram_bytes)} less of device"
        f" memory; copied over slots once per step, and {loads} more, which is"
        f" {shown_time(cost.added_s)} longer"
    )


def memory_limits(machine: Machine) -> dict[str, int]:
    """Return the bytes of each memory by its name; a machine that computes on a CPU has one."""
    limits = {"VRAM": machine.vram_bytes, "RAM": machine.ram_bytes}
    return {"RAM": machine.ram_bytes} if machine.device == "cpu" else limits


def gpus_json(plan: Plan) -> dict[str, Any]:
    """Return how GPUs of a machine share the step; memory of the device is that of each."""
    return {
        "num_gpus": plan.request.num_ranks,
        "most_micro_batches": plan.request.rank_micro_batches,
    }


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
    columns = ("rank", "card", "micro-batches", "slots", "kept graphs", "step", "waits")
    table = table_of("Ranks: each one's share, and its step before it waits for others", *columns)
    for number, row in enumerate(ranks_json(plan)):
        waits_for = row["waits_for"]
        waits = "" if waits_for is None else f"{shown_time(row['waits_s'])} for rank {waits_for}"
        counts = (row["num_micro_batches"], row["num_slots"], row["kept_graphs"])
        table.add_row(
            str(number), row["machine"], *map(str, counts), shown_time(row["alone_s"]), waits
        )
    return table


def gpus_lines(plan: Plan) -> list[str]:
    """Return the same in words, and what is assumed."""
    request, machine = plan.request, plan.machine
    if request.own_micro_batches is not None:
        return [
            f"{request.num_ranks} ranks share the step's {request.num_micro_batches} micro-batches;"
            f" this is the plan of rank 0, which takes {request.rank_micro_batches}"
        ]
    if request.num_ranks == 1 or machine.device == "cpu":
        return []
    most_bytes_per_s = request.local_ranks * plan.costs.h2d_bytes_per_s
    lines = [
        f"{request.num_ranks} share the step, each with at most {request.rank_micro_batches} of its"
        f" {request.num_micro_batches} micro-batches",
        f"VRAM is of each, RAM of all{', layers in it once' if request.num_slabs == 1 else ''}",
    ]
    if plan.schedule.num_loads:
        rate = f"{most_bytes_per_s / 1e9:,.0f} GB/s"
        lines.append(f"assumed: a link for each, and {rate} for all of them at once")
    return lines


def _probe_json(plan: Plan) -> dict[str, Any]:
    cost = feature_pass(plan, plan.request)
    return {} if cost is None else {"probe": asdict(cost) | {"pass_s": cost.pass_s}}


def _objective_json(plan: Plan) -> dict[str, Any] | None:
    if plan.request.objective is None:
        return None
    time_frac, num_loads = plan.objective_price
    return {**asdict(plan.request.objective), "time_frac": time_frac, "num_loads": num_loads}


def _network_json(plan: Plan, network: Network) -> dict[str, Any]:
    return {
        "num_ranks": plan.request.num_ranks,
        "num_bytes": plan.schedule.network_bytes,
        "latency_s": network.latency_s.value,
        "bytes_per_s": network.bytes_per_s.value,
        "source": network.bytes_per_s.source,
        "hidden_frac": plan.network_hidden_frac,
        "needed_bytes_per_s": plan.network_needed_bytes_per_s,
    }


def network_line(plan: Plan, network: Network) -> str:
    """Return what ranks send each other, over what, and which network would cost no time."""
    rate, needed = network.bytes_per_s, plan.network_needed_bytes_per_s
    what = "layers and gradients" if plan.request.is_sharded else "gradients"
    return (
        f"each rank moves {shown_mib(plan.schedule.network_bytes)} of {what} per step at"
        f" {shown_gigabits(rate.value)} ({rate.source}): {plan.network_hidden_frac:.0%} of the time"
        f" overlaps with compute; at {shown_gigabits(needed)} or more it adds at most"
        f" {FREE_FRAC:.0%} to the step"
    )


def objective_line(plan: Plan) -> str:
    """Return what a loss over the whole step costs, in words."""
    assert plan.request.objective is not None
    time_frac, num_loads = plan.objective_price
    reference = ", also by the reference" if plan.request.objective.has_reference else ""
    return f"rows are scored before they are trained on{reference}: +{time_frac:.0%} time, " + (
        f"+{num_loads} loads"
    )


def probe_line(cost: FeaturePass) -> str:
    """Return what a probe's features are predicted to cost, and what trains on them."""
    trained = f"then the head alone, {shown_count(cost.num_parameters)} trained"
    one = f"{shown_time(cost.one_pass_s)} for the rows of a step"
    if cost.num_features is None or cost.pass_s is None:
        return f"features of each row once, {one}, {cost.feature_bytes:,} bytes each; {trained}"
    size = shown_gib(cost.num_features * cost.feature_bytes)
    return (
        f"{cost.num_features:,} features once, {shown_time(cost.pass_s)} ({one}), {size} of RAM;"
        f" {trained}"
    )


def plan_tables(plan: Plan) -> RenderableType:
    """Return the figures behind a plan: of a layer, of the step by lane, of memory by term."""
    return Group(_layer_table(plan), _time_table(plan), _memory_table(plan))


def _layer_table(plan: Plan) -> Table:
    table = table_of("One layer, and how it is counted")
    table.add_row("counted", FACTS_GRADES[plan.facts.grade])
    table.add_row("layer 0", _layer_line(plan))
    table.add_row("slot", shown_mib(plan.costs.layers[0].weight_bytes))
    if plan.facts.has_experts:
        rate = plan.machine.expert_gemm_flops_per_s
        table.add_row("experts", f"{rate.value / 1e12:,.2f} TFLOP/s ({rate.source})")
    for figure in compute_figures(plan):
        seconds = shown_time(figure.seconds)
        table.add_row("compute", f"{seconds} per layer and micro-batch: {figure.name}")
    return table


def place_of_layers(plan: Plan) -> str:
    """Return where layers wait, in words."""
    rate = plan.machine.disk_bytes_per_s
    if not plan.request.is_on_disk:
        return "in RAM"
    if rate is None:
        return "on a disk that could not be measured (priced as if in RAM)"
    return f"on disk, read at {rate.value / 1e9:,.2f} GB/s ({rate.source})"


def sharded_line(plan: Plan) -> str:
    """Return where the parts of layers are, and how often a layer is gathered, in words."""
    num, size = plan.request.num_ranks, sum(cost.weight_bytes for cost in plan.costs.layers)
    return (
        f"{shown_gib(size)} over {num} ranks, a part of each layer on each (fsdp2): gathered before"
        f" each of {2 * plan.request.rank_micro_batches} visits, two at a time"
    )


def adapter_line(plan: Plan) -> str:
    """Return what is trained, in words."""
    spec = plan.request.typical.adapter
    if spec.whole is not None:
        return _whole_line(plan, spec.whole)
    if plan.request.is_on_features:
        return f"none: the head alone trains, {shown_count(trained_parameters(plan.facts, spec))}"
    if spec.virtual:
        num, trained = spec.virtual[0][0], shown_count(trained_parameters(plan.facts, spec))
        if spec.num_past:
            return (
                f"prefix tuning, {num} keys and values in front of each layer's: {trained} trained"
            )
        name = "p-tuning" if spec.virtual[1:] else "prompt tuning"
        return f"{name}, {num} virtual tokens in front of each row: {trained} trained"
    places = [*spec.targets, *(["the experts"] if spec.experts else [])]
    ranks = ", ".join(f"{name} {rank}" for name, rank in spec.rank_pattern)
    dtype_bytes = plan.request.typical.dtype_bytes
    is_wider = bool(spec.targets) and dtype_bytes < FP32_BYTES and not spec.are_branches_grouped
    name = f"{'DoRA' if spec.is_dora else 'LoRA'} rank {spec.rank}"
    if spec.method is not None:
        name = spec.method.name
    return (
        name
        + (f" ({ranks})" if ranks else "")
        + f" on {', '.join(places[:-1])}{' and ' if places[1:] else ''}{places[-1]}"
        + (f", with {', '.join(spec.modules)} whole" if spec.modules else "")
        + f": {shown_count(trained_parameters(plan.facts, spec))} trained"
        + (", computed in float32" if is_wider else "")
    )


def _whole_line(plan: Plan, whole: WholeWeights) -> str:
    """Return how many weights train, what each takes in RAM, and how long their update does."""
    workload = plan.request.typical
    if plan.request.is_sharded:
        return (
            f"no adapter: {shown_count(whole.num_parameters)} of"
            f" {shown_count(plan.facts.num_parameters)} weights trained, with fp32 masters; each"
            f" rank updates its part by {workload.optimizer}"
        )
    sizes = host_update_bytes(workload.dtype_bytes, workload.optimizer, whole.low_bytes)
    words = {LOW_HALVES: "fp32 masters"} if whole.low_bytes else {}
    parts = ", ".join(f"{size:.3g} {words.get(n, n)}" for n, size in sizes.items() if size)
    timeline = plan.predict()
    update_s = timeline.busy_s(Kind.UPDATE)
    exposed = f"{shown_time(timeline.exposed_s(Kind.UPDATE))} of it exposed"
    return (
        f"no adapter: {shown_count(whole.num_parameters)} of"
        f" {shown_count(plan.facts.num_parameters)} weights trained,"
        f" {sum(sizes.values()):.3g} bytes each in RAM ({parts}); updated there by"
        f" {workload.optimizer}, each layer before its next load: {shown_time(update_s)},"
        f" {exposed}"
    )


def kept_line(plan: Plan) -> str:
    """Return how many layers are not checkpointed, and the time that it saves."""
    first, num_layers = plan.facts.num_layers - plan.num_kept_graphs, plan.facts.num_layers
    layers, sent = plan.costs.layers, plan.saved.graphs
    saved_s = sum(layers[i].recompute_s for i in {*range(first, num_layers), *sent})
    saved_s -= sum(layers[i].graph_pack_s for i in sent)
    words = f"{plan.num_kept_graphs} of {num_layers} layers keep their graph, the last ones"
    if sent:
        num_micro_batches = plan.request.rank_micro_batches
        num_bytes = num_micro_batches * sum(layers[i].graph_bytes for i in sent)
        words += f", {len(sent)} send it to RAM and back ({shown_gib(num_bytes)})"
    return f"{words}: {shown_time(saved_s * plan.request.rank_micro_batches)} of recompute saved"


def outputs_line(plan: Plan) -> str:
    """Return how many layers' attention is not computed again, and the time that it saves."""
    outputs, layers = plan.saved, plan.costs.layers
    saved_s = sum(layers[i].attention_s for i in outputs.kept | outputs.sent)
    saved_s -= sum(layers[i].pack_s for i in outputs.sent)
    words = f"{len(outputs.kept)} of {len(layers)} layers keep the output of their attention"
    if outputs.sent:
        words += f", {len(outputs.sent)} send it to RAM and back"
    return f"{words}: {shown_time(saved_s * plan.request.rank_micro_batches)} of recompute saved"


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


def _layer_line(plan: Plan) -> str:
    layer, dtype_bytes = plan.facts.layers[0], plan.request.typical.dtype_bytes
    classes = {name: n * dtype_bytes for name, n in layer.parameters_by_class().items() if n}
    small = {
        name: classes.pop(name) for name in ("norm", "router", "bias", "other") if name in classes
    }
    return f"{sum(classes.values()):,} bytes of {' and '.join(classes)} weights" + "".join(
        f", {num_bytes:,} of {name}" for name, num_bytes in small.items()
    )


def _time_table(plan: Plan) -> Table:
    phases = predicted_phases(plan)
    table = table_of(f"Predicted step ({plan.costs.grade})", "lane", "time", "share")
    for name, lane in (
        ("forward", "compute: forward"),
        ("decode", "compute: decoding of weights"),
        ("head and loss", "compute: head and loss"),
        ("backward", "compute: backward"),
        ("stall", "compute: waits for weights"),
        ("optimizer", "compute: optimizer"),
        ("h2d", "h2d: loads, during compute"),
        ("d2h", "d2h: layer inputs and gradients, during compute"),
        ("reads", "host: reads into page-locked buffers, during compute"),
        ("updates", "host: updates of weights, during compute"),
        ("network", "network: what ranks send each other, during compute"),
        ("exposed network", "network: the part with nothing to compute"),
    ):
        always = ("forward", "head and loss", "backward", "stall", "optimizer", "h2d")
        if name not in always and not phases.get(name):
            continue
        table.add_row(lane, shown_time(phases[name]), f"{phases[name] / phases['step']:.0%}")
    table.add_row("step", shown_time(phases["step"]), "")
    table.add_row("bound R3", shown_time(plan.bound_s), "")
    table.add_row("tokens/s", f"{plan.tokens_per_step / phases['step']:,.0f}", "")
    return table


def _memory_table(plan: Plan) -> Table:
    table = table_of(f"Predicted peak memory ({plan.memory_grade})", "term", "size")
    for place, terms, total in (
        ("device", plan.device_memory, plan.peak_bytes),
        ("host", plan.host_memory, plan.host_bytes),
    ):
        for term in terms:
            if term.num_bytes:
                table.add_row(f"{place}: {term.name}", shown_mib(term.num_bytes))
        table.add_row(f"{place}: all", shown_mib(total), style="bold")
    return table


def machine_table(machine: Machine) -> Table:
    """Return a machine's rates and capacities, each with its source."""
    table = table_of(f"{machine.name} ({machine.device}, {machine.dtype})", "", "value", "source")
    named = {field.name: getattr(machine, field.name) for field in fields(machine)}
    if machine.network is not None:
        between = f"network, {machine.network.world_size} ranks"
        named[f"{between}: latency_s"] = machine.network.latency_s
        named[f"{between}: bytes_per_s"] = machine.network.bytes_per_s
    for name, value in named.items():
        if isinstance(value, Rate):
            table.add_row(name, f"{value.value:.4g}", value.source)
        elif isinstance(value, Implementation):
            table.add_row(name, value.value, value.source)
        elif name.endswith("_bytes"):
            table.add_row(name, shown_gib(value), "")
    return table
