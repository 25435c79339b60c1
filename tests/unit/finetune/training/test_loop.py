"""A run's loop and what is prepared for it."""

import copy
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.adapter import lora as adapters
from finetune.adapter.linear_lora import is_trained_whole
from finetune.data.order import PackedOrder, Packing, RowCost, StepSizes
from finetune.data.step_rows import StepRows
from finetune.data.steps import StepShare, collate, num_parts
from finetune.data.tokenize import Example
from finetune.errors import FinetuneError
from finetune.planning.request import facts_of, request_for
from finetune.planning.subject import subject_of
from finetune.recipe.adapters import LoraSection
from finetune.recipe.extensions import ObjectiveSection
from finetune.recipe.recipe import Recipe, with_settings
from finetune.recipe.sections import TrainSection
from finetune.report.screen import Screen
from finetune.run.checkpoint import MAX_SKIPPED, Checkpoints, LossScale
from finetune.run.run_dir import RunDir
from finetune.run.run_files import Evaluation
from finetune.training.attach import with_unread
from finetune.training.generate import generate
from finetune.training.loop import Computed, Loop, Request, StepRecord, computed, digest_of
from finetune.training.objectives import Objectives, mean_of
from finetune.training.optimizer import AdapterUpdate
from finetune.training.packing import settled_packing, shown_layers, shown_packing
from finetune.training.prepare import with_way
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from offload.engine.engine import Engine
from offload.engine.objective import Scores
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec, linear_names
from offload.plan.machine.machine import GIB, Machine, named_machine, with_interconnect
from offload.plan.memory.memory import device_terms
from offload.plan.memory.visit import visit_bytes
from offload.plan.plan import plan
from tests.builders import adapter, model_facts, qwen3_8b, request, workload
from tests.parity.steps import tiny
from tests.parity.tiny_models import tiny_model
from tests.rehearsals import rehearse
from tests.tiers import mostly_slow

CONFIG = Qwen3Config.from_dict(
    {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 32,
    }
)


PLAIN = adapter(dropout=0.2)


def make_loop(
    *,
    optimizer: Any = "adamw",
    dtype: torch.dtype = torch.float32,
    section: LoraSection = PLAIN,
    loraplus_ratio: float | None = None,
    lr: float = 0.1,
    scaling: LossScale | None = None,
    largest: float | None = None,
) -> tuple[Loop, dict[str, torch.nn.Parameter]]:
    torch.manual_seed(0)
    base: Any = Qwen3ForCausalLM(CONFIG)
    if largest is not None:
        torch.nn.init.constant_(base.model.layers[1].mlp.up_proj.weight, largest)
    model = adapters.add_lora(base.to(dtype), section, seed=0).train()
    trained = adapters.trained(model)
    for name, parameter in trained.items():
        if "lora_B" in name:  # zero at the start, so that dropout would change nothing
            torch.nn.init.constant_(parameter, 0.1)
    train = TrainSection(grad_accum_steps=2, steps=4, lr=lr, weight_decay=0.1, optimizer=optimizer)
    engine = offload.attach(model, num_slots=2, device="cpu")
    rounds = section.dtype == "bfloat16"
    loop = Loop(
        model=model,
        engine=engine,
        update=AdapterUpdate(
            trained,
            train=train,
            loraplus_ratio=loraplus_ratio,
            ranks=Ranks(),
            rounded={name for name in trained if rounds and not is_trained_whole(name)},
        ),
        train=train,
        num_steps=4,
        ranks=Ranks(),
        scaling=scaling,
    )
    return loop, trained


def batches(width: int) -> StepShare:
    ids = torch.randint(0, 32, (2, 2, width), generator=torch.Generator().manual_seed(width))
    return StepShare(
        micro_batches=tuple({"input_ids": rows, "labels": rows} for rows in ids),
        micro_batch_ids=(0, 1),
        num_tokens=4 * width,
        num_label_tokens=4 * (width - 1),
    )


@pytest.mark.thorough
def test_a_rehearsal_leaves_no_trace() -> None:
    with_rehearsal, parameters = make_loop()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    rehearse(with_rehearsal, batches(20), [batches(8)])
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert all(p.grad is None for p in parameters.values())
    assert not with_rehearsal.optimizer.state_dict()["state"]
    without, others = make_loop()
    for number in range(2):
        assert with_rehearsal.step(number, batches(8)).loss == without.step(number, batches(8)).loss
    assert all(torch.equal(p, others[name]) for name, p in parameters.items())


