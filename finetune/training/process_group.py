"""Ranks that use torch.distributed: gloo for messages; gloo or, on CUDA, NCCL for gradients.

No rank waits for a dead one. Messages go over TCP connections between the processes: a process that
is killed closes its connections, which at once is an error on the others. One that is stopped, or
whose machine is gone, no longer gives signs of life. Our own collectives are polled; while a
library's are waited for, as those that gather parts of a model, a thread looks for these signs. One
that hangs lets the others wait for its share of a step, for no longer than ten times the longest
step so far, and between steps, unless it is the main one, than ten times what they took themselves.
The main rank between steps, and any before the first has ended, may be at work for long: it is
waited for as long as it does some, see `heartbeat`.
A rank that fails but lives takes part in the others' next exchange with the reason in place of a
value; who does not come to it is ended, see `heartbeat`.

No error report is cut off. On each machine one rank shows the error: the one that has it, or the
first if that is elsewhere. A launcher ends all ranks of its machine as soon as one exits with an
error, so those that have nothing to report wait until the one that shows the error has exited.
"""

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from finetune.env import Launch, connect_on_loopback
from finetune.errors import (
    FinetuneError,
    RankError,
    RunFailedError,
    ToldRankError,
    file_error,
)
from finetune.exits import end_at_once
from finetune.training.ranks import Ranks
from finetune.training.world.blocks import MOST_RUNNING, block_elements, parts_of
from finetune.training.world.heartbeat import BEAT_S, STOPPED_S, Heartbeat
from finetune.training.world.likeness import difference, digests_of
from finetune.training.world.meeting import cause_of, meet, opened_store
from finetune.training.world.one_world import require_one_world
from finetune.training.world.parcel import (
    ParcelError,
    memory_of,
    opened,
    packed,
    sealed,
    unpacked,
)
from finetune.training.world.secret import secret_of
from offload.errors import SluiceError
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.memory.memory import GRADIENT_BUCKET_BYTES

T = TypeVar("T")

JOIN_S = 120.0
# In all, for one that does work before the first step, or as the main rank between steps.
TIMEOUT_S = 6 * 3600.0
# Within steps, for a process that hangs; one that dies or is stopped is noticed before.
LEAST_STEP_TIMEOUT_S, STEP_TIMEOUT_STEPS = 60.0, 10
FAREWELL_S = 30.0
_POLL_S, _POLL_FRAC, _MOST_POLL_S = 0.0002, 0.02, 0.01


