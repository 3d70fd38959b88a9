"""Every row of docs/compatibility.md names what shows it, and that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")][1:]


def test_every_row_is_shown_by_something_that_exists() -> None:
    tests = {path: set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) for path in (ROOT / "tests").rglob("test_*.py")}
    default = [path for path in tests if str(path.relative_to(ROOT)) in re.findall(r"`(tests/[\w/.]+)`", PAGE.splitlines()[-1])]
    assert len(default) == 2 and len(ROWS) > 25
    for feature, _, shown in ROWS:
        names = re.findall(r"`([^`]+)`", shown)
        assert names, feature
        for name in names:
            if name.startswith("test_"):
                assert any(name in tests[path] for path in default), f"{feature}: no {name} in {default}"
            elif "::" in name:
                path, _, test = name.partition("::")
                assert test in tests[ROOT / path], f"{feature}: {name}"
            elif name != "validate_configuration":  # vLLM's own
                assert (ROOT / name).exists(), f"{feature}: {name}"