def test_a_step_depends_on_its_number_and_not_on_the_state_of_random() -> None:
    first, _ = make_loop()
    again, _ = make_loop()
    loss = first.step(0, batches(8)).loss
    torch.manual_seed(99)
    assert again.step(0, batches(8)).loss == loss
    other, _ = make_loop()
    assert other.step(1, batches(8)).loss != loss  # another dropout mask


WHOLE = adapter(dropout=0.2, modules_to_save=("norms", "lm_head"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "kept_in"),
    [
        ("adamw", "float32"),
        ("adamw_8bit", "float32"),
        ("adafactor", "float32"),
        ("adamw_8bit", "bfloat16"),
    ],
)
def test_a_resume_in_16_bits_continues_to_the_bit(
    optimizer: Any, kept_in: str, tmp_path: Path
) -> None:
    def make() -> tuple[Loop, dict[str, torch.nn.Parameter]]:
        return make_loop(
            optimizer=optimizer,
            dtype=torch.bfloat16,
            section=WHOLE.model_copy(update={"dtype": kept_in}),
            loraplus_ratio=16.0,
            lr=1e-4,  # steps too small for 16 bits: a resume from what computes would lose them
        )

    checkpoints = Checkpoints(tmp_path)
    whole, expected = make()
    rehearse(whole, batches(20), [batches(8)])
    losses = []
    for number in range(4):
        losses.append(whole.step(number, batches(8)).loss)
        if number == 1:
            checkpoints.save(2, whole.weights, whole.optimizer, data_hash="", num_kept=1)
    resumed, found = make()
    rehearse(resumed, batches(20), [batches(8)])
    resumed.restore(checkpoints.read(2, resumed.weights, data_hash="", form=resumed.state_form))
    assert [resumed.step(number, batches(8)).loss for number in (2, 3)] == losses[2:]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in expected)
    assert all(p.grad is None for p in (*found.values(), *resumed.weights.values()))
    norm = "base_model.model.model.norm.modules_to_save.default.weight"
    assert expected[norm].dtype is torch.bfloat16
    assert whole.weights[norm].dtype is torch.float32
    assert not torch.equal(whole.weights[norm], expected[norm].float())


