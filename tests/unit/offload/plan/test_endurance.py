"""Plans of full training whose optimizer states wait on disk: memory, time, and writes."""

from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError, OffloadError
from offload.plan.endurance import DiskWrites
from offload.plan.facts.optimizer import HOST_STATES, LOW_HALVES, Optimizer
from offload.plan.machine.machine import GIB, Rate
from offload.plan.memory.host import STATE_RING
from offload.plan.plan import Plan, plan
from offload.plan.request import with_states_on_disk, with_updates_on
from offload.plan.schedule.op import Kind, Lane
from tests.full_plans import planned


def on_disk(found: Plan, *, ram_gib: int | None = None) -> Plan:
    machine = found.machine
    if ram_gib is not None:
        machine = replace(machine, ram_bytes=ram_gib * GIB)
    return plan(found.facts, machine, with_states_on_disk(found.request))


@pytest.mark.parametrize(("optimizer", "in_file"), [("adamw", 10), ("lion", 6), ("sgd", 2)])
def test_states_in_layers_leave_ram_but_for_two_layers(optimizer: Optimizer, in_file: int) -> None:
    in_ram = planned("qwen3-8b", ram_gib=192, optimizer=optimizer)
    found = on_disk(in_ram)
    facts = found.facts
    outer, largest = facts.outer_parameters, max(x.num_parameters for x in facts.layers)
    before, after = (
        {term.name: term.num_bytes for term in one.host_memory} for one in (in_ram, found)
    )
    assert after.pop(STATE_RING) == 2 * in_file * largest
    assert after.pop(LOW_HALVES) == 2 * outer
    assert before.pop(LOW_HALVES) == 2 * facts.num_parameters
    assert after.pop(HOST_STATES, 0) == (in_file - 2) * outer
    before.pop(HOST_STATES, 0)
    assert after == before
    assert found.device_memory == in_ram.device_memory
    moved = [
        sum(op.num_bytes for op in found.schedule.ops if op.kind is kind)
        for kind in (Kind.STATES_READ, Kind.STATES_WRITE)
    ]
    assert moved == [in_file * (facts.num_parameters - outer)] * 2


def test_qwen3_8b_trains_with_64_gib() -> None:
    in_ram = planned("qwen3-8b", ram_gib=192)
    with pytest.raises(DoesNotFitError) as caught:
        planned("qwen3-8b", ram_gib=64)
    assert caught.value.hint == "`offload.states: disk`"
    assert "low halves of fp32 masters; less with `offload.states: disk`" in str(caught.value)
    assert on_disk(in_ram, ram_gib=64).host_bytes < 64 * GIB
    with pytest.raises(DoesNotFitError) as caught:
        plan(
            in_ram.facts,
            replace(in_ram.machine, ram_bytes=64 * GIB),
            with_updates_on(in_ram.request, "device"),
        )
    assert caught.value.hint == "`train.update: host` with `offload.states: disk`"


def test_a_drive_takes_its_time_and_a_fast_one_none() -> None:
    found = on_disk(planned("qwen3-8b", ram_gib=192))
    drive_bytes_per_s = found.machine.disk_bytes_per_s
    assert drive_bytes_per_s is not None
    written = sum(op.num_bytes for op in found.schedule.ops if op.kind is Kind.STATES_WRITE)
    expected_s = written / drive_bytes_per_s.value * (1 + 1 / 0.27)
    phases = found.predict().phases()
    assert phases["disk"] == pytest.approx(expected_s)
    assert found.step_s > expected_s  # no update starts before the norm of the step is known
    rate = Rate(value=1e15, source="measured")
    fast = plan(found.facts, replace(found.machine, disk_bytes_per_s=rate), found.request)
    in_ram = planned("qwen3-8b", ram_gib=192)
    assert fast.step_s == pytest.approx(in_ram.step_s, rel=1e-3)
    assert "disk" not in in_ram.predict().phases()
    for one in (found, fast):
        assert one.bound_s <= one.step_s * (1 + 1e-9)


def test_reads_are_a_layer_ahead_and_buffers_take_turns() -> None:
    found = on_disk(planned("qwen3-8b", ram_gib=192))
    ops = [op for op in found.schedule.ops if op.lane is Lane.DISK]
    shown = [(op.kind, op.layer, op.buffer) for op in ops[:6]]
    read, write = Kind.STATES_READ, Kind.STATES_WRITE
    assert shown == [
        *((read, 0, 0), (read, 1, 1), (write, 0, 0)),
        *((read, 2, 0), (write, 1, 1), (read, 3, 1)),
    ]
    assert len(ops) == 2 * 36


def test_a_run_that_wears_a_drive_is_refused_with_bytes_and_the_fix() -> None:
    found = on_disk(planned("qwen3-8b", ram_gib=192))
    written = 10 * (found.facts.num_parameters - found.facts.outer_parameters)
    most = 60 * 10**12 // written
    few, many = (DiskWrites.of(found, num_steps=number) for number in (most, most + 1))
    assert few is not None
    assert many is not None
    few.require_endurance(is_allowed=False)
    many.require_endurance(is_allowed=True)
    assert many.run_bytes == (most + 1) * written
    assert many.drive_steps == 600 * 10**12 // written
    assert many.drive_s == pytest.approx(many.drive_steps * found.step_s)
    with pytest.raises(OffloadError) as caught:
        many.require_endurance(is_allowed=False)
    assert f"{most + 1} steps would write 60.0 TB" in caught.value.what
    assert f"{written / 1e9:.1f} GB each" in caught.value.what
    assert "600 TB, after 8,637 of these steps" in str(caught.value.limit)
    assert "`offload.allow_disk_writes: true`" in str(caught.value.hint)
    assert f"`train.steps: {most}`" in str(caught.value.hint)
    asked = replace(found, request=replace(found.request, num_steps=most + 1))
    assert DiskWrites.of(asked) == many
    assert DiskWrites.of(planned("qwen3-8b", ram_gib=192), num_steps=10**9) is None
