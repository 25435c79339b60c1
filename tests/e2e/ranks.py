"""Starts the processes of one run, as a launcher does or by the launcher itself."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
LAUNCH = (
    *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
    *("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


def start_ranks(*words_of_ranks: Sequence[object]) -> list[subprocess.Popen[str]]:
    """Start a Python process for each rank, with these words behind `python`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(len(words_of_ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return [
        _start([sys.executable, *map(str, words)], common | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i, words in enumerate(words_of_ranks)
    ]


def accelerate_launch(*words: object) -> subprocess.Popen[str]:
    """Start two ranks of the program by the launcher itself."""
    return _start([*LAUNCH, *map(str, words)], {"OMP_NUM_THREADS": "1"})


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for all, and return what each has printed."""
    try:
        return [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def _start(words: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["env", *(f"{name}={value}" for name, value in variables.items()), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
