"""What is wrong with tables that are to be a struct: every problem, in words, with its place.

Runs in: every process. Pure. The library says one thing at a time, and of a mistyped key only that
it is unknown; who writes a RunSpec by hand wants all of it, the line, and the key that was meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

T = TypeVar("T", bound=msgspec.Struct)
MAX_PROBLEMS: Final = 12
"""That are told of one file: whoever has more wants to begin with these."""
_MAX_SHOWN: Final = 60
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "datetime": "a time",
    "date": "a date",
    "time": "a time",
}
_TABLE: Final = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")
_KEY: Final = re.compile(r"\s*([\"']?)([\w-]+)\1\s*=")


def convert_tables(plain: Mapping[str, Any], kind: type[T], text: str) -> T:
    """Make a struct of what was read from TOML (arguments: `problems_of`).

    Raises:
        msgspec.ValidationError: it cannot be one; every problem is named.
    """
    problems = problems_of(plain, kind, text)
    if problems:
        raise msgspec.ValidationError("; ".join(problems))
    return msgspec.convert(plain, kind)


def problems_of(plain: Mapping[str, Any], kind: type[msgspec.Struct], text: str) -> list[str]:
    """Return what keeps `plain` from being a `kind`, a sentence each; none: it is one.

    Args:
        plain: as read from TOML; hostile.
        kind: a struct whose fields are values, or structs of values: one table below the other.
        text: the TOML, for the lines.
    """
    found = list(_problems(plain, kind, kind, _lines_of(text), ""))
    left = len(found) - MAX_PROBLEMS
    return [*found[:MAX_PROBLEMS], f"and {left} more"] if left > 0 else found


def _problems(
    plain: Mapping[str, Any],
    kind: type[msgspec.Struct],
    root: type[msgspec.Struct],
    lines: Mapping[str, int],
    table: str,
) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in plain:
        if key not in fields:
            yield _unknown(key, fields, root, table) + _line(lines, table, key)
    for key, field in fields.items():
        if key not in plain:
            if field.required:
                yield f"{_place(table, key)} is missing" + _line(lines, "", table)
        elif _is_table(field):
            if isinstance(plain[key], dict):
                yield from _problems(plain[key], field.type, root, lines, key)
            else:
                yield f"[{key}] must be a table" + _line(lines, table, key)
        else:
            said = _value_problem(plain[key], field)
            if said:
                yield f"{_place(table, key)} {said}" + _line(lines, table, key)


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)


def _place(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _unknown(key: str, own: Iterable[str], root: type[msgspec.Struct], table: str) -> str:
    """Say that there is no such key, and which one was meant: that of another table, or alike."""
    is_plain = key.isascii() and key.isidentifier() and len(key) <= _MAX_SHOWN
    shown = key if is_plain else _shown(key)
    said = f"there is no {_place(table, shown)}"
    for home in msgspec.structs.fields(root):
        if _is_table(home) and key in home.type.__struct_encode_fields__:
            return f"{said}: it belongs into [{home.encode_name}]"
    near = difflib.get_close_matches(key[:_MAX_SHOWN], own, n=1)
    return f"{said}: did you mean {near[0]}?" if near else said


def _value_problem(value: object, field: FieldInfo) -> str:
    """Return what a value must be and is not; empty: it is right."""
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        entry = re.match(r"\[(\d+)\]", path)
        if entry is not None and isinstance(value, list):
            return f"has an entry that {_due(said, field)}, not {_shown(value[int(entry[1])])}"
        return f"{_due(said, field)}, not {_shown(value)}"
    return ""


def _due(said: str, field: FieldInfo) -> str:
    """Return in words what the library expects."""
    if said.startswith("Invalid enum value"):
        allowed = ", ".join(_shown(one) for one in _choices(field.type))
        return f"must be one of {allowed}"
    found = re.fullmatch(r"Expected `(\w+)`(.*?)(?:, got `\w+`)?", said)
    if found is None:
        return f"cannot be used ({said})"
    if "matching regex" in found[2] and _described(field.type):
        return f"must be {_described(field.type)}"
    kind, bound = _KINDS.get(found[1], found[1]), found[2].strip()
    return f"must be {kind} {bound}" if bound else f"must be {kind}"


def _described(kind: object) -> str:
    """Return what a pattern means, in the words of the field's type; empty: it has none."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((one.description for one in metas if getattr(one, "description", None)), "")


def _choices(kind: object) -> tuple[object, ...]:
    if get_origin(kind) is Annotated:
        return _choices(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) is Literal else ()


def _shown(value: object) -> str:
    """Return what a stranger has written so that a terminal may see it."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _line(lines: Mapping[str, int], table: str, key: str) -> str:
    number = lines.get(_place(table, key))
    return f" (line {number})" if number else ""


def _lines_of(text: str) -> dict[str, int]:
    """Return on which line each key stands, `table.key` as well as `table`; what is sure alone.

    A key that seems to be there twice, as within a text of several lines, is left out.
    """
    lines: dict[str, int] = {}
    twice = set()
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        heading, setting = _TABLE.match(line), _KEY.match(line)
        if heading:
            place = table = heading[1]
        elif setting:
            place = _place(table, setting[2])
        else:
            continue
        if place in lines:
            twice.add(place)
        lines[place] = number
    return {place: number for place, number in lines.items() if place not in twice}
