"""What an extension states of itself to a recipe, and how a section is assembled by its choice.

A section with a `method` has the settings of the extension of that name, and no others: pydantic
refuses what the choice does not have. The rest of the house asks for what an extension states, and
never for its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from finetune.errors import DataError
from offload.registry import Clash, Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from finetune.data.dataset import Rows
    from finetune.data.rows import Row, RowForm
    from finetune.data.step_rows import Exchange, StepRows
    from finetune.recipe.sections import TrainSection
    from finetune.report.rows import Row as Line
    from finetune.run.run_files import Evaluation
    from offload.engine.objective import Objective as StepObjective
    from offload.plan.plan import Plan

Contradiction = tuple[bool, str, str, str, str]
"""Whether it is one, a setting, the other, the limit, and the hint."""
Head = Literal["tokens", "reward", "classes", "token_classes"]


class Section(BaseModel):
    """The base of every section: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class NameIn:
    """Makes a text one of the names that there are, which are looked up when they are needed."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that checks the text."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return a schema that lists the names."""
        return {"type": "string", "enum": [*self.names()]}

    def _checked(self, name: str) -> str:
        if name not in self.names():
            raise PydanticCustomError("no_such_name", "there is no such name")
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """What the loss of a step may read."""

    rows: "StepRows"  # what the step's rows are to each other
    seq_len: int  # longest row, in tokens
    # Hands a table to the other ranks and returns theirs; None without others.
    exchange: "Exchange | None" = None
    is_held_out: bool = False  # whether the rows are a part of those held out


class Choice(Section):
    """A section with the settings of the extension that its `method` names.

    The section is a direct subclass of this; what each extension has is a subclass of it.
    """

    default: ClassVar[str]  # the method where none is chosen
    every: ClassVar[Callable[[], Mapping[str, Any]]]  # the extensions, whose `settings` are chosen

    method: str

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read the settings of the extension that is chosen."""
        if Choice not in cls.__bases__ or not isinstance(values, dict):
            return handler(values)
        name = values.get("method", cls.default)
        if not isinstance(name, str) or name not in cls.every():
            error = PydanticCustomError("no_such_choice", "there is no such method")
            detail = InitErrorDetails(type=error, loc=("method",), input=name)
            raise ValidationError.from_exception_data(cls.__name__, [detail])
        chosen: Any = cls.every()[name].settings
        found: Self = chosen.model_validate(values)
        return found

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> dict[str, Any]:
        """Return the schema of one method's settings, or of the choice among all."""
        if Choice not in cls.__bases__:
            return handler(schema)
        every = [handler(one.settings.__pydantic_core_schema__) for one in cls.every().values()]
        for one in every:
            if one["properties"]["method"]["const"] != cls.default:
                one["required"] = ["method"]  # without it the default is meant
        return {"oneOf": every, "description": (cls.__doc__ or "").partition("\n")[0]}


def chosen(name: str) -> Any:
    """Return the field `method` of an extension's settings."""
    return Field(
        default=name, description="What is chosen; the section's other settings are its own."
    )


