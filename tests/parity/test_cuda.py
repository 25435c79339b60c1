"""The engine on a card, and its protocol of streams and events without one."""

import copy
import random
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import offload
from offload.engine.codec import form_named
from offload.engine.engine import Engine
from offload.engine.host.numa import place_near
from offload.engine.host.pagelock import LockMode, aligned_empty, open_locker, page_lock
from offload.engine.memory_meter import torch_pinned_bytes
from offload.engine.streams import CudaDevice, Event, copy_on_host
from offload.plan.facts.codec import CODECS
from offload.plan.facts.workload import WeightPlace
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.architectures import rel_error
from tests.parity.rounding import matrices, rounded
from tests.parity.steps import (
    EXPERTS,
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    resident,
    streamed,
    tiny,
    truth_of,
    with_lora,
    with_outputs,
)
from tests.parity.tied_models import wide
from tests.tiers import diagonal, mostly_slow

Found = tuple[float, dict[str, torch.Tensor]]

Batches = list[dict[str, torch.Tensor]]


# Copies of these layers take long enough to run beside the kernels of others.
MID_SHAPE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}

MID_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**MID_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**MID_SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MID_SHAPE, **{**EXPERTS, "moe_intermediate_size": 512})
    ),
}


def tiny_on_card(
    name: str, dtype: torch.dtype, *, models: Mapping[str, Callable[[], PreTrainedModel]] = MODELS
) -> PeftModel:
    torch.manual_seed(0)
    base = models[name]()
    torch.nn.Module.to(base, dtype)  # transformers' own has no types
    base.config._experts_implementation = "eager"  # the grouped kernel is not for every card
    return with_lora(base)


def long_micro_batches() -> Batches:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for width in (128, 160, 192):
        input_ids = torch.randint(0, 64, (2, width), generator=generator)
        batches.append({"input_ids": input_ids, "labels": input_ids.clone()})
    return batches


# --------------------------------------------------------------------------------------------- cuda


LATE_CYCLES = 2_000_000  # about a millisecond, many times a tiny layer
TOO_LATE_CYCLES = 50 * LATE_CYCLES  # many times what the host takes to issue a layer


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Take kernels whose sums have one order; cuBLAS's workspace is fixed in tests/conftest.py."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def streamed_cuda(
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_move_streamed_equals_resident_to_the_bit(
    name: str, dtype: torch.dtype, stash: Literal["device", "host"]
) -> None:
    model = tiny_on_card(name, dtype)
    resident = streamed_cuda(model, num_slots=NUM_LAYERS)
    assert_equal(streamed_cuda(model, num_slots=2, stash=stash), resident)
    assert_equal(streamed_cuda(model, num_slots=3, stash=stash, num_steps=3), resident)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MID_MODELS)
def test_move_layers_whose_copies_overlap_equal_resident_ones_to_the_bit(
    name: str, dtype: torch.dtype, stash: Literal["device", "host"]
) -> None:
    model = tiny_on_card(name, dtype, models=MID_MODELS)
    batches = long_micro_batches()
    resident = streamed_cuda(model, num_slots=NUM_LAYERS, batches=batches)
    found = streamed_cuda(model, num_slots=2, stash=stash, batches=batches, num_steps=2)
    assert_equal(found, resident)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_move_dropout_is_replayed_in_the_recompute() -> None:
    torch.manual_seed(0)
    model = with_lora(MODELS["qwen3"](), dropout=0.3)
    assert_equal(streamed_cuda(model, num_slots=2), streamed_cuda(model, num_slots=NUM_LAYERS))


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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
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
        loss, ours = streamed_cuda(model, num_slots=2)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "late",
    [{Lane.H2D}, {Lane.D2H}, {Lane.COMPUTE}, {Lane.H2D, Lane.D2H}, {Lane.COMPUTE, Lane.D2H}],
    ids=lambda lanes: "+".join(sorted(lanes)),
)
def test_move_a_late_stream_changes_nothing(late: set[Lane]) -> None:
    model = tiny_on_card("qwen3", torch.bfloat16)
    resident = streamed_cuda(model, num_slots=NUM_LAYERS)
    device = LateDevice(late=late)
    found = streamed_cuda(model, num_slots=2, stash="host", device=device, num_steps=2)
    assert_equal(found, resident)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("late", "hasty"), [(Lane.COMPUTE, Lane.H2D), (Lane.H2D, Lane.COMPUTE)], ids=str
)
def test_a_stream_that_does_not_wait_gives_other_gradients(late: Lane, hasty: Lane) -> None:
    """What shows that the tests above can fail."""
    model = tiny_on_card("qwen3", torch.bfloat16)
    resident = streamed_cuda(model, num_slots=NUM_LAYERS)
    device = LateDevice(late={late}, hasty={hasty}, cycles=TOO_LATE_CYCLES)
    found = streamed_cuda(model, num_slots=2, device=device, num_steps=2)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("number", [1, 7, 20, 50])