@pytest.mark.thorough
def test_a_rehearsal_in_16_bits_leaves_no_trace_either() -> None:
    loop, parameters = make_loop(dtype=torch.bfloat16, section=WHOLE)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    rehearse(loop, batches(20), [batches(8)])
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert all(torch.equal(w, before[name].float()) for name, w in loop.weights.items())
    assert all(w.grad is None for w in loop.weights.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("times_s", "expected_s", "widths"),
    [
        ([0.0, 9.0, 0.3, 0.7, 0.1], 0.7, [8, 20, 9, 10, 11]),  # the first is not timed
        ([0.0, 9.0, 3.0, 1.0], 1.0, [8, 20, 9, 10]),  # there is time for one more
        ([0.0, 9.0, 6.0], 6.0, [8, 20, 9]),
    ],
)
def test_a_rehearsal_times_other_steps_while_there_is_time(
    times_s: list[float],
    expected_s: float,
    widths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, _ = make_loop()
    record, seen, left_s = loop.step(0, batches(8)), [], list(times_s)

    def timed(request: Request, _: Computed) -> StepRecord:
        seen.append(request.share.micro_batches[0]["input_ids"].shape[1])
        return replace(record, step_s=left_s.pop(0))

    monkeypatch.setattr(loop, "complete", timed)
    found = rehearse(loop, batches(20), [batches(width) for width in (8, 9, 10, 11)])
    assert found.step_s == expected_s
    assert seen == widths


def test_a_run_of_one_step_is_rehearsed_with_it() -> None:
    loop, _ = make_loop()
    assert rehearse(loop, batches(20), [batches(8)]).num_tokens == batches(8).num_tokens


@pytest.mark.parametrize(
    ("dtype", "optimizer", "is_rounded"),
    [
        (torch.float32, "adamw", False),
        (torch.bfloat16, "adamw", False),
        (torch.float32, "adafactor", False),
        (torch.bfloat16, "adamw", True),
    ],
)
def test_what_trains_takes_the_bytes_that_the_plan_says(
    dtype: torch.dtype, optimizer: Any, is_rounded: bool
) -> None:
    kept_in = {"dtype": "bfloat16" if is_rounded else "float32"}
    section = WHOLE.model_copy(update=kept_in)
    loop, parameters = make_loop(dtype=dtype, section=section, optimizer=optimizer)
    loop.step(0, batches(8))
    facts = model_facts(CONFIG.to_dict())
    spec = AdapterSpec(
        rank=2,
        targets=linear_names(facts),
        experts=False,
        modules=WHOLE.modules_to_save,
        is_rounded=is_rounded,
    )
    micro_batch = workload(
        micro_batch_size=2,
        seq_len=8,
        label_tokens=14,
        adapter=spec,
        optimizer=optimizer,
        dtype_bytes=dtype.itemsize,
    )
    terms = device_terms(
        facts,
        named_machine("rtx5090"),
        micro_batch,
        num_slots=2,
        num_micro_batches=2,
        is_reduced=False,
        is_padded=True,
        is_stashed=False,
    )
    planned = {term.name: term.num_bytes for term in terms}
    whole = {name for name in parameters if "modules_to_save" in name}
    copies = {
        tensor.data_ptr(): tensor.nbytes
        for name in whole
        for tensor in (parameters[name], loop.weights[name])
    }
    assert planned["trained modules"] == sum(copies.values())
    assert planned["adapters"] == sum(
        p.nbytes for name, p in parameters.items() if name not in whole
    )
    states = loop.optimizer.state_dict()["state"].values()
    held = {id(t): t.nbytes for s in states for name, t in s.items() if name != "step"}
    assert planned["optimizer states"] == sum(held.values())
    assert planned["gradients"] == sum(4 * weight.numel() for weight in loop.weights.values())


def without_mask(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    batch = collate(examples, pad_token_id=0)
    return {name: batch[name] for name in ("input_ids", "labels")}


def test_a_held_out_loss_that_is_not_finite_is_an_error() -> None:
    loop, parameters = make_loop()
    ids = np.array([1, 2, 3], np.int32)
    row = Example(input_ids=ids, labels=ids, source="rows.jsonl:1", is_truncated=False)
    rows: Any = [row, row]
    steps: Any = SimpleNamespace(padded_batch=without_mask)
    assert math.isfinite(loop.validation_loss(rows, steps=steps))
    # of the MLP: torch's attention on CPUs with AVX-512 gives 0 where a query of few tokens is NaN
    next(p for name, p in parameters.items() if "down_proj" in name).data.fill_(torch.inf)
    with pytest.raises(FinetuneError, match=r"held-out rows is nan;(.|\n)*`train.lr: 2.5e-02`"):
        loop.validation_loss(rows, steps=steps)


HALF = adapter(targets=["q_proj", "v_proj", "down_proj"])


def half_loop(factor: float, *, largest: float | None = None) -> tuple[Loop, Any]:
    """Return a loop in float16; a layer's weights may be so large that its output overflows."""
    loop, trained = make_loop(
        dtype=torch.float16,
        section=HALF,
        scaling=LossScale(factor=factor),
        largest=largest,
        lr=1e-3,
    )
    return loop, trained


@pytest.mark.thorough
def test_a_step_whose_gradients_overflow_is_skipped_and_the_next_one_is_scaled_by_half() -> None:
    loop, trained = half_loop(2.0**24)
    before = {name: p.detach().clone() for name, p in trained.items()}
    records = [loop.step(number, batches(8)) for number in range(12)]
    skipped = [record.is_skipped for record in records]
    num = skipped.index(False)
    assert 0 < num < 12
    assert not any(skipped[num:])
    assert [record.loss_scale for record in records[: num + 1]] == [
        2.0 ** (24 - i) for i in range(num + 1)
    ]
    assert loop.scaling == LossScale(factor=2.0 ** (24 - num), num_good=12 - num, num_skipped=num)
    assert len({record.loss for record in records[: num + 1]}) == 1  # nothing was updated
    assert all(p.grad is None for p in trained.values())
    again, others = half_loop(2.0 ** (24 - num))
    assert all(torch.equal(p, before[name]) for name, p in others.items())
    for number in range(num, 12):
        assert again.step(number, batches(8)).loss == records[number].loss
    assert all(torch.equal(p, trained[name]) for name, p in others.items())


@pytest.mark.thorough
def test_a_rehearsal_scales_its_loss_as_training_does_and_leaves_the_factor() -> None:
    loop, _ = half_loop(2.0**24)
    rehearsal, factors = loop.rehearsal(batches(20), [batches(8), batches(9)]), list[float]()
    rehearsed = list[StepRecord]()
    request = next(rehearsal)
    while True:
        factors.append(request.run.loss_scale)
        (found,) = computed(loop.engine, [request])
        try:
            request = rehearsal.send(found)
        except StopIteration as end:
            rehearsed.append(end.value)
            break
    (record,) = rehearsed
    num = len(factors) - 3  # skipped ones; the longest step and two others were not
    assert num > 0
    assert factors[: num + 1] == [2.0 ** (24 - i) for i in range(num + 1)]
    assert record.loss_scale == factors[-1]
    assert not record.is_skipped
    assert loop.scaling == LossScale(factor=2.0**24)
    other, _ = half_loop(2.0**24)
    assert loop.step(0, batches(8)).loss_scale == other.step(0, batches(8)).loss_scale


@pytest.mark.thorough
def test_what_a_step_in_float16_reports_is_of_the_loss_that_was_not_scaled() -> None:
    one, other = half_loop(2.0**8)[0], half_loop(2.0**10)[0]
    first, second = (loop.step(0, batches(8)) for loop in (one, other))
    assert first.loss == second.loss
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-3)


@pytest.mark.thorough
def test_too_many_skipped_steps_in_a_row_end_the_run_and_name_the_tensor() -> None:
    loop, _ = half_loop(2.0**60)
    for number in range(MAX_SKIPPED - 1):
        assert loop.step(number, batches(8)).is_skipped
    with pytest.raises(FinetuneError, match=r"layers\.2\..* overflows in float16") as caught:
        loop.step(MAX_SKIPPED - 1, batches(8))
    assert "20 steps in a row were skipped" in caught.value.limit


def test_an_overflow_in_the_forward_ends_the_run_and_names_the_module() -> None:
    loop, trained = half_loop(2.0**16, largest=6e4)
    before = {name: p.detach().clone() for name, p in trained.items()}
    with pytest.raises(FinetuneError, match=r"first in model\.layers\.1\.mlp\.up_proj;"):
        loop.step(0, batches(8))
    assert all(torch.equal(p, before[name]) for name, p in trained.items())


@pytest.mark.thorough
def test_move_a_resumed_run_keeps_the_scale_and_skipped_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    whole, expected = half_loop(2.0**24)
    rehearse(whole, batches(20), [batches(8)])
    losses = []
    for number in range(12):
        losses.append(whole.step(number, batches(8)).loss)
        checkpoints.save(
            number + 1,
            whole.weights,
            whole.optimizer,
            data_hash="",
            scaling=whole.scaling,
            num_kept=12,
        )
    assert whole.scaling is not None
    for step in (1, whole.scaling.num_skipped + 1):  # with no update so far, and with one
        loop, trained = half_loop(2.0**16)
        rehearse(loop, batches(20), [batches(8)])
        found = checkpoints.read(
            step,
            loop.weights,
            data_hash="",
            form=loop.state_form,
            is_scaled=True,
        )
        loop.restore(found)
        assert [loop.step(n, batches(8)).loss for n in range(step, 12)] == losses[step:]
        assert loop.scaling == whole.scaling
        assert all(torch.equal(trained[name], expected[name]) for name in expected)


def test_a_digest_is_of_names_types_shapes_and_values_in_their_order() -> None:
    table = torch.arange(6, dtype=torch.float32).view(2, 3)
    same = digest_of({"a": table, "b": table.t()})
    assert same == digest_of({"a": table.clone(), "b": table.t().contiguous()})
    others = (
        {"a": table},
        {"b": table, "a": table.t()},
        {"a": table.view(3, 2), "b": table.t()},
        {"a": table + torch.tensor([0.0, 0.0, 1e-6]), "b": table.t()},
        {"a": table.view(torch.int32), "b": table.t()},
    )
    assert len({same, *map(digest_of, others)}) == 6


# ------------------------------------------------------------------------------------------ prepare


class EightRanks(Ranks):
    num = 8


CARDS = with_interconnect(named_machine("h100"), "nvlink", world_size=8)


def way_of(
    *overrides: str, ranks: Ranks, machine: Machine = CARDS, model: str = "qwen3-8b"
) -> tuple[str, str]:
    subject, shown = subject_of(model, overrides), io.StringIO()
    run = Run(
        recipe=subject.recipe,
        dir=RunDir(Path("none")),
        ranks=ranks,
        device=torch.device("cpu"),
        screen=Screen(Console(file=shown, width=400), is_verbose=False),
        is_resumed=False,
    )
    return with_way(run, subject.facts, machine).train.parallel, shown.getvalue()


AUTO = "train.parallel=auto"


def test_what_is_left_open_is_what_the_plan_says_is_faster_and_why() -> None:
    way, shown = way_of(AUTO, "train.what=all", ranks=EightRanks())
    assert way == "fsdp2"
    assert "train.parallel: fsdp2: stream is not possible, train.what is all" in shown
    little = replace(CARDS, ram_bytes=144 * GIB)
    with pytest.raises(DoesNotFitError, match="sharded over 8 ranks the plan needs"):
        way_of(AUTO, "train.what=all", ranks=EightRanks(), machine=little)
    way, shown = way_of(AUTO, ranks=EightRanks(), machine=replace(CARDS, vram_bytes=6 * GIB))
    assert way == "stream"
    assert "train.parallel: stream: fsdp2 is not possible" in shown
    assert way_of(AUTO, ranks=Ranks()) == ("stream", "")
    assert way_of("train.parallel=stream", ranks=EightRanks()) == ("stream", "")
    assert way_of("train.parallel=fsdp2", ranks=EightRanks()) == ("fsdp2", "")


def test_processes_on_a_cpu_stream_unless_they_are_told_otherwise(desk: Machine) -> None:
    assert way_of(AUTO, ranks=EightRanks(), machine=desk) == ("stream", "")
    large = replace(desk, ram_bytes=512 * GIB)
    assert way_of(AUTO, "train.what=all", ranks=EightRanks(), machine=large)[0] == "fsdp2"


@pytest.fixture
def desk() -> Machine:
    return replace(named_machine("h100"), device="cpu")


# ------------------------------------------------------------------------------------------ session


FOUND = (frozenset({"mlp.down_proj"}),) * 36


def test_a_plan_that_knew_what_is_left_out_stays() -> None:
    made = plan(qwen3_8b(), named_machine("rtx5090"), request(typical=workload()))
    assert with_unread(made, FOUND) == (made, "")
    by_peft = (frozenset({"mlp.down_proj.base_layer"}),) * 36
    assert with_unread(made, by_peft) == (made, "")


def test_a_plan_that_did_not_is_priced_again_and_says_so() -> None:
    made = plan(qwen3_8b(), named_machine("rtx5090"), request(typical=workload()))
    again, note = with_unread(made, (frozenset(), *FOUND[1:]))
    assert note == "Recomputes leave out 35 products, and the plan counted on 36: priced again"
    assert again.costs.layers[0].recompute_frac == 1
    assert again.costs.layers[0].backward_s > made.costs.layers[0].backward_s
    assert again.costs.layers[1:] == made.costs.layers[1:]
    more, note = with_unread(made, (FOUND[0] | {"self_attn.o_proj"}, *FOUND[1:]))
    assert note.startswith("Recomputes leave out 37 products")
    assert more.costs.layers[0].backward_s < made.costs.layers[0].backward_s
    none, _ = with_unread(made, (frozenset(),) * 36)
    assert with_unread(none, (frozenset(),) * 36) == (none, "")


# ------------------------------------------------------------------------------------------ packing


def recipe_for(packing: Any = "auto", **train: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "tiny-qwen3", "init": "random"},
            "data": {"path": "rows.jsonl", "packing": packing},
            "train": {"seq_len": 64, "tokens_per_step": 256, "steps": 1, **train},
            "output": {"name": "run"},
        }
    )


