"""What the features of a probe cost: passes over the layers without gradients, and bytes in RAM."""

from dataclasses import dataclass

from offload.plan.facts.trainable import SCORE, outer_module_sizes
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest
from offload.plan.schedule.schedule import Passes, Ring, Schedule, step_schedule, warm_ring
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of, load_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class FeaturePass:
    """How features are computed, and what trains on them."""

    one_pass_s: float  # predicted seconds of a pass over the layers with about the rows of a step
    num_passes: int | None  # the number of such passes; None before rows are known
    num_features: int | None  # label tokens, each with a feature; None before rows are known
    feature_bytes: int  # bytes of each feature
    num_parameters: int  # parameters of the head, which alone trains on them

    @property
    def pass_s(self) -> float | None:
        """Predicted seconds of all passes; None before rows are known."""
        return None if self.num_passes is None else self.num_passes * self.one_pass_s


def feature_pass(plan: Plan, run: PlanRequest) -> FeaturePass | None:
    """Return what the features of a run's probe cost; None if it has no probe.

    A pass begins with the layers in slots that the pass before it has left there. Micro-batches are
    those of a typical step.

    Args:
        plan: Of the run, or of several that share a step.
        run: Its request, one of `plan.request.runs`.
    """
    probe = run.probe
    if probe is None:
        return None
    facts, typical = plan.facts, run.typical
    sizes = load_sizes(facts, typical, plan.costs, is_staged=plan.schedule.is_staged)
    passes = Passes(num_trained=0, num_scored=run.rank_micro_batches)

    def schedule(ring: Ring) -> Schedule:
        return step_schedule(sizes, ring=ring, runs=[passes], trains_front=False, input_bytes=())

    next_one = schedule(schedule(warm_ring(plan.num_slots)).ring_after)
    return FeaturePass(
        one_pass_s=simulate(next_one, duration_of(plan.costs)).step_s,
        num_passes=probe.num_passes,
        num_features=probe.num_features,
        feature_bytes=facts.hidden_size * typical.dtype_bytes,
        num_parameters=outer_module_sizes(facts, typical.adapter)[SCORE],
    )
