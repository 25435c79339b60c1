"""The program, with a rank 1 that fails in its third step, or differs: `main([KIND, WORDS...])`."""

import os
import signal
import sys
import time
from collections.abc import Sequence

import torch

from finetune import app
from finetune.data.steps import StepShare
from finetune.env import launch
from finetune.training import optimizer, process_group
from finetune.training.loop import Loop, Request
from finetune.training.sharded.engine import _Clock
from offload.engine.executor import Executor
from offload.engine.passes.part import Part
from offload.engine.results import PassState
from offload.errors import TransferError
from offload.plan.schedule.op import Kind, Op

FAILING_STEP = 2  # counted from 0
FAILURES = {
    "named": TransferError("a copy failed", limit="every copy must complete", hint="try again"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host memory": MemoryError(),
    "bug": KeyError("layer"),
}


def break_rank_1(failure: Exception) -> None:
    whole = Loop.request

    def broken(self: Loop, number: int, share: StepShare) -> Request:
        if number == FAILING_STEP:
            raise failure
        return whole(self, number, share)

    if launch().index == 1:
        Loop.request = broken  # type: ignore[method-assign]


def break_rank_1_late_in_a_visit(failure: Exception) -> None:
    """Fail in the backward of the first layer, a second after rank 0 has come to its end."""
    request, backward = Loop.request, Executor._backward
    steps = []

    def counted(self: Loop, number: int, share: StepShare) -> Request:
        steps.append(number)
        return request(self, number, share)

    def broken(self: Executor, state: PassState, op: Op, part: Part) -> None:
        if FAILING_STEP in steps and op.layer == 0:
            time.sleep(1.0)
            raise failure
        backward(self, state, op, part)

    if launch().index == 1:
        Loop.request = counted  # type: ignore[method-assign]
        Executor._backward = broken  # type: ignore[method-assign]


def slow_rank_1() -> None:
    """Let each backward visit of rank 1 take longer."""
    backward = Executor._backward

    def slow(self: Executor, state: PassState, op: Op, part: Part) -> None:
        time.sleep(0.02)
        backward(self, state, op, part)

    if launch().index == 1:
        Executor._backward = slow  # type: ignore[method-assign]


def let_rank_1_drift() -> None:
    """Let rank 1 make other updates than rank 0."""
    whole = optimizer.update

    def drifting(  # its weights are off by a thousandth
        of: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        lr: float,
        loraplus_ratio: float | None,
    ) -> None:
        whole(of, parameters, lr=lr, loraplus_ratio=loraplus_ratio)
        for parameter in parameters:
            parameter.data *= 1.001

    if launch().index == 1:
        optimizer.update = drifting  # type: ignore[assignment]


def kill_rank_1() -> None:
    """Kill rank 1 in its third step, unless its launcher has started it again."""
    whole = Loop.request

    def killed(self: Loop, number: int, share: StepShare) -> Request:
        if number == FAILING_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, number, share)

    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"  # noqa: TID251 - of the launcher
    if launch().index == 1 and is_first:
        Loop.request = killed  # type: ignore[method-assign]


def hang_rank_1() -> None:
    """Let rank 1 sleep in its third step, and allow less for a step than users' runs do."""
    process_group.LEAST_STEP_TIMEOUT_S, process_group.STEP_TIMEOUT_STEPS = 3.0, 3
    whole = Loop.request

    def hanging(self: Loop, number: int, share: StepShare) -> Request:
        if number == FAILING_STEP:
            time.sleep(600)
        return whole(self, number, share)

    if launch().index == 1:
        Loop.request = hanging  # type: ignore[method-assign]


def hang_rank_1_in_a_visit() -> None:
    """Let rank 1 of a model in parts sleep in its third step, with a layer gathered."""
    process_group.LEAST_STEP_TIMEOUT_S, process_group.STEP_TIMEOUT_STEPS = 3.0, 3
    request, mark = Loop.request, _Clock.mark
    steps = []

    def counted(self: Loop, number: int, share: StepShare) -> Request:
        steps.append(number)
        return request(self, number, share)

    def hanging(self: _Clock, kind: Kind, layer: int | None) -> None:
        mark(self, kind, layer)
        if FAILING_STEP in steps and (kind, layer) == (Kind.FORWARD, 1):
            time.sleep(600)

    if launch().index == 1:
        Loop.request = counted  # type: ignore[method-assign]
        _Clock.mark = hanging  # type: ignore[method-assign]


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    if argv[0] == "killed":
        kill_rank_1()
    elif argv[0] == "hangs":
        hang_rank_1()
    elif argv[0] == "hangs in a visit":
        hang_rank_1_in_a_visit()
    elif argv[0] == "late in a visit":
        break_rank_1_late_in_a_visit(FAILURES["named"])
    elif argv[0] == "drifts":
        let_rank_1_drift()
    elif argv[0] == "slow":
        slow_rank_1()
    elif argv[0] in FAILURES:
        break_rank_1(FAILURES[argv[0]])
    elif launch().index == 1:
        assert argv[0] == "threads"
        torch.set_num_threads(2)
    app.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
