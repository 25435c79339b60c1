"""What a question is answered: pure, and the same on the server and in a browser's Python.

The figures are those of `sluice plan --json`. Each kind of question is short, so that a newer one
waits for little: the plan itself; its step, drawn wider; its rate at another number of tokens per
step, a point of the break-even curve; and what other ways to hold and move the model would change.
The last two are asked while the controls rest, and may be answered in the background.
"""

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import yaml
from pydantic import Field, ValidationError

from finetune.errors import ConfigError, StudioError
from finetune.hub.repository import is_hub_reachable
from finetune.planning.candidates import (
    chooser,
    chosen_plan,
    nearest_request,
    uncollected,
)
from finetune.planning.ranks import require_gpus
from finetune.planning.request import ASSUMED_IMAGE_TOKENS, facts_of, with_backend
from finetune.planning.subject import (
    HUB_ID,
    NO_ROWS,
    Subject,
    with_image_tokens,
    with_num_images,
)
from finetune.recipe.adapters import ADAPTERS
from finetune.recipe.draft import Draft
from finetune.recipe.extensions import OBJECTIVES, NameIn, ObjectiveSection, Section
from finetune.recipe.load import find_shape, published_ids, recipe_from, shipped_shapes
from finetune.recipe.recipe import Recipe, whole_units
from finetune.recipe.sections import CodecName
from finetune.report.gantt import gantt_svg
from finetune.report.plan import memory_limits, rows_of
from finetune.report.rows import BRIEF, as_json, tables
from finetune.report.what_if import what_if_json
from finetune.studio.break_even import break_even
from finetune.studio.guard import RUN_NAME, inside
from offload.errors import SluiceError
from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Dtype, Machine, half_dtype, named_machine
from offload.plan.memory.memory import MemoryTerm
from offload.plan.plan import Plan
from offload.plan.refusal import refusal
from offload.plan.request import PlanRequest
from offload.plan.what_if import NUM_CARDS, what_if

# ---------------------------------------------------------------------------------------------
# A question of the Plan room: a model, a machine, a step and a data set, as one frozen value.
#
# Its fields are what the page's controls set. A question becomes a recipe in one place, so what is
# planned and what "show the recipe" gives are the same settings.

HERE = "this machine"
CONFIG = "config.json"
NAME = "from-studio"
ASSUMED = (
    f"Images are assumed to have at most {ASSUMED_IMAGE_TOKENS:,} tokens; image.max_tokens sets it."
)
CONTROLS = {"micro_batch_size": "sequences per forward", "codec": "layers wait as"}
"""What the page calls settings that make a plan fit."""
TRAINED = {"lora": "LoRA", "dora": "DoRA", "all": "all weights of the model"}
"""What trains and is counted without torch and peft, in words."""


def counted_by_peft() -> list[str]:
    """Return the methods whose modules are counted with torch and peft."""
    return [name for name, one in ADAPTERS.items() if one.kind == "modules"]


