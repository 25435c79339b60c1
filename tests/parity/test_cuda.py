"""The engine on a card: streamed equals resident to the bit, whatever a stream is late with.

Run with `pytest -m gpu`; with REQUIRE_GPU=1 a machine without a card fails them.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel

import offload
from offload.engine.engine import Engine
from offload.engine.host.numa import place_near
from offload.engine.host.pagelock import LockMode, aligned_empty, open_locker, page_lock
from offload.engine.memory_meter import torch_pinned_bytes
from offload.engine.streams import CudaDevice, Event
from offload.plan.schedule.op import Lane
from tests.parity.on_card import MID_MODELS, Batches, Found, long_micro_batches, tiny
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    rel_error,
    truth_of,
    with_lora,
    with_outputs,
)

pytestmark = pytest.mark.gpu

LATE_CYCLES = 2_000_000  # about a millisecond, many times a tiny layer
TOO_LATE_CYCLES = 50 * LATE_CYCLES  # many times what the host takes to issue a layer


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Take kernels whose sums have one order; cuBLAS's workspace is fixed in tests/conftest.py."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def streamed(
    model: PeftModel,
    *,
    num_slots: int,
    stash: Literal["device", "host"] = "device",
    batches: Batches | None = None,
    device: CudaDevice | None = None,
    num_steps: int = 1,
) -> Found:
    """Run steps with the same batches, and return the last one's loss and gradients."""
    model = copy.deepcopy(model)
    engine = Engine(
        model,
        device=CudaDevice(torch.device("cuda"), is_staged=False) if device is None else device,
        options=replace(OPTIONS, num_slots=num_slots, stash=stash),
    )
    try:
        for _ in range(num_steps - 1):
            engine.forward_backward(batches or micro_batches(), dropout_seed=0)
            model.zero_grad()
        result = engine.forward_backward(batches or micro_batches(), dropout_seed=0)
        return result.loss, gradients(model)
    finally:
        engine.detach()


# --------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_move_streamed_equals_resident_to_the_bit(
    name: str, dtype: torch.dtype, stash: Literal["device", "host"]
) -> None:
    model = tiny(name, dtype)
    resident = streamed(model, num_slots=NUM_LAYERS)
    assert_equal(streamed(model, num_slots=2, stash=stash), resident)
    assert_equal(streamed(model, num_slots=3, stash=stash, num_steps=3), resident)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MID_MODELS)
def test_move_layers_whose_copies_overlap_equal_resident_ones_to_the_bit(
    name: str, dtype: torch.dtype, stash: Literal["device", "host"]
) -> None:
    model = tiny(name, dtype, models=MID_MODELS)
    batches = long_micro_batches()
    resident = streamed(model, num_slots=NUM_LAYERS, batches=batches)
    found = streamed(model, num_slots=2, stash=stash, batches=batches, num_steps=2)
    assert_equal(found, resident)


def test_move_dropout_is_replayed_in_the_recompute() -> None:
    torch.manual_seed(0)
    model = with_lora(MODELS["qwen3"](), dropout=0.3)
    assert_equal(streamed(model, num_slots=2), streamed(model, num_slots=NUM_LAYERS))


