"""Sweeps, and steps that several processes share, as they are planned."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from finetune.commands.plan import HostOptions, planned_runs
from finetune.errors import ConfigError
from finetune.planning.candidates import full_requests, shared_requests
from finetune.planning.parallel import (
    Wanted,
    Ways,
    compare_ways,
    own_choice,
    share_out,
    ways_json,
    ways_table,
)
from finetune.planning.request import with_backend
from finetune.planning.runs import Variants, plan_variants, variants_of
from finetune.planning.subject import Subject, subject_of
from finetune.recipe.sections import TrainSection
from finetune.report.rows import as_text
from finetune.report.runs import runs_json, runs_tables
from offload.errors import DoesNotFitError, OffloadError, SluiceError
from offload.plan.machine.machine import GIB, Machine, named_machine, with_interconnect
from offload.plan.plan import Plan, plan
from offload.plan.request import PlanRequest
from offload.plan.schedule.op import OVER_NETWORK, Kind
from offload.plan.schedule.schedule import Order
from tests.tools.clusters import CLUSTERS, Cluster, ways_of

MODEL = "qwen3-8b"
SETTINGS = ("train.tokens_per_step=1024", "train.seq_len=512", "offload.num_slots=8")
CARD = named_machine("rtx4090")


def sweep(*grid: str, settings: tuple[str, ...] = SETTINGS) -> Variants:
    return variants_of(MODEL, settings, grid=grid, num_runs=None)


def test_a_grid_is_all_combinations_in_the_order_of_its_values() -> None:
    found = sweep("train.lr=1e-4,2e-4", "adapter.targets=[q_proj,v_proj],all-linear")
    assert found.names == (
        "train.lr=1e-4 adapter.targets=[q_proj,v_proj]",
        "train.lr=1e-4 adapter.targets=all-linear",
        "train.lr=2e-4 adapter.targets=[q_proj,v_proj]",
        "train.lr=2e-4 adapter.targets=all-linear",
    )
    assert [recipe.train.lr for recipe in found.recipes] == [1e-4, 1e-4, 2e-4, 2e-4]
    assert found.recipes[0].adapter.as_lora.targets == ("q_proj", "v_proj")
    assert found.num_steps is None


def test_steps_are_known_where_recipes_say_them() -> None:
    settings = ("train.epochs=null", *SETTINGS)
    assert sweep("train.steps=10,20", settings=settings).num_steps == (10, 20)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("train.lr", "--sweep 'train.lr'"),
        ("train.lr=1e-4,", "--sweep 'train.lr=1e-4,'"),
        ("train.lr=1e-4,1e-4", "has 1e-4 twice"),
        (
            "offload.stash=host,device",
            "offload.stash is host in offload.stash=host and device in offload.stash=device",
        ),
        ("train.what=all,adapter", "train.what is all in train.what=all"),
        ("train.seed=" + ",".join(map(str, range(257))), "257 runs"),
    ],
)
def test_a_sweep_that_cannot_be_says_why(grid: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(grid)


def test_a_file_of_variants_is_planned_as_it_is_trained(tmp_path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text(
        "recipe: qwen3_8b_lora_3060\nvariants:\n  wide: {adapter.rank: 64}\n"
        "  few: {adapter.targets: [q_proj, v_proj]}\nstop: {worse_than_best_by: 1, after_steps: 9}"
    )
    found = variants_of(str(file), ["train.lr=3e-4"], grid=[], num_runs=None)
    assert found.names == ("wide", "few")
    assert found.recipes[0].adapter.as_lora.rank == 64
    assert found.recipes[1].adapter.as_lora.targets == ("q_proj", "v_proj")
    assert {recipe.train.lr for recipe in found.recipes} == {3e-4}
    with pytest.raises(ConfigError, match="names its variants"):
        variants_of(str(file), [], grid=["train.lr=1e-4,2e-4"], num_runs=None)


def test_runs_are_equal_ones_or_those_of_a_grid() -> None:
    with pytest.raises(ConfigError, match="--runs and --sweep"):
        variants_of(MODEL, SETTINGS, grid=["train.lr=1e-4"], num_runs=2)
    with pytest.raises(ConfigError, match="neither"):
        variants_of(MODEL, SETTINGS, grid=[], num_runs=None)
    assert variants_of(MODEL, SETTINGS, grid=[], num_runs=2).names == ("run 1", "run 2")


def test_one_recipe_asks_the_same_with_and_without_others() -> None:
    subject = subject_of(MODEL, ["train.micro_batch_size=auto", "train.tokens_per_step=8192"])
    alone = full_requests(subject.recipe, subject.facts, num_ranks=1)
    shared = shared_requests([subject.recipe] * 2, subject.facts, num_ranks=1)
    layers = [request for request in alone if request.order is Order.LAYER_MAJOR]
    assert [request.runs[0] for request in shared] == layers  # runs pass each layer together
    assert all(request.runs[0] == request.runs[1] for request in shared)


def test_runs_of_other_lengths_are_cut_to_micro_batches_of_about_the_same_size() -> None:
    found = sweep(
        "train.seq_len=512,2048",
        settings=("train.micro_batch_size=auto", "train.tokens_per_step=4096"),
    )
    requests = shared_requests(found.recipes, found.subjects[0].facts, num_ranks=1)
    tokens = {tuple(run.typical.num_tokens for run in one.runs) for one in requests}
    assert tokens == {(512, 2048), (1024, 2048), (2048, 2048), (4096, 4096)}
    for one in requests:
        assert {run.tokens_per_step for run in one.runs} == {4096}


def test_a_tile_or_packed_weights_are_open_only_where_they_are_for_all_runs() -> None:
    settings = ("offload.mlp_chunk=auto", *SETTINGS)
    settings = ("train.seq_len=4096", "train.tokens_per_step=4096", *settings[:1], settings[-1])
    plain = sweep("train.lr=1e-4,2e-4", settings=settings)
    dropped = sweep("adapter.dropout=0,0.1", settings=settings)
    facts = plain.subjects[0].facts

    def tiles(variants: Variants) -> set[int | None]:
        requests = shared_requests(variants.recipes, facts, num_ranks=1)
        return {request.typical.mlp_chunk_tokens for request in requests}

    assert tiles(plain) == {None, 2048, 512}
    assert tiles(dropped) == {None}


@pytest.mark.slow
def test_a_plan_says_what_runs_take_together_and_alone() -> None:
    variants = sweep("train.lr=1e-4,2e-4,5e-4", "adapter.rank=8,32")
    found = plan_variants(variants, CARD, num_ranks=1)
    assert [sharing.num_runs for sharing in found.sharings] == [1, 2, 4, 6]
    assert len({sharing.plan.schedule.num_loads for sharing in found.sharings}) == 1
    figures = runs_json(found, variants.names, are_steps_known=False)
    assert figures["times_are_of"] == "a step of each"
    last = figures["sharings"][-1]
    assert last["tokens_per_s"] == pytest.approx(6 * 1024 / last["step_s"])
    assert last["alone_s"] == pytest.approx(figures["alone_s"])
    assert sum(last["device_memory"].values()) == last["peak_vram_bytes"]
    assert figures["together_s"] < 0.5 * figures["alone_s"]
    assert sorted(figures["waves"][0]["runs"]) == sorted(variants.names)


def test_more_runs_than_fit_train_in_waves_and_the_table_says_so() -> None:
    small = named_machine("rtx4090", ram_bytes=64 * GIB)
    settings = ("train.tokens_per_step=8192", "train.seq_len=8192", "adapter.rank=256")
    variants = variants_of(MODEL, settings, grid=[], num_runs=5)
    found = plan_variants(variants, small, num_ranks=1)
    assert len(found.waves) > 1
    assert sum(len(wave.runs) for wave in found.waves) == 5
    console = Console(width=150)
    with console.capture() as shown:
        console.print(as_text(runs_tables(found, variants.names, are_steps_known=False)))
    text = shown.get()
    assert f"together in {len(found.waves)} waves" in text
    assert "cannot share their steps: they do not fit" in text
    assert "a step of all 5 one after the other would take" in text


def test_a_run_that_does_not_fit_alone_is_named() -> None:
    variants = sweep("adapter.rank=8,4096", settings=("train.tokens_per_step=2048",))
    with pytest.raises(OffloadError, match=r"adapter\.rank=4096 does not fit rtx3060"):
        plan_variants(variants, named_machine("rtx3060"), num_ranks=1)


def test_the_command_answers_for_a_card_as_a_table_and_as_json() -> None:
    host = HostOptions(ram_gib=None, link_gb_per_s=None)

    def asked(form: str) -> object:
        return planned_runs(
            MODEL,
            SETTINGS,
            grid=["train.lr=1e-4,2e-4"],
            num_runs=None,
            machine="rtx4090",
            host=host,
            form=form,  # type: ignore[arg-type]
            note=print,
        )

    figures = json.loads(str(asked("json")))
    assert figures["machine"] == "rtx4090"
    assert figures["runs"] == ["train.lr=1e-4", "train.lr=2e-4"]
    with pytest.raises(ConfigError, match="--verbose with several runs"):
        asked("verbose")


# ------------------------------------------------------------------------------------------- shares


ROOMY = 128 * 2**30
SHAPE = ("qwen3-8b", ["train.tokens_per_step=16384"])


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(*SHAPE)


def machines(subject: Subject, *names: str, ram_bytes: int = ROOMY) -> list[Machine]:
    named = (named_machine(name, ram_bytes=ram_bytes) for name in names)
    return [with_backend(subject.recipe, subject.facts, machine) for machine in named]


def asked(subject: Subject, num_ranks: int = 2) -> list[PlanRequest]:
    requests = full_requests(subject.recipe, subject.facts, num_ranks=num_ranks)
    return [replace(request, most_local_ranks=1) for request in requests]


def test_shares_are_those_of_the_shortest_step_of_all(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    requests = [one for one in asked(subject) if not one.is_stashed][:1]

    def slowest_s(first: int) -> float:
        counts = (first, requests[0].num_micro_batches - first)
        return max(
            plan(subject.facts, card, replace(requests[0], own_micro_batches=count)).step_s
            for card, count in zip(cards, counts, strict=True)
        )

    shares = share_out(subject.facts, cards, requests, wanted="auto")
    best_s = min(slowest_s(first) for first in range(1, requests[0].num_micro_batches))
    assert slowest_s(shares.micro_batches[0]) == pytest.approx(best_s)
    assert shares.micro_batches[0] > shares.micro_batches[1]


@pytest.mark.parametrize(
    ("wanted", "counts"), [("equal", (4, 4)), ((3, 1), (6, 2)), ((1, 7), (1, 7))]
)
def test_shares_that_are_named_are_taken(
    wanted: Wanted, counts: tuple[int, ...], subject: Subject
) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    assert share_out(subject.facts, cards, asked(subject), wanted=wanted).micro_batches == counts


def test_each_rank_has_slots_and_graphs_of_its_own(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    shares = share_out(subject.facts, cards, asked(subject), wanted="auto")
    first, second = (
        own_choice(subject.facts, card, shares, rank=rank).plan for rank, card in enumerate(cards)
    )
    assert first.residency != second.residency
    assert first.request.typical == second.request.typical
    assert (
        first.request.rank_micro_batches + second.request.rank_micro_batches
        == first.request.num_micro_batches
    )


def test_shares_of_no_whole_micro_batches_are_refused(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    with pytest.raises(ConfigError) as info:
        share_out(subject.facts, cards, asked(subject), wanted=(2, 1))
    assert info.value.what == "train.shares: [2, 1] for a step of 8 micro-batches"
    assert info.value.limit == "they add up to 3, which must divide the micro-batches of a step"
    assert info.value.hint == "`train.shares: [5, 3]`, or `train.shares: auto`"


def test_a_rank_that_does_not_fit_is_named(subject: Subject) -> None:
    roomy, small = machines(subject, "rtx3090", "rtx4060ti")
    small = replace(small, ram_bytes=2**30)
    with pytest.raises(DoesNotFitError, match=r"^rank 1 with 4 of the step's micro-batches: "):
        share_out(subject.facts, [roomy, small], asked(subject), wanted="auto")


# -------------------------------------------------------------------------------------------- ranks


def train_section(**settings: object) -> TrainSection:
    return TrainSection.model_validate({"steps": 1, "seq_len": 64, **settings})


def test_no_plan_streams_weights_that_train_over_several_gpus() -> None:
    subject = subject_of("qwen3-8b", ["train.what=all", "train.parallel=auto"])
    with pytest.raises(ConfigError, match=r"train\.what is all and the number of processes is 2"):
        full_requests(subject.recipe, subject.facts, num_ranks=2)


# ----------------------------------------------------------------------------------------- parallel


def ways_of_parallel(
    model: str, *overrides: str, card: str = "h100", between: str = "nvlink", num: int = 8
) -> Ways:
    subject = subject_of(model, overrides)
    machine = with_interconnect(named_machine(card), between, world_size=num)
    return compare_ways(subject.recipe, subject.facts, machine, num_ranks=num)


def test_where_nvlink_gathers_faster_than_the_link_loads_the_model_is_held_in_sum() -> None:
    found = ways_of_parallel("llama-3.1-70b", "offload.codec=native")
    assert found.stream.plan is not None
    assert found.sharded.plan is not None
    assert found.faster is found.sharded
    assert found.sharded.plan.step_s < found.stream.plan.step_s
    assert found.reason.startswith("fsdp2: ")
    assert ways_json(found)["auto"] == "fsdp2"
    shown = ways_table(found)
    assert [line[:2] for line in shown.lines] == [
        ("stream", found.stream.plan.step_s),
        ("fsdp2", found.sharded.plan.step_s),
    ]
    assert shown.note.startswith("train.parallel: auto takes fsdp2: ")


def test_over_a_slow_network_layers_are_streamed() -> None:
    found = ways_of_parallel("llama-3.1-70b", between="1")
    assert found.faster is found.stream
    assert found.reason.startswith("stream: ")


def test_weights_that_train_are_sharded_wherever_that_fits() -> None:
    found = ways_of_parallel("qwen3-8b", "train.what=[model.layers.*]")
    assert found.faster is found.sharded
    assert found.stream.why_not.startswith("train.what is model.layers.* and the number of pr")
    assert found.reason.startswith("fsdp2: stream is not possible, train.what is model.layers.")


@pytest.mark.parametrize(
    ("settings", "card", "num", "what", "hint"),
    [
        ((), "rtx4090", 2, r"sharded over 2 ranks the plan needs .* of 21\.99 GiB", ""),
        (
            ("train.optimizer=adafactor",),
            "h100",
            8,
            r"train\.optimizer is adafactor and train\.parallel is fsdp2",
            r"`train\.optimizer: adamw`, or ",
        ),
    ],
)
def test_what_cannot_be_sharded_of_weights_that_train_is_refused_with_the_fix(
    settings, card, num, what, hint
) -> None:
    found = ways_of_parallel(
        "qwen3-8b", "train.what=all", *settings, card=card, between="pcie", num=num
    )
    one = r"`train\.parallel: stream`,? with one process"
    with pytest.raises(SluiceError, match=rf"{what}(.|\n)*\n\nhint: {hint}{one}"):
        _ = found.faster


def test_a_router_loss_of_weights_that_train_over_several_gpus_is_refused_with_the_fix() -> None:
    found = ways_of_parallel(
        "qwen3-30b-a3b", "train.what=[model.layers.0.*]", "train.router_loss_coef=0.01"
    )
    with pytest.raises(ConfigError, match=r"`train\.router_loss_coef: 0`, or `.*with one process"):
        _ = found.faster


def test_what_the_parts_cannot_do_is_streamed_and_said() -> None:
    found = ways_of_parallel("qwen3-8b", "offload.codec=nf4")
    assert found.faster is found.stream
    assert found.sharded.why_not.startswith("as offload.codec is nf4: parts of layers")


def test_where_neither_fits_the_error_is_that_of_the_stream() -> None:
    subject = subject_of("llama-3.1-70b", ())
    card = replace(named_machine("rtx4090"), vram_bytes=4 * GIB, ram_bytes=8 * GIB)
    machine = with_interconnect(card, "pcie", world_size=2)
    found = compare_ways(subject.recipe, subject.facts, machine, num_ranks=2)
    with pytest.raises(DoesNotFitError, match="slots of 80 layers"):
        _ = found.faster


# ----------------------------------------------------------------------------------------- clusters


LATENCY_S = 50e-6  # of a collective, assumed


def linear_weights(hidden: int, heads: int, kv_heads: int, mlp: int) -> int:
    """Return the weights of a layer's linears, whose heads have 128 features."""
    return hidden * 128 * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp


