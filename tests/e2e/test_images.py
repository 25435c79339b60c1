"""Rows with images, from a recipe to an adapter, against plain transformers from pixels."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText

from finetune.images import computing
from finetune.images.computing import Tower
from finetune.images.features import Features
from finetune.images.tower import computed, tower_digest
from finetune.recipe.sections import ModelSection
from finetune.report.pages import NUM_SAMPLES, run_page
from finetune.studio.talk import MOST_TOKENS
from tests.e2e.runs import adapter, losses, rows_of, run, same_adapter
from tests.e2e.seeing import draw, save_seeing_model, seeing_recipe, small_family
from tests.e2e.talking import talk
from tests.image_processors import plain_processor
from tests.studios import axe_script, browser, serious_findings, served

TYPES = ("gemma3", "qwen3_vl")
Images = list[Image.Image]


def asked_and_told(row: dict[str, Any], folder: Path, model_type: str) -> tuple[str, str, Images]:
    """Return what the template writes of a row's question and of its answer, and its images."""
    asked, told = (turn["content"] for turn in row["messages"])
    family = small_family(model_type)
    place = family.around.format(family.tokens[1 if model_type == "gemma3" else 0])
    images, said = list[Image.Image](), ""
    parts: list[Any] = [{"text": asked}] if isinstance(asked, str) else asked
    for part in parts:
        said += part.get("text", place)
        if "image_url" in part:
            images.append(Image.open(folder / part["image_url"]["url"]).convert("RGB"))
    return f"user: {said}</s>assistant: ", f"{told}</s>", images


def encoded(
    row: dict[str, Any], folder: Path, model_type: str, processor: Any
) -> dict[str, torch.Tensor]:
    """Return inputs and labels of a row, as transformers' own processor makes them."""
    asked, told, images = asked_and_told(row, folder, model_type)
    given = {"images": [images]} if images else {}
    inputs = processor(
        text=[asked + told],
        **given,
        add_special_tokens=False,
        return_tensors="pt",
        return_mm_token_type_ids=True,
    )
    num = len(processor.tokenizer(told, add_special_tokens=False)["input_ids"])
    labels = inputs["input_ids"].clone()
    labels[:, :-num] = -100
    return {**inputs, "labels": labels}


def plain_inputs(folder: Path, model_type: str) -> list[dict[str, torch.Tensor]]:
    """Return inputs and labels of all rows."""
    processor = plain_processor(small_family(model_type), folder / "model")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [encoded(json.loads(line), folder, model_type, processor) for line in lines]