def settled(recipe: Recipe) -> tuple[str, str]:
    console = Console(record=True, width=200)
    found = settled_packing(recipe, Screen(console, is_verbose=True).note)
    return found, console.export_text()


def test_auto_packs() -> None:
    assert settled(recipe_for()) == ("on", "")


def test_auto_does_not_pack_compiled_layers_and_says_so() -> None:
    found, shown = settled(recipe_for(compile=True))
    assert found == "off"
    assert "Packing: off, as compiled layers do not keep packed rows apart" in shown


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_what_is_asked_for_is_taken(wanted: str) -> None:
    assert settled(recipe_for(wanted))[0] == wanted


@pytest.mark.parametrize(("switch", "meant"), [(True, "on"), (False, "off")])
def test_on_and_off_are_taken_as_yaml_reads_them(switch: object, meant: str) -> None:
    assert recipe_for(switch).data.packing == meant


def test_packing_compiled_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.packing is on and train\.compile is true"):
        recipe_for("on", compile=True)


SIZES = StepSizes(
    rows_per_step=4,
    typical_steps=(0,),
    typical_width=60,
    label_tokens=30,
    largest_width=64,
    most_label_tokens=64,
    num_micro_batches=5,
    packing=Packing(row_tokens=15, longest_row=50, rows_per_step=21, fill=0.9375, most_tokens=230),
)


