"""Clients of a server: order, room, what is promised, and what becomes of those that are gone."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import CheckpointError
from finetune.serve.base import Base
from finetune.serve.checkpoints import Checkpoints
from tests.served_here import NUM_SAMPLERS, Here, datum, opened_here, served_here, training


@pytest.fixture(scope="module", name="base")
def a_base() -> Iterator[Base]:
    with opened_here() as found:
        yield found


@pytest.fixture(name="here")
def a_server(base: Base, tmp_path: Path) -> Iterator[Here]:
    with served_here(base, tmp_path) as found:
        yield found


def rows(number: int) -> list[Any]:
    return [datum([3 + number, 4, 5], weights=[1.0, 0.5 * number, -1.0])]


def values(here: Here, model: str, name: str) -> dict[str, torch.Tensor]:
    path = here.wait(here.of_model("save_weights", model, path=name))["path"]
    return dict(here.sessions.checkpoints.load(path, has_moments=True).values)


# ------------------------------------------------------------------------------------- order


def test_requests_are_done_by_number_and_not_as_they_come(here: Here) -> None:
    """A step that comes first waits for the rows before it."""
    one, other = here.model(), here.model()
    for number in (1, 2):
        here.scored(here.send(training(one, number, rows(number))))
    here.wait(here.step(one, seq_id=3, learning_rate=0.1))
    step = here.step(other, seq_id=3, learning_rate=0.1)
    second = here.send(training(other, 2, rows(2)))
    assert here.poll(step.json()["request_id"]).status_code == 408
    first = here.send(training(other, 1, rows(1)))
    here.scored(first), here.scored(second), here.wait(step)
    here.numbers = {one: 3, other: 3}
    found, expected = values(here, other, "a"), values(here, one, "a")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_request_that_is_sent_again_is_done_once(here: Here) -> None:
    model = here.model()
    sent = [here.send(training(model, 1, rows(1))) for _ in range(3)]
    assert len({one.text for one in sent}) == 1
    first = here.wait(sent[0])
    assert here.wait(sent[1]) == first
    here.send(training(model, 1, rows(1)))
    norm = here.wait(here.step(model, seq_id=2, learning_rate=0.0))["metrics"]["grad_norm:mean"]
    other = here.model()
    here.scored(here.send(training(other, 1, rows(1))))
    again = here.wait(here.step(other, seq_id=2, learning_rate=0.0))["metrics"]["grad_norm:mean"]
    assert norm == again


def test_another_request_under_a_number_is_refused(here: Here) -> None:
    """So are two clients that use the same ids: the second has other rows."""
    model = here.model()
    here.scored(here.send(training(model, 1, rows(1))))
    for other in (here.send(training(model, 1, rows(2))), here.step(model, seq_id=1)):
        assert other.status_code == 400
        assert f"another request came as {model}:1" in other.text
    session = model.split(":")[0]
    again = here.post("create_model", session_id=session, model_seq_id=0, base_model="other")
    assert again.status_code == 400
    assert "another request" in again.text


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_count_from_one(here: Here, number: int) -> None:
    model = here.model()
    assert here.send(training(model, number)).status_code == 400


def test_requests_of_a_number_that_was_forgotten_are_gone(base: Base, tmp_path: Path) -> None:
    """Answers that were sent are kept for a while, in case they were lost on the way."""
    with served_here(base, tmp_path, kept_bytes=1) as here:
        model = here.model()
        for number in (1, 2):
            here.scored(here.send(training(model, number, rows(number))))
        assert here.poll(f"{model}:1").status_code == 410
        assert here.send(training(model, 1, rows(1))).status_code == 410
        assert here.post(
            "create_model", session_id=model.split(":")[0], model_seq_id=0, base_model="tiny/qwen3"
        ).status_code in (400, 410)
        here.wait(here.step(model, seq_id=3))


def test_what_ended_sessions_were_sent_makes_no_room_scarce(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, kept_bytes=6000) as here:
        for _ in range(4):
            session = here.begin()
            model = here.model(session)
            here.scored(here.send(training(model, 1)))
            here.http.post(f"/api/v1/sessions/{session}/finish")
        model = here.model()
        here.scored(here.send(training(model, 1)))
        here.wait(here.step(model, seq_id=2))
        assert here.poll(f"{model}:1").status_code == 200
        promises = here.sessions.promises
        assert promises._sent_bytes == sum(num_bytes for _, num_bytes in promises._sent) <= 6000


# ---------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("loss", ["stable_reinforce", "no_such_loss", ""])
def test_a_step_never_trains_on_a_part(here: Here, loss: str) -> None:
    """The step that follows rows which were refused fails, and clears what was added."""
    model = here.model()
    before = values(here, model, "before")
    here.scored(here.train(model))
    why = here.failed(here.train(model, loss=loss))
    assert repr(loss) in why
    assert "importance_sampling" in why
    assert "before this step" in here.failed(here.step(model, learning_rate=1.0))
    after = values(here, model, "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    here.scored(here.train(model))
    assert "metrics" in here.wait(here.step(model, learning_rate=1.0))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("save_weights", {"path": "../out"}),
        ("save_weights_for_sampler", {"path": "a/b"}),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}),
    ],
)
def test_what_fails_and_trains_nothing_fails_no_step(here: Here, what: str, said: Any) -> None:
    model = here.model()
    here.scored(here.train(model))
    assert here.wait(here.of_model(what, model, **said))["category"] == "user"
    assert "metrics" in here.wait(here.step(model))


def test_scoring_that_fails_fails_no_step(here: Here) -> None:
    model = here.model()
    here.scored(here.train(model))
    here.failed(here.train(model, forward_only=True, loss="stable_reinforce"))
    assert "metrics" in here.wait(here.step(model))


def test_a_step_without_rows_is_refused(here: Here) -> None:
    assert "no gradients" in here.failed(here.step(here.model()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", "NaN"),
        ("learning_rate", "Infinity"),
        ("beta1", 1.0),
        ("beta2", 1.5),
        ("beta1", -0.1),
        ("eps", -1.0),
        ("weight_decay", "NaN"),
        ("weight_decay", -0.1),
        ("grad_clip_norm", "NaN"),
    ],
)
def test_settings_of_a_step_that_no_optimizer_takes_are_refused(
    here: Here, name: str, value: Any
) -> None:
    model = here.model()
    before = values(here, model, "before")
    here.scored(here.train(model))
    assert name in here.failed(here.step(model, **{name: value}))
    after = values(here, model, "after")
    assert all(torch.equal(before[one], after[one]) for one in before)


def test_gradients_are_not_clipped_at_norms_of_zero_or_below(here: Here) -> None:
    """As the API says of its other optimizer."""
    found = []
    for norm in (0.0, -1.0):
        model = here.model()
        here.scored(here.train(model))
        here.wait(here.step(model, learning_rate=0.1, grad_clip_norm=norm))
        found.append(values(here, model, "a"))
    assert all(torch.equal(found[0][one], found[1][one]) for one in found[0])


def test_other_optimizers_are_refused(here: Here) -> None:
    model = here.model()
    here.scored(here.train(model))
    other = {"type": "dimuon", "learning_rate": 0.1}
    asked = here.post("optim_step", model_id=model, seq_id=2, optimizer_params=other)
    here.numbers[model] = 2
    assert "AdamW" in here.failed(asked)


# -------------------------------------------------------------------------------------- room


def test_a_client_that_is_silent_is_saved_and_gives_way(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, gives_way_s=0.3) as here:
        models = []
        for number in range(2):
            models.append(here.model())
            here.scored(here.train(models[number]))
            here.wait(here.step(models[number]))
        time.sleep(0.4)
        here.post("session_heartbeat", session_id=models[1].split(":")[0])
        model, promised = here.create(here.begin())
        assert here.wait(promised)["model_id"] == model
        gone = here.train(models[0])
        assert gone.status_code == 410
        (saved,) = list(here.sessions.checkpoints)
        assert saved.path == f"tinker://{models[0]}/weights/left"
        assert saved.num_steps == 1
        assert here.notes[-1] == f"a client is silent: {models[0]} is saved as {saved.path}"
        here.scored(here.train(models[1]))


def test_clients_wait_for_a_slot_and_are_shown_why(here: Here) -> None:
    first, _ = here.model(), here.model()
    _, promised = here.create(here.begin())
    waits = here.poll(promised)
    assert waits.status_code == 408
    assert waits.json()["queue_state"] == "paused_capacity"
    here.http.post(f"/api/v1/sessions/{first.split(':')[0]}/finish")
    assert "model_id" in here.wait(promised)


@pytest.mark.parametrize("num_models", [1, 2])
def test_clients_that_go_while_their_models_begin_leave_their_slots(
    here: Here, num_models: int
) -> None:
    for _ in range(4):
        here.gate.clear()
        session = here.begin()
        for number in range(num_models):
            here.create(session, number)
        time.sleep(0.02)
        done = threading.Thread(target=here.http.post, args=(f"/api/v1/sessions/{session}/finish",))
        done.start()
        time.sleep(0.05)
        here.gate.set()
        done.join()
        assert not list(here.sessions.promises)
    for _ in range(2):
        here.model()


def test_clients_that_go_as_there_is_room_take_none(here: Here) -> None:
    """At whichever turn of the event loop they go."""
    here.model(), here.model()

    async def gone(session: str, promised: str, turns: int) -> bool:
        answer = here.sessions.promises.find(promised).answer
        await here.sessions._slots.tell()
        for _ in range(turns):
            await asyncio.sleep(0)
        await here.sessions.finish(session)
        await asyncio.wait([answer])
        return answer.cancelled()

    for turns in range(8):
        session = here.begin()
        _, promised = here.create(session)
        time.sleep(0.02)
        assert here.run(gone, session, promised, turns), turns


def test_checkpoints_that_do_not_load_leave_their_slot(here: Here) -> None:
    """The base has changed since: a value has another shape."""
    model = here.model()
    path = here.wait(here.of_model("save_weights", model, path="a"))["path"]
    state = here.sessions.checkpoints.load(path, has_moments=True)
    record = here.sessions.checkpoints.find(path)
    wrong = {name: value[:, :1].clone() for name, value in state.values.items()}
    other = record.model_copy(update={"name": "b"})
    here.sessions.checkpoints.save(other, type(state)(values=wrong, moments=state.moments))
    session = here.begin()
    for number in range(4):
        asked = here.post(
            "load_weights",
            session_id=session,
            model_seq_id=number,
            path=other.path,
            optimizer=True,
        )
        assert "error" in here.wait(asked)
    here.model()


class Slow(Checkpoints):
    """A disk that is slow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_read = threading.Event()

    def load(self, path: str, *, has_moments: bool) -> Any:
        assert self.may_read.wait(10.0)
        return super().load(path, has_moments=has_moments)


