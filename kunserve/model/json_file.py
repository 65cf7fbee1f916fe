"""Reads the JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from kunserve.core.errors import ModelFiles


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelFiles says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFiles(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFiles(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFiles(f"{path}: not a JSON object")
    return value
