"""A run whose model is on its engine, and the kinds of runs: what trains in them.

A kind is a type with what the main path asks of it: put what trains on the loaded model, put the
model on an engine, update what trains, save it, and describe the memory that it holds. The types
are loaded by name, so a run imports the code of its own kind alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from finetune.data.chat_template import Stops
from finetune.data.dataset import Rows
from finetune.data.step_rows import StepRows
from finetune.data.steps import StepBatch, Steps
from finetune.model.load import Loaded
from finetune.recipe.recipe import Recipe
from finetune.run.checkpoint import LossScale, Saved
from finetune.run.references import References
from finetune.run.run_files import Evaluation
from finetune.training.loop import (
    Computed,
    Loop,
    Progress,
    Request,
    StepEngine,
    StepRecord,
    computed,
)
from finetune.training.optimizer import Update
from finetune.training.run import Run
from offload.engine.host.store import Backing
from offload.engine.objective import Objective
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.training.images import RunImages

_KINDS = {
    ("adapter", "stream"): "finetune.training.kinds.adapter:AdapterRun",
    ("online", "stream"): "finetune.online.run:OnlineRun",
    ("virtual", "stream"): "finetune.training.kinds.virtual:VirtualRun",
    ("probed", "stream"): "finetune.training.kinds.head:ProbedRun",
    ("head", "stream"): "finetune.training.kinds.head:HeadRun",
    ("full", "stream"): "finetune.training.kinds.full:FullRun",
    ("adapter", "fsdp2"): "finetune.training.sharded.kinds:ShardedAdapterRun",
    ("full", "fsdp2"): "finetune.training.sharded.kinds:ShardedFullRun",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """A model on the host: with its adapter, or with its own weights to be trained."""

    model: "PeftModel | PreTrainedModel"  # the model
    # The memory of its layers' weights; None if each parameter has its own memory.
    backing: Backing | None

    @property
    def streamed(self) -> "PeftModel | PreTrainedModel":
        """What an engine runs: with virtual tokens in its rows the model without peft's wrapper."""
        config = getattr(self.model, "active_peft_config", None)
        if config is None or not config.is_prompt_learning:
            return self.model
        return cast("PreTrainedModel", cast("PeftModel", self.model).get_base_model())


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """A run whose model is on its engine."""

    run: Run  # the run
    kind: "Kind"  # the kind of run: what trains in it
    tokenizer: "PreTrainedTokenizerBase"  # the model's
    rows: Rows  # the rows that are trained on, and those held out
    steps: Steps  # the run's steps
    model: "PeftModel | PreTrainedModel"  # with its adapter, if it has one
    engine: StepEngine  # runs it
    loop: Loop  # the optimizer steps of the run
    stops: Stops  # tokens that end an answer
    images: "RunImages | None" = None  # those of the rows; None if no row has any
    held_out: Steps | None = None  # steps of the held-out rows, where rows are compared
    # Log-probabilities that were taken before step 1; empty if none were.
    references: References = field(default_factory=dict)
    # The losses of rows that are compared; None for cross-entropy.
    objectives: "Comparing | None" = None
    # The steps of a head that trains alone, once its features are taken; None in other runs.
    head: "OwnSteps | None" = None
    rounds: "OwnRows | None" = None  # what gives steps their rows, where the model samples them
    first_step: int = 0  # steps that were done before
    seal: str = ""  # the seal of the file that the plan was written to

    def step(self, batch: StepBatch) -> StepRecord:
        """Run an optimizer step: the gradients of its rows, and the update by them."""
        request = self.loop.request(batch.step, batch.share)
        if self.head is not None:
            return self.loop.complete(request, self.head.computed(request))
        (found,) = computed(self.engine, [request])
        return self.loop.complete(request, found)

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say, shared by the ranks."""
        own = self.head or self.rounds
        if own is not None:
            return own.evaluation()
        with self.run.screen.working("Evaluating", "rows") as progress:
            if self.held_out is not None:
                assert self.objectives is not None
                return self.objectives.validation(self.loop, self.held_out, progress=progress)
            rows = self.rows.held_out
            assert rows is not None, "a rule of recipes"
            loss = self.loop.validation_loss(rows, steps=self.steps, progress=progress)
            return Evaluation(loss=loss, metrics={})

    @property
    def rows_hash(self) -> str:
        """Digest of the rows that are trained on, and of those that are held out."""
        held_out = self.rows.held_out
        return f"{self.rows.data_hash} {held_out.digest() if held_out else None}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTerm:
    """A measured amount of memory, under the plan's name for it."""

    name: str  # the plan's name where it has one
    num_bytes: int  # bytes that are held in memory
    how: str  # the way in which they were measured
    is_on_host: bool  # whether it is host memory