class ObjectiveSection(Choice):
    """What is learned from the rows: to repeat them, to prefer some of them, or their rewards.

    An objective is a subclass. Here are the facts of one that compares the answers of a step by
    their log-probabilities; a subclass overrides those that differ. Three settings have one meaning
    for all that have them: `loss`, `reference` (`base` or `precomputed`) and `sft_weight`.
    """

    default: ClassVar[str] = "sft"
    every = staticmethod(lambda: OBJECTIVES)
    formats: ClassVar[tuple[str, ...]]  # values of `data.format` that it reads, the usual one first
    loss_at: ClassVar[str] = ""  # `module:class` of its loss, made of `section` and `step`
    head: ClassVar[Head] = "tokens"  # what it learns by, as `model.head`
    is_cross_entropy: ClassVar[bool] = False  # whether rows are repeated, without a loss of its own
    has_teacher: ClassVar[bool] = False  # whether rows have a distribution at each token
    has_classes: ClassVar[bool] = False  # whether the head has `model.num_classes` outputs
    classifies_tokens: ClassVar[bool] = False  # whether each word has a class, and not the row
    card: ClassVar[str] = ""  # what the model card says in place of the adapter's sentence
    of_losses: ClassVar[Mapping[str, Mapping[str, object]]] = MappingProxyType({})
    """Setting -> the losses that read it, each with the setting's default there."""

    @property
    def read_formats(self) -> tuple[str, ...]:
        """The formats that it reads with these settings."""
        return formats_like(self.formats)

    @property
    def samples_answers(self) -> bool:
        """Whether rows are prompts, which the model answers in training."""
        return False

    def require_ready(self) -> None:
        """Check what a run needs besides its recipe.

        Raises:
            ConfigError: It is not there, or is no such thing.
        """

    def planned(self, rows: "Rows", *, seq_len: int) -> "Rows":
        """Return rows as steps are planned for them; the same where they are learned as they are.

        Args:
            rows: Those that are trained on, and held out.
            seq_len: Most tokens of a row.

        Raises:
            DataError: Some leave no room for what is sampled.
        """
        return rows

    def more_rows(
        self, plan: "Plan", train: "TrainSection", *, num_steps: int | None
    ) -> "list[Line]":
        """Return what a plan says of what is done between its steps, of which there are so many.

        Raises:
            DoesNotFitError: It does not fit.
        """
        return []

    @property
    def computes_reference(self) -> bool:
        """Whether a step computes the reference that it compares with."""
        return dict(self).get("reference") == "base"

    @property
    def precomputes_reference(self) -> bool:
        """Whether log-probabilities of the reference are known before step 1."""
        return dict(self).get("reference") == "precomputed"

    @property
    def without_reference(self) -> str:
        """The setting with which no reference is computed, for hints."""
        return "`objective.reference: precomputed`"

    @property
    def scores_mismatched(self) -> bool:
        """Whether each prompt is also scored with the answer of another row."""
        return False

    @property
    def nll_weight(self) -> float:
        """Weight of the cross-entropy of the best answers' tokens in the loss."""
        weight: float = dict(self).get("sft_weight", 0.0)
        return weight

    def with_reference(self, rows: "StepRows") -> "StepRows":
        """Return the rows with the reference's sums only if these are what to compare with.

        Raises:
            DataError: They are, and the rows have none.
        """
        if not self.precomputes_reference:
            return replace(rows, reference_R=None)
        if rows.reference_R is None:
            raise DataError(
                "objective.reference is precomputed and the rows have no log-probabilities of it",
                limit="each answer needs the sum of the reference's log-probabilities of its"
                " tokens",
                hint="`objective.reference: base`, or rows with them",
            )
        return rows

    def require_values(self, values: "NDArray[np.float64]") -> None:
        """Check the values of all rows that are trained on.

        Raises:
            DataError: There is nothing to learn from them.
        """

    def objective(self, step: StepData) -> "StepObjective":
        """Return the loss of a step.

        Raises:
            DataError: Rows lack what it reads.
        """
        module, _, name = self.loss_at.partition(":")
        rows = self.with_reference(step.rows)
        made: StepObjective = getattr(import_module(module), name)(
            section=self, step=replace(step, rows=rows)
        )
        return made

    def weight(self, *, num_groups: int, num_rows: int, num_label_tokens: int) -> int:
        """Return what held-out rows count for: that which the loss is a mean over."""
        return num_groups

    def counts(
        self, rows: "StepRows", label_lens: Sequence[int], metrics: Mapping[str, float]
    ) -> dict[str, int]:
        """Return what metrics are means over, where that is not what the loss is a mean over."""
        return {}

    def merged(self, means: dict[str, float], parts: "Sequence[Evaluation]") -> dict[str, float]:
        """Return the metrics of all parts, from their weighted means."""
        return means

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield settings and other settings with which they may be impossible."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Give settings that the loss reads their defaults, so that a run keeps them."""
        if not isinstance(values, dict) or not cls.of_losses:
            return values
        loss, filled = values.get("loss", cls.model_fields["loss"].default), dict(values)
        for name, defaults in cls.of_losses.items():
            if filled.get(name) is None and isinstance(loss, str) and loss in defaults:
                filled[name] = defaults[loss]
        return filled

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        """Refuse settings that are each valid but contradict each other."""
        value_of = dict(self)
        unread = (
            (
                loss not in defaults,
                name,
                "loss",
                f"it is read by {', '.join(defaults)}",
                f"leave out `objective.{name}`, or `objective.loss: {next(iter(defaults))}`",
            )
            for name, defaults in self.of_losses.items()
            if (loss := value_of["loss"]) and value_of[name] is not None
        )
        for is_broken, first, other, limit, hint in (*unread, *self.contradictions()):
            if is_broken:
                seen = (f"objective.{name} is {value_of[name]}" for name in (first, other))
                parts = {"what": " and ".join(seen), "limit": limit, "hint": hint}
                raise PydanticCustomError("refusal", "{what}; {limit}", parts | {"field": first})
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """An objective, of this project or of another package's entry point."""

    # What `objective` holds where it is chosen, and the facts of it.
    settings: type[ObjectiveSection]
    summary: str  # what it learns, in a sentence of the reference
    # What other trainers call a setting -> its name.
    words: Mapping[str, str] = field(default_factory=dict)
    clashes: tuple[Clash, ...] = ()  # settings of other sections that it does not go with


