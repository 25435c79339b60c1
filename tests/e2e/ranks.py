"""Starts the processes of one run by the launcher itself."""

import subprocess
import sys
from pathlib import Path

from finetune.env import SECRET

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
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


def torchrun(*words: object, node: int, port: int, cache: Path) -> subprocess.Popen[str]:
    """Start one of two machines with a rank each, which restarts its rank once."""
    secret = f"{SECRET}=of two machines that are this one"
    environment = ("env", "OMP_NUM_THREADS=1", f"XDG_CACHE_HOME={cache}", secret)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank")
    place = (str(node), "--nproc-per-node", "1", "--max-restarts", "1")
    master = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return subprocess.Popen(
        [*environment, *launcher, *place, *master, *map(str, words)],
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