def lora_weights(hidden: int, heads: int, kv_heads: int, mlp: int, *, rank: int) -> int:
    """Return those of LoRA on all of them."""
    q = o = hidden + 128 * heads
    k = v = hidden + 128 * kv_heads
    return rank * (q + o + k + v + 3 * (hidden + mlp))


LLAMA_70B = linear_weights(8192, 64, 8, 28672) + 2 * 8192
LLAMA_70B_LORA = lora_weights(8192, 64, 8, 28672, rank=16)
LLAMA_70B_OUTER = 2 * 128_256 * 8192 + 8192
QWEN_8B = linear_weights(4096, 32, 8, 12288) + 2 * 4096 + 2 * 128
QWEN_8B_LORA = lora_weights(4096, 32, 8, 12288, rank=16)
QWEN_8B_OUTER = 2 * 151_936 * 4096 + 4096
QWEN_32B = linear_weights(5120, 64, 8, 25600) + 2 * 5120 + 2 * 128


def both(ways: Ways) -> tuple[Plan, Plan]:
    assert ways.stream.plan is not None
    assert ways.sharded.plan is not None
    return ways.stream.plan, ways.sharded.plan


def seconds(plan: Plan, *, num_bytes: float, num_collectives: int, bytes_per_s: float) -> None:
    """Compare the network's time of a sharded step with bytes at a rate, and its collectives."""
    busy_s = plan.predict().busy_s(*OVER_NETWORK)
    assert plan.schedule.network_bytes == pytest.approx(num_bytes, rel=1e-6)
    expected_s = num_bytes / bytes_per_s + num_collectives * LATENCY_S
    assert busy_s == pytest.approx(expected_s, rel=1e-6)


