"""Sweeps as they are asked for, and planned for a card."""

import json

import pytest
from rich.console import Console

from finetune.commands.plan import HostOptions, planned_runs
from finetune.errors import ConfigError
from finetune.planning.candidates import full_requests, shared_requests
from finetune.planning.runs import Variants, plan_variants, variants_of
from finetune.planning.subject import subject_of
from finetune.report.runs import runs_json, runs_tables
from offload.errors import OffloadError
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.schedule.schedule import Order

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
    assert found.recipes[0].adapter.targets == ("q_proj", "v_proj")
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
    assert found.recipes[0].adapter.rank == 64
    assert found.recipes[1].adapter.targets == ("q_proj", "v_proj")
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
        console.print(runs_tables(found, variants.names, are_steps_known=False))
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
