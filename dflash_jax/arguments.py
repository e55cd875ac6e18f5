"""key=value arguments and YAML files -> checked, frozen configuration, with errors a person can act on.

Reading and typing is OmegaConf's; this adds the nearest valid name for a typo, limits, and one-line messages.
"""

import dataclasses
import difflib
import math
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_jax.config import MISSING
from dflash_jax.errors import HangError, UserError

C = TypeVar("C")
_PACKAGE = pathlib.Path(__file__).parent
KEY = re.compile(r"[^\s.\[\]]+(\.[^\s.\[\]]+)*")  # names with dots between
SPAN = re.compile(r"\d+:\d+")  # such as profile.steps=20:24; YAML takes it for a number to the base of 60
# What a value of a type is called, one and several.
KINDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Any: ("a value", "values"),
}


def parse_assignments(arguments: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", "c=x"] -> {"a": {"b": 1}, "c": "x"}. Raises UserError for anything that is not key=value."""
    seen, spelled = list[str](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not KEY.fullmatch(key):
            raise UserError(f"argument {argument!r} is not of the form key=value (see --help)")
        if key in seen:
            raise UserError(f"key {key!r} is given twice")
        for other in seen:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise UserError(
                    f"keys {other!r} and {key!r} are given, and one is inside the other; give one of them"
                )
        seen.append(key)
        spelled.append(f'{key}="{value}"' if SPAN.fullmatch(value) else argument)
        try:
            OmegaConf.from_dotlist(spelled[-1:])
        except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
            raise UserError(
                f"argument {argument!r}: not valid YAML ({_yaml_problem(error)}); a text takes quotes "
                f"""inside the shell's: {key}='"{value}"'"""
            ) from None
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(spelled))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def read_yaml(file: pathlib.Path) -> dict[str, Any]:
    """A YAML mapping as plain Python values."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except Exception as error:  # the YAML reader raises errors of many kinds
        raise UserError(f"{file}: not valid YAML ({_yaml_fault(error)})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: expected a mapping of keys, found {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def find_named(folder: str, name: str, *, key: str) -> pathlib.Path:
    """The file that `key=name` means: a YAML file's path, or a name in ./folder or in the installed folder."""
    if name.endswith((".yaml", ".yml")):
        if not pathlib.Path(name).is_file():
            fault = "is a folder" if pathlib.Path(name).exists() else "does not exist"
            raise UserError(f"{key}: file {name} {fault}")
        return pathlib.Path(name)
    places = [pathlib.Path(folder), _PACKAGE.parent / folder, _PACKAGE / folder]
    for place in places:
        if (place / f"{name}.yaml").is_file():
            return place / f"{name}.yaml"
    known = sorted({file.stem for place in places for file in place.glob("*.yaml")})
    raise UserError(
        f"{key}: nothing named {name!r} in {folder}/{_suggestion(name, known)}; known: {', '.join(known)}"
    )


def build(schema: type[C], sources: Sequence[tuple[str, Mapping[str, Any]]]) -> C:
    """An instance of the dataclass `schema` from nested mappings, later ones winning.

    sources: (where it comes from, values). Raises UserError for an unknown key, a wrong type, a value outside
    its limits and a missing key.
    """
    merged = OmegaConf.structured(schema)
    for origin, tree in sources:
        _refuse_unknown(schema, tree, origin, "")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.create(dict(tree)))
        except OmegaConfBaseException as error:
            raise UserError(f"{origin}: {_wrong_type(schema, tree, error)}") from None
    assert isinstance(merged, DictConfig)
    if missing := sorted(OmegaConf.missing_keys(merged)):
        places = " and ".join(origin for origin, _ in sources)
        raise UserError(f"{missing[0]}: a value is required, and there is none in {places}")
    built = OmegaConf.to_object(merged)
    for key, value, field in leaves(built):
        try:
            _check_limits(key, value, field)
        except UserError as fault:
            origin = next((origin for origin, tree in reversed(sources) if _inside(tree, key)[0]), "default")
            raise UserError(f"{origin}: {fault}") from None
    return built  # pyright: ignore[reportReturnType]


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(dotted key, value, field) of every option of a configuration, groups opened up."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, field


def describe(schema: type) -> str:
    """One paragraph per key: name, type, default, meaning and limits; the text of --help."""
    lines = []
    for key, default, field, hint in _options(schema, ""):
        limits = _limits(field)
        lines.append(f"{key}={'REQUIRED' if default == MISSING else _spelled(default)}  ({_kind(hint)})")
        lines.append(textwrap.indent(field.metadata["meaning"] + (f" [{limits}]" if limits else ""), "      "))
    return "\n".join(lines)


