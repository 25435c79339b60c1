"""Sluice as its user runs it: `sluice finetune RECIPE`, and what its run directory says then."""

import threading
import time
from pathlib import Path

from tests.bench.gpu.peers.programs.told import Job, Result, Watch, tell

POLL_S = 0.02


def run(_way: str, job: Job, watch: Watch) -> Result:
    """Run the command in this process, and read what it left."""
    from finetune.app import main
    from finetune.report.explain import METRICS, explain
    from finetune.report.prediction import read_predictions
    from finetune.run.run_files import read_rows

    run_dir = Path(job["folder"]) / "sluice"
    began = threading.Thread(target=_note_first, args=(run_dir / METRICS, watch), daemon=True)
    began.start()
    known = ["--machine", job["machine"]] if job["machine"] else []
    try:
        main(["finetune", job["recipe"], *known])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"exit status {ended.code}, see the log") from None
    began.join()
    rows = list(read_rows(run_dir / METRICS))
    watch.losses[:] = [row["loss"] for row in rows]
    watch.grad_norms[:] = [row["grad_norm"] for row in rows]
    for row in rows[1:]:
        step_s = row["phases_s"]["step"] + row["phases_s"]["data wait"]
        watch.ends_s.append(watch.ends_s[-1] + step_s)
    explanation = explain(run_dir)
    (section,) = explanation.sections
    step = section.comparison[0]
    peak = next(row for row in explanation.memory if row.name.startswith("peak"))
    return {
        "num_trained": _num_trained(run_dir / "adapter"),
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "predicted_s": step.predicted,
        "calibrated_error": step.predicted / step.p50 - 1,
        "predicted_peak_bytes": peak.predicted,
        "memory_error": peak.error,
        "placed": read_predictions(run_dir)[-1].calibrated["schedule"],
    }


def _note_first(metrics: Path, watch: Watch) -> None:
    """Note when the first step was written down."""
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(POLL_S)
    watch.ends_s.append(time.perf_counter())


def _num_trained(adapter: Path) -> int:
    from safetensors.torch import load_file

    return sum(t.numel() for t in load_file(adapter / "adapter_model.safetensors").values())


if __name__ == "__main__":
    tell(run, needs=("torch", "transformers", "peft"))
