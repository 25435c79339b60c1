"""Sweeps: variants, what ends them, and ranks that agree."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.errors import ConfigError, FinetuneError, RunFailedError
from finetune.recipe.capabilities import require_shared
from finetune.recipe.grid import values_of
from finetune.recipe.load import load_recipe
from finetune.sweep import together
from finetune.sweep.plan_wave import with_common_places
from finetune.sweep.sweep import _with_begun
from finetune.sweep.variants import (
    StopRule,
    Variant,
    Verdicts,
    recipes_together,
    variants_of,
    waves_of,
)
from finetune.training.ranks import Ranks
from finetune.training.run import Outcome
from offload.plan.request import PlanRequest, with_workload
from tests.builders import lora, qwen3_8b, request, workload


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,2e-4", ["1e-4", "2e-4"]),
        ("[q_proj,v_proj],[k_proj]", ["[q_proj,v_proj]", "[k_proj]"]),
        ("{q_proj: 2, k_proj: 4}", ["{q_proj: 2, k_proj: 4}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("8", ["8"]),
    ],
)
def test_values_are_split_at_commas_that_are_in_no_list(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_a_grid_has_a_run_for_each_combination() -> None:
    words = ["train.lr=1e-3,2e-3", "adapter.rank=4,8,16", "train.steps=50"]
    found = variants_of("quickstart", words, is_zipped=False, max_runs=64)
    pairs = [(run.recipe.train.lr, run.recipe.adapter.as_lora.rank) for run in found.runs]
    assert pairs == [(lr, rank) for lr in (1e-3, 2e-3) for rank in (4, 8, 16)]
    assert all(run.recipe.train.steps == 50 for run in found.runs)
    assert [run.name for run in found.runs][:2] == ["lr-1e-3_rank-4", "lr-1e-3_rank-8"]
    assert found.folder == Path("runs/quickstart-sweep")
    assert found.runs[0].recipe.output.run_dir == found.folder / "lr-1e-3_rank-4"
    assert len({run.recipe.output.name for run in found.runs}) == 6


def test_zipped_values_are_taken_in_step() -> None:
    words = ["train.lr=1e-3,2e-3", "adapter.rank=4,8"]
    found = variants_of("quickstart", words, is_zipped=True, max_runs=64)
    pairs = [(run.recipe.train.lr, run.recipe.adapter.as_lora.rank) for run in found.runs]
    assert pairs == [(1e-3, 4), (2e-3, 8)]


def test_a_list_is_part_of_a_name_without_its_brackets() -> None:
    words = ["adapter.targets=[q_proj],[q_proj,k_proj],attention"]
    found = variants_of("quickstart", words, is_zipped=False, max_runs=64)
    names = [run.name for run in found.runs]
    assert names == ["targets-q-proj", "targets-q-proj-k-proj", "targets-attention"]


def test_a_file_names_its_variants(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "recipe: quickstart\n"
        "variants:\n"
        "  slow: {train.lr: 1e-3}\n"
        "  small: {adapter.rank: 2, adapter.targets: [q_proj]}\n"
        "stop: {worse_than_best_by: 0.5, after_steps: 40}\n"
    )
    found = variants_of(str(file), ["train.steps=70"], is_zipped=False, max_runs=64)
    assert [run.name for run in found.runs] == ["slow", "small"]
    assert found.runs[0].recipe.train.lr == 1e-3
    assert found.runs[1].recipe.adapter.as_lora.targets == ("q_proj",)
    assert all(run.recipe.train.steps == 70 for run in found.runs)
    assert found.stop is not None
    assert (found.stop.worse_than_best_by, found.stop.after_steps) == (0.5, 40)


@pytest.mark.parametrize(
    ("words", "is_zipped", "match"),
    [
        (["train.steps=3"], False, "no setting of train.steps=3 has several values"),
        (["train.lr=1e-3,0.001"], False, "lr-1e-3 and lr-0.001 are equal"),
        (["train.lr=1e-3,2e-3", "adapter.rank=1,2,3"], True, "2 values of train.lr, 3 values of"),
        (["train.lr=1e-3,,2e-3"], False, "train.lr=1e-3,,2e-3 has an empty value"),
        (["train.lr=1e-3,2e-3", "train.lr=1,2"], False, "train.lr is given a second time"),
        (["train.seed=" + ",".join(map(str, range(9)))], False, "the sweep has 9 runs"),
        (["train.larning=1,2"], False, "train.larning"),
        (["output.name=a,b"], False, "output.name differs between the runs"),
        (["train.lr=1e-3,2e-3", "stop.after_steps=4"], False, "stop is {'after_steps': 4}"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], is_zipped: bool, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        variants_of("quickstart", words, is_zipped=is_zipped, max_runs=8)


def test_a_recipe_that_is_not_there_is_told_before_what_a_sweep_is() -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe nowhere\.yaml"):
        variants_of("nowhere.yaml", [], is_zipped=False, max_runs=8)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("recipe: quickstart\nvariants: {a b: {train.lr: 1}}\n", "a variant is named 'a b'"),
        ("recipe: quickstart\nvariants: {}\n", "it is no sweep"),
        ("recipe: quickstart\nvariants: {a: {}}\nstopp: 1\n", "stopp is not known"),
        ("recipe: quickstart\nvariants: {a: {train.rate: 1}}\n", "train.rate"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        variants_of(str(file), [], is_zipped=False, max_runs=8)


def test_recipes_with_one_name_or_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="quickstart and quickstart are both to be written to"):
        recipes_together(["quickstart", "quickstart"], [])


# --------------------------------------------------------------------------------------------- stop


def verdicts(
    rule: StopRule | None, before: dict[str, dict[int, float]]
) -> tuple[Verdicts, list[str]]:
    notes: list[str] = []
    judge = Verdicts(rule=rule, names=["a", "b"], before=lambda: before, note=notes.append)
    return judge, notes


RULE = StopRule(worse_than_best_by=0.5, after_steps=4)


def test_a_run_stops_where_it_is_worse_than_the_best_by_more_than_the_margin() -> None:
    judge, notes = verdicts(RULE, {})
    early = {0: 1.0, 1: 9.0}
    assert judge(2, early) == {}  # no run stops before step 4
    at = {0: 1.25, 1: 1.5}
    assert judge(4, at) == {}  # exactly the margin above the lowest, of step 2
    late = {0: 1.25, 1: 1.75}
    assert list(judge(6, late)) == [1]
    assert notes == [
        "b: stopped after step 6: loss on held-out rows 1.7500, more than 0.5 above 1.0000 of a"
    ]


def test_runs_of_earlier_waves_count_with_their_losses_up_to_the_same_step() -> None:
    judge, _ = verdicts(RULE, {"earlier": {4: 3.0, 8: 1.0}})
    assert judge(4, {0: 3.25}) == {}
    assert list(judge(8, {0: 3.25})) == [0]


def test_without_a_rule_no_run_stops() -> None:
    judge, notes = verdicts(None, {"earlier": {4: 0.0}})
    assert judge(4, {0: 9.0}) == {}
    assert not notes


@pytest.mark.parametrize("loss", [0.5, 0.25])
def test_the_best_run_never_stops(loss: float) -> None:
    judge, _ = verdicts(StopRule(worse_than_best_by=0.0, after_steps=1), {})
    assert 0 not in judge(4, {0: loss, 1: 0.5})


# -------------------------------------------------------------------------------------------- agree


def require(runs: list[Variant]) -> None:
    require_shared([(run.name, run.recipe) for run in runs])


def variants(*settings: Sequence[str]) -> list[Variant]:
    return [
        Variant(name=f"run-{number}", settings={}, recipe=load_recipe("quickstart", list(words)))
        for number, words in enumerate(settings)
    ]


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("offload.num_slots=4", r"offload.num_slots is 3 in run-0 and 4 in run-1"),
        ("model.dtype=bfloat16", r"model.dtype is float32 in run-0 and bfloat16 in run-1"),
        ("train.neftune_alpha=5", r"train.neftune_alpha is None in run-0 and 5.0 in run-1"),
        ("train.router_loss_coef=0.1", r"train.router_loss_coef is None in run-0 and 0.1"),
        ("report.profile=3", r"report.profile is 3 in run-1"),
        ("train.compile=true", r"train.compile is true in run-1"),
    ],
)
def test_what_differs_and_must_not_is_named(setting: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        require(variants([], [setting]))


def test_runs_may_differ_in_what_is_their_own() -> None:
    own = ["adapter.rank=2", "train.seed=9", "train.lr=0.1", "adapter.dropout=0", "train.steps=40"]
    own += ["adapter.compute_dtype=float32"]
    require(variants([], own, ["train.optimizer=sgd"]))


def test_the_base_must_be_the_same_where_it_is_random() -> None:
    random = ["model.init=random"]
    with pytest.raises(ConfigError, match=r"train.seed is 0 in run-0 and 1 in run-1"):
        require(variants(random, [*random, "train.seed=1"]))


def test_a_wave_has_no_more_runs_than_asked_for() -> None:
    runs = variants(["train.seed=1"], ["train.seed=2"], ["train.seed=3"])
    names = [[run.name for run in wave] for wave in waves_of(runs, most=2)]
    assert names == [["run-0", "run-1"], ["run-2"]]
    assert [len(wave) for wave in waves_of(runs, most=None)] == [3]


def test_a_run_takes_the_places_of_those_that_have_begun_unless_it_trains_a_copy_there() -> None:
    begun, plain, headed, embedded = variants(
        ["offload.head=host", "offload.embeddings=host", "offload.head_chunk=512"],
        ["train.seed=1"],
        ["adapter.modules_to_save=[lm_head]"],
        ["adapter.modules_to_save=[embed_tokens]"],
    )
    settled = {begun.name: begun.recipe.offload}
    made = [run.recipe.offload for run in _with_begun([begun, plain, headed, embedded], settled)]
    assert [one.head for one in made] == ["host", "host", "auto", "auto"]  # it may be one weight
    assert [one.embeddings for one in made] == ["host", "host", "host", "auto"]
    assert {one.head_chunk for one in made} == {512}


def test_runs_that_share_a_step_have_the_head_where_all_may_have_it() -> None:
    facts, chosen = (
        qwen3_8b(),
        with_workload(with_workload(request(), embeddings="host"), head="host"),
    )
    plain, headed, embedded = (
        request(workload(adapter=lora(modules=modules)))
        for modules in ((), ("lm_head",), ("embed_tokens",))
    )

    def places(*others: PlanRequest) -> tuple[str, str]:
        made = with_common_places(chosen, [chosen, *others], facts).typical
        return made.embeddings, made.head

    assert places(plain) == ("host", "host")
    assert places(plain, headed) == ("host", "device")
    assert places(embedded) == ("device", "host")


# ----------------------------------------------------------------------------------------- together


class FakeEngine:
    """Notes which runs share a step, by the names that they give in place of requests."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def forward_backward_runs(self, runs: Sequence[str]) -> list[Any]:
        self.steps.append(list(runs))
        return [SimpleNamespace(timeline=None, of=run) for run in runs]


