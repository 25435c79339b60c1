"""Faults of a rank or of its machine, each caused in a run of two machines that are this one.

A fault within a run comes in the third of six steps; there is a checkpoint of the second. One that
is there from the start comes when a run is resumed. `suffer` causes one, waits until all processes
have ended, and resumes the run without it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch

from tests.e2e.broken_rank import (
    FAILS_AT,
    FULL_DISK,
    IMPATIENT,
    LEAST_STEP_S,
    MAIN,
    OTHER_VERSION,
    TIMEOUT_S,
    fill,
)
from tests.e2e.forked import Forked, Started
from tests.e2e.ranks import output, torchrun
from tests.e2e.runs import adapter, losses
from tests.e2e.sweeps import learned

NUM_STEPS, NUM_BEFORE = 6, 2  # of a run, and those with a checkpoint before a fault
LIMIT_S = 30.0  # in which all processes have to end
STREAM, FSDP2 = "stream", "fsdp2"
WAYS = (STREAM, FSDP2)
SECTIONS: Mapping[str, dict[str, object]] = {  # of a recipe that either way can run
    "adapter": {"experts": False, "dropout": 0.2},
    "offload": {"num_slots": "auto"},
    "data": {"packing": "off"},
}
DISK = ("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")


class NoDiskError(Exception):
    """A small disk cannot be mounted here."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Runs of one recipe, in one way, on two machines that are this one.

    Attributes:
        folder: For all of them.
        model: The base's folder.
        words: Of the command.
        way: How the ranks share a step.
        forked: What starts processes.
    """

    folder: Path
    model: Path
    words: Sequence[object]
    way: str
    forked: Forked

    @property
    def place(self) -> Path:
        """The directory of runs that are resumed, which their recipe names."""
        return self.folder / "run"

    @cached_property
    def whole(self) -> Path:
        """A run without a fault."""
        ranks = self.start(self.place)
        assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
        return shutil.copytree(self.place, self.folder / "whole")

    def begun(self) -> Path:
        """Put the whole run in its place as it was after its next to last checkpoint."""
        whole = self.whole
        shutil.rmtree(self.place)
        shutil.copytree(whole, self.place)
        shutil.rmtree(self.place / "checkpoints" / f"step-{NUM_STEPS:07d}")
        shutil.rmtree(self.place / "adapter")
        return self.place

    def cache(self, node: int) -> Path:
        return self.folder / f"cache-{node}"

    def start(
        self,
        run_dir: Path,
        *more: object,
        kind: str | None = None,
        way: str | None = None,
        sizes: Sequence[int] = (1, 1),
        of_rank_1: Sequence[object] = (),
        variables: Mapping[int, Mapping[str, str]] | None = None,
    ) -> list[Started]:
        """Start the ranks of a run; only rank 0's machine has its directory."""
        nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
        variables = variables or {}
        places = {
            rank: run_dir if node == 0 else run_dir.with_name("none")
            for rank, node in enumerate(nodes)
        }
        return self.forked.start_machines(
            *([] if kind is None else [kind]),
            *(*self.words, f"train.parallel={way or self.way}", *more),
            sizes=sizes,
            more={
                rank: [f"output.dir={place}", *(of_rank_1 if rank == 1 else ())]
                for rank, place in places.items()
            },
            variables={
                rank: {"XDG_CACHE_HOME": str(self.cache(node)), **variables.get(rank, {})}
                for rank, node in enumerate(nodes)
            },
            module="finetune.app" if kind is None else "tests.e2e.broken_rank",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What is different around the ranks while a fault is there.

    Attributes:
        of_rank_1: Its further arguments.
        variables: Of the environment, by rank.
        relieve: What ends the fault.
    """

    of_rank_1: Sequence[object] = ()
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    relieve: Callable[[], None] = lambda: None


def _as_ever(_scene: Scene, _held: ExitStack, _run_dir: Path) -> Around:
    return Around()


def _another_base(scene: Scene, _held: ExitStack, run_dir: Path) -> Around:
    """Give rank 1 a base whose config.json has a line more."""
    other = run_dir.with_name("other")
    shutil.copytree(scene.model, other)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    return Around(of_rank_1=[f"model.path={other}"])


def _port_in_use(_scene: Scene, held: ExitStack, _run_dir: Path) -> Around:
    """Let another program listen at the launcher's port, and say nothing."""
    other = held.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = {"MASTER_PORT": str(other.getsockname()[1])}
    return Around(variables={0: port, 1: port})


def _full_disk(_scene: Scene, held: ExitStack, run_dir: Path) -> Around:
    """Put the run's directory on a disk of its own, which rank 0 fills in the third step."""
    held.enter_context(small_disk(run_dir.parent))
    return Around(relieve=(run_dir.parent / "filler").unlink)


def _no_room_for_the_store(scene: Scene, held: ExitStack, run_dir: Path) -> Around:
    """Give rank 1 a cache with all but the store of encoded layers, on a disk that is full."""
    cache = run_dir.with_name("cache")
    held.enter_context(small_disk(cache))
    shutil.copytree(
        scene.cache(1), cache, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.store")
    )
    fill(cache / "filler")
    return Around(variables={1: {"XDG_CACHE_HOME": str(cache)}})


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 16 MiB, in memory.

    Raises:
        NoDiskError: This process may not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [*DISK, str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        raise NoDiskError
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong, and what has to come of it.

    Attributes:
        name: In words.
        codes: The exit codes of both ranks.
        causes: What each of them has to show; nothing is asked of one that was killed.
        kind: What `broken_rank` does; None if the program is as it is.
        around: What is different around it.
        is_from_start: Whether it is there before the first step: then a run is resumed with it.
        ways: To share a step in which it can happen.
        more: Further words of the command, in all runs.
        waited_s: How long ranks wait before they take it for a fault.
    """

    name: str
    codes: tuple[int, int]
    causes: tuple[str, str]
    kind: str | None = None
    around: Callable[[Scene, ExitStack, Path], Around] = _as_ever
    is_from_start: bool = False
    ways: Sequence[str] = WAYS
    more: Sequence[str] = ()
    waited_s: float = 0.0


def _on_both(cause: str) -> tuple[str, str]:
    return cause, cause


INT8, EVALUATED = ("offload.codec=int8",), ("output.eval_every=3",)
FAULTS = (
    Fault(
        name="killed (SIGKILL)",
        kind="SIGKILL",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
    ),
    Fault(
        name="terminated (SIGTERM)",
        kind="SIGTERM",
        codes=(143, 143),
        causes=_on_both("SIGTERM to rank 1"),
    ),
    Fault(
        name="Ctrl-C on one rank",
        kind="SIGINT",
        codes=(130, 130),
        causes=_on_both("SIGINT to rank 1"),
    ),
    Fault(
        name="stopped (SIGSTOP)",
        kind="SIGSTOP",
        codes=(1, 1),
        causes=(  # and rank 1, once it goes on, finds that rank 0 is no longer there
            "error (rank 0): rank 1 (machine 1) is gone or does not answer",
            "error (rank 1): rank 0 (machine 0) is gone or does not answer",
        ),
        waited_s=LEAST_STEP_S,
    ),
    Fault(
        name="hangs in a step",
        kind="hangs",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
        waited_s=LEAST_STEP_S,
    ),
    Fault(
        name="hangs in a visit",
        kind="hangs in a visit",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
        waited_s=LEAST_STEP_S,
    ),
    Fault(
        name="hangs in an evaluation",
        kind="hangs in an evaluation",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
        more=EVALUATED,
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="the main rank hangs in an evaluation",
        kind="hangs in an evaluation" + MAIN,
        codes=(-signal.SIGKILL, 1),
        causes=("", "error (rank 1): rank 0 (machine 0) is gone or does not answer"),
        more=EVALUATED,
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="the main rank hangs in a checkpoint",
        kind="hangs in a checkpoint" + MAIN,
        codes=(-signal.SIGKILL, 1),
        causes=("", "error (rank 1): rank 0 (machine 0) is gone or does not answer"),
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="the main rank hangs as weights load",
        kind="hangs in loading" + MAIN,
        codes=(-signal.SIGKILL, 1),
        causes=("", "error (rank 1): rank 0 (machine 0) is gone or does not answer"),
        is_from_start=True,
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="hangs as weights load",
        kind="hangs in loading",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
        is_from_start=True,
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="hangs in the first step",
        kind="hangs in the rehearsal",
        codes=(1, -signal.SIGKILL),
        causes=("error (rank 0): rank 1 (machine 1) is gone or does not answer", ""),
        is_from_start=True,
        waited_s=TIMEOUT_S,
    ),
    Fault(
        name="an exception in a visit",
        kind="bug in a visit",
        codes=(1, 1),
        causes=("error (rank 0): rank 1 has failed: KeyError: 'layer'", "KeyError: 'layer'"),
    ),
    Fault(
        name="out of device memory in a visit",
        kind="memory in a visit",
        codes=(1, 1),
        causes=("error (rank 0): rank 1 ", "error (rank 1): rank 1 ran out of device memory"),
    ),
    Fault(
        name="a full disk at a checkpoint",
        kind=FULL_DISK,
        codes=(1, 1),
        causes=_on_both("No space left on device"),
        around=_full_disk,
    ),
    Fault(
        name="another version of peft",
        kind="version",
        codes=(1, 1),
        causes=_on_both(
            f"has peft {OTHER_VERSION}; by the other ranks it is peft {version('peft')}"
        ),
        is_from_start=True,
    ),
    Fault(
        name="another base",
        codes=(1, 1),
        causes=_on_both("files of the base model on rank 1 are not those on rank 0"),
        around=_another_base,
        is_from_start=True,
    ),
    Fault(
        name="a port in use",
        codes=(1, 1),
        causes=(
            "error (rank 0): rank 0 of 2 cannot reach the others at 127.0.0.1",
            "error (rank 1): rank 1 of 2 cannot reach the others at 127.0.0.1",
        ),
        kind=IMPATIENT,
        around=_port_in_use,
        is_from_start=True,
    ),
    Fault(
        name="no room for the store",
        codes=(1, 1),
        causes=_on_both(".store"),
        around=_no_room_for_the_store,
        is_from_start=True,
        ways=(STREAM,),
        more=INT8,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a fault.

    Attributes:
        ended_s: Of each rank, how long after the fault it had ended; one that was stopped is let go
            on when the other has ended, and its time counts from then; one that hangs is killed.
        codes: Their exit codes.
        shown: All that they printed.
        checkpoint: The newest that is left; 0 for none.
        is_resumed: Whether the run went on without the fault, and is the whole run to the bit.
        resume_shown: What the ranks of the resume printed.
    """

    ended_s: tuple[float, float]
    codes: tuple[int, int]
    shown: tuple[str, str]
    checkpoint: int
    is_resumed: bool
    resume_shown: tuple[str, ...]

    @property
    def said(self) -> tuple[str, str]:
        """The line of each rank that says why it has ended."""
        first, second = map(said, self.shown)
        return first, second


def said(shown: str) -> str:
    """Return the line that says why a process has ended; empty if there is none."""
    begins = ("error", "stopped", "Stopped")
    lines = [line.strip() for line in shown.splitlines()]
    kept = [line for line in lines if line.startswith(begins) or "Error: " in line]
    return kept[-1] if kept else ""


def suffer(scene: Scene, fault: Fault) -> Outcome:
    """Cause a fault, and resume the run without it.

    Raises:
        NoDiskError: It takes a disk that cannot be mounted here.
    """
    whole, flags = scene.whole, ["--resume"] if fault.is_from_start else []
    run_dir = scene.begun() if flags else scene.folder / fault.name.replace(" ", "-") / "run"
    with ExitStack() as held:
        with ExitStack() as faulty:
            around = fault.around(scene, held if fault.kind else faulty, run_dir)
            start_s = time.monotonic()
            ranks = scene.start(
                run_dir,
                *flags,
                kind=fault.kind,
                of_rank_1=around.of_rank_1,
                variables=around.variables,
            )
            ended_s = _ends(ranks, start_s, fault)
            codes = ranks[0].end(), ranks[1].end()
            shown = ranks[0].shown, ranks[1].shown
        steps = [int(path.name[-7:]) for path in (run_dir / "checkpoints").glob("step-*")]
        around.relieve()
        resume = scene.start(run_dir, "--resume")
        is_ended = [rank.end() for rank in resume] == [0, 0]
        return Outcome(
            ended_s=ended_s,
            codes=codes,
            shown=shown,
            checkpoint=max(steps, default=0),
            is_resumed=is_ended and are_same(run_dir, whole),
            resume_shown=tuple(rank.shown for rank in resume),
        )


def _ends(ranks: Sequence[Started], start_s: float, fault: Fault) -> tuple[float, float]:
    """Return for each rank how long after the fault it had ended.

    One that hangs is killed once the other has ended, as by its launcher.
    """
    ended: dict[int, float] = {}
    since: dict[int, float] = {}
    while len(ended) < len(ranks):
        for number, rank in enumerate(ranks):
            if number not in ended and not rank.is_running():
                ended[number] = time.monotonic()
                other, code = 1 - number, fault.codes[1 - number]
                if fault.kind == "SIGSTOP" and number == 0:
                    since[1] = ended[number]
                    ranks[1].signal(signal.SIGCONT)
                elif code == -signal.SIGKILL and other not in ended:
                    ranks[other].signal(signal.SIGKILL)
        time.sleep(0.005)
    at = [
        float(line.removeprefix(FAILS_AT))
        for rank in ranks
        for line in rank.shown.splitlines()
        if line.startswith(FAILS_AT)
    ]
    fault_s = at[0] if at else start_s
    first, second = (ended[number] - since.get(number, fault_s) for number in range(2))
    return first, second


def are_same(run_dir: Path, whole: Path) -> bool:
    """Return whether two runs have learned the same, to the bit."""
    mine, other = adapter(run_dir), adapter(whole)
    return (
        learned(run_dir) == learned(whole)
        and mine.keys() == other.keys()
        and all(torch.equal(mine[name], other[name]) for name in other)
    )


# ------------------------------------------------------------------------------------------ resumes


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A resume against the whole run.

    Attributes:
        shown: What the processes printed.
        codes: Their exit codes.
        loss_error: The largest relative difference of a loss.
        weight_error: That of a tensor of the adapter, by its norm.
    """

    shown: tuple[str, ...]
    codes: tuple[int, ...]
    loss_error: float
    weight_error: float


def resumed_by(scene: Scene, *sizes: int) -> Resumed:
    """Resume the run with another number of ranks and machines; a lone one streams."""
    run_dir = scene.begun()
    way = STREAM if sum(sizes) == 1 else scene.way
    ranks = scene.start(run_dir, "--resume", way=way, sizes=sizes)
    codes = tuple(rank.end() for rank in ranks)
    return _against_whole(scene, run_dir, codes, tuple(rank.shown for rank in ranks))


def restarted(scene: Scene) -> Resumed:
    """Kill a rank of two launches by torchrun with `--max-restarts`, which go on by themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [scene.folder / "restarted" / name for name in ("run", "none")]
    launches = [
        torchrun(
            *("-m", "tests.e2e.broken_rank", "SIGKILL", *scene.words),
            *(f"train.parallel={scene.way}", f"output.dir={place}"),
            node=node,
            port=port,
            cache=scene.cache(node),
        )
        for node, place in enumerate(places)
    ]
    shown = tuple(output(launched) for launched in launches)
    codes = tuple(launched.returncode for launched in launches)
    return _against_whole(scene, places[0], codes, shown)


def _against_whole(
    scene: Scene, run_dir: Path, codes: tuple[int, ...], shown: tuple[str, ...]
) -> Resumed:
    loss_error = weight_error = float("inf")
    with suppress(FileNotFoundError, json.JSONDecodeError):
        mine, other = losses(run_dir), losses(scene.whole)
        loss_error = max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
        trained, expected = adapter(run_dir), adapter(scene.whole)
        weight_error = max(
            float((trained[name] - tensor).norm() / tensor.norm())
            for name, tensor in expected.items()
        )
    return Resumed(shown=shown, codes=codes, loss_error=loss_error, weight_error=weight_error)