def test_how_full_sequences_are_is_shown() -> None:
    assert shown_packing(SIZES) == (
        "Packing: sequences are 93.8% full; a typical step has 21 rows in 5 micro-batches of 60"
        " tokens",
    )


@pytest.mark.parametrize(
    ("num_together", "num_joined", "words"),
    [
        (4, 0, "in all layers, attention row by row"),
        (1, 0, "in 1 of 4 layers, attention row by row"),
        (0, 0, "take one by one"),
        (4, 4, r"in all layers, attention in one call (torch's varlen_attn)"),
        (3, 2, "varlen_attn) in 2 of them, row by row in the others; the others do not"),
    ],
)
def test_how_layers_compute_packed_rows_is_shown(
    num_together: int, num_joined: int, words: str
) -> None:
    assert words in shown_layers(num_together=num_together, num_joined=num_joined, num_layers=4)


def test_a_plan_counts_one_call_of_attention_and_no_mask_where_rows_are_joined() -> None:
    recipe = with_settings(recipe_for(), {"data.packing": "on"})
    facts = facts_of(recipe.model)
    load = request_for(recipe, facts, SIZES, num_ranks=1).typical
    kind: Any = facts.layers[0].attention
    kind = replace(kind, qk_dim=16, v_dim=16)
    assert load.num_attention_calls(kind, is_cuda=True) == 1
    assert load.num_attention_calls(kind, is_cuda=False) == 4
    unlike: list[Any] = [
        replace(kind, scores="sinks"),
        replace(kind, scores="capped"),
        replace(kind, qk_dim=24),
        replace(kind, qk_dim=12, v_dim=12),
        replace(kind, qk_dim=512, v_dim=512),
    ]
    assert {load.num_attention_calls(other, is_cuda=True) for other in unlike} == {4}
    assert replace(load, dtype_bytes=4).num_attention_calls(kind, is_cuda=True) == 4
    assert not replace(load, packed_tokens=None).joins_rows(kind, is_cuda=True)

    card = named_machine("rtx4090", dtype="bfloat16")
    windowed = replace(kind, window=load.seq_len // 2, num_kv_heads=1)
    layer = replace(facts.layers[0], attention=windowed)
    joined = visit_bytes(facts, card, layer, load, is_padded=False)
    masked = visit_bytes(facts, card, layer, replace(load, packed_tokens=None), is_padded=False)
    per_token = (kind.num_heads - 1) * 2 * 16 * load.dtype_bytes  # keys and values of one head
    assert joined.saved / load.num_tokens < masked.saved / load.seq_len - 0.9 * per_token


def test_a_plan_counts_the_tokens_of_packed_rows_and_attention_within_them() -> None:
    recipe = with_settings(recipe_for(), {"data.packing": "on"})
    facts = facts_of(recipe.model)
    request = request_for(recipe, facts, SIZES, num_ranks=1)
    machine = named_machine("rtx4090", dtype="bfloat16")
    assert request.num_micro_batches == 5
    assert plan(facts, machine, request).tokens_per_step == 300
    assert request.largest.num_tokens == 64
    assert request.largest.seq_len >= 50  # the longest row
    kept = {term.name: term.num_bytes for term in plan(facts, machine, request).device_memory}
    assert kept["kept layer inputs"] == 230 * facts.num_layers * facts.hidden_size * 2
    assert request.typical.num_rows == 4
    layer = facts.layers[0]
    alone = request.typical.output_bytes(layer, is_cuda=True)
    kind: Any = layer.attention
    assert alone == 4 * kind.num_heads * (15 * kind.v_dim * 2 + 4 * 32)


def test_the_cost_of_rows_is_that_of_the_models_products() -> None:
    facts = facts_of(recipe_for().model)
    cost = RowCost.of(facts)
    products = sum(2.0 * x.active * x.num_weights for y in facts.layers for x in y.linears)
    assert cost.flops_per_token == products
    assert cost(20) > 2 * cost(10)


def test_epochs_of_packed_rows_are_counted_in_tokens() -> None:
    class Rows:
        lengths = (10, 20, 30, 40)

        def __len__(self) -> int:
            return 4

    recipe = recipe_for("on", steps=None, epochs=6)
    cost = RowCost(flops_per_token=1.0)
    rows: Any = Rows()
    order = PackedOrder.of(recipe.train, rows, cost=cost)
    assert order.num_steps == 3  # 600 tokens in steps of 256
    visits = np.bincount([row for step in range(3) for row in order.rows(step)])
    assert visits.tolist() == [6, 6, 6, 6]


# --------------------------------------------------------------------------------------- objectives


def test_rewards_of_desired_answers_are_means_over_these_answers() -> None:
    policy = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    section = ObjectiveSection.model_validate(
        {"method": "kto", "loss": "apo_zero_unpaired", "beta": 0.5}
    )
    kto = Objectives(section=section, seq_len=8, ranks=Ranks())

    def said(part: slice) -> tuple[int, Evaluation]:
        num = len(policy[part])
        rows = StepRows(groups_R=torch.arange(num), values_R=labels[part], num_trained=num)
        objective = kto.of_held_out(rows)
        scores = Scores(
            policy_N=policy[part],
            reference_N=torch.zeros(num),
            rows_N=torch.arange(num),
            num_rows=num,
        )
        found = objective.loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        lens, loss = [1] * num, found.value.item()
        return num, kto.evaluation(rows, label_lens=lens, loss=loss, metrics=metrics)

    _, whole = said(slice(0, 6))
    cut = mean_of([said(slice(0, 4)), said(slice(4, 6))], section)
    assert cut.metrics == pytest.approx(whole.metrics)
    assert cut.loss == pytest.approx(whole.loss)
    assert whole.metrics["rewards/chosen"] == pytest.approx(0.5 * -23 / 4)


PAIR_LENS = [3, 5, 1, 9, 20, 2, 7, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "orpo"},
        {"method": "cpo"},
        {"method": "simpo", "sft_weight": 0.5},
        {"method": "dpo", "sft_weight": 2.0},
        {"method": "dpo", "loss": "plackett_luce", "sft_weight": 1.0},
    ],
)
def test_cross_entropy_of_held_out_answers_is_a_mean_over_their_tokens(
    settings: dict[str, Any],
) -> None:
    of_run = Objectives(
        section=ObjectiveSection.model_validate(settings), seq_len=32, ranks=Ranks()
    )
    rng = torch.Generator().manual_seed(0)
    logps = [-3 * torch.rand(num, generator=rng, dtype=torch.float64) for num in PAIR_LENS]
    values = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])

    def said(rows: list[int]) -> tuple[int, Evaluation]:
        step_rows = StepRows(
            groups_R=torch.arange(len(rows)) // 2, values_R=values[rows], num_trained=len(rows)
        )
        lens = [PAIR_LENS[row] for row in rows]
        policy_N = torch.cat([logps[row] for row in rows])
        scores = Scores(
            policy_N=policy_N,
            reference_N=0.9 * policy_N,
            rows_N=torch.arange(len(rows)).repeat_interleave(torch.tensor(lens)),
            num_rows=len(rows),
        )
        found = of_run.of_held_out(step_rows).loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        loss = found.value.item()
        evaluation = of_run.evaluation(step_rows, label_lens=lens, loss=loss, metrics=metrics)
        return len(rows) // 2, evaluation

    chosen = torch.cat([logps[row] for row in (0, 3, 4, 6)])
    whole = said(list(range(8)))[1]
    assert whole.metrics["nll_loss"] == pytest.approx(-chosen.mean().item(), rel=1e-12)
    cut = mean_of([said([0, 1]), said([2, 3, 4, 5]), said([6, 7])], of_run.section)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)