def test_the_step_after_one_that_failed_is_right(number: int) -> None:
    model = tiny_on_card("qwen3", torch.bfloat16)
    expected = streamed_cuda(model, num_slots=NUM_LAYERS)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stash", ["device", "host"])
def test_inside_a_step_the_host_waits_for_nothing_but_transformers_looks_at_masks(
    stash: Literal["device", "host"], waits: list[warnings.WarningMessage]
) -> None:
    """See test_read_back.py: they come before the layers and before the head."""
    model = tiny_on_card("qwen3", torch.bfloat16)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_loads_are_counted_from_cold_and_steady_and_after_an_evaluation() -> None:
    model = tiny_on_card("qwen3", torch.bfloat16)
    engine = offload.attach(model, num_slots=2, device="cuda")
    assert engine.forward_backward(micro_batches()).num_loads == 10
    assert engine.forward_backward(micro_batches()).num_loads == 8
    assert engine.forward(micro_batches()[0]).num_loads == 4
    assert engine.forward_backward(micro_batches()).num_loads == 10
    engine.detach()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_measured_step_has_its_ops_in_order_on_one_clock() -> None:
    model = tiny_on_card("llama", torch.bfloat16, models=MID_MODELS)
    engine = offload.attach(model, num_slots=2, device="cuda")
    engine.forward_backward(long_micro_batches())
    spans = engine.forward_backward(long_micro_batches()).timeline.spans
    engine.detach()
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    for lane in (Lane.COMPUTE, Lane.H2D):
        ends = [span.end_s for span in spans if span.lane is lane]
        assert ends == sorted(ends)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_page_locked_memory_is_within_two_percent_of_the_weights() -> None:
    model = tiny_on_card("llama", torch.bfloat16, models=MID_MODELS)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_detach_gives_the_model_back_as_it_was() -> None:
    model = tiny_on_card("qwen3", torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = offload.attach(model, num_slots=2, device="cuda")
    engine.forward_backward(micro_batches())
    engine.detach()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(tensor.is_pinned() for tensor in after.values())


# -------------------------------------------------------------------------------------- the machine


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_memory_is_locked_in_place_and_unlocked() -> None:
    locker = open_locker(torch.device("cuda"), fd=None)
    slab = aligned_empty(2**26)  # torch asks where the storage begins, not the view
    lock = page_lock(slab.data_ptr(), slab.numel(), 2**20, locker)
    assert lock.mode is LockMode.PINNED, lock.reason
    assert slab.is_pinned()
    lock.release()
    assert not slab.is_pinned()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_refused_lock_leaves_no_error_for_the_next_kernel() -> None:
    locker = open_locker(torch.device("cuda"), fd=None)
    assert locker is not None
    assert locker.register(4096, 2**20) is not None  # nothing is mapped there
    assert (torch.ones(3, device="cuda") * 2).sum().item() == 6


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
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


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_an_embedding_on_the_host_changes_no_bit_and_leaves_the_card() -> None:
    model: Any = tiny_on_card("qwen3", torch.bfloat16)
    table = model.get_input_embeddings().weight
    assert saved_on_the_card(model, "embeddings", num_slots=2) >= table.nbytes


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_head_on_the_host_changes_no_bit_and_leaves_the_card() -> None:
    model = with_outputs(tiny_on_card("qwen3", torch.bfloat16), 1000)
    # a head of 64,000 bytes, in slots that are a little larger than 3 x 20 KiB for it
    assert saved_on_the_card(model, "head", num_slots=3) >= 3 * 20 * 1024 - 4096


# ------------------------------------------------------------------------------------- cuda encoded


ENCODED_NUM_LAYERS = 6
ENCODED = [n for n in CODECS if n not in ("native", "bf16") and not CODECS[n].published]


@pytest.fixture
def deterministic_encoded() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rounded_on_card(model: PeftModel, codec: str) -> PeftModel:
    """Return a copy whose weights were written and read back on the card."""
    model, form = copy.deepcopy(model), form_named(codec)
    for parameter in matrices(model, codec).values():
        values = parameter.data.cuda()
        num_bytes = form.num_bytes(values.shape, values.dtype)
        written = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        form.encode(values, written)
        form.decode(written, values)
        parameter.data = values.cpu()
    return model


def stepped(model: PeftModel, codec: str, *, num_slots: int) -> Found:
    model = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=num_slots, codec=codec, device="cuda")
    try:
        engine.forward_backward(long_micro_batches(), dropout_seed=0)
        model.zero_grad()
        result = engine.forward_backward(long_micro_batches(), dropout_seed=0)
        return result.loss, gradients(model)
    finally:
        engine.detach()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic_encoded")
