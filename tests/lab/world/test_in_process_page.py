"""The example of ``docs/testing.md`` runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "check_empty()" in example
    exec(compile(example, str(PAGE), "exec"), {})
