"""What each peer's program is told and tells: a job, its rows and adapter, and a measured result.

A program is started as `python -m ...programs.NAME WAY JOB.json RESULT.json START_S`: START_S is
the clock, the same in all processes, when the process was asked for. What goes wrong is a result.
"""

import importlib.util
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GIB = 2**30
SAMPLE_S = 0.05
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "unsloth",
    "experts4bit-qlora",
    "soup-cli",
    "trl",
    "liger-kernel",
)
MAX_ERROR_LETTERS = 300

Job = Mapping[str, Any]
Result = dict[str, Any]


def tell(program: Callable[[str, Job, "Watch"], Result], *, needs: tuple[str, ...]) -> None:
    """Run a program's way through a job, and write its result, or why there is none.

    Args:
        program: Is handed the way, the job and a watch; returns what it found.
        needs: Packages without which it is not installed.
    """
    way, job_file, result_file, start_s = sys.argv[1:]
    job: Job = json.loads(Path(job_file).read_text())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        result: Result = {"error": f"not installed: no module named {', '.join(missing)}"}
    else:
        try:
            result = _measured(program, way, job, float(start_s))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the row says it
            traceback.print_exc()
            said = " / ".join(str(error).split("\n")[:2])[:MAX_ERROR_LETTERS]
            result = {"error": f"{type(error).__name__}: {said}"}
    result["versions"] = versions()
    Path(result_file).write_text(json.dumps(result))


def _measured(
    program: Callable[[str, Job, "Watch"], Result], way: str, job: Job, start_s: float
) -> Result:
    with Watch(job, start_s) as watch:
        found = program(way, job, watch)
    return found | watch.found()


def versions() -> dict[str, str]:
    """Return the versions of what is installed where this runs; of torch, the build that ran."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


class Watch:
    """Caps the card, notes when steps end, and how much memory the process has at most.

    Attributes:
        ends_s: When each step ended.
        losses: Of each step: the mean over its label tokens.
        grad_norms: Before clipping; None where the library does not say.
    """

    def __init__(self, job: Job, start_s: float) -> None:
        """Begin at the time when the process was asked for."""
        import torch

        self._torch, self._job, self._start_s = torch, job, start_s
        self._is_cuda = job["device"] == "cuda"
        self.ends_s: list[float] = []
        self._least_free_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.losses: list[float] = []
        self.grad_norms: list[float | None] = []

    def __enter__(self) -> Self:
        """Cap the card, and begin to watch its free memory."""
        if self._is_cuda:
            cuda = self._torch.cuda
            free, total = cuda.mem_get_info()
            if self._job["vram_gib"] is not None:
                cuda.set_per_process_memory_fraction(min(1.0, free / total))
            self._least_free_bytes = free
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching."""
        self._is_over.set()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            free, _ = self._torch.cuda.mem_get_info()
            self._least_free_bytes = min(self._least_free_bytes, free)

    def ended(self, loss: float, grad_norm: float | None) -> None:
        """Note that a step has ended, its device included."""
        if self._is_cuda:
            self._torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)

    def found(self) -> Result:
        """Return what was noted; the first step is told apart from the warm ones."""
        ends_s = self.ends_s
        if not ends_s:
            return {"error": "no step was run"}
        found: Result = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "first_step_s": ends_s[0] - self._start_s,
            "steps_s": [end - start for start, end in pairwise(ends_s)],
        }
        if self._is_cuda:
            cuda = self._torch.cuda
            found["peak_allocated_bytes"] = cuda.max_memory_allocated()
            found["peak_reserved_bytes"] = cuda.max_memory_reserved()
            found["least_free_bytes"] = self._least_free_bytes
        return found


def rows_of(job: Job) -> list[dict[str, list[int]]]:
    """Return the rows in the order in which they are trained on: input_ids and labels."""
    rows: list[dict[str, list[int]]] = json.loads(Path(job["rows"]).read_text())
    return rows


def load_adapter(model: Any, job: Job) -> int:
    """Give a model's adapter the initial values of the job, and return how many train.

    Raises:
        ValueError: Its tensors are not those of the job.
    """
    import torch
    from safetensors.torch import load_file

    initial = load_file(job["adapter"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    odd = sorted(initial.keys() ^ trained.keys())
    if odd:
        raise ValueError(f"{len(odd)} adapter tensors are not those of the job, such as {odd[0]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(initial[name])
    return sum(parameter.numel() for parameter in trained.values())
