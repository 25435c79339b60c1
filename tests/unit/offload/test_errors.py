"""The parts of an error."""

from offload.errors import OffloadError


def test_an_error_says_what_the_limit_and_the_fix() -> None:
    error = OffloadError("num_slots is 1", limit="at least 2", hint="`num_slots=2`")
    assert str(error) == "num_slots is 1; at least 2\n\nhint: `num_slots=2`"


def test_a_limit_that_is_plain_from_what_is_wrong_is_left_out() -> None:
    error = OffloadError("the file exists", hint="name another")
    assert str(error) == "the file exists\n\nhint: name another"
