"""TOML and YAML files: what they hold, and at which line each schedule in them begins."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from cron_ticks.errors import DeclarationsError

LARGEST_FILE_BYTES = 16 * 1_048_576
MOST_YAML_NODES = 1_000_000  # with all aliases written out
YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_TOML_SCHEDULE = re.compile(r"[ \t]*\[\[[ \t]*schedules[ \t]*\]\]")


def read_document(path: Path) -> tuple[dict[str, Any], list[int]]:
    """The document, and the line at which each of its schedules begins, as far as that can be told."""
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise DeclarationsError([f"{path.name}: the name must end in {', '.join(readers)}"])
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise DeclarationsError([f"{path.name}: must be at most {LARGEST_FILE_BYTES} bytes, has {size}"])
        document, lines = readers[suffix](path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DeclarationsError([f"{path}: {error.strerror}"]) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise DeclarationsError([f"{path.name}: can't be read: {error}"]) from None
    if not isinstance(document, dict):
        raise DeclarationsError([f"{path.name}: must be a table with the key schedules"])
    return document, lines


def _read_toml(text: str) -> tuple[Any, list[int]]:
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _TOML_SCHEDULE.match(line)]
    return tomllib.loads(text), lines


def _read_yaml(text: str) -> tuple[Any, list[int]]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, []
        _YamlCheck().size(node)
        return _construct(loader, node), _lines_of(node)
    finally:
        loader.dispose()


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    try:
        return loader.construct_document(node)
    except (LookupError, AttributeError, TypeError) as error:  # from a tag that is written by hand
        raise ValueError(f"a value doesn't fit its tag: {error!r}") from None


class _YamlCheck:
    """Refuses what YAML takes for something else than people do, and aliases that stand for too much."""

    def __init__(self) -> None:
        self._sizes: dict[yaml.Node, int | None] = {}  # None: we are inside it

    def size(self, node: yaml.Node) -> int:
        """How many values a node stands for."""
        if node not in self._sizes:
            self._sizes[node] = None
            self._sizes[node] = 1 + sum(self.size(part) for part in self._parts(node))
        size = self._sizes[node]
        if size is None:
            raise _refusal(node, "an alias contains itself")
        if size > MOST_YAML_NODES:
            raise _refusal(node, f"its aliases stand for more than {MOST_YAML_NODES} values")
        return size

    def _parts(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
            return [part for pair in node.value for part in pair]
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if node.tag in YAML_NUMBERS and ":" in node.value:
            raise _refusal(node, f"{node.value} is a number to the base of 60 in YAML: put it in quotes")
        return []


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _refusal(key, f"the key {key.value!r} is there twice")
            seen.add(key.value)


def _refusal(node: yaml.Node, reason: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {reason}")


def _lines_of(node: yaml.Node) -> list[int]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    found = [value for key, value in pairs if key.value == "schedules" and isinstance(value, yaml.SequenceNode)]
    return [item.start_mark.line + 1 for items in found for item in items.value]