class FakeLog:
    """The steps of a run, of which one may fail, and some are evaluated."""

    def __init__(self, steps: range, *, fails: int | None, evaluated: Sequence[int]) -> None:
        self._steps, self._fails, self._evaluated = steps, fails, evaluated
        self.num_steps, self.outcome = steps.start, None if steps else outcome(steps.start)
        self.loss = 7.0 if steps.start in evaluated else None

    def batches(self) -> Iterator[Any]:
        for number in self._steps:
            if number == self._fails:
                raise FinetuneError("it has failed", hint="")
            yield SimpleNamespace(step=number, share=None)

    def watching(self, _batch: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, _batch: Any, _record: str) -> None:
        self.num_steps += 1
        self.loss = float(self.num_steps) if self.num_steps in self._evaluated else None

    def close_step(self, _record: str, _received: Any, *, stopped: str | None = None) -> None:
        if stopped:
            self.stop(stopped)
        elif self.num_steps == self._steps.stop:
            self.outcome = outcome(self.num_steps)

    def stop(self, why: str) -> None:
        self.outcome = outcome(self.num_steps, stopped=why)


def outcome(num_steps: int, **how: str) -> Outcome:
    return Outcome(run_dir=Path(), num_steps=num_steps, stopped=how.get("stopped"))