def test_eight_h100_stream_llama_70b_packed_as_fast_as_they_would_gather_it() -> None:
    assert (LLAMA_70B, LLAMA_70B_LORA) == (855_654_400, 2_588_672)
    stream, sharded = both(ways_of(CLUSTERS[0]))
    # one micro-batch of 2,048 tokens each: 80 layers up and down, what is around them, 80 sums
    gathered = 160 * (2 * LLAMA_70B + 4 * LLAMA_70B_LORA) + 2 * LLAMA_70B_OUTER
    sent = 7 / 8 * (gathered + 80 * 4 * LLAMA_70B_LORA)
    assert sent == pytest.approx(245.4e9, rel=1e-3)
    seconds(sharded, num_bytes=sent, num_collectives=241, bytes_per_s=0.8 * 450e9)
    # 80 packed layers in 52 slots: 28 are loaded for the forward and 28 for the backward
    assert stream.residency.num_slots == 52
    assert stream.schedule.num_loads == 56
    packed = 1.5274 * LLAMA_70B
    load_s = 56 * packed / stream.machine.h2d_bytes_per_s.value
    assert stream.predict().busy_s(Kind.LOAD) == pytest.approx(load_s, rel=0.03)
    assert 0.05 < stream.predict().stall_s < 0.15
    assert 0.9 * sharded.step_s < stream.step_s < sharded.step_s
    assert ways_of(CLUSTERS[0]).faster.name == "stream"