@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_move_encoded_layers_compute_as_resident_rounded_ones(name: str, codec: str) -> None:
    model = tiny_on_card(name, torch.bfloat16, models=MID_MODELS)
    expected = stepped(rounded_on_card(model, codec), "native", num_slots=ENCODED_NUM_LAYERS)
    assert_equal(stepped(model, codec, num_slots=2), expected)
    assert_equal(stepped(model, codec, num_slots=ENCODED_NUM_LAYERS), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic_encoded")
@pytest.mark.parametrize("codec", ENCODED)
def test_a_card_reads_what_was_written_on_the_host_as_the_host_does(codec: str) -> None:
    torch.manual_seed(0)
    values, form = torch.randn(3, 130, 64, dtype=torch.bfloat16), form_named(codec)
    written = torch.empty(form.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
    form.encode(values, written)
    on_host, on_card = torch.empty_like(values), torch.empty_like(values, device="cuda")
    form.decode(written, on_host)
    form.decode(written.cuda(), on_card)
    torch.testing.assert_close(on_card.cpu(), on_host, rtol=2**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic_encoded")
@pytest.mark.parametrize("codec", ENCODED)
def test_the_host_does_not_wait_for_decoding(codec: str) -> None:
    engine = offload.attach(
        tiny_on_card("qwen3", torch.bfloat16, models=MID_MODELS),
        num_slots=2,
        codec=codec,
        device="cuda",
    )
    engine.forward_backward(long_micro_batches(), dropout_seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        engine.forward_backward(long_micro_batches(), dropout_seed=0)
        torch.cuda.set_sync_debug_mode("default")
    found = {Path(wait.filename).name for wait in caught if "synchroniz" in str(wait.message)}
    assert found <= {"masking_utils.py"}
    engine.detach()


# ------------------------------------------------------------------------------------ cuda protocol


TIMEOUT_S = 60
PIECE_BYTES = 7_000


class FakeStream:
    """A queue of work; `is_own` for the caller's stream, whose work runs as it is issued."""

    def __init__(self, cuda: "FakeCuda", *, is_own: bool = False) -> None:
        self._cuda = cuda
        self._queue: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._is_own = is_own
        if not is_own:
            cuda.streams.append(self)
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def put(self, work: Callable[[], Any]) -> None:
        if self._is_own:
            work()
        else:
            self._queue.put(work)

    def wait_event(self, event: "FakeEvent") -> None:
        recorded = event.recorded
        if recorded is None:
            self._cuda.num_waits_for_nothing += 1
        else:
            self.put(lambda: recorded.wait(TIMEOUT_S))

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        assert done.wait(TIMEOUT_S)

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(TIMEOUT_S)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._cuda.delay_s())
            work()


class FakeEvent:
    """An event, which can be recorded on a stream and then waited for."""

    def __init__(self) -> None:
        self.recorded: threading.Event | None = None
        self._time_s = 0.0

    def record(self, stream: FakeStream) -> None:
        self.recorded = done = threading.Event()

        def mark() -> None:
            self._time_s = time.perf_counter()
            done.set()

        stream.put(mark)

    def synchronize(self) -> None:
        assert self.recorded is not None
        assert self.recorded.wait(TIMEOUT_S)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end._time_s - self._time_s)


class FakeCuda:
    """The part of `torch.cuda` that the lanes use."""

    def __init__(self, seed: int) -> None:
        self.streams: list[FakeStream] = []
        self.num_waits_for_nothing = 0
        self._own = FakeStream(self, is_own=True)
        self._here = threading.local()
        self._chance = random.Random(seed)

    def delay_s(self) -> float:
        return self._chance.choice([0, 0, 0, 0.002])

    def current_stream(self, _device: torch.device | None = None) -> FakeStream:
        stream: FakeStream = getattr(self._here, "stream", self._own)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before


class FakeCudaDevice(CudaDevice):
    """The CUDA lanes over memory of the host; a copy is work of the running stream."""

    cuda: FakeCuda

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.cuda.current_stream().put(lambda: copy_on_host(target, source))


Open = Callable[..., FakeCudaDevice]


@pytest.fixture
def open_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return what opens CUDA lanes over a made-up `torch.cuda`."""
    opened: list[FakeCuda] = []

    def opening(*, seed: int, is_staged: bool) -> FakeCudaDevice:
        cuda = FakeCuda(seed)
        opened.append(cuda)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: FakeStream(cuda))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_options: FakeEvent())
        monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
        monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        device = FakeCudaDevice(torch.device("cpu"), is_staged=is_staged)
        device.cuda = cuda
        return device

    yield opening
    for cuda in opened:
        for stream in cuda.streams:
            stream.end()


def attached(
    model: torch.nn.Module,
    device: FakeCudaDevice,
    *,
    num_staging: int,
    codec: str = "native",
    embeddings: WeightPlace = "device",
    head: WeightPlace = "device",
    trained_weights: Literal["device", "host"] = "device",
) -> Engine:
    options = replace(
        OPTIONS,
        stash="host",
        codec=codec,
        embeddings=embeddings,
        head=head,
        trained_weights=trained_weights,
    )
    engine = Engine(model, device=device, options=options)
    sizes = replace(engine._bound.sizes, piece_bytes=PIECE_BYTES, num_staging=num_staging)
    engine._bound = replace(engine._bound, sizes=sizes)
    engine._bound.executor._transfers._slots._staging = [
        torch.full((PIECE_BYTES,), 0xFF, dtype=torch.uint8) for _ in range(num_staging)
    ]
    return engine


@pytest.mark.parametrize(
    ("seed", "is_staged", "num_staging"),
    mostly_slow(
        [
            (seed, *staging)
            for seed in range(2)
            for staging in ((False, 0), (True, 0), (True, 1), (True, 3))
        ],
        (1, True, 3),
    ),
)
def test_move_streams_that_run_apart_give_the_bits_of_the_resident_step(
    open_device: Open, seed: int, *, is_staged: bool, num_staging: int
) -> None:
    """Staged without buffers is for pageable memory: a thread waits for the driver."""
    model = tiny("qwen3")
    expected = resident("qwen3")
    device = open_device(seed=seed, is_staged=is_staged)
    engine = attached(model, device, num_staging=num_staging)
    first = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((first.loss, gradients(model)), expected)
    model.zero_grad()
    second = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((second.loss, gradients(model)), expected)
    spans = second.timeline.spans
    assert all(span.start_s <= span.end_s for span in spans)
    assert any(span.lane is Lane.HOST for span in spans) == (num_staging > 0)
    assert device.cuda.num_waits_for_nothing == 0
    engine.detach()


@pytest.mark.thorough
def test_a_host_buffer_is_filled_again_after_the_last_copy_of_the_pass_before(
    open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is issued while the one before computes: nobody has to look at its loss."""
    device = open_device(seed=0, is_staged=True)
    engine = attached(tiny("qwen3"), device, num_staging=2, embeddings="host")
    submit, fills = device.submit, {Kind.LOAD: Kind.READ, Kind.ROWS: Kind.LOOK_UP}
    last_copies: dict[tuple[Kind, int | None], Any] = {}
    num_waits = {Kind.READ: 0, Kind.LOOK_UP: 0}

    def submitted(lane: Lane, waits: Any, body: Any) -> Any:
        event, op = submit(lane, waits, body), body.args[-1]
        if (op.kind, op.buffer) in last_copies:
            assert last_copies[op.kind, op.buffer] in waits
            num_waits[op.kind] += 1
        if op.kind in fills:
            last_copies[fills[op.kind], op.buffer] = event
        return event

    monkeypatch.setattr(device, "submit", submitted)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    before = dict(num_waits)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    assert all(num_waits[kind] >= before[kind] + 2 for kind in before)
    engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "num_staging"), [(0, 0), (1, 2)])