class Setup(Section):
    """What is planned."""

    model: str = Field(description="A shipped shape, a hub id, or `config.json` with its text.")
    config: str | None = Field(
        default=None, max_length=2**20, description="The text of a pasted config."
    )
    card: str = Field(description="A named card, or `this machine`.")
    num_cards: int = Field(ge=1, le=16, description="Cards that share a step.")
    ram_gib: float | None = Field(
        default=None, ge=1, le=1e6, description="RAM of a named card's host, in GiB."
    )
    link_gb_per_s: float | None = Field(
        default=None, ge=0.1, le=1e6, description="Rate of a named card's link, in GB/s."
    )
    method: Annotated[str, NameIn(lambda: (*TRAINED, *counted_by_peft()))] = Field(
        description="An adapter's method, or `all` weights of the model."
    )
    rank: int = Field(ge=1, le=4096, description="Of the adapter, where its method has one.")
    codec: Literal["auto"] | CodecName = Field(description="Form in which layers wait.")
    objective: Annotated[str, NameIn(lambda: OBJECTIVES)] = Field(
        description="What is learned from the rows."
    )
    seq_len: int = Field(ge=8, le=2**24, description="Tokens of a sequence.")
    tokens_per_step: int = Field(ge=8, le=2**24, description="Cut to whole micro-batches.")
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Sequences per forward."
    )
    num_images: int = Field(
        default=0, ge=0, le=10**9, description="Distinct images of the rows; 0 for rows of text."
    )
    image_tokens: int | None = Field(
        default=None, ge=1, le=2**16, description="Tokens of an image at most."
    )

    @property
    def source(self) -> str:
        """The model as a recipe names it: its hub id, or its folder."""
        hub_ids = published_ids()
        return "my-model" if self.model == CONFIG else hub_ids.get(self.model, self.model)

    @property
    def is_here(self) -> bool:
        """Whether it is about this machine."""
        return self.card == HERE

    @property
    def is_assumed(self) -> bool:
        """Whether nobody has said how many tokens the images have."""
        return self.num_images > 0 and self.image_tokens is None

    @property
    def dtype(self) -> Dtype:
        """What the layers compute in."""
        return half_dtype(self.card)

    def recipe_values(self, source: str) -> dict[str, Any]:
        """Return the settings of the recipe that is planned, those that are no defaults.

        Args:
            source: Where the model is.
        """
        adapter: dict[str, Any] = {}
        if self.method not in TRAINED:
            has_rank = "rank" in ADAPTERS[self.method].settings.model_fields
            adapter = {"method": self.method} | ({"rank": self.rank} if has_rank else {})
        elif self.method != "all":
            adapter = {"rank": self.rank, "alpha": float(2 * self.rank)}
            adapter |= {"dora": True} if self.method == "dora" else {}
        is_default = self.objective == ObjectiveSection.default
        most = ASSUMED_IMAGE_TOKENS if self.is_assumed else self.image_tokens
        size = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        train: dict[str, Any] = {
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "tokens_per_step": whole_units(self.tokens_per_step, self.seq_len * size),
            "epochs": 1,
        }
        if self.method == "all":
            train |= {"what": "all"} | ({"parallel": "fsdp2"} if self.num_cards > 1 else {})
        return {
            "model": {"path": source} | ({} if self.dtype == "bfloat16" else {"dtype": self.dtype}),
            **({"adapter": adapter} if adapter else {}),
            "data": {"path": NO_ROWS},
            **({} if most is None else {"image": {"max_tokens": most}}),
            **({} if is_default else {"objective": {"method": self.objective}}),
            "train": train,
            **({} if self.codec == "auto" else {"offload": {"codec": self.codec}}),
            "output": {"name": NAME},
        }


class Work(Section):
    """What the plan is to be used for: how much, and at which prices."""

    data_tokens: int = Field(ge=0, le=10**15, description="Tokens that are trained on in all.")
    price_per_hour: float = Field(ge=0, le=1e9, description="Of the machine, as if rented.")
    power_watts: float = Field(ge=0, le=1e9, description="Of the machine, as it trains.")
    price_per_kwh: float = Field(ge=0, le=1e9, description="Of electricity.")


class Run(Section):
    """What a run needs that a plan does not."""

    rows: str = Field(default="", max_length=4096, description="File that the run learns from.")
    name: str = Field(default=NAME, pattern=f"^{RUN_NAME}$", description="Of the run.")


class Question(Section):
    """All that the page asks."""

    setup: Setup
    work: Work
    run: Run = Run()
    zoom: int = Field(default=1, ge=1, le=16, description="How wide the step is drawn.")


def recipe_text(question: Question) -> str:
    """Return the recipe of a question as YAML that `sluice plan` and `sluice finetune` read."""
    setup, run = question.setup, question.run
    values = setup.recipe_values(setup.source)
    values["data"]["path"] = run.rows or NO_ROWS
    values["output"]["name"] = run.name
    comments = [f"# {command(question)}"]
    if not run.rows:
        comments.append("# data.path: put the file of your rows here")
    if setup.is_assumed:
        comments.append("# image.max_tokens: assumed")
    if setup.num_cards > 1:
        comments.append(
            f"# {setup.num_cards} cards: `accelerate launch --multi_gpu"
            f" --num_processes {setup.num_cards}` shares a step among them"
        )
    if setup.model == CONFIG:
        comments.append(f"# model.path: the folder of your {CONFIG} and weights")
    return "\n".join(comments) + "\n\n" + yaml.safe_dump(values, sort_keys=False)


