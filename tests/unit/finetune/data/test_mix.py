import json
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.dataset import ExampleSet, Rows, drawn, load_rows, rows_per_source
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer


@pytest.mark.parametrize(
    ("sizes", "weights", "max_rows", "counts"),
    [
        ((10,), (1.0,), None, (10,)),
        ((10, 10), (1.0, 1.0), None, (10, 10)),
        ((10, 10), (3.0, 1.0), None, (30, 10)),
        ((100, 10), (3.0, 1.0), None, (100, 33)),
        ((5, 7, 11), (0.5, 0.3, 0.2), None, (28, 16, 11)),
        ((10, 10), (3.0, 1.0), 8, (6, 2)),
        ((10, 10, 10), (1.0, 1.0, 1.0), 4, (2, 1, 1)),
        ((1000, 3), (0.1, 0.2), None, (1000, 2000)),
    ],
)
def test_an_epoch_has_exact_shares_and_every_row_unless_it_is_cut(
    sizes: tuple[int, ...], weights: tuple[float, ...], max_rows: int | None, counts: object
) -> None:
    assert rows_per_source(sizes, weights, max_rows=max_rows) == counts


def test_no_count_is_a_row_away_from_its_share_whatever_the_weights() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        num = random.randint(1, 6)
        sizes = random.randint(1, 500, num).tolist()
        weights = [round(float(w), 3) + 0.001 for w in random.rand(num)]
        counts = rows_per_source(sizes, weights, max_rows=None)
        shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
        for count, size, share in zip(counts, sizes, shares, strict=True):
            assert count >= size
            assert abs(count - share * sum(counts)) < 1
        assert any(count - size <= 1 for count, size in zip(counts, sizes, strict=True))


def test_a_source_is_drawn_whole_as_often_as_it_fits_and_then_in_part() -> None:
    rows = drawn(23, 10, seed=4, source=1).tolist()
    assert Counter(Counter(rows).values()) == {2: 7, 3: 3}
    assert rows == sorted(rows)
    assert rows == drawn(23, 10, seed=4, source=1).tolist()
    others = [drawn(23, 10, seed=5, source=1).tolist(), drawn(23, 10, seed=4, source=2).tolist()]
    assert rows not in others
    assert len(set(drawn(4, 10, seed=4, source=0).tolist())) == 4


# --------------------------------------------------------------------------------------------------
# In a recipe
# --------------------------------------------------------------------------------------------------


def write(file: Path, name: str, num_rows: int) -> str:
    rows = [{"instruction": f"{name} {n}?", "output": f"{name}{n}"} for n in range(num_rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def load(tmp_path: Path, *, seed: int = 0, **settings: Any) -> Rows:
    return load_rows(
        DataSection(**settings),
        tiny_tokenizer(),
        seq_len=256,
        seed=seed,
        cache_dir=tmp_path / "cache",
    )


@pytest.fixture
def mix(tmp_path: Path) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return [
        {"path": write(tmp_path / "a.jsonl", "a", 12), "weight": 3},
        {"path": write(tmp_path / "b.jsonl", "b", 9), "weight": 1, "max_rows": 2},
        {"path": str(tmp_path / "c.jsonl"), "weight": 0.5, "system": "Hi."},
    ]


def test_sources_are_mixed_by_weight_each_in_its_own_form(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    rows = load(tmp_path, mix=mix)
    files = Counter(Path(source.rpartition(":")[0]).name for source in rows.train.sources)
    assert files == {"a.jsonl": 12, "b.jsonl": 4, "c.jsonl": 2}
    assert {source.rpartition(":")[2] for source in rows.train.sources[12:16]} == {"1", "2"}
    assert "Hi." in str(tiny_tokenizer().decode(rows.train[-1].input_ids))
    assert [note.partition(": ")[2] for note in rows.notes] == [
        "12 of an epoch's 18 rows (66.7 %), 1.00 times its 12",
        "4 of an epoch's 18 rows (22.2 %), 2.00 times its 2",
        "2 of an epoch's 18 rows (11.1 %), 2.00 times its 1",
    ]
    assert len(load(tmp_path, mix=mix, max_rows=9).train) == 9


def test_the_data_hash_covers_weights_seed_and_order(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    first = load(tmp_path, mix=mix, max_rows=9)
    again = load(tmp_path, mix=mix, max_rows=9)
    assert again.train.is_from_cache
    assert again.data_hash == first.data_hash
    assert [e.source for e in again.train] == [e.source for e in first.train]
    heavier = [mix[0] | {"weight": 9}, *mix[1:]]
    others = [
        load(tmp_path, mix=heavier, max_rows=9),
        load(tmp_path, mix=mix, max_rows=9, seed=1),
        load(tmp_path, mix=mix[::-1], max_rows=9),
    ]
    assert len({rows.data_hash for rows in [first, *others]}) == 4


def test_the_arrays_of_a_mix_are_those_of_its_examples(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    train = load(tmp_path, mix=mix).train
    assert train.input_ids.tolist() == [t for e in train for t in e.input_ids.tolist()]
    assert train.labels.tolist() == [t for e in train for t in e.labels.tolist()]
    assert train.lengths == tuple(len(example.input_ids) for example in train)
    assert train.loss_tokens.tolist() == [example.num_loss_tokens for example in train]
    assert train.offsets.tolist() == [0, *np.cumsum(train.lengths).tolist()]
    for loss_on in ("assistant", "all"):
        whole = load(tmp_path, path=mix[0]["path"], loss_on=loss_on).train
        assert whole.loss_tokens.tolist() == [example.num_loss_tokens for example in whole]


def test_tokens_go_to_another_process_as_the_name_of_their_store(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    train = load(tmp_path, mix=[*mix, {"path": write(tmp_path / "d.jsonl", "d", 900)}]).train
    sent = pickle.dumps(train)
    assert len(sent) < train.input_ids.nbytes / 10
    received: ExampleSet = pickle.loads(sent)
    assert received.digest() == train.digest()
    assert received[-1].source == train[-1].source


def test_held_out_rows_of_a_mix_are_of_all_its_sources_and_not_trained_on(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    rows = load(tmp_path, mix=mix[:2], eval_frac=0.5)
    assert rows.held_out is not None
    assert len(rows.held_out) == 7
    assert not {*rows.held_out.sources} & {*rows.train.sources}
    assert [row.source for row in rows.held_out_rows] == list(rows.held_out.sources)
    assert list(rows.held_out_rows)[2].source == rows.held_out.sources[2]


def test_max_rows_is_of_the_training_rows_whatever_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a", 8)
    rows = load(tmp_path, path=path, eval_path=path, max_rows=3)
    assert rows.held_out is not None
    assert (len(rows.train), len(rows.held_out)) == (3, 8)


def test_a_missing_source_of_a_mix_is_named(tmp_path: Path, mix: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl does not exist"):
        load(tmp_path, mix=[*mix, {"path": str(tmp_path / "d.jsonl")}])


def test_weights_that_make_an_endless_epoch_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"an epoch of 2,000,000,002 rows, entry 2 seen 2,000,000,000 times"
    ):
        rows_per_source([2, 1], [1e-9, 1], max_rows=None)
    assert sum(rows_per_source([2, 1], [1e-9, 1], max_rows=50)) == 50