def plain(model: PeftModel) -> Found:
    """Ordinary gradient accumulation of transformers and peft, all on the card."""
    model = copy.deepcopy(model).cuda()
    batches = [{key: value.cuda() for key, value in batch.items()} for batch in micro_batches()]
    num_items = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum()
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    return loss, gradients(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_reorder_gradients_are_no_worse_than_those_of_transformers_and_peft(name: str) -> None:
    """Over several models, since for a single one the ratio of two roundings is 1 +- 0.2."""
    ours_squared = reference_squared = 0.0
    for seed in range(12):
        torch.manual_seed(seed)
        model = with_lora(MODELS[name]())
        model.config._experts_implementation = "eager"
        truth = truth_of(model)
        reference_loss, reference = plain(model)
        loss, ours = streamed(model, num_slots=2)
        assert loss == pytest.approx(reference_loss, rel=1e-5)
        ours_squared += rel_error(on_host(ours), truth) ** 2
        reference_squared += rel_error(on_host(reference), truth) ** 2
    assert ours_squared <= 1.05**2 * reference_squared
    assert reference_squared < 12 * 1e-5**2


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------- races


class LateDevice(CudaDevice):
    """A card whose ops come late on some lanes, and on some wait for nothing in a second pass."""

    def __init__(
        self, *, late: Collection[Lane], hasty: Collection[Lane] = (), cycles: int = LATE_CYCLES
    ) -> None:
        super().__init__(torch.device("cuda"), is_staged=False)
        self._late, self._hasty, self._cycles = late, hasty, cycles
        self._num_passes = 0

    def begin(self) -> None:
        super().begin()
        self._num_passes += 1

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        def run() -> None:
            if lane in self._late:
                torch.cuda._sleep(self._cycles)
            body()

        is_hasty = lane in self._hasty and self._num_passes > 1
        return super().submit(lane, () if is_hasty else waits, run)


@pytest.mark.parametrize(
    "late",
    [{Lane.H2D}, {Lane.D2H}, {Lane.COMPUTE}, {Lane.H2D, Lane.D2H}, {Lane.COMPUTE, Lane.D2H}],
    ids=lambda lanes: "+".join(sorted(lanes)),
)
def test_move_a_late_stream_changes_nothing(late: set[Lane]) -> None:
    model = tiny("qwen3", torch.bfloat16)
    resident = streamed(model, num_slots=NUM_LAYERS)
    device = LateDevice(late=late)
    found = streamed(model, num_slots=2, stash="host", device=device, num_steps=2)
    assert_equal(found, resident)


@pytest.mark.parametrize(
    ("late", "hasty"), [(Lane.COMPUTE, Lane.H2D), (Lane.H2D, Lane.COMPUTE)], ids=str
)
def test_a_stream_that_does_not_wait_gives_other_gradients(late: Lane, hasty: Lane) -> None:
    """What shows that the tests above can fail."""
    model = tiny("qwen3", torch.bfloat16)
    resident = streamed(model, num_slots=NUM_LAYERS)
    device = LateDevice(late={late}, hasty={hasty}, cycles=TOO_LATE_CYCLES)
    found = streamed(model, num_slots=2, device=device, num_steps=2)
    with pytest.raises(AssertionError):
        assert_equal(found, resident)


class BrokenDevice(CudaDevice):
    """A card on which one op fails, once."""

    def __init__(self, number: int) -> None:
        super().__init__(torch.device("cuda"), is_staged=False)
        self._num_left = number

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        self._num_left -= 1
        if self._num_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().submit(lane, waits, body)


@pytest.mark.parametrize("number", [1, 7, 20, 50])
def test_the_step_after_one_that_failed_is_right(number: int) -> None:
    model = tiny("qwen3", torch.bfloat16)
    expected = streamed(model, num_slots=NUM_LAYERS)
    engine = Engine(model, device=BrokenDevice(number), options=replace(OPTIONS, stash="host"))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((result.loss, gradients(model)), expected)
    engine.detach()


# ------------------------------------------------------------------------------- waits and memory


@pytest.fixture
def waits() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of calls in which the host waits for the card."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # one tells of the mode itself
        yield caught
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stash", ["device", "host"])
def test_inside_a_step_the_host_waits_for_nothing_but_transformers_looks_at_masks(
    stash: Literal["device", "host"], waits: list[warnings.WarningMessage]
) -> None:
    """See test_read_back.py: they come before the layers and before the head."""
    model = tiny("qwen3", torch.bfloat16)
    engine = offload.attach(model, num_slots=2, device="cuda", stash=stash)
    warm = engine.forward_backward(long_micro_batches(), dropout_seed=0).loss
    waits.clear()
    result = engine.forward_backward(long_micro_batches(), dropout_seed=0)
    found = {Path(wait.filename).name for wait in waits if "synchroniz" in str(wait.message)}
    assert found <= {"masking_utils.py"}
    waits.clear()
    assert result.loss == warm  # waits, and shows that a wait is seen
    assert any("synchroniz" in str(wait.message) for wait in waits)
    engine.detach()


def test_loads_are_counted_from_cold_and_steady_and_after_an_evaluation() -> None:
    model = tiny("qwen3", torch.bfloat16)
    engine = offload.attach(model, num_slots=2, device="cuda")
    assert engine.forward_backward(micro_batches()).num_loads == 10
    assert engine.forward_backward(micro_batches()).num_loads == 8
    assert engine.forward(micro_batches()[0]).num_loads == 4
    assert engine.forward_backward(micro_batches()).num_loads == 10
    engine.detach()


def test_a_measured_step_has_its_ops_in_order_on_one_clock() -> None:
    model = tiny("llama", torch.bfloat16, models=MID_MODELS)
    engine = offload.attach(model, num_slots=2, device="cuda")
    engine.forward_backward(long_micro_batches())
    spans = engine.forward_backward(long_micro_batches()).timeline.spans
    engine.detach()
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    for lane in (Lane.COMPUTE, Lane.H2D):
        ends = [span.end_s for span in spans if span.lane is lane]
        assert ends == sorted(ends)


def test_page_locked_memory_is_within_two_percent_of_the_weights() -> None:
    model = tiny("llama", torch.bfloat16, models=MID_MODELS)
    weight_bytes = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if ".layers." in name and not parameter.requires_grad
    )
    before_bytes = torch_pinned_bytes()
    engine = offload.attach(model, num_slots=2, device="cuda")
    engine.forward_backward(long_micro_batches())
    pinned_bytes = engine.slab_bytes + torch_pinned_bytes() - before_bytes
    engine.detach()
    assert weight_bytes <= pinned_bytes <= 1.02 * weight_bytes