class ProcessGroup(Ranks):
    """The ranks of a launch with several processes."""

    run_errors = (RunFailedError,)  # any other error may be of one rank, for which the others wait

    def __init__(
        self,
        launch: Launch,
        *,
        timeout_s: float = TIMEOUT_S,
        bucket_bytes: int = GRADIENT_BUCKET_BYTES,
    ) -> None:
        """Wait for the others.

        Raises:
            FinetuneError: They cannot be reached.
        """
        self.num, self.index, self.local_index = launch.num, launch.index, launch.local_index
        self._timeout_s = timeout_s
        self._is_broken = False
        self._longest_step_s = 0.0
        self._begun_s = time.monotonic()
        self._has_summed = False
        self._bucket_bytes = bucket_bytes
        self._bucket: torch.Tensor | None = None
        has_cuda, timeout = torch.cuda.is_available(), timedelta(seconds=timeout_s + FAREWELL_S)
        try:
            secret, store = secret_of(launch), opened_store(launch, timeout_s=JOIN_S)
            self._meeting = meet(store, secret, index=self.index, num=self.num, timeout_s=JOIN_S)
            self._heartbeat = Heartbeat(
                self._meeting.store, index=self.index, num=self.num, end=self._end
            )
            if launch.is_on_one_machine:
                connect_on_loopback()
            dist.init_process_group(
                backend="cuda:nccl,cpu:gloo" if has_cuda else "gloo",
                store=self._meeting.store,
                rank=self.index,
                world_size=self.num,
                timeout=timeout,
            )
            PartialState(cpu=not has_cuda)
        except (RuntimeError, ValueError) as error:
            raise FinetuneError(
                f"rank {self.index} of {self.num} cannot reach the others:"
                f" {str(error).splitlines()[0]}",
                limit="the launcher's MASTER_ADDR and MASTER_PORT must lead to rank 0",
                hint=f"`accelerate launch --multi_gpu --num_processes {self.num}"
                " --main_process_port 0` takes a port that is free",
            ) from error
        self.is_restart = self._meeting.is_restart
        self._heartbeat.start()
        atexit.register(self._leave)  # for a process that does not exit at once, as commands do
        try:
            self.nodes = tuple(self.exchange(launch.node))
            require_one_world(self, launch)
        except FinetuneError as error:
            self._tell(error)
            raise

    def note_begun(self) -> None:
        """Let processes that the launcher starts after these continue the run."""
        self._meeting.note_begun()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect, report to the others why this rank fails, or let the failed rank report."""
        if error is None:
            self.exchange(None)
        elif isinstance(error, ToldRankError):
            self._wait_for(error.speaker)
        elif isinstance(error, KeyboardInterrupt):
            self._is_broken = True
            self._heartbeat.leave(f"rank {self.index} was stopped before a step had ended")
        elif isinstance(error, Exception) and not (isinstance(error, RankError) or self._is_broken):
            self._tell(error)

    def exchange(self, value: T, *, is_step: bool = False) -> tuple[T, ...]:
        """Return the values of all ranks, in rank order."""
        if is_step:
            return self._exchange(value, limit_s=self._step_timeout_s())
        values = self._exchange(value, limit_s=self._timeout_s)
        self._begun_s = time.monotonic()
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on the main rank, on all ranks."""
        if self.is_main:
            value = make()
            content, tensors = packed(value)
            self.exchange(content)
        else:
            content, *_ = self.exchange("")
            with self._read_from(0):
                value, tensors = unpacked(content)
        for tensor in tensors:
            for piece in memory_of(tensor).split(GRADIENT_BUCKET_BYTES):
                self._send(piece)
        return value

    def _send(self, piece: torch.Tensor) -> None:
        """Fill memory of all ranks with what the main rank has there."""
        with self._connected():
            self._wait(dist.broadcast(piece, src=0, async_op=True), limit_s=self._timeout_s)
        self.mark()

    @contextmanager
    def first_here_first(self) -> Iterator[None]:
        """See `Ranks`; a run is loaded, for which each machine takes its own time."""
        self._heartbeat.has_steps = False
        with super().first_here_first():
            yield

    def _exchange(self, value: T, *, limit_s: float) -> tuple[T, ...]:
        words = self._gather(value, failure=None, limit_s=limit_s)
        failed = [rank for rank, (_, failure) in enumerate(words) if failure is not None]
        if failed:
            raise self._reported(failed, words[failed[0]][1] or "")
        return tuple(value for value, _ in words)

    def _reported(self, failed: Sequence[int], failure: str) -> ToldRankError:
        """Return the error for a rank to which others have reported a failure."""
        self._heartbeat.note_ending()
        here = [rank for rank in range(self.num) if self.nodes[rank] == self.nodes[self.index]]
        speaker = next((rank for rank in failed if rank in here), here[0])
        is_shown = speaker == self.index
        return ToldRankError(failed[0], failure, speaker=speaker, is_shown=is_shown)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Fail on all ranks if one fails in this context, with its error."""
        failure: SluiceError | None = None
        try:
            with self._heartbeat.writing() if self.is_main else nullcontext():
                yield
        except RankError:
            raise
        except SluiceError as error:
            failure = error
        except OSError as error:
            failure = file_error(error, f"rank {self.index}")
        own = None if failure is None else (failure.what, failure.limit, failure.hint)
        first = next((one for one in self.exchange(own) if one is not None), None)
        if first is not None:
            what, limit, hint = first
            raise RunFailedError(what, limit=limit, hint=hint) from failure

    @contextmanager
    def in_collectives(self, *, is_step: bool) -> Iterator[None]:
        """See `Ranks`; a rank that fails cannot tell the others, who wait for a tensor."""
        try:
            with self._watched(limit_s=self._step_timeout_s() if is_step else self._timeout_s):
                yield
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                gone = self._heartbeat.gone()
                if gone or self._heartbeat.reason():
                    raise self._lost(gone, cause_of(error)) from error
            self._is_broken = True
            what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._heartbeat.leave(f"rank {self.index} has failed: {what}")
            raise

    def arrive(self) -> None:
        """See `Ranks`."""
        self._heartbeat.arrive()

    def mark(self) -> None:
        """See `Ranks`."""
        self._heartbeat.mark()

    @contextmanager
    def following(self, count: Callable[[], int]) -> Iterator[None]:
        """See `Ranks`."""
        with self._heartbeat.following(count):
            yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, dtype: torch.dtype) -> None:
        """Add up the gradients of all ranks, in place."""
        missing = {i for i, parameter in enumerate(parameters) if parameter.grad is None}
        for i in missing:
            parameters[i].grad = torch.zeros_like(parameters[i])
        gradients = [p.grad for p in parameters if p.grad is not None]
        num_elements = self._bucket_bytes // 2 // FP32_BYTES
        num_elements = min(num_elements, sum(gradient.numel() for gradient in gradients))
        bucket = self._bucket_for(2 * (num_elements + self.num), like=gradients[0])
        # All memory is allocated: from here on no rank can fail alone and leave others waiting.
        gathered = self._exchange(missing, limit_s=self._step_timeout_s())
        with self._connected():
            for part in parts_of(gradients, max_elements=num_elements):
                self._sum_in_order(part, bucket, dtype)
        for i in set.intersection(*gathered):
            parameters[i].grad = None

    def send_from_main(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by those of the main rank; all are fp32."""
        num_elements = min(self._bucket_bytes // FP32_BYTES, sum(map(torch.Tensor.numel, tensors)))
        bucket = self._bucket_for(num_elements, like=tensors[0])
        self._exchange(None, limit_s=self._step_timeout_s())  # see `sum_gradients`
        with self._connected():
            for part in parts_of(tensors, max_elements=num_elements):
                sizes = [piece.numel() for piece in part]
                flat = bucket[: sum(sizes)]
                if self.is_main:
                    torch.cat(list(part), out=flat)
                self._wait(
                    dist.broadcast(flat, src=0, async_op=True), limit_s=self._step_timeout_s()
                )
                for piece, sent in zip(part, flat.split(sizes), strict=True):
                    piece.copy_(sent)

    def sum_losses(self, loss: float) -> float:
        """Return the sum of the losses of all ranks, at the end of a step."""
        losses = self._exchange(loss, limit_s=self._step_timeout_s())
        self._has_summed, self._begun_s = True, time.monotonic()
        self._heartbeat.has_steps = True
        return sum(losses)

    def _step_timeout_s(self) -> float:
        """Return how long the others may take longer than this rank for their share of a step."""
        if not self._has_summed:  # layers are compiled, or kernels for their shapes
            return self._timeout_s
        own_s = time.monotonic() - self._begun_s
        self._longest_step_s = max(self._longest_step_s, own_s)
        allowed_s = max(LEAST_STEP_TIMEOUT_S, STEP_TIMEOUT_STEPS * self._longest_step_s)
        return min(self._timeout_s, allowed_s)

    def _idle_timeout_s(self) -> float:
        """Return how long the others may take longer than this rank for what all do alike."""
        own_s = max(self._longest_step_s, time.monotonic() - self._begun_s)
        return max(LEAST_STEP_TIMEOUT_S, STEP_TIMEOUT_STEPS * own_s)

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """Add up a vector over the ranks, in rank order; waits for the device."""
        every = self._exchange(own.tolist(), limit_s=self._step_timeout_s())
        return torch.tensor([sum(one) for one in zip(*every, strict=True)]).to(own)

    def require_same(self, what: str, digest: Callable[[], str]) -> None:
        """Check that all ranks have the same of something."""
        self._require_alike(what, {what: digest()})

    def require_same_weights(self, parameters: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Check that what trains has stayed the same on all ranks that have it, to the bit."""
        self._require_alike(f"the trained weights after step {step}", digests_of(parameters))

    def _require_alike(self, what: str, digests: Mapping[str, str]) -> None:
        found = difference(what, self.exchange(digests), nodes=self.nodes)
        if found is not None:
            raise found

    # ----------------------------------------------------------------------------------- messages

    def _gather(
        self, value: Any, *, failure: str | None, limit_s: float
    ) -> list[tuple[Any, str | None]]:
        """Return the value of each rank, or why it has failed."""
        own = sealed((value, failure))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num)]
        self._heartbeat.arrive()
        with self._connected():
            size = torch.tensor([len(own)])
            self._wait(dist.all_gather(sizes, size, async_op=True), limit_s=limit_s)
            most = max(int(size) for size in sizes)
            parcels = [torch.empty(most, dtype=torch.uint8) for _ in range(self.num)]
            own = torch.nn.functional.pad(own, (0, most - len(own)))
            self._wait(dist.all_gather(parcels, own, async_op=True), limit_s=limit_s)
        words = []
        for rank, (parcel, size) in enumerate(zip(parcels, sizes, strict=True)):
            with self._read_from(rank):
                own_value, own_failure = opened(parcel[: int(size)])
            words.append((own_value, own_failure))
        return words

    @contextmanager
    def _read_from(self, rank: int) -> Iterator[None]:
        """Read what a rank has sent.

        Raises:
            RankError: It is nothing that a rank sends.
        """
        try:
            yield
        except ParcelError as error:
            raise self._lost([rank], f"what it has sent cannot be read ({error})") from error

    def _wait(self, work: "dist.Work | None", *, limit_s: float) -> None:
        """Wait for a collective, but for no rank that has stopped, nor longer than allowed.

        Raises:
            RankError: A rank does not answer.
            RuntimeError: A connection is closed.
        """
        assert work is not None
        start_s, idle_s = time.monotonic(), self._idle_timeout_s()
        while not work.is_completed():
            waited_s = time.monotonic() - start_s
            self._require_answers(waited_s=waited_s, limit_s=limit_s, idle_s=idle_s)
            # a lane that polls often would keep the interpreter from others
            time.sleep(min(_POLL_S + _POLL_FRAC * waited_s, _MOST_POLL_S))
        work.wait()

    def _require_answers(self, *, waited_s: float, limit_s: float, idle_s: float) -> None:
        """Check that all ranks live, and that none has let this one wait for too long.

        Args:
            waited_s: How long this rank has waited.
            limit_s: How long it may wait for the main rank, which may be at work for all.
            idle_s: How long for others, between the steps of a run.

        Raises:
            RankError: A rank does not answer, or has left.
        """
        if self._heartbeat.have_left():
            raise self._lost([], "")
        stopped = self._heartbeat.stopped(waited_s=waited_s)
        if stopped:
            raise self._lost(stopped, f"no sign of life for {STOPPED_S:.0f} s")
        idle = self._heartbeat.idle(waited_s=waited_s)
        if idle:
            raise self._lost(idle, f"it has let others wait for {waited_s:,.0f} s without any work")
        late = self._heartbeat.late()
        if self._heartbeat.has_steps and late and 0 not in late:
            limit_s = min(limit_s, idle_s)
        if waited_s > limit_s:
            raise self._lost(late, f"others have waited for it for {limit_s:,.0f} s")

    @contextmanager
    def _watched(self, *, limit_s: float) -> Iterator[None]:
        """End this process if another rank stops in this context, or this one comes no further.

        No thread can end another's wait in a collective of gloo or NCCL: aborting gloo's group
        leaves it waiting.
        """
        is_done = Event()

        def watch() -> None:
            place, since_s = self._heartbeat.place, time.monotonic()
            idle_s = self._idle_timeout_s()
            while not is_done.wait(BEAT_S):
                if self._heartbeat.place != place:
                    place, since_s = self._heartbeat.place, time.monotonic()
                waited_s = time.monotonic() - since_s
                try:
                    self._require_answers(waited_s=waited_s, limit_s=limit_s, idle_s=idle_s)
                except RankError as error:
                    end_at_once(error)

        watching = Thread(target=watch, name="watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_done.set()
            watching.join()

    def _tell(self, error: Exception) -> None:
        """Report why this rank fails; of a machine's that fail alike, one reports for all."""
        failure = (
            error.what if isinstance(error, SluiceError) else f"{type(error).__name__}: {error}"
        )
        self._heartbeat.fail(f"rank {self.index} has failed: {failure}")
        try:
            words = self._gather(None, failure=failure, limit_s=self._timeout_s)
        except RankError:
            return  # no rank is left to report to
        reported = self._reported(
            [r for r, (_, other) in enumerate(words) if other == failure], failure
        )
        if reported.speaker != self.index:
            self._wait_for(reported.speaker)
            raise reported from error

    def _wait_for(self, rank: int) -> None:
        """Wait until a rank has exited; it sends nothing, its closing connection ends the wait."""
        if rank == self.index:
            return
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), src=rank)
            assert work is not None
            work.wait(timedelta(seconds=FAREWELL_S))

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(self._heartbeat.gone(), cause_of(error)) from error

    def _lost(self, ranks: Sequence[int], why: str) -> RankError:
        """Return the error that ranks are gone, and let the others know that this one is not.

        If others have left because of it, it is the error that they have said.
        """
        self._is_broken = True
        self._heartbeat.note_ending()
        machine = "" if self.num_machines == 1 else " (machine {})"
        names = [f"rank {rank}{machine.format(self.nodes[rank])}" for rank in ranks]
        what = self._heartbeat.reason() or (
            f"{' and '.join(names) or 'another rank'} is gone or does not answer: {why}"
        )
        self._heartbeat.leave(what)
        return _rank_error(what)

    def _end(self, why: str) -> None:
        """End this process, whose main thread has not come to notice that the others do."""
        end_at_once(_rank_error(why))

    def _leave(self) -> None:
        """Disconnect, unless an exchange is unfinished, which would be waited for."""
        self._heartbeat.leave()
        if dist.is_initialized() and not self._is_broken:
            dist.destroy_process_group()

    # ----------------------------------------------------------------------------------- gradients

    def _bucket_for(self, num_elements: int, *, like: torch.Tensor) -> torch.Tensor:
        """Return fp32 memory that gradients are sent from, kept from step to step."""
        if self._bucket is None or self._bucket.numel() < num_elements:
            self._bucket = torch.empty(num_elements, dtype=torch.float32, device=like.device)
        return self._bucket

    def _sum_in_order(
        self, part: Sequence[torch.Tensor], bucket: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Add up in fp32, in the order of the ranks; each rank adds up an equal share.

        It gets the others' gradients of its share, and sends them the sums: 2 (N - 1) / N of the
        data, as the best all-reduce. So the bits depend on no size of bucket, and on no place in
        it: a layer's own sums are those of all gradients at once.
        """
        sizes = [piece.numel() for piece in part]
        num_elements = -(-sum(sizes) // self.num) * self.num
        memory = bucket.view(dtype)
        sent, received = memory[: 2 * num_elements].split(num_elements)
        for piece, place in zip(part, sent.split([*sizes, len(sent) - sum(sizes)]), strict=False):
            place.copy_(piece)
        share, is_gloo = num_elements // self.num, bucket.device.type == "cpu"
        most = self.num * block_elements(share, dtype) if is_gloo else num_elements
        blocks = list(zip(sent.split(most), received.split(most), strict=True))
        self._exchange_bytes(dist.all_to_all_single, ((own, others) for others, own in blocks))
        shares = []
        for block, every in blocks:
            first, *others = every.view(self.num, -1)
            total = first.float()
            for other in others:
                total += other
            shares.append((block, first.copy_(total)))
        self._exchange_bytes(dist.all_gather_into_tensor, shares)
        for piece, summed in zip(part, sent[: sum(sizes)].split(sizes), strict=True):
            piece.copy_(summed)

    def _exchange_bytes(
        self,
        collective: Callable[..., Any],
        blocks: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Run a collective that moves bytes, as gloo does not know all types, on each block.

        Args:
            collective: Of torch.distributed.
            blocks: Its target and source, each.
        """
        running = deque[Any]()
        for target, source in blocks:
            if len(running) == MOST_RUNNING:
                self._wait(running.popleft(), limit_s=self._step_timeout_s())
            as_bytes = target.view(torch.uint8), source.view(torch.uint8)
            running.append(collective(*as_bytes, async_op=True))
        while running:
            self._wait(running.popleft(), limit_s=self._step_timeout_s())


def _rank_error(what: str) -> RankError:
    return RankError(
        what,
        limit="all must live, and do their share of each step",
        hint="see what the others and the launcher show; `--resume` continues from the newest"
        " checkpoint",
    )
