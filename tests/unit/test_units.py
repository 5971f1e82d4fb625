"""Amounts as people write and read them."""

import pytest

from drystone.errors import InvalidSpec
from drystone.units import GiB, MiB, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * GiB),
        ("24 GB", 24 * 10**9),
        ("512", 512),
        (".5 MiB", MiB // 2),
        ("1.5tib", 1536 * GiB),
    ],
)
def test_amounts_of_memory_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "80 GPUs", "-1 GiB", "1e9", "GiB", "nan"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(InvalidSpec, match="is not an amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (999, "999"),
        (999.6, "1 k"),
        (125e6, "125 M"),
        (999.4e6, "999 M"),
        (999.9e6, "1 B"),
        (8_030_261_248, "8.03 B"),
        (-5e9, "-5 B"),
        (1e16, "10000 T"),
    ],
)
def test_counts_never_show_an_exponent(number, expected):
    assert format_count(number) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1 KiB"),
        (512 * MiB, "512 MiB"),
        (1000 * MiB, "1000 MiB"),
        (1023.9 * MiB, "1 GiB"),
        (23.44 * GiB, "23.4 GiB"),
        (5000 * 1024 * GiB, "5000 TiB"),
        (-2 * GiB, "-2 GiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(number, expected):
    assert format_bytes(number) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (41e-3, "41 ms"),
        (999.9e-6, "1 ms"),
        (0.9999, "1 s"),
        (59.99, "1 min"),
        (3599, "1 h"),
        (11520, "3.2 h"),
        (4e6, "1111 h"),
        (2e-9, "2 ns"),
    ],
)
def test_seconds_carry_over_to_the_next_unit(seconds, expected):
    assert format_seconds(seconds) == expected
