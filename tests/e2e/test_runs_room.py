"""The runs room in a browser: a run is started, stopped, resumed and finished from the page."""

import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tinker
from tinker import types

from finetune.errors import StudioError
from finetune.studio.launcher import started
from finetune.studio.talk import MOST_TOKENS
from tests.e2e.runs import losses, run, same_adapter
from tests.e2e.talking import talk
from tests.serving import NAME, row, save_base
from tests.serving import served as serving
from tests.studios import (
    axe_script,
    browser,
    client_status,
    serious_findings,
    served,
    write_status,
)


@pytest.mark.browser
@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed_to_the_bit_and_outlives_the_server(
    tmp_path: Path, write_recipe, machine_file: Path
) -> None:
    recipe = write_recipe(
        train={"steps": 60, "schedule": "constant"}, output={"checkpoint_every": 1000}
    )
    words = ("--machine", machine_file, f"output.dir={tmp_path / 'whole'}")
    assert run("finetune", recipe, *words) == 0
    folder = tmp_path / "runs"
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        with served(folder, tmp_path / "configs", tmp_path, machine_file) as made:
            page.goto(f"{made.studio.address}runs")
            page.select_option("#start [name=recipe]", recipe.name)
            page.fill("#start [name=name]", "one")
            page.click("#start button")
            page.wait_for_selector("#said.good:text('start: one')")
            page.click("#start button")  # a second one
            page.wait_for_selector("#said.bad:text('one is at work')")
            page.wait_for_selector("#runs td:text-is('training')", timeout=120_000)
            page.click("[aria-label='stop one']")
            page.wait_for_selector("#said.good:text('stop: one')")
            page.wait_for_selector("[aria-label='resume one']", timeout=60_000)
            done = len(losses(folder / "one"))
            assert 0 < done < 60
            saved = [path.name for path in (folder / "one" / "checkpoints").iterdir()]
            assert saved == [f"step-{done:07d}"]
            assert "Stopped after step" in page.text_content("#log")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert (scheme, serious_findings(page, axe_script())) == (scheme, [])
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.click("[aria-label='resume one']")
            page.wait_for_selector("#said.good:text('resume: one')")
        assert started(folder) is not None  # the server has ended
        with served(folder, tmp_path / "configs", tmp_path, machine_file) as made:
            page.goto(f"{made.studio.address}runs")
            page.wait_for_selector("#runs td:text-is('finished')", timeout=120_000)
        assert not problems
    assert losses(folder / "one") == losses(tmp_path / "whole")
    assert same_adapter(folder / "one", tmp_path / "whole")
    assert json.loads((folder / "one" / "report.json").read_text())