@pytest.mark.parametrize(
    ("num_groups", "per_part", "num"),
    [(16, 8, 2), (15, 8, 2), (17, 8, 3), (3, 8, 1), (3, 2, 1), (1, 2, 1), (5, 1, 5)],
)
def test_parts_of_held_out_rows_are_no_larger_than_a_step(
    num_groups: int, per_part: int, num: int
) -> None:
    assert num_parts(num_groups, per_part) == num


def test_the_least_and_the_largest_reward_are_those_of_all_parts() -> None:
    def part(least: float, largest: float) -> Evaluation:
        metrics = {"rewards/min": least, "rewards/mean": 1.0, "rewards/max": largest}
        return Evaluation(loss=1.0, metrics=metrics)

    reward = ObjectiveSection.model_validate({"method": "reward"})
    found = mean_of([(3, part(-2.0, 1.0)), (1, part(-1.0, 4.0))], reward)
    assert found.metrics == {"rewards/min": -2.0, "rewards/mean": 1.0, "rewards/max": 4.0}


OBJECTIVES_SIZES = [2, 4, 3, 2]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "rloo"])
def test_what_held_out_samples_say_is_weighted_by_answers_and_tokens(loss: str) -> None:
    settings = {"beta": 0.1, "importance_sampling_mode": "ratio", "clip_epsilon": 0.05}
    section = ObjectiveSection.model_validate({"method": "grpo", "loss": loss} | settings)
    grpo = Objectives(section=section, seq_len=32, ranks=Ranks())
    rng = torch.Generator().manual_seed(0)
    groups = torch.arange(4).repeat_interleave(torch.tensor(OBJECTIVES_SIZES))
    values = torch.rand(len(groups), generator=rng, dtype=torch.float64)
    lens = torch.randint(1, 20, (len(groups),), generator=rng).tolist()
    logps = [-3 * torch.rand(num, generator=rng, dtype=torch.float64) for num in lens]

    def said(of: list[int]) -> tuple[int, Evaluation]:
        rows = [row for row, group in enumerate(groups.tolist()) if group in of]
        own = [lens[row] for row in rows]
        policy_N = torch.cat([logps[row] for row in rows])
        step_rows = StepRows(
            groups_R=groups[rows] - min(of),
            values_R=values[rows],
            num_trained=len(rows),
            sampler_N=policy_N - 0.2 * torch.sin(40 * policy_N),
        )
        scores = Scores(
            policy_N=policy_N,
            reference_N=0.9 * policy_N,
            rows_N=torch.arange(len(rows)).repeat_interleave(torch.tensor(own)),
            num_rows=len(rows),
        )
        found = grpo.of_held_out(step_rows).loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        evaluation = grpo.evaluation(
            step_rows, label_lens=own, loss=found.value.item(), metrics=metrics
        )
        num = section.weight(num_groups=len(of), num_rows=len(rows), num_label_tokens=sum(own))
        return num, evaluation

    whole = said([0, 1, 2, 3])[1]
    assert {"kl", "clip_ratio/region_mean", "reward_std", "logps/accuracies"} <= {*whole.metrics}
    cut = mean_of([said([0]), said([1, 2]), said([3])], section)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-12)


