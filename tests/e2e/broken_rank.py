"""The program, with a rank that fails in its third step, or differs: `main([KIND, WORDS...])`.

It is rank 1, or the main rank where a kind says so.

A rank that fails prints first at what time of the system's monotonic clock it does.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch

from finetune import app
from finetune.data.steps import StepShare
from finetune.env import launch
from finetune.run import checkpoint
from finetune.run.checkpoint import Stateful
from finetune.training import load, optimizer, process_group
from finetune.training.loop import Loop, Request
from finetune.training.sharded.engine import _Clock
from offload.engine.executor import Executor
from offload.engine.passes.part import Part
from offload.engine.results import PassState
from offload.errors import TransferError
from offload.plan.schedule.op import Kind, Op

FAILING_STEP = 2  # counted from 0
FAILS_AT = "fails at "
OTHER_VERSION = "0.0.1"  # of peft
LEAST_STEP_S, STEPS, TIMEOUT_S = 3.0, 3, 8.0  # users' runs allow more
JOIN_S = 4.0
MIB = 2**20

NAMED = TransferError("a copy failed", limit="every copy must complete", hint="try again")
NO_DEVICE_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def raise_(failure: Exception, *, after_s: float = 0.0) -> NoReturn:
    """Fail, after a while in which rank 0 comes to wait for this one."""
    time.sleep(after_s)
    raise failure


def send_itself(number: signal.Signals) -> None:
    """Send this process a signal; not if its launcher has started it again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # noqa: TID251 - of the launcher
        os.kill(os.getpid(), number)


def fill_disk(words: Sequence[str]) -> None:
    """Leave no room where the run's directory is."""
    place = next(word for word in words if word.startswith("output.dir="))
    fill(Path(place.removeprefix("output.dir=")).parent / "filler")


def fill(file: Path) -> None:
    """Let a file take all room of its disk, to the last byte."""
    with suppress(OSError), file.open("wb", buffering=0) as filler:
        for size in (MIB, 1):
            with suppress(OSError):
                while True:
                    filler.write(bytes(size))


def failing(act: Callable[[], object]) -> Callable[[], None]:
    """Return what prints the time before it fails."""

    def fails() -> None:
        sys.stdout.write(f"{FAILS_AT}{time.monotonic()}\n")
        sys.stdout.flush()
        act()

    return fails


def in_step(act: Callable[[], None]) -> None:
    """Do something as this rank's third step begins."""
    whole = Loop.request

    def broken(self: Loop, number: int, share: StepShare) -> Request:
        if number == FAILING_STEP:
            act()
        return whole(self, number, share)

    Loop.request = broken  # type: ignore[method-assign]


def in_visit(act: Callable[[], None]) -> None:
    """Do something in the third step's first backward of the first layer, its weights there."""
    backward, mark = Executor._backward, _Clock.mark
    steps: list[int] = []

    def begun() -> None:
        steps.append(FAILING_STEP)

    def acting() -> None:
        if steps:
            steps.clear()
            act()

    def broken(self: Executor, state: PassState, op: Op, part: Part) -> None:
        if op.layer == 0:
            acting()
        backward(self, state, op, part)

    def broken_in_parts(self: _Clock, kind: Kind, layer: int | None) -> None:
        mark(self, kind, layer)
        if (kind, layer) == (Kind.BACKWARD, 0):
            acting()

    in_step(begun)
    Executor._backward = broken  # type: ignore[method-assign]
    _Clock.mark = broken_in_parts  # type: ignore[method-assign]


def in_evaluation(act: Callable[[], None]) -> None:
    """Do something as this rank's first evaluation begins."""
    whole = Loop.validation_loss

    def broken(self: Loop, *args: Any, **settings: Any) -> float:
        act()
        return whole(self, *args, **settings)

    Loop.validation_loss = broken  # type: ignore[method-assign]


