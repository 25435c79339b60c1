import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.adapter import lora as adapters
from finetune.adapter.linear_lora import is_trained_whole
from finetune.data.steps import StepShare, collate
from finetune.data.tokenize import Example
from finetune.errors import FinetuneError
from finetune.recipe.sections import AdapterSection, TrainSection
from finetune.run.checkpoint import MAX_SKIPPED, Checkpoints, LossScale
from finetune.training.loop import Computed, Loop, Request, StepRecord, computed, digest_of
from finetune.training.optimizer import AdapterUpdate
from finetune.training.ranks import Ranks
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import device_terms
from tests.builders import adapter, workload
from tests.rehearsals import rehearse

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
    section: AdapterSection = PLAIN,
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
    resumed.restore(checkpoints.read(2, resumed.weights, data_hash=""))
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
