"""docs/vllm-features.md names everything that it should, and only tests that are there."""

import ast
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest
from starlette.routing import Route

from kunserve import LLM, SamplingParams
from kunserve.server.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kunserve.server.api.unsupported import HARMLESS, OTHER_ENDPOINTS, REFUSED
from kunserve.server.start.app import _routes
from kunserve.server.start.foreign_flags import FLAGS
from kunserve_extras.messages.schema import MessagesBody
from kunserve_extras.responses.schema import ResponsesBody
from tests.unit.server.live_server import live_server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm-features.md").read_text()
STATES = {"same", "other", "out of scope"}
FOREIGN_CLIENTS = {"openai", "httpx", "subprocess", "langchain_openai", "instructor"}
"""Modules that tests ask with, or start one with (curl, a program of a user)."""
IN_PYTHON = "In Python"


@dataclass(frozen=True)
class Row:
    section: str
    names: tuple[str, ...]
    state: str
    text: str


def parsed_rows() -> list[Row]:
    rows = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.splitlines()[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| `"):
                assert len(cells) == 3, line
                rows.append(Row(title, tuple(re.findall(r"`([^`]+)`", cells[0])), *cells[1:]))
    return rows


ROWS = parsed_rows()
FILES = dict(re.findall(r"^\* `(\w+)`: `(tests/\S+)`$", PAGE, re.MULTILINE))


def names_in(*titles: str) -> set[str]:
    return {name for row in ROWS if row.section in titles for name in row.names}


def named_in(row: Row) -> list[tuple[str, str]]:
    return re.findall(r"`(\w+)::(test_\w+)`", row.text)


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def test_the_page_is_read() -> None:
    assert len(ROWS) > 60 and len(FILES) > 8
    assert {row.state for row in ROWS} == STATES


def test_every_endpoint() -> None:
    with live_server() as server:
        ours = {one.path for one in _routes(server.front) if isinstance(one, Route)}
    assert not (ours | set(OTHER_ENDPOINTS)) - names_in("Endpoints")


def test_every_field() -> None:
    told = names_in("Fields of completions and chats")
    known = {*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED, *HARMLESS}
    assert not known - told
    assert not {*ResponsesBody.model_fields} - told - names_in("Fields of responses")
    assert not {*MessagesBody.model_fields} - told - names_in("Fields of messages")
    tokens = {*TokenizeBody.model_fields, *DetokenizeBody.model_fields}
    assert not tokens - names_in("Fields of `/tokenize` and `/detokenize`")


def test_what_is_refused_is_not_called_the_same() -> None:
    """But for what vLLM refuses too."""
    promised = {
        name
        for row in ROWS
        if row.section == "Fields of completions and chats" and row.state == "same"
        for name in row.names
    }
    assert promised & set(REFUSED) <= {"suffix"}


def test_every_flag_that_is_refused() -> None:
    assert not set(FLAGS) - names_in("Flags of the server")


def test_every_name_in_python() -> None:
    told = names_in(IN_PYTHON)
    methods = {f"LLM.{name}" for name in vars(LLM) if not name.startswith("_")}
    assert not methods - told
    assert not {field.name for field in fields(SamplingParams)} - told


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_a_row_keeps_its_word(row: Row) -> None:
    assert row.state in STATES
    if row.state != "same":
        assert len(row.text) > 8, "say why"
        return
    found = named_in(row)
    assert found, "name a test"
    for short, name in found:
        file = FILES[short]
        defined = {node.name for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{file} has no {name}"
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree(file))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert row.section == IN_PYTHON or imported & FOREIGN_CLIENTS, f"who asks in {file}?"


def test_what_other_rows_name_is_there_too() -> None:
    for row in ROWS:
        for short, name in named_in(row):
            assert re.search(rf"def {name}\(", (ROOT / FILES[short]).read_text()), (short, name)