class Comparing(Protocol):
    """The losses of rows that are compared."""

    def of_step(self, rows: StepRows) -> Objective:
        """Return the loss of a step that ranks share."""

    def validation(self, loop: Loop, held_out: Steps, *, progress: Progress) -> Evaluation:
        """Return the mean of the loss and metrics over held-out rows."""


class OwnSteps(Protocol):
    """Steps that are computed without the engine: of a head that trains alone."""

    def computed(self, request: Request) -> Computed:
        """Add the gradients of a step to those of the weights."""

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say."""


class OwnRows(AbstractContextManager["OwnRows"], Protocol):
    """Rows that are made between steps: answers that the model samples."""

    def __iter__(self) -> Iterator[StepBatch]:
        """Give the rows of each step that is left."""

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say."""


class Kind(Protocol):
    """What the main path asks of what trains."""

    def load(self, loaded: Loaded, runs: Sequence[Run]) -> "PeftModel | PreTrainedModel":
        """Let a loaded model train: add the adapter of each run, or choose its own weights."""

    def notes(self, model: "PeftModel | PreTrainedModel", recipe: Recipe) -> list[str]:
        """Return what the user should know about what trains."""

    def engine(self, run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
        """Put the model on an engine that runs the plan."""

    def update(self, run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
        """Return the update of what trains, with a fresh optimizer."""

    def scaling(self, recipe: Recipe) -> LossScale | None:
        """Return how the loss of the first step is scaled; None where the model needs no scale."""

    def timed(self, session: Session, plan: Plan) -> Plan:
        """Return the plan at the price of what a step of this kind really computes."""

    def begin(self, session: Session, plan: Plan, request: PlanRequest) -> None:
        """Do what precedes the first step."""

    def save(self, session: Session, saved: Saved) -> Path:
        """Write what was trained, on the main rank; return the folder."""

    def result(self, session: Session) -> Saved:
        """Return what was trained, with all that is saved with it; all ranks call it."""

    def memory(self, session: Session) -> list[MeasuredTerm]:
        """List the memory that is held between two steps, in the plan's terms."""


def kind_of(recipe: Recipe) -> Kind:
    """Return what trains in a run, by its recipe."""
    train = recipe.train
    what = "full" if train.is_full else "virtual" if recipe.adapter.stated.is_virtual else "adapter"
    if recipe.objective.samples_answers:
        what = "online"
    elif train.takes_features:
        what = "head" if train.is_head_alone else "probed"
    return cast("Kind", _loaded(_KINDS[what, "fsdp2" if train.is_sharded else "stream"])())


def objectives_of(run: Run) -> Comparing | None:
    """Return the losses of a run whose rows are compared; None for cross-entropy."""
    if run.recipe.objective.is_cross_entropy:
        return None
    make, train = _loaded("finetune.training.objectives:Objectives"), run.recipe.train
    section = run.recipe.objective
    return cast("Comparing", make(section=section, seq_len=train.seq_len, ranks=run.ranks))


def take_references(session: Session) -> None:
    """Take the reference's log-probabilities of all rows, where a recipe asks for them first."""
    if session.run.recipe.objective.precomputes_reference:
        _loaded("finetune.training.objectives:take_references")(session)


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
