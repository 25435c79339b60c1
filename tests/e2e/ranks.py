"""Starts the processes of one run by the launcher itself."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
LAUNCH = (
    *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
    *("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


def accelerate_launch(*words: object) -> subprocess.Popen[str]:
    """Start two ranks of the program by the launcher itself."""
    return subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", *LAUNCH, *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(launched: subprocess.Popen[str]) -> str:
    """Wait for its end, and return what it has printed."""
    try:
        return launched.communicate(timeout=TIMEOUT_S)[0]
    finally:
        launched.kill()
