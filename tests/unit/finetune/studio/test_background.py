"""The second process: it answers as the first does, which waits for nothing, and ends with it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from finetune.errors import StudioError
from finetune.studio.answer import HERE, Json, Kind, Planner, Question
from finetune.studio.server import NICENESS, Background
from offload.plan.machine.machine import Machine, named_machine
from tests.studios import question

ROOT = Path(__file__).parents[4]
# Prints the second process's id, and goes on until a signal.
COMMAND = """
import multiprocessing, signal, sys, time
from contextlib import suppress
from pathlib import Path
from finetune.interrupts import raised
from finetune.studio.server import Background
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for background jobs
with suppress(KeyboardInterrupt), raised(), Background(Path(sys.argv[1])):
    print(multiprocessing.active_children()[0].pid, flush=True)
    for _ in range(600):  # a signal just before a sleep does not end it: Python sees it afterwards
        time.sleep(0.1)
"""


def test_its_answers_are_those_of_the_first_process_and_its_death_is_said(tmp_path: Path) -> None:
    asked, here = question(), named_machine("rtx4090")
    with Background(tmp_path) as background:
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)  # Ctrl-C reaches it too: it is left to the command
        planner = Planner(here=lambda: here, folder=tmp_path)
        assert background.answer("rate", asked, None) == planner.answer("rate", asked)
        assert background.answer("ways", asked, None) == planner.answer("ways", asked)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == NICENESS + os.nice(0)
        about_here = question(card=HERE)
        assert background.answer("rate", about_here, here) == planner.answer("rate", about_here)
        refused = background.answer("rate", question(card="t4"), None)
        assert refused["error"]["what"].startswith("t4 does not compute in bfloat16")

        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(
            StudioError, match=r"died \(exit code -9\)(.|\n)*hint: change a control"
        ):
            background.answer("rate", asked, None)
        assert background.answer("rate", asked, None) == planner.answer("rate", asked)
    assert not multiprocessing.active_children()


def test_a_plan_waits_for_no_point_of_the_curve_and_the_machine_is_measured_once(
    tmp_path: Path,
) -> None:
    begun, may_end, machines = threading.Event(), threading.Event(), list[Machine | None]()
    here = named_machine("rtx4090")
    num_measured = [0]

    def measured() -> Machine:
        num_measured[0] += 1
        return here

    def slow(kind: Kind, asked: Question, given: Machine | None) -> Json:
        machines.append(given)
        begun.set()
        assert may_end.wait(timeout=20)
        return {"error": None}

    planner = Planner(here=measured, folder=tmp_path, background=slow)
    asked = question(card=HERE)
    thread = threading.Thread(target=planner.answer, args=("rate", asked))
    thread.start()
    assert begun.wait(timeout=20)
    assert planner.answer("plan", asked)["fits"]
    assert planner.answer("step", asked)["gantt"]
    may_end.set()
    thread.join()
    planner.answer("ways", question())
    assert machines == [here, None]
    assert num_measured == [1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if number == signal.SIGKILL:
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, number)  # as a terminal does: to both processes
        _, said = process.communicate(timeout=20)  # their ends of the pipe are closed
    assert said == ""
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
