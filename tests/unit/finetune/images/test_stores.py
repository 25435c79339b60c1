"""Tokens of rows with images, kept between runs."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finetune.data.dataset import Rows, load_rows
from finetune.data.pictures.picture import Picture
from finetune.data.spans import Rendering
from finetune.errors import DataError
from finetune.images.features import Features, Images
from finetune.images.rows import with_images
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '#' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class OneToken:
    """An image as one token, `#`."""

    image_id: int
    digest: str = "one token"
    silent_ids: frozenset[int] = frozenset()

    def expanded(
        self, rendering: Rendering, pictures: Sequence[Picture], *, source: str
    ) -> tuple[Rendering, tuple[tuple[bytes, int], ...]]:
        return replace(rendering), tuple((one.opened().key, 1) for one in pictures)


def written(folder: Path, colour: str) -> Path:
    folder.mkdir()
    Image.new("RGB", (8, 8), colour).save(folder / "a.png")
    row = {"prompt": "?", "completion": "!", "image": "a.png"}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    return folder


def loaded(folder: Path, cache: Path) -> Rows:
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    (image_id,) = tokenizer("#")["input_ids"]
    return load_rows(
        DataSection(path=str(folder / "rows.jsonl"), num_workers=0),
        tokenizer,
        seq_len=100,
        seed=0,
        cache_dir=cache,
        imaging=OneToken(image_id=image_id),
    )


def keys(rows: Rows) -> list[bytes]:
    return [key for example in rows.train for key, _ in example.images]


def test_rows_in_another_folder_have_the_images_that_are_there(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", "red"), written(tmp_path / "other", "blue")
    shown = [keys(loaded(folder, tmp_path / "cache")) for folder in (one, other, one)]
    wanted = [
        Picture(name="a", path=str(folder / "a.png")).opened().key for folder in (one, other, one)
    ]
    assert shown == [[key] for key in wanted]


@pytest.mark.parametrize("is_as_old", [False, True])
def test_an_image_that_changes_is_read_again(tmp_path: Path, is_as_old: bool) -> None:
    folder = written(tmp_path / "one", "red")
    before = keys(loaded(folder, tmp_path / "cache"))
    assert keys(loaded(folder, tmp_path / "cache")) == before
    status = (folder / "a.png").stat()
    Image.new("RGB", (9, 9), "blue").save(folder / "a.png")
    if is_as_old:
        os.utime(folder / "a.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = loaded(folder, tmp_path / "cache")
    assert keys(after) == [Picture(name="a", path=str(folder / "a.png")).opened().key] != before
    assert any("has changed since its row was tokenised" in note for note in after.notes)


def test_images_that_move_with_their_rows_are_found(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", "red")
    before = loaded(folder, tmp_path / "cache")
    shutil.move(folder, tmp_path / "moved")
    after = loaded(tmp_path / "moved", tmp_path / "cache")
    assert keys(after) == keys(before)
    assert after.data_hash == before.data_hash


def test_a_text_with_the_image_token_is_refused_where_other_rows_have_images(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path / "a", "red")
    with (folder / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "a # b", "completion": "!"}))
    rows = loaded(folder, tmp_path / "cache")
    (image_id,) = tiny_tokenizer()("#")["input_ids"]
    with pytest.raises(DataError, match=r"rows.jsonl:2 has the model.s image token in its text"):
        with_images(rows, first_id=1_000, image_id=image_id)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_features_of_other_numbers_of_tokens_are_refused(num_rows: int) -> None:
    features = Features(rows_ND=torch.ones(num_rows, 8))
    images = Images(first_id=100, starts=np.array([0, 3]), of=lambda _number: features)
    with pytest.raises(DataError, match=f"{num_rows} rows of features and 3 tokens"):
        images.features(0)