def test_while_a_checkpoint_is_read_its_model_waits_and_others_do_not(
    base: Base, tmp_path: Path
) -> None:
    with served_here(base, tmp_path / "a") as here:
        here.sessions.checkpoints = slow = Slow(tmp_path / "b")
        model, other = here.model(), here.model()
        first = here.wait(here.of_model("save_weights", model, path="a"))["path"]
        here.scored(here.train(model))
        here.wait(here.step(model, learning_rate=0.1))

        def load_and_save(name: str) -> list[str]:
            asked = [
                here.of_model("load_weights", model, path=first, optimizer=True),
                here.of_model("save_weights", model, path=name),
            ]
            here.scored(here.train(other))
            names = [one.json()["request_id"] for one in asked]
            assert [here.poll(one).status_code for one in names] == [408, 408]
            return names

        loads, saves = load_and_save("b")
        slow.may_read.set()
        assert here.wait(loads)["path"] == first
        second = here.wait(saves)["path"]
        states = [slow.load(one, has_moments=True).values for one in (first, second)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert slow.find(second).num_steps == 0
        slow.may_read.clear()
        names = load_and_save("c")
        here.http.post(f"/api/v1/sessions/{model.split(':')[0]}/finish")
        slow.may_read.set()
        assert [here.poll(one).status_code for one in names] == [410, 410]
        here.model()


def test_a_client_that_waits_and_goes_does_not_undo_what_it_waits_for(
    base: Base, tmp_path: Path
) -> None:
    """Who gives way is saved, even if the one that needed its slot is gone by then."""
    with served_here(base, tmp_path, gives_way_s=0.2) as here:
        models = [here.model(), here.model()]
        here.scored(here.train(models[0]))
        here.wait(here.step(models[0]))
        time.sleep(0.3)
        here.post("session_heartbeat", session_id=models[1].split(":")[0])
        here.gate.clear()
        session = here.begin()
        here.create(session)
        here.until(lambda: models[0] not in here.sessions._models)
        done = threading.Thread(target=here.http.post, args=(f"/api/v1/sessions/{session}/finish",))
        done.start()
        time.sleep(0.1)
        here.gate.set()
        done.join()
        here.until(lambda: [one.name for one in here.sessions.checkpoints] == ["left"])
        here.post("session_heartbeat", session_id=models[1].split(":")[0])
        here.model()


class Full(Checkpoints):
    """A disk that is full."""

    is_full = False

    def save(self, record: Any, state: Any) -> None:
        if self.is_full:
            raise CheckpointError("the disk is full", hint="free space")
        super().save(record, state)


def test_a_full_disk_fails_the_request_and_keeps_no_slot(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path / "a", gives_way_s=0.2) as here:
        full = Full(tmp_path / "b")
        here.sessions.checkpoints = full
        models = [here.model(), here.model()]
        for model in models:
            here.scored(here.train(model))
            here.wait(here.step(model))
        full.is_full = True
        assert "the disk is full" in here.failed(here.of_model("save_weights", models[0], path="a"))
        here.scored(here.train(models[0]))
        time.sleep(0.3)
        here.model()
        assert any("the disk is full" in note for note in here.notes)


def test_work_in_flight_ends_with_its_session(here: Here) -> None:
    model = here.model()
    session = model.split(":")[0]
    here.gate.clear()
    for _ in range(20):
        here.train(model)
    here.step(model)
    here.send(training(model, 40))
    sampler = here.sampler(session)
    for number in range(10):
        here.sample(sampler, number)
    done = threading.Thread(target=here.http.post, args=(f"/api/v1/sessions/{session}/finish",))
    done.start()
    time.sleep(0.1)
    here.gate.set()
    done.join()
    assert here.poll(f"{model}:1").status_code == 410
    assert here.train(model).status_code == 410
    assert here.sample(sampler, 20).status_code == 410
    assert not list(here.sessions.promises)
    assert not list(here.sessions.checkpoints)
    for _ in range(2):
        here.model()


def test_a_server_that_ends_saves_clients_whose_work_is_in_flight(
    base: Base, tmp_path: Path
) -> None:
    with served_here(base, tmp_path) as here:
        model = here.model()
        here.scored(here.train(model))
        here.wait(here.step(model))
        here.gate.clear()
        for _ in range(5):
            here.train(model)
        here.step(model)
        here.sample(here.sampler(model.split(":")[0]), 1)
    (saved,) = list(Checkpoints(tmp_path))
    assert (saved.name, saved.num_steps) == ("left", 1)
    assert here.notes == [f"the server ends: {model} is saved as {saved.path}"]


def test_sessions_that_are_silent_are_freed(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, frees_s=0.2) as here:
        watch = here.http.portal.start_task_soon(here.sessions.watch)  # type: ignore[union-attr]
        model = here.model()
        here.scored(here.train(model))
        here.wait(here.step(model))
        at = f"/api/v1/sessions/{model.split(':')[0]}"
        here.until(lambda: here.http.get(at).status_code == 410)  # who looks is not the client
        assert not here.sessions._sessions
        here.until(lambda: [one.name for one in here.sessions.checkpoints] == ["left"])
        watch.cancel()


# ---------------------------------------------------------------------------------- samplers


def test_more_samplers_than_slots_take_turns(here: Here) -> None:
    session = here.begin()
    samplers = [here.sampler(session, number) for number in range(NUM_SAMPLERS + 3)]
    asked = [here.sample(one, number) for number in range(3) for one in samplers]
    for one in asked:
        assert isinstance(here.wait(one), bytes)


def test_prompts_that_wait_for_a_slot_when_their_session_ends_take_none(here: Here) -> None:
    session = here.begin()
    here.gate.clear()
    for number in range(NUM_SAMPLERS + 2):
        sampler = here.sampler(session, number)
        for prompt in range(3):
            here.sample(sampler, prompt)
    time.sleep(0.05)
    done = threading.Thread(target=here.http.post, args=(f"/api/v1/sessions/{session}/finish",))
    done.start()
    time.sleep(0.1)
    here.gate.set()
    done.join()
    other = here.begin()
    for number in range(NUM_SAMPLERS):
        here.wait(here.sample(here.sampler(other, number), 1))


def test_a_number_of_a_sampler_is_used_once(here: Here) -> None:
    model = here.model()
    session = model.split(":")[0]
    kind = "save_weights_for_sampler"
    first = here.wait(here.of_model(kind, model, sampling_session_seq_id=7))
    here.wait(here.sample(first["sampling_session_id"], 1))
    for _ in range(4):
        again = here.of_model(kind, model, sampling_session_seq_id=7)
        assert "7" in here.failed(again)
    other = here.post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=7,
        base_model="tiny/qwen3",
    )
    assert other.status_code == 400
    here.wait(here.sample(first["sampling_session_id"], 2))


