"""What a question is answered: pure, and the same on the server and in a browser's Python.

The figures are those of `sluice plan --json`. Each kind of question is short, so that a newer one
waits for little: the plan itself; its step, drawn wider; its rate at another number of tokens per
step, a point of the break-even curve; and what other ways to hold and move the model would change.
The last two are asked while the controls rest, and may be answered in the background.
"""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import ValidationError

from finetune.planning.candidates import chooser, chosen_plan, full_requests, nearest_request
from finetune.planning.collector import uncollected
from finetune.planning.ranks import require_gpus
from finetune.planning.request import with_backend
from finetune.report.gantt import gantt_svg
from finetune.report.pages import charts
from finetune.report.plan import memory_limits, plan_json
from finetune.report.what_if import what_if_json
from finetune.studio.question import Question, Setup, Work, command, machine, recipe_text, subject
from offload.errors import SluiceError
from offload.plan.facts.facts import ModelFacts
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import MemoryTerm
from offload.plan.plan import Plan
from offload.plan.refusal import refusal
from offload.plan.request import PlanRequest
from offload.plan.what_if.what_if import NUM_CARDS, what_if

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
        background: Answers questions that are asked while the controls rest, with this machine if
            they are about it; None answers them here.
    """

    def __init__(
        self,
        *,
        here: Callable[[], Machine] | None,
        folder: Path,
        background: Callable[[Kind, Question, Machine | None], Json] | None = None,
    ) -> None:
        """Plan nothing yet."""
        self._here = None if here is None else functools.cache(here)
        self._folder = folder
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
            return {"error": said, "recipe": recipe_text(question.setup)}

    def _answer(self, kind: Kind, question: Question) -> Json:
        facts, here, requests, plan = self._planned(question.setup)
        if kind == "rate":
            return _rate(plan, requests[0])
        if plan is None:
            needs = MemoryNeeds.of(facts, here, nearest_request(facts, here, requests))
            if kind == "ways":
                return {"other_ways": None, "hint": refusal(needs).hint}
            return _refused(needs, question.setup)
        if kind == "step":
            return {"gantt": _drawn(plan, zoom=question.zoom)}
        return _ways(plan) if kind == "ways" else _plan_answer(plan, question)

    def _measured(self, setup: Setup) -> Machine | None:
        """Return this machine if the setup is about it, and it can be measured."""
        if self._here is None or not setup.is_here:
            return None
        with self._is_measuring:
            return self._here()

    def _plan_of(self, setup: Setup) -> tuple[ModelFacts, Machine, list[PlanRequest], Plan | None]:
        found = machine(setup, here=self._measured(setup))
        planned = subject(setup, folder=self._folder)
        here = with_backend(planned.recipe, planned.facts, found)
        num_cards = setup.num_cards
        require_gpus(planned.recipe.train, here, num_gpus=num_cards, setting="cards:")
        requests = full_requests(planned.recipe, planned.facts, num_ranks=num_cards)
        if planned.recipe.train.is_sharded:
            choice = chooser(planned.recipe)(planned.facts, here, requests)
            return planned.facts, here, requests, choice.plan
        return planned.facts, here, requests, chosen_plan(planned.facts, here, requests)


def _said(what: str, *, limit: str) -> str:
    return json.dumps({"error": {"what": what, "limit": limit, "hint": "change it"}})


def _plan_answer(plan: Plan, question: Question) -> Json:
    figures = plan_json(plan)
    typical = plan.request.typical
    return {
        "fits": True,
        "figures": figures,
        "settings": {
            "codec": typical.codec,
            "layers": plan.facts.num_layers,
            "slots": plan.num_slots,
            "inputs": "in RAM" if plan.request.is_stashed else "on the device",
            "disk": plan.request.is_on_disk,
            "sequences": typical.micro_batch_size,
            "micro_batches": plan.request.num_micro_batches,
        },
        "memory": _memory(plan.machine, plan.device_memory, plan.host_memory),
        "work": _work(question.work, figures),
        "gantt": _drawn(plan, zoom=1),
        "curve": charts.break_even([], break_even_tokens=plan.break_even_tokens).complete_spec,
        "recipe": recipe_text(question.setup),
        "command": command(question.setup),
    }


def _drawn(plan: Plan, *, zoom: int) -> str:
    """Return the step as a drawing; the wider it is, the fewer ops are one bar."""
    timeline = plan.predict().with_optimizer(plan.costs.optimizer_s)
    return gantt_svg({"predicted": timeline}, width=zoom * DRAWN_WIDTH)


def _refused(needs: MemoryNeeds, setup: Setup) -> Json:
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
        "recipe": recipe_text(setup),
        "command": command(setup),
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


def _ways(plan: Plan) -> Json:
    """Return what other ways would change; they are priced for one card and its neighbours."""
    ways = None if plan.request.num_ranks > 1 else what_if(plan, num_cards=NUM_CARDS)
    return {"other_ways": None} if ways is None else what_if_json(ways)