class Scene:
    """Runs that train together on a fake engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.finished: list[str] = []
        self.closed: list[str] = []
        self.ranks = Ranks()
        monkeypatch.setattr(together, "step_log", self._opened)
        monkeypatch.setattr(together, "finish", lambda session: self.finished.append(session.name))

    @contextmanager
    def _opened(self, session: Any, _plan: object) -> Iterator[Any]:
        yield session.log
        self.closed.append(session.name)

    def run(
        self, name: str, steps: range, *, fails: int | None = None, evaluated: Sequence[int] = ()
    ) -> Any:
        def complete(request: Any, found: Any) -> str:
            assert found.result.of == request.run  # its own result, whoever shared the step
            return name

        checkpoints = SimpleNamespace(newest=lambda: None)
        folder = SimpleNamespace(path=Path(), checkpoints=checkpoints)
        recipe = SimpleNamespace(report=SimpleNamespace(notify=None))
        return SimpleNamespace(
            name=name,
            engine=self.engine,
            run=SimpleNamespace(ranks=self.ranks, dir=folder, recipe=recipe),
            log=FakeLog(steps, fails=fails, evaluated=evaluated),
            loop=SimpleNamespace(
                request=lambda number, _share: SimpleNamespace(run=f"{name}{number}"),
                complete=complete,
            ),
        )

    def train(self, *runs: Any, judge: Any = lambda *_: {}) -> list[Outcome]:
        plan: Any = None
        return together._trained(runs, plan, judge)


def test_a_run_that_ends_leaves_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    ended = scene.train(scene.run("a", range(3)), scene.run("b", range(1)))
    assert scene.engine.steps == [["a0", "b0"], ["a1"], ["a2"]]
    assert [one.num_steps for one in ended] == [3, 1]
    assert scene.finished == scene.closed == ["b", "a"]


def test_a_run_that_is_complete_is_finished_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.train(scene.run("a", range(2, 2)), scene.run("b", range(2)))
    assert scene.engine.steps == [["b0"], ["b1"]]
    assert sorted(scene.finished) == ["a", "b"]


def test_a_run_that_fails_leaves_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    failed, whole = scene.train(scene.run("a", range(3), fails=1), scene.run("b", range(3)))
    assert scene.engine.steps == [["a0", "b0"], ["b1"], ["b2"]]
    assert "it has failed" in str(failed.error)
    assert whole.is_complete
    assert scene.finished == ["b"]


def test_a_run_that_is_further_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.train(scene.run("a", range(2, 4)), scene.run("b", range(4)))
    assert scene.engine.steps == [["b0"], ["b1"], ["a2", "b2"], ["a3", "b3"]]


def test_losses_of_a_step_are_judged_together_once_all_runs_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, dict[int, float]]] = []

    def judge(step: int, losses: Mapping[int, float]) -> Mapping[int, str]:
        seen.append((step, dict(losses)))
        return {1: "is worse"} if len(losses) == 2 else {}

    scene = Scene(monkeypatch)
    resumed = scene.run("a", range(2, 4), evaluated=[2])  # evaluated before it was killed
    ended = scene.train(resumed, scene.run("b", range(4), evaluated=[2]), judge=judge)
    assert seen == [(2, {0: 7.0, 1: 2.0})]
    assert scene.engine.steps == [["b0"], ["b1"], ["a2"], ["a3"]]
    assert (ended[1].stopped, ended[1].num_steps) == ("is worse", 2)
    assert scene.finished == ["a"]


def test_a_resumed_run_stops_by_the_loss_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    run = scene.run("a", range(2, 4), evaluated=[2])
    (ended,) = scene.train(run, judge=lambda *_: {0: "is worse"})
    assert (ended.stopped, scene.engine.steps, scene.finished) == ("is worse", [], [])


def test_a_failure_of_the_engine_ends_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeEngine):
        def forward_backward_runs(self, runs: Sequence[str]) -> list[Any]:
            raise FinetuneError("the device is gone", hint="")

    scene = Scene(monkeypatch, Broken())
    with pytest.raises(FinetuneError, match="the device is gone"):
        scene.train(scene.run("a", range(3)), scene.run("b", range(3)))
    assert not scene.finished


def test_a_failure_that_other_ranks_do_not_know_is_everybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Several(Ranks):
        run_errors = (RunFailedError,)

    scene = Scene(monkeypatch)
    scene.ranks = Several()
    with pytest.raises(FinetuneError, match="it has failed"):
        scene.train(scene.run("a", range(3), fails=1), scene.run("b", range(3)))
