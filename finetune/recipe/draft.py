"""A recipe before it is checked: values, and where each was written.

YAML files and the command line are read into one `Draft`: the values as nested dictionaries, and
for each dotted path its `Place`. Nothing here knows which settings exist. Errors of syntax (a
duplicate key, a value that is not YAML) become `Problem`s, kept in the draft, so that all
problems of a recipe are reported together.

The YAML is read by the 1.2 core schema: `1e-4` is a number (YAML 1.1 reads text), `no` and
`12:30` are text (YAML 1.1 reads false and 750), and a date stays text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.recipe.recipe import is_section, written

COMMAND_LINE = 2**31  # sorts after every line of a file
MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value was written: a line of a file, or the command line."""

    text: str  # the place as it is shown: `recipe.yaml:7` or `command line: train.lr=1`
    line: int  # line in the file, from 1; `COMMAND_LINE` for an override

    @property
    def is_override(self) -> bool:
        """Whether the value came from the command line."""
        return self.line == COMMAND_LINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe, in the three parts of an error, and its place."""

    place: Place
    what: str
    limit: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The settings as they were written, before any is checked."""

    name: str  # the file as it is shown in errors
    values: dict[str, Any] = field(default_factory=dict)  # nested dictionaries of values
    # Dotted path -> where its value was written.
    places: dict[str, Place] = field(default_factory=dict)
    # What was found wrong so far; readers append to it.
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: str) -> Place:
        """Return where a setting, or else the section around it, or else the file begins."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path] if path else Place(text=f"{self.name}:1", line=1)

    def add_problem(self, place: Place, what: str, *, limit: str, hint: str) -> None:
        """Note one thing that is wrong."""
        self.problems.append(Problem(place=place, what=what, limit=limit, hint=hint))

    def section(self, name: str) -> dict[str, Any] | None:
        """Return a section's settings, created if absent; None if the section is not a mapping."""
        section = self.values.setdefault(name, {})
        return section if isinstance(section, dict) else None


def joint_error(problems: Sequence[Problem]) -> ConfigError:
    """Put problems into one error, by line, each in the form that it would have alone.

    If there are very many, some of the file's are left out, but none of the command line's.
    """
    ordered = sorted(problems, key=lambda problem: problem.place.line)
    left_out = len(ordered) - MAX_SHOWN
    if left_out > 0:
        num_in_file = sum(not problem.place.is_override for problem in ordered)
        first = max(0, num_in_file - left_out)
        ordered = ordered[:first] + ordered[num_in_file:]
    *others, last = ordered
    blocks = [
        f"{other.place.text}: {other.what}; {other.limit}\n\nhint: {other.hint}" for other in others
    ]
    if others:
        of_these = f", of which these are {len(ordered)}" if left_out > 0 else ""
        blocks.insert(0, f"{len(problems)} problems in the recipe{of_these}")
    blocks.append(f"{last.place.text}: {last.what}")
    return ConfigError("\n\n".join(blocks), limit=last.limit, hint=last.hint)


# ---------------------------------------------------------------------------------------------
# YAML


class CoreLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads scalars by the YAML 1.2 core schema; in C, where PyYAML has its library."""


CoreLoader.yaml_implicit_resolvers = {}
_NUMBER_STARTS = list("-+.0123456789")
for _tag, _pattern, _starts in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", _NUMBER_STARTS),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        _NUMBER_STARTS,
    ),
):
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _starts)


_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "null", "bool", "int", "float")
}


def _composed(text: str) -> yaml.Node | None:
    """Return the node of a text, None if it is empty.

    Raises:
        yaml.YAMLError: It is not YAML, or has an alias: a recipe has each value where it is read.
    """
    for event in yaml.parse(text, Loader=CoreLoader):
        if isinstance(event, yaml.AliasEvent):
            what = "aliases are not read in recipes"
            mark = event.start_mark
            raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)  # type: ignore[arg-type]
    return yaml.compose(text, Loader=CoreLoader)


def read_draft(name: str, text: str) -> Draft:
    """Read the text of a recipe file.

    Args:
        name: The file as it is shown in errors.
        text: The text of the file.

    Raises:
        ConfigError: The text is not YAML, is empty, or is not sections of settings.
    """
    draft = Draft(name=name)
    start = Place(text=f"{name}:1", line=1)
    form = "a recipe is YAML: sections such as `train:`, with settings below them"
    hint = "`sluice recipes show quickstart` prints one to start from"
    try:
        root = _composed(text)
    except (yaml.YAMLError, RecursionError) as error:
        draft.add_problem(_error_place(name, error), _yaml_error(error), limit=form, hint=hint)
        raise joint_error(draft.problems) from error
    if root is None:
        draft.add_problem(start, "the file is empty", limit=form, hint=hint)
        raise joint_error(draft.problems)
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        draft.add_problem(start, f"the file holds {kind}", limit=form, hint=hint)
        raise joint_error(draft.problems)
    values = _value(root, "", draft)
    if values is not None:
        draft.values.update(values)
    return draft


def _mapping(node: yaml.MappingNode, path: str, draft: Draft) -> dict[str, Any]:
    """Return a mapping's values, and note the place of each and every key written twice."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = _node_place(draft, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _PLAIN_TAGS:
            draft.add_problem(
                place,
                "a key is a list, a mapping or tagged",
                limit="a key is one word",
                hint="`key: value`",
            )
            continue
        key = key_node.value
        key_path = f"{path}.{key}" if path else key
        if key in values:
            draft.add_problem(
                place,
                f"{key_path} is written a second time",
                limit=f"a key is written once, and this one is at {draft.places[key_path].text}",
                hint="remove one of the two",
            )
            continue
        draft.places[key_path] = place
        values[key] = _value(value_node, key_path, draft)
    return values


