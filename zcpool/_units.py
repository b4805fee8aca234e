"""Sizes as people write them: ``"64MiB"`` to bytes, and bytes back to text."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

__all__ = ["format_bytes", "parse_bytes"]

_PREFIXES = "kmgtpe"
_SCALE: dict[str, int] = {"": 1, "b": 1}
for _power, _prefix in enumerate(_PREFIXES, 1):
    for _unit in (_prefix, _prefix + "b"):
        _SCALE[_unit] = 1000**_power
    for _unit in (_prefix + "i", _prefix + "ib"):
        _SCALE[_unit] = 1024**_power

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_SIZE = re.compile(
    rf"(?P<sign>[+-]?)(?P<number>(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e(?P<exponent>[+-]?[0-9]+))?)"
    r"\s*(?P<unit>[a-z]*)",
    re.IGNORECASE,
)
# Beyond these a "size" is an attack on the parser: "1e999999999" is eleven characters and a gigabyte of digits.
_MAX_CHARACTERS = 100
_MAX_EXPONENT = 100

_EXPECTED = 'an int, or a string such as "4096", "64MiB" (1024-based) or "64MB" (1000-based)'


def parse_bytes(value: SupportsIndex | str, what: str = "nbytes") -> int:
    """Convert a size to a whole number of bytes.

    Parameters
    ----------
    value : int or str
        Anything with ``__index__``, or a number with an optional unit: ``"4096"``, ``"64MiB"``, ``"1.5 GB"``,
        ``"1e9"``, ``"1_000"``. Units are case-insensitive. With an ``i`` they are powers of 1024 (``KiB``, ``Ki``),
        without one powers of 1000 (``kB``, ``K``), as in rmm and dask; they go up to ``E``.
    what : str, optional
        The name of the argument, for the error message.

    Returns
    -------
    int
        The size in bytes: zero or more, and without an upper limit.

    Raises
    ------
    TypeError
        If the value is neither an integer nor a string; a float is refused because it may not be exact.
    ValueError
        If the text is not a size, or the size is negative or not a whole number of bytes.

    Examples
    --------
    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes("1.5 MB")
    1500000
    """
    if isinstance(value, str):
        return _parse_text(value, what)
    try:
        nbytes = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be {_EXPECTED}, not {value!r} of type {type(value).__name__}") from None
    if nbytes < 0:
        raise ValueError(f"{what} must be zero or more bytes, not {nbytes}")
    return nbytes


def _parse_text(text: str, what: str) -> int:
    shown = repr(text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "...")
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        raise ValueError(f"{what} must be {_EXPECTED}, not {shown}")
    scale = _SCALE.get(match["unit"].lower())
    if scale is None:
        raise ValueError(
            f"{what}={shown} has the unknown unit {match['unit']!r}; use B, or one of K M G T P E followed by "
            '"iB" (1024-based) or "B" (1000-based)'
        )
    # Compared as text first: the exponent itself may have any number of digits.
    exponent = (match["exponent"] or "0").lstrip("+-").lstrip("0")
    if len(exponent) > 3 or int(exponent or 0) > _MAX_EXPONENT:
        raise ValueError(f"{what}={shown} is not a size: its exponent must lie within {_MAX_EXPONENT}")
    # A Fraction is exact where a float is not: "0.1 GB" is 100000000 bytes, and 2**63 + 1 stays odd.
    nbytes = Fraction(match["number"].replace("_", "")) * scale
    if match["sign"] == "-" and nbytes:
        raise ValueError(f"{what} must be zero or more bytes, not {shown}")
    if nbytes.denominator != 1:
        below = nbytes.numerator // nbytes.denominator
        raise ValueError(f"{what}={shown} is not a whole number of bytes; use {below} or {below + 1}")
    return nbytes.numerator


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people.

    Parameters
    ----------
    nbytes : int
        The number of bytes; a difference may be negative.

    Returns
    -------
    str
        Below 10 KiB the exact number (``"4096 B"``), above it at most two decimals in 1024-based units
        (``"1.5 MiB"``).

    Examples
    --------
    >>> format_bytes(4096), format_bytes(3 << 19)
    ('4096 B', '1.5 MiB')
    """
    if abs(nbytes) < 10 * 1024:
        return f"{nbytes} B"
    value = Fraction(nbytes)
    for prefix in _PREFIXES.upper():
        value /= 1024
        # Rounded before the comparison, so that one byte less than a MiB is "1 MiB" and not "1024 KiB".
        if round(abs(value), 2) < 1024 or prefix == "E":
            break
    text = f"{float(round(value, 2)):.2f}".rstrip("0").rstrip(".")
    return f"{text} {prefix}iB"