def run_entry_point(
    main: Callable[[list[str]], int | None], *, usage: str = "", schema: type | None = None
) -> None:
    """Run `main(arguments)` as a process: a UserError is one line on stderr and exit status 2.

    With a schema, --help prints the usage and its keys instead; without one, that is main's own affair.
    `debug=true` lets the traceback through.
    """
    arguments = sys.argv[1:]
    if schema is not None and {"-h", "--help"} & set(arguments):
        print(f"{usage}\n{describe(schema)}")
        sys.exit(0)
    debug = "debug=true" in arguments
    try:
        sys.exit(main([argument for argument in arguments if argument not in ("debug=true", "debug=false")]))
    except UserError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if isinstance(error, HangError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
        sys.exit(2)


def _refuse_unknown(schema: type, tree: Mapping[str, Any], origin: str, prefix: str) -> None:
    hints = get_type_hints(schema)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in hints:
            where = f"keys of {prefix[:-1]}" if prefix else "keys and groups"
            raise UserError(
                f"{origin}: unknown key {key!r}{_suggestion(str(name), list(hints), prefix)}; "
                f"{where}: {', '.join(hints)}"
            )
        is_group = dataclasses.is_dataclass(hints[name])
        if is_group and isinstance(value, Mapping):
            _refuse_unknown(hints[name], value, origin, f"{key}.")  # pyright: ignore[reportArgumentType]
        elif "${" in str(value):
            raise UserError(f"{origin}: {key}: references such as {value!r} are not supported; write the value")
        elif is_group:
            raise UserError(f"{origin}: {key} is a group of keys, found {_shown(value)}; write {key}.KEY=value")
        kinds = (hints[name], *get_args(hints[name]))
        containers = {list} if hints[name] is Any else {get_origin(kind) for kind in kinds} & {list, dict}
        is_misplaced = bool(containers) and isinstance(value, list | dict) and type(value) not in containers
        # OmegaConf would take any number for true.
        if is_misplaced or (bool in kinds and type(value) in (int, float)):
            raise UserError(f"{origin}: {key}: found {value!r}, allowed: {_words(hints[name])}")


def _wrong_type(schema: type, tree: Mapping[str, Any], error: OmegaConfBaseException) -> str:
    """Key, value and what is allowed, of the place where OmegaConf could not take a value."""
    place = str(getattr(error, "full_key", None) or "?")
    for key, _, field, hint in _options(schema, ""):
        found, value = _inside(tree, place.replace("[", ".").replace("]", ""))
        if (place == key or place.startswith((f"{key}.", f"{key}["))) and found and hint is not Any:
            words = [_words(hint, inner=place != key), _limits(field, of_names=False)]
            return f"{place}: found {_shown(value)}, allowed: {', '.join(filter(None, words))}"
    return f"{place}: {_first_line(error)}"


def _inside(tree: Any, key: str) -> tuple[bool, Any]:
    """Whether a tree has a dotted key, and its value."""
    for name in key.split("."):
        if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
            tree = tree[int(name)]
        elif isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        else:
            return False, None
    return True, tree


def _check_limits(key: str, value: Any, field: dataclasses.Field) -> None:
    allowed, low, high = (field.metadata.get(name) for name in ("choices", "low", "high"))
    if isinstance(value, dict):
        if allowed and not value:
            raise UserError(f"{key}: found nothing in it; name at least one of: {_limits(field)}")
        for name, inner in value.items():
            _check_choice(key, name, allowed)
            if isinstance(inner, dict | list):
                raise UserError(f"{key}.{name}: found {inner}, allowed: a single value")
            _check_number(f"{key}.{name}", inner, low=low, high=high)
        return
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict | list):
            raise UserError(f"{key}: found {item} in the list, allowed: single values")
        if item is not None:
            _check_choice(key, item, allowed)
        _check_number(key, item, low=low, high=high)


def _check_choice(key: str, value: Any, allowed: tuple[str, ...] | None) -> None:
    if allowed and value not in allowed:
        raise UserError(
            f"{key}: found {value!r}{_suggestion(str(value), list(allowed))}; allowed: {', '.join(allowed)}"
        )


def _check_number(key: str, value: Any, *, low: float | None, high: float | None) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        inside = (low is None or value >= low) and (high is None or value <= high)
        if not inside or not math.isfinite(value):
            finite = "" if math.isfinite(value) else "finite numbers"
            raise UserError(
                f"{key}: found {value}, allowed: {', '.join(filter(None, [_range(low, high), finite]))}"
            )


def _limits(field: dataclasses.Field, *, of_names: bool = True) -> str:
    """What is allowed. of_names: where it is a mapping, its names and not their values."""
    allowed, low, high = (field.metadata.get(name) for name in ("choices", "low", "high"))
    return " | ".join(allowed) if allowed and (of_names or low is None) else _range(low, high)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else ""


def _options(schema: type, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field, Any]]:
    """(dotted key, default, field, type) of every option of a schema, groups opened up."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _options(hint, f"{prefix}{field.name}.")  # pyright: ignore[reportArgumentType]
        else:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield f"{prefix}{field.name}", default, field, hint


def _kind(hint: Any) -> str:
    """A type as --help shows it."""
    if hint is Any:  # only what OmegaConf has no type for
        return "list or str"
    kind = hint.__name__ if isinstance(hint, type) else str(hint).replace(" | None", " or null")
    return kind.replace("typing.", "")


def _words(hint: Any, *, inner: bool = False) -> str:
    """A type in the words of a message; inner: that of its items."""
    if hint is Any:
        return "a list or text"
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if type(None) in get_args(hint):
        return _words(kinds[0], inner=True) if inner else f"{_words(kinds[0])} or null"
    if not kinds:
        return KINDS[hint][0]
    one, several = KINDS[kinds[-1]]
    if inner:
        return one
    return f"a mapping of names to {several}" if get_origin(hint) is dict else f"a list of {several}"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else _spelled(value)


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _suggestion(name: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {prefix + close[0]!r}?)" if close else ""


def _yaml_fault(error: Exception) -> str:
    """What is wrong with a text, and in which line of it."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f"line {mark.line + 1}: {_yaml_problem(error)}" if mark else _yaml_problem(error)


def _yaml_problem(error: Exception) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return problem or _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
