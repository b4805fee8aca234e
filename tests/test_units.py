"""Sizes: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcpool._units import format_bytes, parse_bytes

BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15, "EB": 10**18}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 * 2**20),
        ("4 GiB", 4 * 2**30),
        ("1e9", 10**9),
        ("1.5 MB", 1_500_000),
        ("4096", 4096),
        ("12 kB", 12_000),
        ("12KB", 12_000),
        ("1_000", 1000),
        ("1_000.5 kB", 1_000_500),
        ("  7\tB ", 7),
        ("+8", 8),
        ("0", 0),
        ("-0", 0),
        (".5KiB", 512),
        ("2.KiB", 2048),
        ("1e3KiB", 1_024_000),
        ("25e-1 kB", 2500),
        ("2E", 2 * 10**18),
        ("2e1", 20),
        ("0.1GB", 100_000_000),
        ("1e+2", 100),
    ],
)
def test_text_is_read_exactly(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("unit", "scale"), [*BINARY.items(), *DECIMAL.items()])
def test_units_ignore_case_and_may_drop_the_b(unit: str, scale: int) -> None:
    for spelled in (unit, unit.lower(), unit.upper(), unit[:-1]):
        assert parse_bytes(f"3{spelled}") == 3 * scale


def test_anything_with_an_index_is_an_int() -> None:
    assert parse_bytes(np.int64(7)) == 7
    assert type(parse_bytes(np.uint8(7))) is int


def test_no_upper_limit() -> None:
    assert parse_bytes(2**200) == 2**200
    assert parse_bytes(f"{2**64 + 1}") == 2**64 + 1


@pytest.mark.parametrize("value", [1.0, 1.5, None, b"64MiB", [1], np.float32(4)])
def test_floats_and_other_types_are_type_errors(value: object) -> None:
    with pytest.raises(TypeError, match=r"max_bytes must be an int, or a string such as .*, not .* of type"):
        parse_bytes(value, "max_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, r"^nbytes must be zero or more bytes, not -1$"),
        ("-1MB", r"^nbytes must be zero or more bytes, not '-1MB'$"),
        ("1.5B", r"^nbytes='1.5B' is not a whole number of bytes; use 1 or 2$"),
        ("1e-3", r"not a whole number of bytes; use 0 or 1"),
        ("12XB", r"unknown unit 'XB'; use B, or one of K M G T P E"),
        ("12 bytes", r"unknown unit 'bytes'"),
        ("nan", r"must be an int, or a string such as .*, not 'nan'"),
        ("inf", r"not 'inf'"),
        ("-inf", r"not '-inf'"),
        ("", r"not ''"),
        ("MiB", r"not 'MiB'"),
        ("1 2MB", r"not '1 2MB'"),
        ("1__0", r"not '1__0'"),
        ("_1", r"not '_1'"),
        ("1,5MB", r"not '1,5MB'"),
        ("0x10", r"unknown unit|not '0x10'"),
        ("٣MB", r"not '٣MB'"),
        ("1e999999999", r"exponent must lie within 100"),
        ("1e-999999999", r"exponent must lie within 100"),
        ("1e" + "9" * 90, r"exponent must lie within 100"),
        ("9" * 5000, r"not '9+\.\.\.'"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(value: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(value)


@given(st.text(max_size=40) | st.from_regex(r"[-+]?[0-9._]{1,9}(e[-+]?[0-9]{1,12})?\s?[a-zA-Z]{0,3}", fullmatch=True))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        nbytes = parse_bytes(text)
    except ValueError:
        return
    assert nbytes >= 0


@given(st.integers(0, 10**9), st.integers(0, 3), st.sampled_from([*BINARY.items(), *DECIMAL.items()]))
def test_decimals_are_exact_or_refused(digits: int, places: int, unit: tuple[str, int]) -> None:
    name, scale = unit
    exact = Fraction(digits, 10**places) * scale
    text = f"{digits // 10**places}.{digits % 10**places:0{places}d}{name}" if places else f"{digits}{name}"
    if exact.denominator == 1:
        assert parse_bytes(text) == exact
    else:
        with pytest.raises(ValueError, match="whole number"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (4096, "4096 B"),
        (10_239, "10239 B"),
        (10_240, "10 KiB"),
        (192 * 1024, "192 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 + 2**28, "1.25 GiB"),
        (5 * 2**40, "5 TiB"),
        (2**80, "1048576 EiB"),
        (-3 * 2**19, "-1.5 MiB"),
        (-1, "-1 B"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**70))
def test_formatted_sizes_read_back_within_rounding(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    scale = {"B": 1, **BINARY}[unit]
    back = Fraction(number) * scale
    assert abs(back - nbytes) <= (0 if unit == "B" else Fraction(scale, 200))