@pytest.mark.browser
@pytest.mark.slow
def test_a_plan_is_started_from_its_page_and_finishes_in_the_runs_room(
    tmp_path: Path, model_dir: Path, machine_file: Path
) -> None:
    config = json.loads((shutil.copytree(model_dir, tmp_path / "tiny") / "config.json").read_text())
    config["max_position_embeddings"] = 256
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    row = json.dumps({"prompt": "what follows 7", "completion": "8"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 1000)
    here = tmp_path / "here.json"
    here.write_text(json.dumps(json.loads(machine_file.read_text()) | {"dtype": "bfloat16"}))
    folder = tmp_path / "runs"
    with (
        browser() as chromium,
        served(folder, tmp_path / "configs", tmp_path, here) as made,
    ):
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(made.studio.address)
        page.wait_for_selector("#said:text('It is not started here: the plan is for rtx4090')")
        assert page.is_disabled("#start-plan")
        page.select_option("[name=model]", "other")
        page.fill("[name=hub_id]", "tiny")
        page.locator("[name=hub_id]").blur()
        page.select_option("[name=card]", "this machine")
        page.locator("[name=seq_len]").press("Home")
        page.locator("[name=tokens_per_step]").press("Home")
        page.wait_for_selector("#start-plan:enabled")
        page.click("#start-plan")
        page.wait_for_selector("#said.bad:text('no file of rows is given')")
        page.fill("[name=rows]", "rows.jsonl")
        page.fill("[name=name]", "from-a-plan")
        page.locator("[name=name]").blur()
        page.wait_for_selector("#recipe:text('name: from-a-plan')")
        shown = page.text_content("#recipe")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert (scheme, serious_findings(page, axe_script())) == (scheme, [])
        page.wait_for_selector("#start-plan:enabled")
        page.click("#start-plan")
        page.wait_for_url("**/runs#run=from-a-plan")
        page.wait_for_selector("#runs td:text-is('finished')", timeout=120_000)
        assert page.inner_text("#name") == "from-a-plan"
        assert not problems
    assert (tmp_path / "from-a-plan.yaml").read_text() == shown
    assert losses(folder / "from-a-plan")


@pytest.mark.browser
@pytest.mark.slow
def test_a_finished_run_answers_what_sluice_chat_answers(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    assert talk(["what follows 7"], monkeypatch, finished, num_new=MOST_TOKENS) == 0
    expected = capfd.readouterr().out.strip()
    with (
        browser() as chromium,
        served(finished.parent, tmp_path / "configs") as made,
    ):
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"{made.studio.address}runs#run={finished.name}")
        page.fill("#chat [name=said]", "what follows 7")
        page.click("#chat button")
        page.wait_for_selector("#chat button:disabled")
        page.wait_for_selector("#chat button:not(:disabled)", timeout=120_000)
        paragraphs = page.locator("#talk p").all_text_contents()
        assert [one.strip() for one in paragraphs] == ["what follows 7", expected]
        page.fill("#chat [name=said]", "/reset")
        page.press("#chat [name=said]", "Enter")
        page.wait_for_selector("#talk p:text-is('/reset')")
        page.wait_for_selector("#chat button:not(:disabled)")
        assert page.locator("#talk .bad").count() == 0
        page.fill("#chat [name=said]", "/image /etc/passwd")
        page.click("#chat button")
        page.wait_for_selector("#talk .bad:text('names a file')")
        assert serious_findings(page, axe_script()) == []
        page.click(f"[aria-label='rows of {finished.name}']")
        page.wait_for_selector("text=what follows")
        assert serious_findings(page, axe_script()) == []
        held = made.studio.talk
        left = held.answer(finished.name, "what follows 8")
        next(left)
        (busy,) = held.answer(finished.name, "what follows 7")
        assert busy == ("problem", "run is answering: one conversation is held at a time")
        with pytest.raises(StudioError, match="run is answering"):
            held.end()
        left.close()  # as a page that is closed: nothing of its answer is in the next one
        parts = list(held.answer(finished.name, "what follows 7"))
        assert "".join(text for kind, text in parts if kind == "say").strip() == expected
        held.end()
        assert not multiprocessing.active_children()[1:]  # but the one that plans


def trained(address: str, key: str) -> str:
    """Train for a step, and return the name of the model."""
    service = tinker.ServiceClient(base_url=address, api_key=key)
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()
    data = [row([5, 6, 7], [6, 7, 8], weights=[1.0, 1.0, 1.0])]
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams()).result()
    return client.model_id


@pytest.mark.browser
@pytest.mark.slow
def test_a_server_s_clients_and_the_rewards_of_a_recipe_are_shown(
    tmp_path: Path, machine_file: Path
) -> None:
    folder = tmp_path / "runs"
    old = write_status(folder / "old", client_status("a:train:0"), num_waiting=1)
    written_s = old.stat().st_mtime - 60
    os.utime(old, (written_s, written_s))
    (folder / "math_rl").mkdir()
    rows = [{"step": n, "env/all/reward/total": n / 10} for n in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "math_rl" / "metrics.jsonl").write_text(text)
    base = save_base(tmp_path / "base")
    with (
        serving(base, folder / "serve", machine_file) as server,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes,
    ):
        client = processes.submit(trained, server.address, server.key).result()
        with browser() as chromium, served(folder, tmp_path / "configs") as made:
            page = chromium.new_page(viewport={"width": 390, "height": 844})
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(f"{made.studio.address}runs")
            found = page.locator("#clients tr", has_text=client)
            found.locator("td:nth-child(4):text-is('1')").wait_for(timeout=60_000)
            cells = found.locator("td").all_text_contents()
            assert cells[:5] == ["serve", client, "4", "1", "3"]
            assert float(cells[5]) > 1
            said = page.locator("#servers p").all_text_contents()
            assert said[0].startswith("old: Qwen/Qwen3-8B. Clients that train: 1; ")
            assert "it was killed" in said[0]
            assert said[1].startswith(f"serve: {NAME}. Clients that train: 1; ")
            assert "passes to train: 1 (" in said[1]
            shown = page.locator("#rewards td").all_text_contents()
            assert shown == ["math_rl", "", "4", "0.0000", "0.3000", "0.3000"]
            assert page.get_attribute("#rewards svg", "aria-label") == (
                "reward of math_rl: 0.000, at last 0.300"
            )
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert (scheme, serious_findings(page, axe_script())) == (scheme, [])
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            old.unlink()
            page.locator("#servers p").nth(1).wait_for(state="detached")
            assert not problems