def in_checkpoint(act: Callable[[], None]) -> None:
    """Do something as this rank's second checkpoint is half written."""
    whole, numbers = checkpoint._save_optimizer, count(1)

    def broken(optimizer: Stateful, file: Path) -> None:
        if next(numbers) > 1:
            act()
        whole(optimizer, file)

    checkpoint._save_optimizer = broken


def in_loading(act: Callable[[], None]) -> None:
    """Do something as this rank's weights are loaded."""
    whole = vars(load)["load_model"]

    def broken(*args: Any, **settings: Any) -> Any:
        act()
        return whole(*args, **settings)

    vars(load)["load_model"] = broken


def in_rehearsal(act: Callable[[], None]) -> None:
    """Do something as the first step is tried."""
    whole = Loop._rehearsed

    def broken(self: Loop, *args: Any) -> Any:
        act()
        return whole(self, *args)

    Loop._rehearsed = broken  # type: ignore[method-assign, assignment]


def be_slow() -> None:
    """Let each backward visit take longer."""
    backward = Executor._backward

    def slow(self: Executor, state: PassState, op: Op, part: Part) -> None:
        time.sleep(0.02)
        backward(self, state, op, part)

    Executor._backward = slow  # type: ignore[method-assign]


def drift() -> None:
    """Make other updates than rank 0."""
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

    optimizer.update = drifting  # type: ignore[assignment]


def have_another_version() -> None:
    """Have another version of peft."""

    whole = process_group.surroundings

    def other_version() -> dict[str, str]:
        return {**whole(), "peft": OTHER_VERSION}

    vars(process_group)["surroundings"] = other_version


def hang() -> None:
    """Sleep for longer than others wait."""
    time.sleep(600)


IN_STEP: Mapping[str, Callable[[], object]] = {
    "named": partial(raise_, NAMED),
    "memory": partial(raise_, NO_DEVICE_MEMORY),
    "host memory": partial(raise_, MemoryError()),
    "bug": partial(raise_, KeyError("layer")),
    "hangs": hang,
    **{number.name: partial(send_itself, number) for number in signal.Signals},
}
IN_VISIT: Mapping[str, Callable[[], object]] = {
    "late in a visit": partial(raise_, NAMED, after_s=1.0),
    "memory in a visit": partial(raise_, NO_DEVICE_MEMORY),
    "bug in a visit": partial(raise_, KeyError("layer")),
    "hangs in a visit": hang,
}
DIFFERENT: Mapping[str, Callable[[], object]] = {
    "drifts": drift,
    "slow": be_slow,
    "version": have_another_version,
    "threads": partial(torch.set_num_threads, 2),
}
HANGS_BETWEEN: Mapping[str, Callable[[Callable[[], None]], None]] = {
    "hangs in an evaluation": in_evaluation,
    "hangs in loading": in_loading,
    "hangs in the rehearsal": in_rehearsal,
    "hangs in a checkpoint": in_checkpoint,
}
IMPATIENT = "impatient"  # on all ranks, to meet the others
MAIN = " (rank 0)"  # ends kinds of the main rank
FULL_DISK = "full disk" + MAIN  # it writes the run's directory


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    kind, *words = argv
    if kind.startswith("hangs") or kind == "SIGSTOP":
        process_group.LEAST_STEP_S, process_group.STEPS = LEAST_STEP_S, STEPS
        process_group.TIMEOUT_S = TIMEOUT_S
    if kind == IMPATIENT:
        process_group.JOIN_S = JOIN_S
    in_steps: Mapping[str, Callable[[], object]] = {
        **IN_STEP,
        FULL_DISK: partial(fill_disk, words),
    }
    if launch().index == (0 if kind.endswith(MAIN) else 1):
        if kind in in_steps:
            in_step(failing(in_steps[kind]))
        elif kind in IN_VISIT:
            in_visit(failing(IN_VISIT[kind]))
        elif kind.removesuffix(MAIN) in HANGS_BETWEEN:
            HANGS_BETWEEN[kind.removesuffix(MAIN)](failing(hang))
        elif kind in DIFFERENT:
            DIFFERENT[kind]()
    app.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