# ----------------------------------------------------------------------------------------- generate


PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 4], [30, 31, 32], [12]]
LIMIT = 5


@pytest.fixture
def engine() -> Iterator[Engine]:
    attached = offload.attach(tiny("qwen3").eval(), num_slots=2, device="cpu")
    yield attached
    attached.close()


def answers(engine: Engine, **changes: Any) -> list[list[int]]:
    notes: list[str] = []
    asked: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": (), "pad_id": 0, "batch_size": 4}
    found = generate(engine, PROMPTS, **asked | changes, note=notes.append)
    assert not notes
    return found


def alone(stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
    """Return what plain transformers answers, a prompt at a time."""
    model: Any = tiny("qwen3").eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        stops = list(stop_ids) or None
        output = model.generate(
            **given, max_new_tokens=LIMIT, do_sample=False, eos_token_id=stops, pad_token_id=0
        )
        answer = output[0, len(prompt) :].tolist()
        found.append(answer[:-1] if answer[-1] in stop_ids else answer)
    return found


@pytest.mark.parametrize("batch_size", mostly_slow([4, 3, 1], 3))
def test_answers_are_those_of_plain_transformers(engine: Engine, batch_size: int) -> None:
    assert answers(engine, batch_size=batch_size) == alone()


def test_each_answer_ends_at_its_own_limit(engine: Engine) -> None:
    limits = [2, 5, 1, 0]
    expected = [answer[:limit] for answer, limit in zip(alone(), limits, strict=True)]
    ended = list[int]()
    found = answers(engine, max_new_tokens=limits, batch_size=2, progress=ended.append)
    assert found == expected
    assert ended == sorted(ended)
    assert (ended[0], ended[-1]) == (0, len(PROMPTS))


def test_an_answer_ends_before_a_stop_token_and_the_others_go_on(engine: Engine) -> None:
    stop = alone()[0][2]
    found = answers(engine, stop_ids=(stop,))
    assert found == alone((stop,))
    assert len(found[0]) < LIMIT == max(map(len, found))


def test_a_model_without_a_cache_answers_the_same_and_says_why() -> None:
    model = tiny_model("openai-gpt").eval()
    reference: Any = copy.deepcopy(model)
    notes: list[str] = []
    engine = offload.attach(model, num_slots=2, device="cpu")
    try:
        found = generate(
            engine,
            PROMPTS,
            max_new_tokens=LIMIT,
            stop_ids=(),
            pad_id=0,
            batch_size=2,
            note=notes.append,
        )
    finally:
        engine.close()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens = list(prompt)
        for token in answer:
            with torch.no_grad():
                assert int(reference(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)
    assert notes == [
        "Generates without a key-value cache, more slowly: OpenAIGPTLMHeadModel takes no key-value"
        " cache of transformers"
    ]


def test_an_answer_ends_where_its_own_rule_says(engine: Engine) -> None:
    found = answers(engine, is_ended=lambda row, ids: row == 1 and len(ids) == 2, batch_size=3)
    expected = alone()
    assert found == [expected[0], expected[1][:2], *expected[2:]]