OBJECTIVES: Registry[Objective] = Registry("objectives", "finetune.objectives", Objective)


Recast = Callable[[Mapping[str, object], Callable[[str], str]], Mapping[str, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What a chat's turns are, in its first column."""

    keys: tuple[str, str]  # the keys of a turn's role and text
    unlearned: tuple[str, ...]  # roles that are not learned
    foreign: str  # a key that a turn of another format of chats has


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFormat:
    """A format of rows, of this project or of another package's entry point."""

    summary: str  # what a row is, in a sentence of the reference
    columns: tuple[str, ...]  # columns that each row has
    # Reads a row with these columns: the row, how rows are read, where it is, and its keys that are
    # not read. It raises `RowError` for one that cannot be used.
    read: "Callable[[Mapping[str, object], RowForm, str, tuple[str, ...]], Row]"
    optional: tuple[str, ...] = ()  # columns that a row may have
    # A format of ours whose rows mean the same, of another package's: what reads that reads this
    # one too.
    like: str = ""
    # Gives a row the format's columns, from the names that others have for them, where it has
    # these; None if there are no such names.
    recast: "Recast | None" = None
    turns: Turns | None = None  # what the turns of a chat are; None elsewhere
    is_document: bool = False  # whether rows are texts, which are joined and cut, and learned whole
    keeps_others: bool = False  # whether all other columns are read, by something else
    # The section `objective` for such rows; None where they say too little for it.
    suggests: Mapping[str, object] | None = None
    # Settings that it does not go with; with some, it is read only where it is named.
    clashes: tuple[Clash, ...] = ()


FORMATS = Registry("data_formats", "finetune.data.formats", DataFormat)


def formats_like(names: Iterable[str]) -> tuple[str, ...]:
    """Return formats, and those of other packages whose rows mean the same."""
    named = tuple(names)
    return named + tuple(name for name in FORMATS.foreign if FORMATS[name].like in named)


def repeated_formats() -> tuple[str, ...]:
    """Return the formats that are read where no objective is chosen."""
    return ObjectiveSection.model_validate({}).read_formats


def column_names() -> Iterator[str]:
    """Yield the names that formats have for columns."""
    every = (name for one in FORMATS.values() for name in (*one.columns, *one.optional))
    yield from dict.fromkeys(every)
