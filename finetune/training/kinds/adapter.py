"""An adapter that trains on frozen weights, which are streamed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from finetune.adapter.linear_lora import computed_by_peft, is_trained_whole
from finetune.adapter.lora import (
    ALONE,
    NewAdapter,
    add_loras,
    load_into,
    save_adapter,
    trained,
)
from finetune.model.load import Loaded
from finetune.recipe.recipe import Recipe
from finetune.run.checkpoint import LossScale, Saved
from finetune.training.compile import compile_layers
from finetune.training.loop import StepEngine
from finetune.training.measured import streamed_memory, tensor_terms
from finetune.training.optimizer import AdapterUpdate, Update
from finetune.training.preflight import adapter_to_go_on_from
from finetune.training.run import Run
from finetune.training.session import Adapted, MeasuredTerm, Session
from offload.engine.engine import Engine, EngineOptions
from offload.engine.model.layers import LayeredModel
from offload.plan.memory.memory import PAGED_STATES
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def streamed(run: Run, plan: Plan, adapted: Adapted) -> Engine:
    """Put a model on an engine that streams its layers by a plan."""
    if run.recipe.train.compile:
        compile_layers(LayeredModel(adapted.model).layers)
    options = EngineOptions.planned(plan)
    return Engine(adapted.streamed, device=run.device, options=options, backing=adapted.backing)


class AdapterRun:
    """See `Kind`."""

    def load(self, loaded: Loaded, runs: Sequence[Run]) -> "PeftModel | PreTrainedModel":
        """Add the adapter of each run, new or as an earlier run has left it."""
        new = {
            run.adapter or ALONE: NewAdapter(section=run.recipe.adapter, seed=run.recipe.train.seed)
            for run in runs
        }
        model = add_loras(loaded.model, new, backing=loaded.backing)
        for run in runs:
            if (begun := run.recipe.adapter.as_lora.init_from) is not None:
                folder, _ = adapter_to_go_on_from(Path(begun), model=run.recipe.model)
                load_into(model, folder, adapter=run.adapter or ALONE)
        return model

    def notes(self, model: "PeftModel | PreTrainedModel", recipe: Recipe) -> list[str]:
        """Name kinds of layers whose adapters are computed in another precision than planned."""
        adapter = recipe.adapter.as_lora
        if adapter.compute_dtype == "float32" or (adapter.dora and adapter.dropout):
            return []
        kinds = computed_by_peft(model) if recipe.model.dtype != "float32" else ()
        return [f"adapters of {kind} layers are computed in float32, by peft" for kind in kinds]

    def engine(self, run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
        """Stream the layers."""
        return streamed(run, plan, adapted)

    def update(self, run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
        """Update the adapter's tensors where they compute."""
        assert isinstance(engine, Engine)
        recipe, adapter = run.recipe, run.recipe.adapter.as_lora
        tensors, own_layers = trained(model, run.adapter), engine.own_layers
        is_rounded = adapter.dtype == "bfloat16"
        layers: list[set[str]] = [set() for _ in engine.layer_bytes]
        for name, tensor in tensors.items():
            if id(tensor) in own_layers:
                layers[own_layers[id(tensor)]].add(name)
        return AdapterUpdate(
            tensors,
            train=recipe.train,
            loraplus_ratio=adapter.loraplus_ratio,
            ranks=run.ranks,
            are_cards_alike=run.are_cards_alike,
            layers=layers,
            rounded={name for name in tensors if is_rounded and not is_trained_whole(name)},
        )

    def scaling(self, recipe: Recipe) -> LossScale | None:
        """Scale the loss of a model in float16."""
        return LossScale() if recipe.model.dtype == "float16" else None

    def timed(self, session: Session, plan: Plan) -> Plan:
        """Return the plan: steps compute the layers that were timed."""
        return plan

    def begin(self, session: Session, plan: Plan, request: PlanRequest) -> None:
        """Do nothing: the first step is the first."""

    def save(self, session: Session, saved: Saved) -> Path:
        """Write the adapter in peft's format."""
        return save_trained(session, None)

    def result(self, session: Session) -> Saved:
        """Return the adapter's tensors."""
        return session.loop.saved()

    def memory(self, session: Session) -> list[MeasuredTerm]:
        """List the engine's arenas, what is around the layers, the adapter and its states."""
        assert isinstance(session.engine, Engine)
        terms, alone = streamed_memory(session.engine)
        weights = [*session.loop.weights.items()]
        named = session.engine.resident_parameters
        weights += [(name, p) for name, p in named.items() if p.requires_grad]
        states = [
            value
            for state in session.loop.optimizer.state_dict()["state"].values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        by_name: dict[str, list[torch.Tensor]] = {
            "embeddings, norm and head": [p for p in alone if not p.requires_grad],
            "adapters": [p for name, p in weights if "lora_" in name],
            "trained modules": [p for name, p in weights if "lora_" not in name],
            "optimizer states": [value for value in states if not hasattr(value, "is_paged")],
            # bitsandbytes marks them
            PAGED_STATES: [value for value in states if hasattr(value, "is_paged")],
        }
        return terms + tensor_terms(by_name, on_host=(PAGED_STATES,))


def save_trained(session: Session, tensors: "dict[str, torch.Tensor] | None") -> Path:
    """Write a run's adapter in peft's format; return the folder.

    Args:
        session: The run.
        tensors: The adapter's values, of a model that is in parts; None takes the model's.
    """
    run, model = session.run, cast("PeftModel", session.model)
    folder = run.dir.adapter
    save_adapter(
        model,
        folder,
        adapter=run.adapter or ALONE,
        tensors=tensors,
        stops=session.stops,
        revision=run.recipe.model.revision,
    )
    return folder