def test_move_rows_of_an_embedding_on_the_host_are_there_when_a_front_looks_them_up(
    open_device: Open, seed: int, num_staging: int
) -> None:
    """More micro-batches than buffers, so that each is filled again while others compute."""
    model = tiny("qwen3")
    batches = micro_batches(5)
    reference = copy.deepcopy(model)
    engine = offload.attach(reference, num_slots=2, device="cpu", head_chunk_tokens=7)
    expected = engine.forward_backward(batches, dropout_seed=0).loss, gradients(reference)
    device = open_device(seed=seed, is_staged=True)
    engine = attached(model, device, num_staging=num_staging, embeddings="host")
    kinds: list[Kind] = []
    for _ in range(2):
        model.zero_grad()
        result = engine.forward_backward(batches, dropout_seed=0)
        assert_equal((result.loss, gradients(model)), expected)
        kinds = [span.kind for span in result.timeline.spans]
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == 5
    assert device.cuda.num_waits_for_nothing == 0
    engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "num_staging"), [(0, 0), (1, 2)])
def test_move_a_head_on_the_host_is_in_the_slots_when_it_computes_and_layers_are_after_it(
    open_device: Open, seed: int, num_staging: int
) -> None:
    model = with_outputs(tiny("qwen3"), 400)
    reference = copy.deepcopy(model)
    engine = offload.attach(reference, num_slots=2, device="cpu", head_chunk_tokens=7)
    expected = engine.forward_backward(micro_batches(), dropout_seed=0).loss, gradients(reference)
    device = open_device(seed=seed, is_staged=num_staging > 0)
    engine = attached(model, device, num_staging=num_staging, head="host")
    kinds: list[Kind] = []
    for _ in range(2):
        model.zero_grad()
        result = engine.forward_backward(micro_batches(), dropout_seed=0)
        assert_equal((result.loss, gradients(model)), expected)
        kinds = [span.kind for span in result.timeline.spans]
    assert kinds.count(Kind.HEAD) > 2  # over both slots, in pieces
    assert device.cuda.num_waits_for_nothing == 0
    engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "num_staging"), [(0, 0), (1, 2)])
