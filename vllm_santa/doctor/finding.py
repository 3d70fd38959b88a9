"""What a check reports."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    check: what was looked at. found: what it is, in words. cure: what to do about it, empty where nothing has to be done. An error keeps a
    server on this backend from starting; a warning does not.
    """

    check: str
    level: Level
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, cure: str) -> Finding:
    return Finding(check, "warning", found, cure)


def error(check: str, found: str, cure: str) -> Finding:
    return Finding(check, "error", found, cure)
