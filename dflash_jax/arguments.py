"""key=value arguments and YAML files -> checked, frozen configuration, with errors a person can act on.

Reading and typing is OmegaConf's; this adds the nearest valid name for a typo, limits, and one-line messages.
"""

import dataclasses
import difflib
import math
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_jax.config import MISSING
from dflash_jax.errors import UserError

C = TypeVar("C")
_PACKAGE = pathlib.Path(__file__).parent


def parse_assignments(arguments: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", "c=x"] -> {"a": {"b": 1}, "c": "x"}. Raises UserError for anything that is not key=value."""
    seen = set()
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals or not key:
            raise UserError(f"argument {argument!r} is not of the form key=value (see --help)")
        if key in seen:
            raise UserError(f"key {key!r} is given twice")
        seen.add(key)
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise UserError(f"arguments {' '.join(arguments)}: {_first_line(error)}") from None
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def read_yaml(file: pathlib.Path) -> dict[str, Any]:
    """A YAML mapping as plain Python values."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except Exception as error:  # the YAML reader raises errors of many kinds
        raise UserError(f"{file}: not valid YAML ({_first_line(error)})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: expected a mapping of keys, found {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def find_named(folder: str, name: str, *, key: str) -> pathlib.Path:
    """The file that `key=name` means: a YAML file's path, or a name in ./folder or in the installed folder."""
    if name.endswith((".yaml", ".yml")):
        if not pathlib.Path(name).is_file():
            raise UserError(f"{key}: file {name} does not exist")
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
            key = getattr(error, "full_key", None) or "?"
            raise UserError(f"{origin}: {key}: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise UserError(f"{missing[0]}: a value is required and none was given")
    built = OmegaConf.to_object(merged)
    for key, value, field in leaves(built):
        _check_limits(key, value, field)
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
    for key, default, field, kind in _options(schema, ""):
        limits = _limits(field)
        lines.append(f"{key}={'REQUIRED' if default == MISSING else _spelled(default)}  ({kind})")
        lines.append(textwrap.indent(field.metadata["meaning"] + (f" [{limits}]" if limits else ""), "      "))
    return "\n".join(lines)


def run_entry_point(main: Callable[[list[str]], int | None], *, usage: str, schema: type) -> None:
    """Run `main(arguments)` as a process: a UserError is one line on stderr and exit status 2.

    --help prints the usage and the keys of the schema instead. `debug=true` lets the traceback through.
    """
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(f"{usage}\n{describe(schema)}")
        sys.exit(0)
    debug = "debug=true" in arguments
    try:
        sys.exit(main([argument for argument in arguments if argument not in ("debug=true", "debug=false")]))
    except UserError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
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
            raise UserError(f"{origin}: {key} is a group of keys, found {value!r}; write {key}.KEY=value")
        kinds = {get_origin(kind) for kind in (hints[name], *get_args(hints[name]))} & {list, dict}
        if kinds and isinstance(value, list | dict) and type(value) not in kinds:
            wanted = "a mapping" if dict in kinds else "a list"
            raise UserError(f"{origin}: {key}: found {value!r}, allowed: {wanted}")


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
            raise UserError(f"{key}: found {value}, allowed: {_range(low, high)}")


def _limits(field: dataclasses.Field) -> str:
    allowed, low, high = (field.metadata.get(name) for name in ("choices", "low", "high"))
    return " | ".join(allowed) if allowed else _range(low, high)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else ""


def _options(schema: type, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field, str]]:
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _options(hint, f"{prefix}{field.name}.")  # pyright: ignore[reportArgumentType]
        else:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            kind = hint.__name__ if isinstance(hint, type) else str(hint).replace(" | None", " or null")
            # Only what OmegaConf has no type for is Any.
            kind = "list or str" if hint is Any else kind.replace("typing.", "")
            yield f"{prefix}{field.name}", default, field, kind


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _suggestion(name: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {prefix + close[0]!r}?)" if close else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