def _value(node: yaml.Node, path: str, draft: Draft) -> Any:
    """Return a node's value: a mapping, a list, or a scalar of the core schema."""
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        draft.add_problem(
            draft.places.get(path, _node_place(draft, node)),
            f"{path} is tagged {node.tag[:80]}",
            limit="a recipe holds sections, lists and plain values; nothing is built of tags",
            hint="remove the tag",
        )
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, draft)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{path}.{index}", draft) for index, item in enumerate(node.value)]
    try:
        return CoreLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, TypeError):  # as of `!!bool x`
        draft.add_problem(
            draft.places.get(path, _node_place(draft, node)),
            f"{path} is {node.value[:80]}, which cannot be read as {node.tag}",
            limit="a value is text, a number, true, false or null",
            hint=f'write it without a tag, as text: `{path}: "{node.value[:80]}"`',
        )
        return None


# ---------------------------------------------------------------------------------------------
# Command line


def apply_overrides(
    draft: Draft, overrides: Sequence[str], *, rivals: Sequence[tuple[str, str]]
) -> None:
    """Apply `section.field=value` overrides to a draft.

    An override of one of two rival settings replaces the other where the file sets it, because the
    command line takes precedence.

    Args:
        draft: The settings of the file; changed in place.
        overrides: Settings of the command line, each value written as YAML.
        rivals: Pairs of dotted paths of which one at most may be set.
    """
    for override in overrides:
        place = Place(text=f"command line: {override}", line=COMMAND_LINE)
        path, equals, text = override.partition("=")
        section_name, dot, key = path.partition(".")
        if equals and path and not dot and not is_section(path):  # as other trainers have it
            draft.values[path] = _override_value(draft, place, path, text)
            draft.places[path] = place
            continue
        if not equals or not section_name or not key:
            draft.add_problem(
                place,
                f"{override} does not name a setting and its value",
                limit="a setting is section.field=value",
                hint="`train.lr=1e-4`",
            )
            continue
        if path in draft.places and draft.places[path].is_override:
            draft.add_problem(
                place,
                f"{path} is given a second time",
                limit=f"a setting is given once, and there is {draft.places[path].text}",
                hint="remove one of the two",
            )
            continue
        section = draft.section(section_name)
        if section is None:
            continue  # the file has no mapping there, which is reported by itself
        draft.places.setdefault(section_name, place)
        draft.places[path] = place
        num_problems = len(draft.problems)
        value = _override_value(draft, place, path, text)
        if len(draft.problems) == num_problems:
            section[key] = value
    _drop_beaten_rivals(draft, rivals)


def _override_value(draft: Draft, place: Place, path: str, text: str) -> Any:
    """Return the value of an override, read as YAML; nothing at all is null."""
    try:
        node = _composed(text)
    except (yaml.YAMLError, RecursionError) as error:
        draft.add_problem(
            place,
            f"{path} is {text}, which is not YAML: {_yaml_error(error)}",
            limit="a value is written as in a recipe",
            hint=f"quote it: `'{path}=\"{text}\"'`",
        )
        return None
    return None if node is None else _value(node, path, draft)


def _drop_beaten_rivals(draft: Draft, rivals: Sequence[tuple[str, str]]) -> None:
    """Remove what the file sets where the command line sets its rival to a value."""
    for first, second in rivals:
        for winner, loser in ((first, second), (second, first)):
            section_name, _, key = winner.partition(".")
            section = draft.values.get(section_name)
            if (
                isinstance(section, dict)
                and section.get(key) is not None
                and draft.place(winner).is_override
                and not draft.place(loser).is_override
            ):
                section.pop(loser.partition(".")[2], None)


# ---------------------------------------------------------------------------------------------
# Places


def _node_place(draft: Draft, node: yaml.Node) -> Place:
    """Return the line on which a node begins."""
    line = node.start_mark.line + 1
    return Place(text=f"{draft.name}:{line}", line=line)


def _error_place(name: str, error: yaml.YAMLError | RecursionError) -> Place:
    """Return the line at which the YAML stopped being readable."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    line = mark.line + 1 if mark is not None else 1
    return Place(text=f"{name}:{line}", line=line)


def _yaml_error(error: yaml.YAMLError | RecursionError) -> str:
    """Return in one line why the text is not YAML."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError):
        parts = [part for part in (error.problem, error.context) if part]
        return " ".join(parts)
    return str(error).splitlines()[0]


def as_setting(place: Place, path: str, value: Any) -> str:
    """Write a setting as it is written at a place: in a recipe, or on the command line."""
    is_of_section = isinstance(value, dict) and not path.count(".")
    if is_of_section and not place.is_override:
        return f"`{path}:`"
    if is_of_section:
        return " ".join(f"`{path}.{key}={written(item)}`" for key, item in value.items())
    return f"`{path}={written(value)}`" if place.is_override else f"`{path}: {written(value)}`"