@pytest.mark.parametrize("order", Order)
def test_move_rows_and_head_of_one_weight_on_the_host_are_there_when_they_are_read(
    open_device: Open, order: Order, seed: int, num_staging: int
) -> None:
    """Late copies, and a thread that gathers rows of one pass while another's head computes."""
    model, batches = wide(), micro_batches(5)
    reference = copy.deepcopy(model)
    engine = offload.attach(reference, num_slots=2, device="cpu", head_chunk_tokens=7)
    result = engine.forward_backward(batches, dropout_seed=0, order=order)
    expected = result.loss, gradients(reference)
    device = open_device(seed=seed, is_staged=True)
    engine = attached(model, device, num_staging=num_staging, embeddings="host", head="host")
    kinds: list[Kind] = []
    for _ in range(2):
        model.zero_grad()
        result = engine.forward_backward(batches, dropout_seed=0, order=order)
        assert_equal((result.loss, gradients(model)), expected)
        kinds = [span.kind for span in result.timeline.spans]
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == 5
    assert kinds.count(Kind.HEAD) > 2  # over both slots, in pieces
    assert device.cuda.num_waits_for_nothing == 0
    engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize("num_staging", mostly_slow([0, 2], 2))
def test_move_encoded_layers_over_streams_compute_as_resident_rounded_ones(
    open_device: Open, num_staging: int
) -> None:
    model = tiny("qwen3_moe")
    expected = streamed(rounded(model, "nf4"), num_slots=NUM_LAYERS)
    device = open_device(seed=0, is_staged=num_staging > 0)
    engine = attached(model, device, num_staging=num_staging, codec="nf4")
    for _ in range(2):
        model.zero_grad()
        result = engine.forward_backward(micro_batches(), dropout_seed=0)
        assert_equal((result.loss, gradients(model)), expected)
    assert device.cuda.num_waits_for_nothing == 0
    engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "num_staging"), diagonal([1, 40], [0, 2]))
