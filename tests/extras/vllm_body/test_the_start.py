"""What an operator reads before the first request."""

from contextlib import closing
from pathlib import Path

import pytest

from kunserve.core.errors import ModelFiles
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import save_tiny


@NEEDS_VLLM
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_promises_the_same_tokens(
    kind: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO"),
        closing(open_engine(save_tiny(tmp_path, kind), 0, "vllm", dtype=dtype)),
    ):
        pass
    (line,) = [one for one in caplog.messages if one.startswith("engine vllm")]
    assert f"{dtype}: the same tokens alone, in batches and through drops" in line


@NEEDS_VLLM
def test_vllm_is_not_given_a_file_that_is_none(tmp_path: Path) -> None:
    """Such as a pointer of Git LFS, in which its reader takes words for a length."""
    folder = save_tiny(tmp_path, "llama")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFiles, match="truncated or corrupt"):
        open_engine(folder, 0, "vllm")