def command(question: Question) -> str:
    """Return the command that plans the recipe for the same machine."""
    setup = question.setup
    words = [f"sluice plan {question.run.name}.yaml"]
    if not setup.is_here:
        words.append(f"--machine {setup.card}")
        words += [] if setup.ram_gib is None else [f"--ram {setup.ram_gib:g}"]
        words += [] if setup.link_gb_per_s is None else [f"--link {setup.link_gb_per_s:g}"]
    words += [f"--gpus {setup.num_cards}"] if setup.num_cards > 1 else []
    words += [f"--images {setup.num_images}"] if setup.num_images else []
    return " ".join(words)


def obstacle(setup: Setup, *, other: str | None) -> StudioError | None:
    """Return why the page starts no run of a setup, whether it fits or not; None if it does.

    Args:
        setup: Settings of the plan.
        other: The card that "this machine" is planned as; None if it is measured.
    """
    if not setup.is_here or other is not None:
        return StudioError(
            f"the plan is for {other if setup.is_here else setup.card}, and a run starts on the"
            " machine of this page",
            hint="`sluice studio` without `--machine NAME`"
            if setup.is_here
            else f"choose {HERE} as the card",
        )
    if setup.num_cards > 1:
        return StudioError(
            f"{setup.num_cards} cards share a step, and the page starts one process",
            hint="copy the recipe and use the command in its comment",
        )
    if setup.model == CONFIG:
        return StudioError(
            f"a {CONFIG} has no weights",
            hint="give a hub id, or a folder with the model",
        )
    return None


def subject(setup: Setup, *, folder: Path, root: Path | None) -> Subject:
    """Return the recipe and the model's facts.

    Args:
        setup: Settings of the plan.
        folder: Where a pasted config is written, by its hash.
        root: A folder that models may be in; None if there is none.

    Raises:
        ConfigError: There is no such model, or settings contradict each other.
    """
    recipe = _recipe(setup, _model_path(setup, folder=folder, root=root))
    facts = facts_of(recipe.model)
    return Subject(name=setup.model, recipe=recipe, facts=facts, num_ranks=setup.num_cards)


def machine(setup: Setup, *, here: Machine | None) -> Machine:
    """Return the machine of a setup.

    Args:
        setup: Settings of the plan.
        here: This machine, as it was measured; None where it cannot be.

    Raises:
        ConfigError: This machine is not known, or was measured in another type.
        MachineError: It is no known card.
    """
    if setup.is_here:
        if here is None:
            raise ConfigError(
                f"{HERE} was not measured",
                hint="`sluice studio`, which measures it, or take a named card",
            )
        if here.dtype != setup.dtype:
            raise ConfigError(
                f"{HERE} was measured in {here.dtype}, and the page plans it in {setup.dtype}",
                hint="`sluice init --machine here` for a GPU without bfloat16, else `sluice probe"
                " --save FILE` and `sluice studio --machine FILE`",
            )
        return here
    link = setup.link_gb_per_s
    return named_machine(
        setup.card,
        dtype=setup.dtype,
        ram_bytes=None if setup.ram_gib is None else int(setup.ram_gib * GIB),
        link_bytes_per_s=None if link is None else link * 1e9,
    )


def _recipe(setup: Setup, path: str) -> Recipe:
    draft = Draft(name="the page")
    draft.values.update(setup.recipe_values(path))
    return recipe_from(draft, Path("/"), check_files=False)


def _model_path(setup: Setup, *, folder: Path, root: Path | None) -> str:
    """Return the path or hub id of the model; no path outside of the root is read."""
    if setup.model == CONFIG:
        text = setup.config or ""
        held = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        held.mkdir(parents=True, exist_ok=True)
        (held / CONFIG).write_text(text, encoding="utf-8")
        return str(held)
    if setup.model in shipped_shapes():
        return str(find_shape(setup.model).absolute())
    found = None if root is None else inside(root, setup.model)
    if found is not None and (found / CONFIG).is_file():
        return str(found)
    is_id = HUB_ID.fullmatch(setup.model) is not None and not Path(setup.model).exists()
    if is_id and (setup.model in published_ids().values() or is_hub_reachable()):
        return setup.model
    raise ConfigError(
        f"{setup.model} is no shipped model, and no id on the hub that can be reached",
        limit=f"shipped are {', '.join(published_ids())}",
        hint=f"paste the model's {CONFIG}, or name a folder with it, relative to the studio's",
    )


