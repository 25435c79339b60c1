import pytest

from finetune.report.data_view import Bin, histogram, printable, shortened


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([1], [(1, 1, 1)]),
        ([1, 2, 3], [(1, 1, 1), (2, 2, 1), (3, 3, 1)]),
        ([1, 11, 20], [(n, n + 1, 1 if n in (1, 11, 19) else 0) for n in range(1, 20, 2)]),
        ([21], [(n, min(n + 2, 21), int(n == 19)) for n in range(1, 21, 3)]),
    ],
)
def test_each_row_is_in_the_bin_of_its_length(
    lengths: list[int], bins: list[tuple[int, int, int]]
) -> None:
    expected = tuple(Bin(first=first, last=last, num_rows=num) for first, last, num in bins)
    assert histogram(lengths) == expected


def test_control_characters_are_written_out_and_others_are_left() -> None:
    assert (
        printable("a\x1b[1m\r\n\tb\x07\u00e9\u4e2d\u2028")
        == "a\\x1b[1m\\x0d\n\tb\\x07\u00e9\u4e2d\u2028"
    )


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 400) == "a" * 400
    text = shortened("a" * 300 + "b" * 300)
    assert text == "a" * 200 + " [... 200 characters ...] " + "b" * 200
