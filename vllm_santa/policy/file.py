"""Reading a policy from YAML, with errors that say where."""

import difflib
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vllm_santa.policy.budget import shown
from vllm_santa.policy.schema import Policy

Location = tuple[int | str, ...]


class PolicyError(ValueError):
    """A policy that cannot be used; the message names file, line, field, value and what is allowed."""


def read_policy(path: Path) -> Policy:
    """Read and check a policy file.

    Raises:
        PolicyError: one line for each mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    policy = parse_policy(text, str(path))
    if policy.codebooks is None:
        return policy
    codebooks = path.parent / Path(policy.codebooks).expanduser()
    if not codebooks.is_file():
        raise PolicyError(f"{path}: codebooks: no such file: {codebooks}; allowed: null, or the path of a safetensors file")
    return policy.model_copy(update={"codebooks": str(codebooks)})


def parse_policy(text: str, name: str) -> Policy:
    """Check the text of a policy; `name` stands for the file in errors. Paths in it are left as they are.

    Raises:
        PolicyError: one line for each mistake.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        data = loader.construct_document(root) if root else {}
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PolicyError(f"{name}:{line}: is not YAML: the character #x{error.character:04x} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise PolicyError(f"{where}: is not YAML: {getattr(error, 'problem', None) or error}") from None
    except (ValueError, RecursionError) as error:  # a date that does not exist, aliases without end
        raise PolicyError(f"{name}: is not YAML: {error}") from None
    _refuse_duplicates(root, name)
    if not isinstance(data, dict):
        raise PolicyError(f"{name}:1: the file is {shown(data)}; allowed: a mapping of {', '.join(Policy.model_fields)}")
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError("\n".join(_message(name, root, item) for item in error.errors())) from None


def _refuse_duplicates(root: yaml.Node | None, name: str) -> None:
    pending, seen = [root] if root else [], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                if key.value in keys:
                    raise PolicyError(f"{name}:{key.start_mark.line + 1}: {key.value}: is given twice; allowed: once")
                keys.add(key.value)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


def _message(name: str, root: yaml.Node, item: Any) -> str:
    location, line = _locate(root, item["loc"])
    field = _dotted(location)
    if item["type"] == "extra_forbidden":
        known = list(_model_at(location[:-1]).model_fields)
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name}:{line}: {field}: unknown field (value {shown(item['input'])}); allowed: {', '.join(known)}{hint}"
    allowed = _allowed(location)
    suffix = f"; allowed: {allowed}" if allowed else ""
    if item["type"] == "missing":
        return f"{name}:{line}: {field}: is missing{suffix}"
    problem = item["msg"].removeprefix("Value error, ")
    if problem.partition("; allowed: ")[2]:
        return f"{name}:{line}: {problem}"
    return f"{name}:{line}: {field}: {shown(item['input'])}: {problem[0].lower() + problem[1:]}{suffix}"


def _locate(root: yaml.Node, location: Location) -> tuple[Location, int]:
    """The part of a pydantic location that is in the file (unions add parts that are not), and its line from 1."""
    node, line, found = root, root.start_mark.line, []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:  # a missing field, or what a union adds
                found.append(part)
                break
            line, node = pair[0].start_mark.line, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
        found.append(part)
    return tuple(found), line + 1


def _dotted(location: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "policy"


def _model_at(location: Location) -> type[BaseModel]:
    """The model whose fields are allowed at a location."""
    model: type[BaseModel] = Policy
    for part in location:
        if isinstance(part, str):
            model = submodel(model, part) or model
    return model


def submodel(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The model of a field, or of the items of its list; None for plain values."""
    annotation = model.model_fields[field].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def allowed_text(field: FieldInfo) -> str:
    """The words of the schema for what a field may hold."""
    return field.json_schema_extra["allowed"]  # type: ignore[index,return-value]


def _allowed(location: Location) -> str | None:
    """The words of the schema for what may stand at a location."""
    model: type[BaseModel] = Policy
    text = None
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            text = allowed_text(model.model_fields[part])
            model = submodel(model, part) or model
    return text