Json = dict[str, Any]
Kind = Literal["plan", "step", "rate", "ways"]
RESTING: tuple[Kind, ...] = ("rate", "ways")  # are asked while the controls rest
DRAWN_WIDTH = 920  # of a step, in pixels
NUM_HELD = 64  # plans: a slider that returns is answered at once


class Planner:
    """Answers questions, and holds the newest plans.

    Args:
        here: Measures this machine, when a question is first about it; None where it cannot be.
        folder: Where pasted configs are written.
        root: A folder that models may be in; None if there is none.
        other: The card that "this machine" is planned as; None if it is measured.
        background: Answers questions that are asked while the controls rest, with this machine if
            they are about it; None answers them here.
    """

    def __init__(
        self,
        *,
        here: Callable[[], Machine] | None,
        folder: Path,
        root: Path | None = None,
        other: str | None = None,
        background: Callable[[Kind, Question, Machine | None], Json] | None = None,
    ) -> None:
        """Plan nothing yet."""
        self._here = None if here is None else functools.cache(here)
        self._folder, self._root, self._other = folder, root, other
        self._background = background
        self._is_planning = threading.Lock()  # one plan at a time is the fastest for each
        self._is_measuring = threading.Lock()
        self._planned = functools.lru_cache(maxsize=NUM_HELD)(self._plan_of)

    def answered(self, kind: str, text: str) -> str:
        """Answer a question that is JSON, as JSON."""
        if kind not in get_args(Kind):
            return _said(f"{kind!r} is no kind of question", limit=", ".join(get_args(Kind)))
        try:
            question = Question.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the question"
            return _said(f"{where}: {first['msg']}", limit="")
        return json.dumps(self.answer(cast(Kind, kind), question), allow_nan=False)

    def answer(self, kind: Kind, question: Question) -> Json:
        """Return the answer to one kind of question; what cannot be planned says why and the fix.

        Returns:
            `error` is None, or what is wrong, its limit and the fix. All else depends on the kind.
        """
        try:
            if self._background is not None and kind in RESTING:
                return self._background(kind, question, self._measured(question.setup))
            with self._is_planning, uncollected():
                return {"error": None, **self._answer(kind, question)}
        except SluiceError as error:
            said = {"what": error.what, "limit": error.limit, "hint": error.hint}
            return {"error": said, "recipe": recipe_text(question)}

    def startable(self, question: Question) -> str:
        """Return the recipe of a question whose run the page may start.

        Raises:
            StudioError: The plan does not fit, or the page starts no such run.
            SluiceError: It cannot be planned.
        """
        why = obstacle(question.setup, other=self._other)
        if why is not None:
            raise why
        with self._is_planning, uncollected():
            plan = self._planned(question.setup)[-1]
        if plan is None:
            raise StudioError("the plan does not fit", hint="change it until it fits")
        return recipe_text(question)

    def _answer(self, kind: Kind, question: Question) -> Json:
        facts, here, requests, plan = self._planned(question.setup)
        if kind == "rate":
            return _rate(plan, requests[0])
        if plan is None:
            needs = MemoryNeeds.of(facts, here, nearest_request(facts, here, requests))
            if kind == "ways":
                fixes = filter(None, (self._nearest_control(question.setup), refusal(needs).hint))
                return {"other_ways": None, "hint": "; or ".join(fixes)}
            return {"sees": facts.tower is not None, **_refused(needs, question)}
        if kind == "step":
            return {"gantt": _drawn(plan, zoom=question.zoom)}
        if kind == "ways":  # they are priced for one card and its neighbours
            is_one = question.setup.num_cards == 1
            return (
                what_if_json(what_if(plan, num_cards=NUM_CARDS)) if is_one else {"other_ways": None}
            )
        why = obstacle(question.setup, other=self._other)
        return _plan_answer(plan, question) | {
            "sees": facts.tower is not None,
            "obstacle": None if why is None else f"{why.what}. Fix: {why.hint}",
        }

    def _nearest_control(self, setup: Setup) -> str:
        """Return the nearest change of the page's own controls that fits; empty if none does."""
        single, packed = {"micro_batch_size": 1}, {"codec": "nf4"}
        for changes in (single, packed, single | packed):
            changed = setup.model_copy(update=changes)
            with suppress(SluiceError):  # not every setup may have each
                if changed != setup and self._planned(changed)[-1] is not None:
                    return " and ".join(f"{CONTROLS[name]}: {to}" for name, to in changes.items())
        return ""

    def _measured(self, setup: Setup) -> Machine | None:
        """Return this machine if the setup is about it, and it can be measured."""
        if self._here is None or not setup.is_here:
            return None
        with self._is_measuring:
            return self._here()

    def _plan_of(self, setup: Setup) -> tuple[ModelFacts, Machine, list[PlanRequest], Plan | None]:
        found = machine(setup, here=self._measured(setup))
        planned = subject(setup, folder=self._folder, root=self._root)
        if setup.num_images:
            planned = with_image_tokens(planned)
        here = with_backend(planned.recipe, planned.facts, found)
        require_gpus(planned.recipe.train, here, num_gpus=setup.num_cards, setting="cards:")
        requests = planned.requests()
        if setup.num_images:
            requests = with_num_images(requests, planned.recipe, setup.num_images)
        if planned.recipe.train.is_sharded:
            choice = chooser(planned.recipe)(planned.facts, here, requests)
            return planned.facts, here, requests, choice.plan
        return planned.facts, here, requests, chosen_plan(planned.facts, here, requests)


