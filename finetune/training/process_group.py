"""Ranks that use torch.distributed: gloo for messages; gloo or, on CUDA, NCCL for gradients.

No rank waits for a dead one. Messages go over TCP connections between the processes: a process that
is killed closes its connections, which at once is an error on the others. A rank that fails but
lives takes part in the others' next exchange with the reason in place of a value. Only a process
that hangs is waited for, until the timeout.

No error report is cut off. A launcher ends all ranks as soon as one exits with an error, so those
that have nothing to report wait until the one that shows the error has exited.
"""

import atexit
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from finetune.env import Launch
from finetune.errors import (
    FinetuneError,
    RankError,
    RunFailedError,
    ToldRankError,
    file_error,
)
from finetune.training.ranks import Ranks
from offload.errors import SluiceError
from offload.plan.memory.memory import GRADIENT_BUCKET_BYTES

T = TypeVar("T")

# For a process that hangs; one that dies is noticed at once. The main rank can sample for hours
# while the others wait.
TIMEOUT_S = 6 * 3600.0
FAREWELL_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Word:
    """A rank's contribution to an exchange: a value, or why it has failed."""

    value: Any
    failure: str | None


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
        self._bucket_bytes = bucket_bytes
        self._bucket: torch.Tensor | None = None
        timeout = timedelta(seconds=timeout_s)
        try:
            if torch.cuda.is_available():
                PartialState(backend="cuda:nccl,cpu:gloo", timeout=timeout)
            else:
                PartialState(cpu=True, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise FinetuneError(
                f"rank {self.index} of {self.num} cannot reach the others:"
                f" {str(error).splitlines()[0]}",
                limit="the launcher's MASTER_ADDR and MASTER_PORT must lead to rank 0",
                hint=f"`accelerate launch --multi_gpu --num_processes {self.num}"
                " --main_process_port 0` takes a port that is free",
            ) from error
        atexit.register(_leave)  # for a process that does not exit at once, as the commands do

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
            self._wait_for(error.rank)
        elif isinstance(error, Exception) and not isinstance(error, RankError):
            self._tell(error)

    def exchange(self, value: T) -> tuple[T, ...]:
        """Return the values of all ranks, in rank order."""
        words = self._gather(_Word(value=value, failure=None))
        for rank, word in enumerate(words):
            if word.failure is not None:
                raise ToldRankError(rank, word.failure)
        return tuple(word.value for word in words)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Fail on all ranks if one fails in this context, with its error."""
        failure: SluiceError | None = None
        try:
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

    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, loss: float) -> float:
        """Add up the gradients of all ranks, in place, and return the sum of their losses."""
        missing = {i for i, parameter in enumerate(parameters) if parameter.grad is None}
        for i in missing:
            parameters[i].grad = torch.zeros_like(parameters[i])
        gradients = [p.grad for p in parameters if p.grad is not None]
        bucket = self._bucket_for(gradients)
        # All memory is allocated: from here on no rank can fail alone and leave others waiting.
        gathered = self.exchange((loss, missing))
        with self._connected():
            for part in _parts(gradients, max_elements=bucket.numel()):
                sizes = [piece.numel() for piece in part]
                flat = torch.cat(part, out=bucket[: sum(sizes)])
                dist.all_reduce(flat)
                for piece, summed in zip(part, flat.split(sizes), strict=True):
                    piece.copy_(summed)
        for i in set.intersection(*(theirs for _, theirs in gathered)):
            parameters[i].grad = None
        return sum(theirs for theirs, _ in gathered)

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """Add up a vector over the ranks, in rank order; waits for the device."""
        every = self.exchange(own.tolist())
        return torch.tensor([sum(one) for one in zip(*every, strict=True)]).to(own)

    def require_same(self, what: str, digest: Callable[[], str]) -> None:
        """Check that all ranks have the same of something."""
        digests = self.exchange(digest())
        others = [str(rank) for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if others:
            raise FinetuneError(
                f"{what} on rank {', '.join(others)} are not those on rank 0",
                limit="ranks train one model on one order of rows, the same to the bit",
                hint="give all ranks the same files, package versions and kind of card;"
                " `--resume` continues from the newest checkpoint",
            )

    def require_same_weights(self, parameters: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Check that what trains has stayed the same on all ranks, to the bit."""
        self.require_same(f"the trained weights after step {step}", lambda: _digest(parameters))

    # ----------------------------------------------------------------------------------- messages

    def _gather(self, word: _Word) -> list[_Word]:
        words: list[Any] = [None] * self.num
        with self._connected():
            dist.all_gather_object(words, word)
        return words

    def _tell(self, error: Exception) -> None:
        """Report why this rank fails; if several fail alike, the first one reports for all."""
        failure = (
            error.what if isinstance(error, SluiceError) else f"{type(error).__name__}: {error}"
        )
        try:
            words = self._gather(_Word(value=None, failure=failure))
        except RankError:
            return  # no rank is left to report to
        speaker = next(rank for rank, word in enumerate(words) if word.failure == failure)
        if speaker != self.index:
            self._wait_for(speaker)
            raise ToldRankError(speaker, failure) from error

    def _wait_for(self, rank: int) -> None:
        """Wait until a rank has exited; it sends nothing, its closing connection ends the wait."""
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), src=rank)
            assert work is not None
            work.wait(timedelta(seconds=FAREWELL_S))

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"another rank is gone or does not answer: {str(error).splitlines()[0]}",
                limit=f"each must live, and answer within {self._timeout_s:,.0f} s",
                hint="see what the others and the launcher show; `--resume` continues from the"
                " newest checkpoint",
            ) from error

    # ----------------------------------------------------------------------------------- gradients

    def _bucket_for(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the memory that gradients are sent from, kept from step to step.

        Its size follows from these gradients alone: so the order of each sum does, and runs that
        share their steps have the bits that they have by themselves.
        """
        dtype = reduce(torch.promote_types, (g.dtype for g in gradients))
        most = self._bucket_bytes // dtype.itemsize
        num_elements = min(most, sum(g.numel() for g in gradients))
        kept = self._bucket
        if kept is None or kept.dtype != dtype or kept.numel() < num_elements:
            kept = torch.empty(num_elements, dtype=dtype, device=gradients[0].device)
            self._bucket = kept
        return kept[:num_elements]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _parts(gradients: Sequence[torch.Tensor], *, max_elements: int) -> Iterator[list[torch.Tensor]]:
    """Cut gradients, as flat views, into parts that fit the bucket."""
    part: list[torch.Tensor] = []
    num_elements = 0
    for piece in (piece for g in gradients for piece in g.view(-1).split(max_elements)):
        if num_elements + piece.numel() > max_elements:
            yield part
            part, num_elements = [], 0
        part.append(piece)
        num_elements += piece.numel()
    yield part


def _digest(parameters: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters.values():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
