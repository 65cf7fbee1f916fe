"""``docs/configuration.md`` tells of every flag as it is, and its example of a file works."""

import re
from pathlib import Path

from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.start.flags.table import flags_tables, renewed

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    renew = "python -m kunserve.server.start.flags.table docs/configuration.md"
    assert page == renewed(page, serve_command), f"run: {renew}"


def test_every_flag_is_told() -> None:
    tables = flags_tables(serve_command)
    for parameter in serve_command.params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name == "model" or f"`{name}`" in tables
    assert "| `--port` | an integer from 0 to 65535 | `8000` | 0 picks a free one. |" in tables


def test_the_example_of_a_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "serve.yaml"
    path.write_text(example)
    context = serve_command.make_context("serve", ["--config", str(path)])
    config = config_from_flags(context.params)
    assert config.model.served_model_name == ("qwen", "default")
    assert config.overload.restore_hold_s == 10.0