def _said(what: str, *, limit: str) -> str:
    return json.dumps({"error": {"what": what, "limit": limit, "hint": "change it"}})


def _plan_answer(plan: Plan, question: Question) -> Json:
    rows = rows_of(plan)
    figures, (acted_on,) = as_json(rows), tables("", rows, BRIEF)
    return {
        "fits": True,
        "figures": figures,
        "rows": acted_on.lines,
        "notes": [ASSUMED] if question.setup.is_assumed else [],
        "memory": _memory(plan.machine, plan.device_memory, plan.host_memory),
        "work": _work(question.work, figures),
        "gantt": _drawn(plan, zoom=1),
        "curve": break_even([], break_even_tokens=plan.break_even_tokens).complete_spec,
        "recipe": recipe_text(question),
        "command": command(question),
    }


def _drawn(plan: Plan, *, zoom: int) -> str:
    """Return the step as a drawing; the wider it is, the fewer ops are one bar."""
    timeline = plan.predict().with_optimizer(plan.costs.optimizer_s)
    return gantt_svg({"predicted": timeline}, width=zoom * DRAWN_WIDTH)


def _refused(needs: MemoryNeeds, question: Question) -> Json:
    least = needs.fewest
    return {
        "fits": False,
        "shortages": [
            {
                "what": one.what.removeprefix("of "),
                "short_bytes": one.short_bytes,
                "needed_bytes": one.needed_bytes,
                "limit_bytes": one.limit_bytes,
            }
            for one in needs.shortages(least)
        ],
        "memory": _memory(needs.machine, needs.device(least), needs.host(least)),
        "recipe": recipe_text(question),
        "command": command(question),
    }


def _memory(
    here: Machine, device: tuple[MemoryTerm, ...], host: tuple[MemoryTerm, ...]
) -> list[Json]:
    """Return each memory with its limit and its terms; on a CPU there is one memory."""
    of_place = {"VRAM": device, "RAM": host}
    if here.device == "cpu":
        of_place = {"RAM": (*device, *host)}
    return [
        {
            "name": name,
            "limit_bytes": limit_bytes,
            "terms": [[term.name, term.num_bytes] for term in of_place[name] if term.num_bytes],
        }
        for name, limit_bytes in memory_limits(here).items()
    ]


def _work(work: Work, figures: Json) -> Json:
    """Return what training on the data takes: steps, hours, and money for both prices."""
    predicted = figures["predicted"]
    hours = work.data_tokens / predicted["tokens_per_s"] / 3600
    kwh = hours * work.power_watts / 1000
    if not work.power_watts:  # what the cards may draw at most, if that is published
        per_million = figures["energy"]["at_most_kwh_per_million_tokens"]
        kwh = work.data_tokens / 1e6 * (per_million or 0.0)
    return {
        "steps": -(-work.data_tokens // figures["schedule"]["tokens_per_step"]),
        "hours": hours,
        "kwh": kwh,
        "cost": hours * work.price_per_hour + kwh * work.price_per_kwh,
    }


def _rate(plan: Plan | None, request: PlanRequest) -> Json:
    """Return a point of the break-even curve; without a rate where nothing fits."""
    rate = None if plan is None else plan.tokens_per_step / plan.step_s
    return {"tokens_per_step": request.tokens_per_step, "tokens_per_s": rate}
