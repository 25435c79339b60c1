"""The CUDA lanes without a card: streams and events that keep CUDA's rules, run by threads.

A stream is a FIFO queue with a thread, save the caller's own, which runs at once. As with CUDA, to
wait for an event is to wait for its last record, and for one never recorded is not to wait at all.
So a wait that is issued too early gives wrong numbers here too.
"""

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal

import pytest
import torch

import offload
from offload.engine.engine import Engine
from offload.engine.streams import CudaDevice, copy_on_host
from offload.plan.facts.codec import CodecName
from offload.plan.facts.workload import WeightPlace
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.rounding import rounded
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    resident,
    streamed,
    tiny,
    with_outputs,
)
from tests.parity.tied_models import wide
from tests.tiers import diagonal, mostly_slow

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
    codec: CodecName = "native",
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
def test_the_step_after_one_that_failed_is_right(
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
def test_a_stream_that_does_not_wait_gives_other_gradients(
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
