"""JSON text from another process."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import json_text

REFUSED = {
    "not JSON": b"{",
    "not UTF-8": b'"\xff"',
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "NaN": b"NaN",
    "-Infinity": b"-Infinity",
    "too large": b"1e999",
    "2**64": b"18446744073709551616",
    "-2**63-1": b"-9223372036854775809",
    "10**400": b"1" + b"0" * 400,
    "10**5000": b"1" + b"0" * 5000,
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_no_json_of_ours_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        json_text.loads(text)


def test_values_are_those_of_json():
    text = '{"a": [1, -2.5, 18446744073709551615, -9223372036854775808, 1e300, true, null, "\\u00e4"]}'
    expected = {"a": [1, -2.5, (1 << 64) - 1, -(1 << 63), 1e300, True, None, "ä"]}
    assert (
        json_text.loads(text) == json_text.loads(text.encode()) == json_text.loads(bytearray(text, "ascii")) == expected
    )


def test_infinity_is_no_number():
    with pytest.raises(ValueError, match="Infinity is not a JSON number"):
        json_text.loads(b"[Infinity]")