def test_the_step_after_one_that_failed_is_right_protocol(
    open_device: Open, number: int, num_staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3")
    expected = resident("qwen3")
    device = open_device(seed=0, is_staged=num_staging > 0)
    engine = attached(model, device, num_staging=num_staging)
    num_left = [number]
    issue = device._issue

    def issue_or_fail(*args: Any) -> None:
        num_left[0] -= 1
        if num_left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        issue(*args)

    monkeypatch.setattr(device, "_issue", issue_or_fail)
    with pytest.raises(Exception, match="CUDA out of memory"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((result.loss, gradients(model)), expected)
    engine.detach()


@pytest.mark.thorough
def test_a_stream_that_does_not_wait_gives_other_gradients_protocol(
    open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shows that the tests above can fail; the first step is right, the second hasty."""
    model = tiny("qwen3")
    device = open_device(seed=0, is_staged=False)
    engine = attached(model, device, num_staging=0)
    first = engine.forward_backward(micro_batches(), dropout_seed=0)
    expected = first.loss, gradients(model)
    model.zero_grad()
    device.finish()
    monkeypatch.setattr(FakeStream, "wait_event", lambda _stream, _event: None)
    monkeypatch.setattr(device.cuda, "delay_s", lambda: 0.01)
    second = engine.forward_backward(micro_batches(), dropout_seed=0)
    with pytest.raises(AssertionError):
        assert_equal((second.loss, gradients(model)), expected)
    engine.detach()


def plain_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss of all labels, by plain PyTorch, in one graph."""
    total, num = torch.zeros(()), 0
    for batch in micro_batches():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:].flatten()
        total = total + torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels, reduction="sum"
        )
        num += int((labels != -100).sum())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total / num, list(trained.values()))
    return dict(zip(trained, found, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_a_thread_sends_back_are_those_of_plain_pytorch(
    open_device: Open, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers." in name
    expected = plain_gradients(copy.deepcopy(model))
    options = replace(OPTIONS, stash="host", trained_weights="host")
    device = open_device(seed=seed, is_staged=True)
    engine = Engine(model, device=device, options=options)
    copies: Any = device._streams[Lane.D2H]
    put = copies.put

    def put_late(work: Callable[[], Any]) -> None:
        put(lambda: time.sleep(0.05))  # until the next layer's backward has begun
        put(work)

    monkeypatch.setattr(copies, "put", put_late)
    for _ in range(2):  # the second step's gradients pass through buffers that the first has used
        engine.forward_backward(micro_batches(), dropout_seed=0)
        found = {n: p.grad for n, p in engine.trained_parameters.items() if p.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient.float() - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, name
        for parameter in engine.trained_parameters.values():
            parameter.grad = None
    assert device.cuda.num_waits_for_nothing == 0
    engine.close()