def test_eight_h100_train_all_weights_of_qwen_8b_in_parts() -> None:
    ways = ways_of(CLUSTERS[1])
    sharded = ways.sharded.plan
    assert sharded is not None
    weights = 36 * QWEN_8B + QWEN_8B_OUTER
    gathered, added = 72 * 2 * QWEN_8B + 2 * QWEN_8B_OUTER, 4 * weights  # bf16, and fp32 sums
    seconds(
        sharded,
        num_bytes=7 / 8 * (gathered + added),
        num_collectives=72 + 1 + 36 + 1,
        bytes_per_s=0.8 * 450e9,
    )
    terms = {term.name: term.num_bytes for term in sharded.device_memory}
    own = sum(terms[name] for name in ("own part of the weights", "gradients", "optimizer states"))
    assert own == 16 * weights // 8
    assert ways.stream.plan is None
    assert ways.faster.name == "fsdp2"


def test_two_rtx_3090_stream_qwen_8b_whose_gathers_cost_more_than_its_loads() -> None:
    stream, sharded = both(ways_of(CLUSTERS[2]))
    # four micro-batches each, every one of which gathers all layers twice
    gathered = 72 * (2 * QWEN_8B + 4 * QWEN_8B_LORA) + 2 * QWEN_8B_OUTER
    sent = 4 * (gathered + 36 * 4 * QWEN_8B_LORA) / 2
    rate = sharded.machine.h2d_duplex_bytes_per_s.value
    seconds(sharded, num_bytes=sent, num_collectives=4 * (73 + 36), bytes_per_s=rate)
    assert stream.predict().stall_s < 0.01 * stream.step_s
    # both compute as many tokens: plain code against fused kernels and graphs that are kept
    waits_s = sharded.predict().exposed_s(*OVER_NETWORK)
    assert sharded.step_s - waits_s > 1.5 * stream.step_s
    assert ways_of(CLUSTERS[2]).faster.name == "stream"


def test_four_rtx_4090_cannot_hold_qwen_32b() -> None:
    ways = ways_of(CLUSTERS[3])
    assert ways.sharded.plan is None
    own_gib = 64 * 2 * QWEN_32B / 4 / 2**30
    outer_gib = 2 * 2 * 151_936 * 5120 / 2**30
    assert own_gib == pytest.approx(14.5, abs=0.1)
    assert own_gib + outer_gib / 4 + outer_gib > 18.0  # and 21.99 are free
    assert "of device memory on each rank, of 21.99 GiB" in ways.sharded.why_not
    assert ways.faster.name == "stream"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: f"{cluster.card}-{cluster.model}")
def test_the_way_that_is_taken_is_the_faster_of_those_that_fit(cluster: Cluster) -> None:
    ways = ways_of(cluster)
    times = {
        way.name: way.plan.step_s
        for way in (ways.stream, ways.sharded)
        if way.plan is not None and way.plan.peak_bytes <= way.plan.machine.vram_bytes
    }
    assert ways.faster.name == min(times, key=lambda name: times[name])
