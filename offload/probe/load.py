"""How busy the processors are, and what other programs take of them while rates are measured."""

import os
from pathlib import Path

MAX_OTHERS_FRAC = 0.25  # above it, other programs disturb rates that are measured


def load_per_cpu() -> float | None:
    """Return the load average per processor over the last minute; None if it is not known."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def shown_load(what: str, others_frac: float) -> str:
    """Return the note that something was measured on a busy machine.

    Args:
        what: Rates or steps, with the verb of what was done to them.
        others_frac: The share of the processors' time that other programs took meanwhile.
    """
    return (
        f"{what} while other programs took {others_frac:.0%} of the processors, so predictions are"
        " of a busy machine: close what else computes (`top` names it), and start again"
    )


class Watch:
    """What other programs take of the processors that this process may run on, from now on.

    Children of this process that still run are other programs.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """Begin.

        Args:
            root: The folder that has `proc`.
        """
        self._root = root
        self._begin = _seconds(root)

    def others_frac(self) -> float | None:
        """Return their share of the processors' time; None if it is little, or not known."""
        end = _seconds(self._root)
        if self._begin is None or end is None:
            return None
        all_s, busy_s, own_s = (now - then for now, then in zip(end, self._begin, strict=True))
        frac = (busy_s - own_s) / all_s if all_s > 0 else 0.0
        return min(1.0, frac) if frac > MAX_OTHERS_FRAC else None


def _seconds(root: Path) -> tuple[float, float, float] | None:
    """Return the time of all processors, what of it was busy, and what this process took.

    Source: Linux, Documentation/filesystems/proc.rst, "Kernel/system statistics in /proc/stat".
    """
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:  # another system, or hidden from a container
        return None
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = [list(map(int, line.split()[1:9])) for line in lines if line.split()[0] in allowed]
    all_ticks = sum(map(sum, ticks))
    idle_ticks = sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks)
    per_s = os.sysconf("SC_CLK_TCK")
    return all_ticks / per_s, (all_ticks - idle_ticks) / per_s, sum(os.times()[:4])
