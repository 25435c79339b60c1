"""What trains in a run whose model is in parts, one on each rank."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.adapter.lora import trained
from finetune.run.checkpoint import Saved
from finetune.training.kinds.adapter import AdapterRun, save_trained
from finetune.training.kinds.full import FullRun
from finetune.training.loop import StepEngine
from finetune.training.measured import tensor_terms
from finetune.training.optimizer import Update
from finetune.training.run import Run
from finetune.training.session import Adapted, MeasuredTerm, Session
from finetune.training.sharded.engine import ShardedEngine
from finetune.training.sharded.update import ShardedFullUpdate, ShardedUpdate, own_part
from offload.plan.memory.memory import ADAPTERS, STATES
from offload.plan.plan import Plan
from offload.plan.sharded import SHARDS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class ShardedAdapterRun(AdapterRun):
    """See `Kind`."""

    def engine(self, run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
        """Cut the model into the parts of the ranks."""
        return _sharded(run, adapted)

    def update(self, run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
        """Update this rank's parts of the adapter."""
        return ShardedUpdate(
            trained(model, run.adapter),
            train=run.recipe.train,
            loraplus_ratio=run.recipe.adapter.as_lora.loraplus_ratio,
            ranks=run.ranks,
        )

    def save(self, session: Session, saved: Saved) -> Path:
        """Write the adapter, put together from its parts."""
        return save_trained(session, dict(saved.weights))

    def memory(self, session: Session) -> list[MeasuredTerm]:
        """List this rank's parts of the weights, the adapter and the optimizer's states."""
        weights = list(session.model.parameters())
        return _parts(
            session,
            {
                SHARDS: [weight for weight in weights if not weight.requires_grad],
                ADAPTERS: [weight for weight in weights if weight.requires_grad],
            },
        )


class ShardedFullRun(FullRun):
    """See `Kind`."""

    def engine(self, run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
        """Cut the model into the parts of the ranks."""
        return _sharded(run, adapted)

    def update(self, run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
        """Update this rank's parts of the weights that train."""
        return ShardedFullUpdate(
            {n: p for n, p in model.named_parameters() if p.requires_grad},
            train=run.recipe.train,
            dtype=getattr(torch, run.recipe.model.dtype),
            ranks=run.ranks,
        )

    def result(self, session: Session) -> Saved:
        """Return the weights, put together from their parts, with those that do not train."""
        assert isinstance(session.engine, ShardedEngine)
        saved = session.loop.saved()
        return replace(saved, weights={**session.engine.frozen_weights(), **saved.weights})

    def memory(self, session: Session) -> list[MeasuredTerm]:
        """List this rank's parts of the weights and of the optimizer's states."""
        return _parts(session, {SHARDS: list(session.model.parameters())})


def _sharded(run: Run, adapted: Adapted) -> ShardedEngine:
    if adapted.backing is not None:  # freed with the layers' weights, as they are cut
        adapted.backing.close()
    return ShardedEngine(adapted.model, device=run.device, ranks=run.ranks)


def _parts(session: Session, weights: dict[str, list[torch.nn.Parameter]]) -> list[MeasuredTerm]:
    assert isinstance(session.loop.update, ShardedUpdate)
    own = {name: [own_part(weight) for weight in every] for name, every in weights.items()}
    return tensor_terms({**own, STATES: session.loop.update.states()})
