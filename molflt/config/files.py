"""Configurations as YAML files, nested mappings and command-line words."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from molflt.config.rules import validate
from molflt.config.sections import Config
from molflt.errors import InputError
from molflt.replacing import replacing

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


_YAML_NUMBERS = {"inf": ".inf", "+inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
"""How YAML, and so a word on the command line, spells what other programs call so."""


def config_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted key, type, what it means), in the order of the dataclasses."""
    import docstring_parser

    hints: dict[str, Any] = get_type_hints(section)
    documented = docstring_parser.parse_from_object(section).params
    docs = {param.arg_name: " ".join((param.description or "").split()) for param in documented}
    for item in fields(section):
        if is_dataclass(hints[item.name]):
            yield from config_keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hints[item.name], docs[item.name]


def add_config_arguments(parser: ArgumentParser) -> None:
    """Give `parser` one option per setting (`--optim.lr`, ...), typed and documented by the dataclasses."""
    defaults = flat_settings(Config())
    for key, hint, doc in config_keys():
        parser.add_argument(f"--{key}", type=hint, default=defaults[key], help=doc.replace("%", "%%"))


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read and check a YAML file; keys it leaves out take their defaults.

    `overrides` are command-line words that win over the file: `["--optim.lr", "1e-3"]` or
    `["--optim.lr=1e-3"]`. Raises `InputError` for a file that is missing, empty or no YAML mapping, for an
    unknown key (naming the nearest valid one), a wrong type and a value outside its range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InputError(f"cannot read the configuration {path}: {reason}; give a YAML file") from error
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {_yaml_error(error)}") from error
    if values is None:
        raise InputError(f"{path} is empty; start from a file in configs/, or write {{}} for all defaults")
    return config_from_dict(values, source=str(path), overrides=overrides)


def config_from_dict(values: Any, source: str = "configuration", overrides: Sequence[str] = ()) -> Config:
    """The checked `Config` of a nested mapping as `config_to_dict` makes it; `source` names it in errors.

    `overrides` and the errors are those of `load_config`.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_config_arguments(parser)
    origin = source
    try:
        _check_keys(values)
        parsed = parser.parse_object(values)
        if overrides:
            origin = f"{source} with {' '.join(overrides)}"
            _check_overrides(overrides)
            parser.set_defaults({key: parsed[key] for key, _, _ in config_keys()})
            parsed = parser.parse_args(list(overrides))
        config = _section(Config, parsed)
        validate(config)
    except ArgumentError as error:
        raise InputError(f"{origin}: {_wrong_type(error, values, overrides)}") from error
    except InputError as error:
        raise InputError(f"{origin}: {_one_line(error)}") from error
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The nested mapping of a configuration, of plain dicts, lists, strings and numbers only."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(asdict(config))


def flat_settings(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, plain values only."""
    return dict(_leaves(config_to_dict(config)))


def config_to_yaml(config: Config, allow_unicode: bool = True) -> str:
    """The complete configuration as YAML, which `load_config` reads back the same."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=allow_unicode)


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the complete configuration as YAML; the file appears whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(config_to_yaml(config), encoding="utf-8")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _section(cls: type, values: Any) -> Any:
    hints = get_type_hints(cls)
    return cls(
        **{
            item.name: _section(hints[item.name], values[item.name])
            if is_dataclass(hints[item.name])
            else values[item.name]
            for item in fields(cls)
        }
    )


def _check_keys(values: Any, cls: type = Config, prefix: str = "") -> None:
    """Refuse what jsonargparse lets pass or reports without a remedy: shapes, unknown keys, empty values."""
    if not isinstance(values, Mapping):
        where = prefix.rstrip(".") or "the configuration"
        raise InputError(f"{where} must be a mapping of settings, got {values!r}")
    hints = get_type_hints(cls)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise InputError(_unknown(key, section=isinstance(value, Mapping)))
        if is_dataclass(hints[name]):
            _check_keys(value, hints[name], f"{key}.")
        elif value is None and type(None) not in getattr(hints[name], "__args__", ()):
            raise InputError(f"{key} has no value; give one or remove the line")


def _check_overrides(overrides: Sequence[str]) -> None:
    known = {key for key, _, _ in config_keys()}
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--").removesuffix("+")
        if word.startswith("--") and key not in known:
            raise InputError(_unknown(key, option="--"))


def _unknown(key: str, option: str = "", section: bool = False) -> str:
    def likeness(candidate: str) -> float:
        last, candidate_last = key.rpartition(".")[2], candidate.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, last, candidate_last).ratio())

    known = [known for known, _, _ in config_keys()]
    sections = sorted({known.rpartition(".")[0] for known in known} - {""})
    nearest = max(sections if section else known if option else [*known, *sections], key=likeness)
    return f"unknown key {option}{key}; the nearest valid one is {option}{nearest}"


def _wrong_type(error: Exception, values: Any, overrides: Sequence[str]) -> str:
    """What the parser's complaint about a setting's type means."""
    named = re.search(r'key "([^"]+)"', str(error))
    hint = {key: hint for key, hint, _ in config_keys()}.get(named[1]) if named else None
    if named is None or hint is None:
        return _one_line(error)
    got = dict(_leaves(values)).get(named[1])
    for number, word in enumerate(overrides):
        key, equals, value = word.removeprefix("--").partition("=")
        if key == named[1]:
            got = value if equals else next(iter(overrides[number + 1 :]), got)
    spelled = _YAML_NUMBERS.get(str(got).lower())
    return f"{named[1]} must be {_in_words(hint)}, got {got!r}" + (
        f" (YAML writes {spelled})" if spelled else ""
    )


def _in_words(hint: Any) -> str:
    """A setting's type for people: `a number`, `one of flt, performer`, `null or an integer`."""
    plain = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if hint in plain:
        return plain[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list, each item {_in_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each item {_in_words(arguments[0])}"
    return " or ".join(_in_words(option) for option in sorted(arguments, key=lambda o: o is not type(None)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _yaml_error(error: yaml.YAMLError) -> str:
    """In one line, without the name that YAML gives to what it reads from a string."""
    return _one_line(error).replace('in "<unicode string>", ', "at ")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)