def test_the_newest_samplers_without_a_name_are_kept(here: Here) -> None:
    model = here.model()
    kind = "save_weights_for_sampler"
    found = [
        here.wait(here.of_model(kind, model, sampling_session_seq_id=number)) for number in range(7)
    ]
    ids = [one["sampling_session_id"] for one in found]
    assert here.sample(ids[0], 1).status_code == 410
    here.wait(here.sample(ids[-1], 1))


def test_samplers_of_checkpoints_take_no_memory_while_nobody_asks(here: Here) -> None:
    """A recipe makes one after each checkpoint, and ends none."""
    model = here.model()
    session = model.split(":")[0]
    path = here.wait(here.of_model("save_weights_for_sampler", model, path="a"))["path"]
    samplers = [here.sampler(session, number, model_path=path) for number in range(8)]
    answers = {here.wait(here.sample(one, 1, params={"seed": 5})) for one in samplers}
    assert len(answers) == 1
    held = [one for one in here.sessions._samplers if one.values is not None]
    assert len(held) <= NUM_SAMPLERS


def test_the_same_sampler_may_be_asked_for_twice_at_once(here: Here) -> None:
    model = here.model()
    session = model.split(":")[0]
    path = here.wait(here.of_model("save_weights_for_sampler", model, path="a"))["path"]
    threads = [
        threading.Thread(target=here.sampler, args=(session, 3), kwargs={"model_path": path})
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    here.wait(here.sample(f"{session}:sample:3", 1))


# ------------------------------------------------------------------------------------ floods


def test_a_flood_of_prompts_is_held_back(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, num_pending=20) as here:
        sampler = here.sampler(here.begin())
        here.gate.clear()
        asked = [here.sample(sampler, number) for number in range(60)]
        assert [one.status_code for one in asked] == [200] * 20 + [429] * 40
        here.gate.set()
        for one in asked[:20]:
            here.wait(one)
        here.wait(here.sample(sampler, 60))


@pytest.mark.parametrize("is_in_order", [True, False])
def test_a_flood_of_rows_is_held_back(base: Base, tmp_path: Path, is_in_order: bool) -> None:
    with served_here(base, tmp_path, num_pending=10) as here:
        model = here.model()
        here.gate.clear()
        numbers = range(1, 61) if is_in_order else range(60, 1, -1)
        codes = [here.send(training(model, number)).status_code for number in numbers]
        assert set(codes) == {200, 429}
        assert codes.count(200) <= 20
        here.gate.set()
        first = here.send(training(model, 1))
        if first.status_code == 200:
            here.wait(first)
        assert "model_id" in here.wait(here.create(here.begin())[1])


def test_answers_that_nobody_fetches_are_bounded(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, num_pending=10) as here:
        sampler = here.sampler(here.begin())
        codes = []
        for number in range(200):
            codes.append(here.sample(sampler, number).status_code)
            if codes[-1] == 429:
                break
            here.until(lambda: here.sessions.sampler(sampler).num_pending == 0)
        assert codes[-1] == 429


def test_bodies_that_wait_are_bounded(base: Base, tmp_path: Path) -> None:
    """Those that are next are taken: others wait for them."""
    with served_here(base, tmp_path, waiting_bytes=2000) as here:
        model = here.model()
        codes = [here.send(training(model, number)).status_code for number in range(60, 1, -1)]
        assert set(codes) == {200, 429}
        here.scored(here.send(training(model, 1)))


def test_sessions_are_bounded(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, num_sessions=3) as here:
        for _ in range(3):
            here.begin()
        said: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        assert here.post("create_session", **said).status_code == 429


# ------------------------------------------------------------------------------------- polls


def test_a_poll_is_held(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, hold_s=0.5) as here:
        model = here.model()
        here.gate.clear()
        asked = here.train(model).json()["request_id"]
        begun_s = time.monotonic()
        found = here.poll(asked)
        assert time.monotonic() - begun_s > 0.4
        assert found.status_code == 408
        assert (found.json()["type"], found.json()["queue_state"]) == ("try_again", "active")
        here.gate.set()
        here.scored(asked)


@pytest.mark.parametrize("name", ["a", "", "x:train:0:1", "../../etc/passwd", "\0", 300 * "y"])
def test_unknown_answers_are_gone(here: Here, name: str) -> None:
    assert here.poll(name).status_code == 410


def test_a_poll_that_is_held_ends_with_its_session(base: Base, tmp_path: Path) -> None:
    with served_here(base, tmp_path, hold_s=20.0) as here:
        model = here.model()
        here.gate.clear()
        asked = here.train(model).json()["request_id"]
        found: list[Any] = []
        poll = threading.Thread(target=lambda: found.append(here.poll(asked)))
        poll.start()
        time.sleep(0.1)
        done = threading.Thread(
            target=here.http.post, args=(f"/api/v1/sessions/{model.split(':')[0]}/finish",)
        )
        done.start()
        time.sleep(0.1)
        here.gate.set()
        done.join()
        poll.join(5)
        assert found[0].status_code in (408, 410) or "error" in found[0].json()
        assert here.poll(asked).status_code == 410


def test_cancelled_polls_cancel_no_request(here: Here) -> None:
    model = here.model()
    here.gate.clear()
    asked = here.train(model).json()["request_id"]

    async def poll() -> None:
        promises = here.sessions.promises
        task = asyncio.create_task(promises.wait(promises.find(asked)))
        await asyncio.sleep(0.05)
        task.cancel()

    here.run(poll)
    here.gate.set()
    here.scored(asked)
