"""What a run with optimizer states on disk writes there, and how much of a drive that uses up.

Flash wears out as it is written, and not as it is read. Makers state an endurance, in terabytes
written: 600 TB for a consumer drive of 1 TB with three bits per cell, such as Samsung's 990 PRO
(data sheet). Without permission a run may write a tenth of that.
"""

from dataclasses import dataclass

from offload.errors import OffloadError
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind

DRIVE_ENDURANCE_BYTES = 600 * 10**12
RUN_FRAC = 0.1
MOST_RUN_BYTES = int(RUN_FRAC * DRIVE_ENDURANCE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskWrites:
    """What steps write to a drive.

    Attributes:
        step_bytes: By each step; as many are read.
        num_steps: Of the run; None if they are not known.
        drive_steps: Steps after which a drive has reached its endurance.
        drive_s: How long these take.
    """

    step_bytes: int
    num_steps: int | None
    drive_steps: int
    drive_s: float

    @classmethod
    def of(cls, plan: Plan, *, num_steps: int | None = None) -> "DiskWrites | None":
        """Return what a plan's steps write; None if states are in RAM.

        Args:
            plan: The plan.
            num_steps: Of the run, where its rows are known; None takes what the request says.
        """
        written = [op.num_bytes for op in plan.schedule.ops if op.kind is Kind.STATES_WRITE]
        if not written:
            return None
        drive_steps = DRIVE_ENDURANCE_BYTES // sum(written)
        return cls(
            step_bytes=sum(written),
            num_steps=num_steps or plan.request.num_steps,
            drive_steps=drive_steps,
            drive_s=drive_steps * plan.step_s,
        )

    @property
    def run_bytes(self) -> int | None:
        """What the run writes; None if its steps are not known."""
        return None if self.num_steps is None else self.num_steps * self.step_bytes

    def require_endurance(self, *, is_allowed: bool) -> None:
        """Refuse a run that writes more than its share of a drive, unless that is allowed.

        Raises:
            OffloadError: It writes more.
        """
        run_bytes = self.run_bytes
        if is_allowed or run_bytes is None or run_bytes <= MOST_RUN_BYTES:
            return
        most = MOST_RUN_BYTES // self.step_bytes
        raise OffloadError(
            f"{self.num_steps:,} steps would write {run_bytes / 1e12:,.1f} TB of optimizer states"
            f" to disk, {self.step_bytes / 1e9:,.1f} GB each",
            limit=f"without permission a run writes at most {MOST_RUN_BYTES / 1e12:.0f} TB, a tenth"
            " of what a consumer drive of 1 TB is rated for:"
            f" {DRIVE_ENDURANCE_BYTES / 1e12:.0f} TB, after {self.drive_steps:,} of these steps",
            hint="`offload.allow_disk_writes: true` on a drive with the endurance for it,"
            + (f" `train.steps: {most}`," if most else "")
            + " or `offload.states: ram`",
        )
