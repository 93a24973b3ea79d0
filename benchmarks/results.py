"""Where figures are kept: JSON files beside each other, each with all that is needed to judge it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "results"


def path_of(question: str, directory: Path = DIRECTORY) -> Path:
    """Where the answer to `question` is kept unless the user says otherwise."""
    return directory / f"{question}.json"


def write(report: Mapping[str, Any], path: Path) -> None:
    """As JSON, a row of numbers on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\s+", " ", row.group()), text) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """What was written there; `None` if nothing has been."""
    return json.loads(path.read_text()) if path.exists() else None


def of_config(config: Any) -> dict[str, Any]:
    """A dataclass of options, ready for JSON, without paths: those are of no interest to others."""
    return {key: value for key, value in dataclasses.asdict(config).items() if not isinstance(value, Path)}
