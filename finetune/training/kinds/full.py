"""A model's own weights that train: streamed, and updated on the host."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from finetune.full.optimizer import LOW
from finetune.full.weights import choose_weights, save_model
from finetune.model.load import Loaded
from finetune.recipe.recipe import Recipe
from finetune.run.checkpoint import Saved
from finetune.training.full.update import FullUpdate
from finetune.training.kinds.adapter import AdapterRun
from finetune.training.loop import StepEngine
from finetune.training.measured import streamed_memory, tensor_terms
from finetune.training.optimizer import Update
from finetune.training.run import Run
from finetune.training.session import MeasuredTerm, Session
from offload.engine.engine import Engine
from offload.plan.facts.optimizer import HOST_STATES, LOW_HALVES

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class FullRun(AdapterRun):
    """See `Kind`."""

    def load(self, loaded: Loaded, runs: Sequence[Run]) -> "PeftModel | PreTrainedModel":
        """Choose which of the model's weights train."""
        choose_weights(loaded.model, runs[0].recipe.train.what)
        return loaded.model

    def notes(self, model: "PeftModel | PreTrainedModel", recipe: Recipe) -> list[str]:
        """Return nothing: all is computed in the model's own precision."""
        return []

    def update(self, run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
        """Update the weights on the host, those of a layer before its next load."""
        assert isinstance(engine, Engine)
        return FullUpdate(engine, train=run.recipe.train)

    def save(self, session: Session, saved: Saved) -> Path:
        """Write the model as files that plain transformers loads."""
        folder = session.run.dir.model
        save_model(
            cast("PreTrainedModel", session.model),
            saved.weights,
            session.tokenizer,
            folder,
            section=session.run.recipe.model,
            stops=session.stops,
        )
        return folder

    def memory(self, session: Session) -> list[MeasuredTerm]:
        """List the engine's arenas, masters' low halves, states, and what is around the layers."""
        assert isinstance(session.engine, Engine)
        terms, alone = streamed_memory(session.engine)
        by_kind: dict[str, list[torch.Tensor]] = {}
        for name, tensor in session.loop.weights.items():
            by_kind.setdefault(name.partition(":")[2], []).append(tensor)
        lows = by_kind.pop(LOW, [])
        states = [tensor for kind, tensors in by_kind.items() if kind for tensor in tensors]
        named: dict[str, list[torch.Tensor]] = {LOW_HALVES: lows, HOST_STATES: states}
        named["embeddings, norm and head"] = [*alone]
        return terms + tensor_terms(named, on_host=(LOW_HALVES, HOST_STATES))