def plain_step(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return loss and gradient norm over the answers of all rows, each by itself, from pixels."""
    num, loss = sum(int((row["labels"] >= 0).sum()) for row in rows), 0.0
    for row in rows:
        inputs = {name: value for name, value in row.items() if name != "labels"}
        logits_TV = model(**inputs, use_cache=False).logits[0, :-1]
        part = nn.functional.cross_entropy(logits_TV, row["labels"][0, 1:], reduction="sum") / num
        part.backward()
        loss += part.item()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return loss, float(torch.stack(norms).norm())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_step_is_that_of_plain_transformers_from_pixels(
    model_type: str, packing: bool, tmp_path: Path, machine_file: Path
) -> None:
    one_step = {"steps": None, "epochs": 1, "lr": 1e-9}
    recipe = seeing_recipe(tmp_path / "it", model_type, data={"packing": packing}, train=one_step)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "it/model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "it/run/adapter", is_trainable=True).eval()
    loss, norm = plain_step(model, plain_inputs(tmp_path / "it", model_type))
    (row,) = rows_of(tmp_path / "it/run")
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


class Counted:
    """Counts the images that a tower looks at, and may fail as it begins one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self.most = 0, 1_000
        monkeypatch.setattr(computing, "computed", self._computed)

    def _computed(self, *args: Any, **kwargs: Any) -> Features:
        if self.num == self.most:
            raise KeyboardInterrupt
        self.num += 1
        return computed(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_each_image_is_looked_at_once_also_after_a_stop(
    tmp_path: Path,
    machine_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = seeing_recipe(tmp_path / "it", "gemma3", output={"checkpoint_every": 1})
    counted = Counted(monkeypatch)
    counted.most = 2
    assert run("finetune", recipe, "--machine", machine_file) != 0
    assert counted.num == 2
    counted.most = 1_000
    assert run("finetune", recipe, "--machine", machine_file, "--overwrite") == 0
    assert counted.num == 6  # of 6 distinct ones in 24 rows
    assert "Encoded 4 images in" in " ".join(capsys.readouterr().out.split())
    taken = json.loads((tmp_path / "it/run/images.json").read_text())
    assert (taken["num_images"], taken["num_encoded"]) == (6, 4)
    whole, shown = adapter(tmp_path / "it/run"), losses(tmp_path / "it/run")
    shutil.rmtree(tmp_path / "it/run/checkpoints/step-0000002")
    shutil.rmtree(tmp_path / "it/run/adapter")
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert counted.num == 6
    assert json.loads((tmp_path / "it/run/images.json").read_text()) == taken
    assert losses(tmp_path / "it/run") == shown
    assert all(torch.equal(adapter(tmp_path / "it/run")[key], one) for key, one in whole.items())
    Image.new("RGB", (32, 32)).save(tmp_path / "it/pictures/0.png")  # in the place of another
    assert run("finetune", recipe, "--machine", machine_file, "--overwrite") == 0
    assert counted.num == 7
    assert losses(tmp_path / "it/run") != shown
    assert "pictures/0.png has changed since" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_pair_of_answers_to_an_image_is_learned_as_plain_transformers_would(
    model_type: str, tmp_path: Path, machine_file: Path
) -> None:
    recipe = seeing_recipe(
        tmp_path / "it",
        model_type,
        objective={"method": "dpo", "beta": 0.5},
        train={"steps": None, "epochs": 1, "lr": 1e-9, "micro_batch_size": 24},
    )
    rows = [json.loads(line) for line in (tmp_path / "it/rows.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": asked[:-1], "chosen": asked[-1:], "rejected": [{**asked[-1], "content": "no"}]}
        for asked in (row["messages"] for row in rows)
    ]
    (tmp_path / "it/rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    assert run("finetune", recipe, "--machine", machine_file) == 0
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "it/model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "it/run/adapter", is_trainable=True).eval()
    processor = plain_processor(small_family(model_type), tmp_path / "it/model")
    total = torch.tensor(0.0)
    for pair in pairs:
        sums = []
        for side in ("chosen", "rejected"):
            row = {"messages": [*pair["prompt"], *pair[side]]}
            inputs = encoded(row, tmp_path / "it", model_type, processor)
            labels_T = inputs.pop("labels")[0, 1:]
            logits_TV = model(**inputs, use_cache=False).logits[0, :-1]
            losses_T = nn.functional.cross_entropy(logits_TV, labels_T, reduction="none")
            sums.append(-losses_T.sum())
        margin = sums[0] - sums[1]
        total = total - nn.functional.logsigmoid(0.5 * (margin - margin.detach())) / len(pairs)
    total.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    (step,) = rows_of(tmp_path / "it/run")
    assert step["loss"] == pytest.approx(float(total), abs=1e-6)
    assert step["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_runs_over_one_stream_with_images_are_each_what_they_are_alone(
    tmp_path: Path, machine_file: Path
) -> None:
    recipe = seeing_recipe(tmp_path / "it", "qwen3_vl")
    words = ("--machine", machine_file)
    assert run("sweep", recipe, "train.lr=0.01,0.001", *words) == 0
    for lr in ("0.01", "0.001"):
        alone = tmp_path / f"alone-{lr}"
        assert run("finetune", recipe, f"train.lr={lr}", f"output.dir={alone}", *words) == 0
        assert same_adapter(tmp_path / f"it/run/lr-{lr}", alone)


@pytest.mark.filterwarnings("ignore")
def test_a_tower_that_is_too_large_is_streamed_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ModelSection(path=str(save_seeing_model(tmp_path / "model", "qwen3_vl")))
    whole = Tower(model=section, seed=0, device=torch.device("cpu"))
    processor = plain_processor(small_family("qwen3_vl"), tmp_path / "model")
    image = Image.open(draw(tmp_path / "pictures")[1]).convert("RGB")
    inputs = processor.image_processor(images=[image], return_tensors="pt")
    expected = computed(whole.loaded(), inputs)
    monkeypatch.setattr(computing, "free_bytes", lambda _device: 0)
    streamed = whole.loaded()
    assert {p.device.type for p in streamed.model.visual.parameters()} == {"meta"}
    found = computed(streamed, inputs)
    for one, other in zip(
        (found.rows_ND, *found.layers), (expected.rows_ND, *expected.layers), strict=True
    ):
        assert torch.equal(one, other)


NUM_NEW = 11  # of samples: the longest answer is 7 letters and an end, and 4 are spare


@pytest.fixture(scope="module", params=TYPES)
def seen(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    machine_file: Path,
) -> Iterator[tuple[str, Path]]:
    """Return a type of model, and a folder with a finished run of one; its features are kept."""
    folder = tmp_path_factory.mktemp("seen")
    recipe = seeing_recipe(
        folder / "it",
        request.param,
        data={"eval_frac": 0.3},
        train={"lr": 3e-3},
        report={"samples": 6},
    )
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert run("finetune", recipe, "--machine", machine_file) == 0
        yield request.param, folder / "it"


class PlainAnswers:
    """A model's answers from pixels, by transformers and peft alone."""

    def __init__(self, model_type: str, folder: Path, *, has_adapter: bool = True) -> None:
        family = small_family(model_type)
        self.processor = plain_processor(family, folder / "model")
        self.place = family.around.format(family.tokens[1 if model_type == "gemma3" else 0])
        model: Any = AutoModelForImageTextToText.from_pretrained(
            folder / "model", dtype=torch.float32
        )
        tokenizer, own_end = self.processor.tokenizer, model.generation_config.eos_token_id
        self._ends = [tokenizer.eos_token_id, *([] if own_end is None else [own_end])]
        if has_adapter:
            model = PeftModel.from_pretrained(model, str(folder / "run" / "adapter"))
        self.model = model.eval()

    def to(self, text: str, images: Images, *, num_new: int) -> str:
        """Return what follows a text with images."""
        given = {"images": [images]} if images else {}
        inputs = self.processor(
            text=[text],
            **given,
            add_special_tokens=False,
            return_tensors="pt",
            return_mm_token_type_ids=True,
        )
        (ids,) = self.model.generate(
            **inputs, max_new_tokens=num_new, do_sample=False, eos_token_id=self._ends
        )
        new = ids[inputs["input_ids"].shape[1] :].tolist()
        new = new[:-1] if new[-1] in self._ends else new
        return str(self.processor.tokenizer.decode(new, skip_special_tokens=True))


def picture(folder: Path, number: int) -> Image.Image:
    return Image.open(folder / "pictures" / f"{number}.png").convert("RGB")


@pytest.mark.filterwarnings("ignore")
def test_samples_are_the_answers_of_plain_transformers_from_pixels(
    seen: tuple[str, Path],
) -> None:
    model_type, folder = seen
    rows = {}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        text, told, images = asked_and_told(json.loads(line), folder, model_type)
        rows[text, told] = images
    plain = {
        when: PlainAnswers(model_type, folder, has_adapter=when == "after")
        for when in ("before", "after")
    }
    num_images = []
    for when, model in plain.items():
        for row in json.loads((folder / "run" / f"samples_{when}.json").read_text())["rows"]:
            asked = row["prompt"].replace("<image>", model.place)
            key = f"user: {asked}</s>assistant: ", f"{row['wanted']}</s>"
            assert row["got"] == model.to(key[0], rows[key], num_new=NUM_NEW)
            num_images.append(len(rows[key]))
    assert {0, 1} <= {*num_images}


@pytest.mark.filterwarnings("ignore")
def test_a_run_shows_what_its_images_took_and_those_of_its_answers(
    seen: tuple[str, Path],
) -> None:
    _, folder = seen
    taken = json.loads((folder / "run/images.json").read_text())
    kept = [*(folder.parent / "cache").rglob("*.safetensors")]
    assert taken["num_images"] == taken["num_encoded"] == len(kept) == 6
    assert taken["feature_bytes"] == sum(file.stat().st_size for file in kept)
    assert 0 < taken["predicted_bytes"] < taken["feature_bytes"]  # files have headers
    assert taken["pass_s"] > 0 < taken["predicted_pass_s"]
    rows = json.loads((folder / "run/samples_after.json").read_text())["rows"][:NUM_SAMPLES]
    page = run_page(folder / "run")
    for row in rows:
        assert len(row["images"]) == row["prompt"].count("<image>")
        assert all(f'<img src="{uri}"' in page for uri in row["images"])
    assert any(row["images"] for row in rows)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("seen", ["gemma3"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_an_image_is_attached_in_the_runs_room_and_answered_as_by_plain_transformers(
    seen: tuple[str, Path], tmp_path: Path
) -> None:
    model_type, folder = seen
    plain = PlainAnswers(model_type, folder)
    text = f"user: {plain.place}what 1</s>assistant: "
    expected = plain.to(text, [picture(folder, 1)], num_new=MOST_TOKENS)
    broken = tmp_path / "broken.png"
    broken.write_bytes((folder / "pictures/1.png").read_bytes()[:-40])
    with browser() as chromium, served(folder, tmp_path / "configs", folder) as made:
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"{made.studio.address}runs#run=run")
        page.wait_for_selector("#samples img")

        page.fill("#chat [name=said]", "what 1")
        for file, problem in (
            (folder / "rows.jsonl", "rows.jsonl is no image"),
            (broken, "the image that is attached"),
        ):
            page.set_input_files("#chat [name=image]", file)
            page.click("#chat button")
            page.wait_for_selector(f"#talk .bad:text('{problem}')", timeout=120_000)
        assert page.input_value("#chat [name=said]") == "what 1"
        page.wait_for_selector("#chat button:not(:disabled)")
        page.set_input_files("#chat [name=image]", folder / "pictures/1.png")
        page.click("#chat button")
        page.wait_for_selector("#chat button:disabled")
        page.wait_for_selector("#chat button:not(:disabled)")
        assert page.input_value("#chat [name=image]") == ""
        assert page.locator("#talk p").last.text_content().strip() == expected.strip()
        assert page.locator("#talk p:has(img)").all_text_contents() == ["what 1"]
        assert serious_findings(page, axe_script()) == []
        for name, place in (("rows", "h3 + .images img"), ("report", "td .images img")):
            page.goto(f"{made.studio.address}{name}?name=run")
            # no policy keeps it from being drawn
            assert page.eval_on_selector(place, "image => image.naturalWidth") >= 32


@pytest.mark.filterwarnings("ignore")
def test_generate_answers_about_images_as_plain_transformers_from_pixels(
    seen: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model_type, folder = seen
    plain = PlainAnswers(model_type, folder)
    given = [word for i in (3, 0) for word in ("--image", folder / f"pictures/{i}.png")]
    capsys.readouterr()
    words = ("--prompt", "what 1", "--max-new-tokens", 20)
    assert run("generate", folder / "run", *words, *given) == 0
    text = f"user: {plain.place * 2}what 1</s>assistant: "
    images = [picture(folder, i) for i in (3, 0)]
    assert capsys.readouterr().out == plain.to(text, images, num_new=20) + "\n"


@pytest.mark.filterwarnings("ignore")
def test_rows_with_images_are_scored_as_by_plain_transformers_from_pixels(
    seen: tuple[str, Path], machine_file: Path, tmp_path: Path
) -> None:
    model_type, folder = seen
    words = ("--base", "--adapter", folder / "run", "--machine", machine_file)
    out = tmp_path / "scores.jsonl"
    assert run("score", folder / "recipe.yaml", folder / "rows.jsonl", *words, "--out", out) == 0
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    for name, has_adapter in (("base", False), (str(folder / "run"), True)):
        model = PlainAnswers(model_type, folder, has_adapter=has_adapter).model
        ours = [one["logp"] for one in scores if one["name"] == name]
        rows = plain_inputs(folder, model_type)
        for logp, row in zip(ours, rows, strict=True):
            labels_T = row.pop("labels")[0, 1:]
            with torch.no_grad():
                logits_TV = model(**row).logits[0, :-1].double()
            wanted = -nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum").item()
            assert logp == pytest.approx(wanted, rel=1e-6)  # other pixels change it by 2e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_chat_shows_images_with_the_next_message(
    seen: tuple[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_type, folder = seen
    plain = PlainAnswers(model_type, folder)
    shown = [f"/image {folder}/pictures/{i}.png" for i in range(3)]
    lines = [
        "hello",
        shown[0],
        "what 1",
        f"/image {folder}/rows.jsonl",
        f"/image {folder}/none.png",
        *shown[1:],
        "and 2",
        "no more",
        shown[2],
        "/reset",
        "no picture 4",
    ]
    capsys.readouterr()
    assert talk(lines, monkeypatch, folder / "run", "--compare", num_new=8) == 0
    found = capsys.readouterr()
    assert "/image PATH shows an image" in found.err
    assert "rows.jsonl is none of the kinds that are read" in found.err
    assert "there is no file" in found.err
    base = PlainAnswers(model_type, folder, has_adapter=False)
    lines, said, images = list[str](), "", list[Image.Image]()
    shown_with: dict[str, list[int]] = {"hello": [], "what 1": [0], "and 2": [1, 2], "no more": []}
    for asked, numbers in {**shown_with, "no picture 4": []}.items():
        if asked not in shown_with:  # after `/reset`
            said, images = "", []
        images += [picture(folder, i) for i in numbers]
        said += f"user: {plain.place * len(numbers)}{asked}</s>"
        text = f"{said}assistant: "
        answer = plain.to(text, images, num_new=8)
        lines += [f"base: {base.to(text, images, num_new=8)}", f"adapter: {answer}"]
        said += f"assistant: {answer}</s>"
    assert found.out.replace("> ", "") == "".join(f"{line}\n" for line in lines)


@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_sees_as_before_and_answers_as_with_its_adapter(
    seen: tuple[str, Path], tmp_path: Path
) -> None:
    model_type, folder = seen
    merged = tmp_path / "merged"
    assert run("merge", folder / "run", "--out", merged) == 0
    for name in ("processor_config.json", "preprocessor_config.json"):
        assert (merged / name).read_bytes() == (folder / "model" / name).read_bytes()
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(merged / "model.safetensors")
    towers = [name for name in before if "visual." in name or "vision_" in name]
    assert towers
    assert before.keys() == after.keys()
    for name in towers:
        assert torch.equal(before[name], after[name])
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with_adapter = PlainAnswers(model_type, folder).model
    whole: Any = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    for row in plain_inputs(folder, model_type)[:4]:
        del row["labels"]
        with torch.no_grad():
            wanted, found = with_adapter(**row).logits, whole(**row).logits
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@contextmanager
def without_processor(model: Path, elsewhere: Path) -> Iterator[None]:
    """Move a model's processor away in this context."""
    names = ("processor_config.json", "preprocessor_config.json")
    for name in names:
        shutil.move(model / name, elsewhere / name)
    try:
        yield
    finally:
        for name in names:
            shutil.move(elsewhere / name, model / name)


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["gemma3"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_images_are_refused_where_the_model_sees_none(
    seen: tuple[str, Path],
    tmp_path: Path,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, folder = seen
    shown, rows = f"{folder}/pictures/0.png", folder / "rows.jsonl"
    words = ("--prompt", "no picture 4", "--max-new-tokens", 8)
    capsys.readouterr()
    assert run("generate", folder / "run", *words) == 0
    alone = capsys.readouterr().out
    with without_processor(folder / "model", tmp_path):
        assert run("generate", folder / "run", *words) == 0
        assert capsys.readouterr().out == alone
        assert run("generate", folder / "run", *words, "--image", shown) == 1
        assert "model has no processor for them" in capsys.readouterr().err
        lines = [f"/image {shown}", "no picture 4"]
        assert talk(lines, monkeypatch, folder / "run", num_new=8) == 0
        found = capsys.readouterr()
        assert "PATH" not in found.err
        assert "model has no processor for them" in found.err
        assert found.out.replace("> ", "") == alone
        base = ("--machine", machine_file, "--base")
        assert run("score", folder / "recipe.yaml", rows, *base) == 1
        assert "it reads text alone" in capsys.readouterr().err


@pytest.mark.parametrize("seen", ["gemma3"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_questions_with_choices_have_no_images(
    seen: tuple[str, Path],
    tmp_path: Path,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, folder = seen
    row = {"prompt": "what", "choices": ["a", "b"], "answer": 0, "image": "pictures/0.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ("--machine", machine_file, "--base")
    assert run("score", folder / "recipe.yaml", tmp_path / "rows.jsonl", *words) == 1
    assert "questions with choices are asked in text" in capsys.readouterr().err


@pytest.mark.parametrize("seen", ["gemma3"], indirect=True)
@pytest.mark.parametrize("token", ["<image_soft_token>", "<start_of_image>"])
@pytest.mark.filterwarnings("ignore")
def test_a_prompt_with_the_tokens_of_an_image_is_refused(
    token: str, seen: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = seen
    words = ("--prompt", token, "--image", folder / "pictures/0.png")
    assert run("generate", folder / "run", *words) == 1
    assert "leave that token out" in capsys.readouterr().err


def test_weights_that_change_in_place_are_another_tower(tmp_path: Path) -> None:
    folder = save_seeing_model(tmp_path / "model", "gemma3")
    section, file = ModelSection(path=str(folder)), folder / "model.safetensors"
    before, status = tower_digest(section, seed=0, device="cpu"), file.stat()
    assert tower_digest(section, seed=1, device="cpu") == before
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert tower_digest(section, seed=0, device="cpu") != before