def test_detach_gives_the_model_back_as_it_was() -> None:
    model = tiny("qwen3", torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = offload.attach(model, num_slots=2, device="cuda")
    engine.forward_backward(micro_batches())
    engine.detach()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(tensor.is_pinned() for tensor in after.values())


# -------------------------------------------------------------------------------------- the machine


def test_memory_is_locked_in_place_and_unlocked() -> None:
    locker = open_locker(torch.device("cuda"), fd=None)
    slab = aligned_empty(2**26)  # torch asks where the storage begins, not the view
    lock = page_lock(slab.data_ptr(), slab.numel(), 2**20, locker)
    assert lock.mode is LockMode.PINNED, lock.reason
    assert slab.is_pinned()
    lock.release()
    assert not slab.is_pinned()


def test_a_refused_lock_leaves_no_error_for_the_next_kernel() -> None:
    locker = open_locker(torch.device("cuda"), fd=None)
    assert locker is not None
    assert locker.register(4096, 2**20) is not None  # nothing is mapped there
    assert (torch.ones(3, device="cuda") * 2).sum().item() == 6


def test_the_card_has_a_place_on_the_host_or_the_reason_is_told() -> None:
    place = place_near(torch.device("cuda"))
    assert "NUMA node" in place.reason or "CPUs" in place.reason


def saved_on_the_card(model: Any, setting: str, *, num_slots: int) -> int:
    """Return the memory that is free with a weight on the host, where no bit may differ."""
    found, allocated = [], []
    for place in ("device", "host"):
        own = copy.deepcopy(model)
        before = torch.cuda.memory_allocated()
        options: dict[str, Any] = {"num_slots": num_slots, setting: place}
        engine = offload.attach(own, head_chunk_tokens=7, **options)
        allocated.append(torch.cuda.memory_allocated() - before)
        engine.forward_backward(micro_batches(), dropout_seed=0)
        own.zero_grad()
        result = engine.forward_backward(micro_batches(), dropout_seed=0)  # in the same buffers
        found.append((result.loss, gradients(own)))
        engine.detach()
    assert_equal(*found)
    return allocated[0] - allocated[1]


def test_an_embedding_on_the_host_changes_no_bit_and_leaves_the_card() -> None:
    model: Any = tiny("qwen3", torch.bfloat16)
    table = model.get_input_embeddings().weight
    assert saved_on_the_card(model, "embeddings", num_slots=2) >= table.nbytes


def test_a_head_on_the_host_changes_no_bit_and_leaves_the_card() -> None:
    model = with_outputs(tiny("qwen3", torch.bfloat16), 1000)
    # a head of 64,000 bytes, in slots that are a little larger than 3 x 20 KiB for it
    assert saved_on_the_card(model, "head", num_slots=3) >= 3 * 20 * 1024 - 4096
