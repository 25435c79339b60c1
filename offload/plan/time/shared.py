"""The costs of a step that several runs share.

Each visit of a micro-batch takes what it takes in its run alone: its own adapter, length and loss.
Loads and decoding are those of one run. The simulation prices each op by its run. The bound R3, by
which a search orders what it simulates, adds up all micro-batches of a visit, so it needs their
mean alone; where inputs or graphs leave the device it is that of as many equal micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.plan.time.costs import Costs, LayerCost, RunCosts


def shared_costs(runs: Sequence[RunCosts]) -> Costs:
    """Return the costs of a step of several runs on one machine.

    Times of a micro-batch are the mean over all that are trained on, those of a step are sums.
    """
    first, numbers = runs[0].costs, [run.passes.num_trained for run in runs]
    total = sum(numbers)

    def mean(value_of: Callable[[Costs], float]) -> float:
        values = [value_of(run.costs) for run in runs]
        return sum(n * value for n, value in zip(numbers, values, strict=True)) / total

    # Passes that only score are all counted as one of a reference for each micro-batch.
    has_scores = any(run.costs.num_passes > 1 for run in runs)
    num_passes = 1 + has_scores
    of_runs = [run.costs for run in runs]
    of_layers = list(zip(*(costs.layers for costs in of_runs), strict=True))
    means = {
        layers: _mean_layer(layers, numbers, runs=of_runs, has_scores=has_scores)
        for layers in set(of_layers)
    }
    return replace(
        first,
        layers=tuple(means[layers] for layers in of_layers),
        front_s=mean(lambda costs: costs.fronts_s) / num_passes,
        front_backward_s=mean(lambda costs: costs.front_backward_s),
        tail_s=mean(lambda costs: costs.tail_s),
        score_s=mean(lambda costs: costs.num_passes * costs.score_s) / num_passes,
        objective_s=sum(run.costs.objective_s for run in runs),
        optimizer_s=sum(run.costs.optimizer_s for run in runs),
        num_scored=0.0,
        num_references=float(has_scores),
        runs=tuple(runs),
    )


def _mean_layer(
    layers: Sequence[LayerCost], numbers: Sequence[int], *, runs: Sequence[Costs], has_scores: bool
) -> LayerCost:
    """Return the mean of a layer's visits; what only scores is counted as a reference's."""
    total, first = sum(numbers), layers[0]

    def mean(value_of: Callable[[LayerCost], float]) -> float:
        values = map(value_of, layers)
        return sum(n * value for n, value in zip(numbers, values, strict=True)) / total

    scoring_s = sum(
        n * (run.num_scored * layer.forward_s + run.num_references * layer.reference_s)
        for n, run, layer in zip(numbers, runs, layers, strict=True)
    )
    return replace(
        first,
        forward_s=mean(lambda layer: layer.forward_s),
        backward_s=mean(lambda layer: layer.backward_s),
        recompute_s=mean(lambda layer: layer.recompute_s),
        forward_flops=mean(lambda layer: layer.forward_flops),
        backward_flops=mean(lambda layer: layer.backward_flops),
        recompute_frac=mean(lambda layer: layer.recompute_frac),
        attention_s=mean(lambda layer: layer.attention_s),
        pack_s=mean(lambda layer: layer.pack_s),
        graph_pack_s=mean(lambda layer: layer.graph_pack_s),
        output_bytes=int(mean(lambda layer: layer.output_bytes)),
        graph_bytes=int(mean(lambda layer: layer.graph_bytes)),
        reference_s=scoring_s / total if has_scores else mean(lambda layer: layer.reference_s),
    )
