"""JSON that is not what its format requires: one clear error that names the field, whatever it contains."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.common.checked_json import Count, Range, check_format, convert, from_json, parse_json
from stageline.common.errors import JsonError


class Point(NamedTuple):
    """An element that may be written as an array."""

    x: float
    y: float = 0.0


@dataclass(frozen=True)
class Record:
    """All kinds of fields."""

    name: str
    size: Count
    share: Annotated[float, Range(0, 1)]
    kind: Literal["a", "b"]
    done: bool
    parent: int | None = None
    points: tuple[Point, ...] = ()
    sizes: dict[str, list[int]] = field(default_factory=dict)


GOOD: dict[str, Any] = {"name": "n", "size": 3, "share": 0.5, "kind": "a", "done": False}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": 3}, "record.name must be a string, got 3"),
    ({"size": -1}, "record.size must be an integer from 0 to"),
    ({"size": 2**63}, "record.size must be an integer from 0 to"),
    ({"size": True}, "record.size must be an integer, got True"),
    ({"size": 1.0}, "record.size must be an integer, got 1.0"),
    ({"share": 2}, "record.share must be a number from 0 to 1, got 2"),
    ({"share": float("nan")}, "record.share must be a number, got nan"),
    ({"share": 10**400}, "record.share must be a number"),
    ({"kind": "c"}, "record.kind must be one of 'a', 'b', got 'c'"),
    ({"kind": ["a"]}, "record.kind must be one of"),
    ({"done": 0}, "record.done must be true or false, got 0"),
    ({"parent": "1"}, "record.parent must be an integer, got '1'"),
    ({"points": [[1, 2, 3]]}, r"record.points\[0\] must have 2 elements"),
    ({"points": [{"y": 1}]}, r"record.points\[0\] lacks 'x'"),
    ({"points": 7}, "record.points must be a list, got 7"),
    ({"sizes": {"k": [1, "x"]}}, r"record.sizes\['k'\]\[1\] must be an integer, got 'x'"),
]


def test_a_record_is_built_with_its_defaults() -> None:
    record = from_json(Record, GOOD | {"points": [[1, 2], {"x": 3}], "sizes": {"k": [1]}, "unknown": 1}, "record")
    assert record == Record("n", 3, 0.5, "a", False, None, (Point(1.0, 2.0), Point(3.0)), {"k": [1]})


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_a_wrong_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JsonError, match=message):
        from_json(Record, GOOD | change, "record")


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(JsonError, match="'record' lacks 'name'; its fields: name, size"):
        from_json(Record, {key: value for key, value in GOOD.items() if key != "name"}, "record")
    with pytest.raises(JsonError, match="'record' has an unknown 'nmae'"):
        from_json(Record, GOOD | {"nmae": 1}, "record", allow_unknown=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(sorted(Record.__annotations__)), VALUES)
def test_any_value_of_any_field_is_taken_or_refused_in_one_short_line(name: str, value: Any) -> None:
    parsed = parse_json(json.dumps(GOOD | {name: value}), allow_nan=True)
    message = ""
    try:
        record = from_json(Record, parsed, "record")
    except JsonError as error:
        message = str(error)
    else:
        assert getattr(record, name) is not None or value is None
    assert not message or (f"record.{name}" in message and len(message) < 300)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 10_000, b"\xff", '{"a": NaN}', "-Infinity"])
def test_text_that_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(JsonError, match=r"^not JSON: ") as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("version", [True, "1", 2, None, 1.5])
def test_only_the_version_of_this_release_is_read(version: Any) -> None:
    with pytest.raises(JsonError, match="of the thing format is not supported; this release reads version 1"):
        check_format({"format": "f", "version": version}, "f", 1, "thing")


def test_none_is_taken_where_it_is_allowed() -> None:
    assert convert(None, int | None, "rank") is None
    with pytest.raises(JsonError, match=r"'rank' must be an integer or a string or null, got 1\.5"):
        convert(1.5, int | str | None, "rank")
