"""Optimizer states that wait in a file against the same in memory, to the bit."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.engine.host.mapping import aligned_empty
from offload.engine.host.state_file import StateFile
from offload.errors import TransferError
from offload.plan.facts.optimizer import Optimizer, moved_state_bytes
from offload.plan.schedule.op import Kind, Lane
from tests.parity.full_training import (
    assert_same,
    engine_of,
    loop_of,
    model_of,
    run,
    share_of,
    step_of,
    values_of,
    wider_model,
)
from tests.parity.steps import NUM_LAYERS
from tests.tiers import mostly_slow


def file_of(loop: Any) -> StateFile:
    file = engine_of(loop).updates.file
    assert file is not None
    return file


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    mostly_slow(
        itertools.product(
            ("adamw", "adamw_bf16", "adamw_8bit", "adafactor", "lion", "lion_bf16"),
            (torch.float32, torch.bfloat16),
        ),
        ("adamw", torch.bfloat16),
    ),
    ids=str,
)
def test_move_updates_from_a_file_are_those_in_memory(
    optimizer: Optimizer, dtype: torch.dtype, tmp_path: Path
) -> None:
    in_memory = loop_of(wider_model().to(dtype), optimizer=optimizer)
    on_disk = loop_of(wider_model().to(dtype), optimizer=optimizer, states_dir=tmp_path)
    assert run(on_disk, range(4)) == run(in_memory, range(4))  # clipped, see MAX_NORM
    assert_same(values_of(on_disk), values_of(in_memory))


@pytest.mark.thorough
def test_move_sgd_keeps_low_halves_alone_in_a_file(tmp_path: Path) -> None:
    in_memory, on_disk = (
        loop_of(model_of().to(torch.bfloat16), optimizer="sgd", lr=0.3, states_dir=where)
        for where in (None, tmp_path)
    )
    assert run(on_disk, range(3)) == run(in_memory, range(3))
    assert_same(values_of(on_disk), values_of(in_memory))


def test_move_each_layers_states_are_read_and_written_once_per_step(tmp_path: Path) -> None:
    loop = loop_of(model_of(), states_dir=tmp_path)
    _, step = (loop.step(n, share_of(step_of(n))).timeline for n in range(2))
    file = file_of(loop)
    weights = [0] * NUM_LAYERS
    for name, layer in engine_of(loop).updates.layer_of.items():
        weights[layer] += loop._model.get_parameter(name).numel()
    planned = [moved_state_bytes(4, "adamw") * number for number in weights]
    for kind in (Kind.STATES_READ, Kind.STATES_WRITE):
        spans = [span for span in step.spans if span.kind is kind]
        assert [span.layer for span in spans] == list(range(NUM_LAYERS))
        assert all(span.lane is Lane.DISK for span in spans)
        for span, least in zip(spans, planned, strict=True):
            assert least <= span.num_bytes <= least + 64 * 2 * 20  # each tensor is aligned
    whole_pages = sum(-(-size // 4096) * 4096 for size in file.layer_bytes)
    assert (file.read_bytes, file.written_bytes) == (whole_pages, whole_pages)
    assert not list(tmp_path.iterdir())  # it has no name: nothing is left of a killed process


def test_move_the_next_layers_states_are_read_while_one_is_updated(tmp_path: Path) -> None:
    loop = loop_of(model_of(), states_dir=tmp_path)
    _, step = (loop.step(n, share_of(step_of(n))).timeline for n in range(2))
    place = {
        (span.kind, span.layer): number
        for number, span in enumerate(step.spans)
        if span.kind in (Kind.STATES_READ, Kind.STATES_WRITE, Kind.UPDATE)
    }
    spans = step.spans
    for layer in range(NUM_LAYERS):
        update = place[Kind.UPDATE, layer]
        assert spans[place[Kind.STATES_READ, layer]].end_s <= spans[update].start_s
        assert spans[update].end_s <= spans[place[Kind.STATES_WRITE, layer]].start_s
        if layer + 1 < NUM_LAYERS:  # it waits for no later update
            assert place[Kind.STATES_READ, layer + 1] < place[Kind.STATES_WRITE, layer]
    blocks = {block.data_ptr() for block in file_of(loop).buffers}
    assert len(blocks) == 2


@pytest.mark.thorough
def test_move_evaluating_between_steps_changes_no_bit(tmp_path: Path) -> None:
    in_memory, on_disk = loop_of(model_of()), loop_of(model_of(), states_dir=tmp_path)
    losses = run(in_memory, range(3))
    for number in range(3):
        assert run(on_disk, [number]) == [losses[number]]
        engine_of(on_disk).forward(step_of(99)[0])
        assert not engine_of(on_disk).updates.layers
    assert_same(values_of(on_disk), values_of(in_memory))


@pytest.mark.thorough
def test_move_what_a_checkpoint_holds_goes_on_in_either_place(tmp_path: Path) -> None:
    """A file's states are saved and restored through its mapping, behind the step's own I/O."""
    whole = loop_of(model_of())
    losses = run(whole, range(4))
    for before, after in ((tmp_path, None), (None, tmp_path), (tmp_path, tmp_path)):
        begun = loop_of(model_of(), states_dir=before)
        assert run(begun, range(2)) == losses[:2]
        saved = values_of(begun)
        resumed = loop_of(model_of(), states_dir=after)
        run(resumed, [7])  # what it has must not survive
        for name, value in resumed.weights.items():
            value.copy_(saved[name])
        resumed.update.publish()
        resumed.update.optimizer.load_state_dict(begun.update.optimizer.state_dict())
        assert run(resumed, range(2, 4)) == losses[2:]
        assert_same(values_of(resumed), values_of(whole))


def failing(number: int, code: int, function: Callable[..., int]) -> Callable[..., int]:
    """Return a function that fails once, at its call of this number."""
    calls = itertools.count()

    def call(*args: Any) -> int:
        if next(calls) == number:
            raise OSError(code, os.strerror(code))
        return function(*args)

    return call


@pytest.mark.parametrize("number", [0, NUM_LAYERS - 1])
def test_a_disk_that_is_full_is_named_and_no_update_is_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory, loop = loop_of(model_of()), loop_of(model_of(), states_dir=tmp_path)
    run(loop, [0])
    run(in_memory, [0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(number, errno.ENOSPC, os.pwritev))
        with pytest.raises(TransferError, match="No space left on device") as caught:
            run(loop, [1])
    assert "offload.states: ram" in str(caught.value.hint)
    assert_same(values_of(loop), values_of(in_memory))  # all updates of the first step


@pytest.mark.thorough
def test_a_file_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(model_of(), states_dir=tmp_path)
    run(loop, [0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(TransferError, match="the file ends there"):
            run(loop, [1])
    in_memory = loop_of(model_of())
    run(in_memory, [0])
    assert_same(values_of(loop), values_of(in_memory))


def test_a_folder_without_room_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(offload.TransferError, match="GiB is free") as caught:
        StateFile(tmp_path, [10_000, 0, 5], allocate=aligned_empty)
    assert "needs 0.00 GiB for optimizer states" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_layers_of_other_sizes_keep_what_was_written(tmp_path: Path) -> None:
    sizes = [10_000, 3, 4096, 20_001]
    file = StateFile(tmp_path, sizes, allocate=aligned_empty)
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes
    ]
    assert not any(int(memory.max()) for memory in file.mapped())
    for layer, value in enumerate(values):
        file.read(layer, layer % 2)
        file.memory(layer).copy_(value)
        file.changed(layer)
        file.write(layer)
    assert all(torch.equal(a, b) for a, b in zip(file.mapped(), values, strict=True))
    file.mapped()[2].fill_(9)  # as a resume sets it
    file.read(2, 0)
    file.read(3, 1)
    assert int(file.memory(2).min()) == int(file.memory(2).max()) == 9
    assert torch.equal(file.memory(3), values[3])
    file.clear()
    assert not any(int(memory.max()) for memory in file.mapped())
    file.read(3, 1)
    assert int(file.memory(3).max()) == 0
    file.close()


def test_move_a_rehearsal_leaves_no_states(tmp_path: Path) -> None:
    in_memory, on_disk = loop_of(model_of()), loop_of(model_of(), states_dir=tmp_path)
    on_disk.rehearse(share_of(step_of(7)), [share_of(step_of(8))])
    assert run(on_disk, range(2)) == run(in_memory, range(2))
    assert_same(values_of(on_disk), values_of(in_memory))


def test_plain_modules_are_no_part_of_it(tmp_path: Path) -> None:
    """Embeddings, norm and head are updated at once, from states in memory."""
    loop = loop_of(model_of(), states_dir=tmp_path)
    outer = {name for name in loop.weights if ".layers." not in name}
    held = {name for name, value in loop.weights.items() if file_of(loop).holds(value)}
    assert outer
    assert not outer & held
    assert {name.partition(":")[2] for name in held} == {"mean", "square"}
