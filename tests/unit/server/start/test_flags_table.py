"""``docs/configuration.md`` tells of every flag as it is, and its example of a file works."""

import re
from pathlib import Path

from kunserve.core.config import CUDA_BLOCK_SIZE, MIB, InstanceConfig
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.start.flags.option import ServeFlag
from tests.unit.server.start.flags_table import flags_tables, renewed

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    renew = "python -m tests.unit.server.start.flags_table docs/configuration.md"
    assert page == renewed(page, serve_command), f"run: {renew}"


def test_every_flag_is_told() -> None:
    tables = flags_tables(serve_command)
    for parameter in serve_command.params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name == "model" or f"`{name}`" in tables
    assert "| `--port` | 0-65535 | `8000` | 0 picks a free one. |" in tables


def test_the_example_of_a_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "serve.yaml"
    path.write_text(example)
    context = serve_command.make_context("serve", ["--config", str(path)])
    config = config_from_flags(context.params)
    assert config.model.served_model_name == ("qwen", "default")
    assert config.overload.restore_hold_s == 10.0


def test_defaults_that_a_device_chooses_are_told() -> None:
    """Their flags have none, so the help says them, and it is written by hand."""
    helps = {one.name: one.help for one in serve_command.params if isinstance(one, ServeFlag)}
    usual = InstanceConfig()
    assert f"[{usual.memory_bytes // MIB}MiB; " in (helps["memory_bytes"] or "")
    assert f"[{usual.block_size}; {CUDA_BLOCK_SIZE} on a GPU, " in (helps["block_size"] or "")
    on_gpu = InstanceConfig.of_device("cuda")
    assert f"[{on_gpu.gpu_memory_utilization}]" in (helps["gpu_memory_utilization"] or "")
