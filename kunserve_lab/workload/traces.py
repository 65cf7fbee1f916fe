"""Published trace formats, and files of lengths, as values.

Rows are put in order of arrival (the sort is stable) and the first arrival becomes time 0.
Requests that produced no token in the trace (failed ones) are left out and counted in the
provenance.
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from kunserve_lab.workload.contents import MAX_NAME, RUN_TOKENS, Content
from kunserve_lab.workload.files import Row, Table, WorkloadFileError, read_csv, read_jsonl
from kunserve_lab.workload.workload import Lengths, Workload

MOONCAKE_SECONDS_PER_UNIT = 0.001
TIMED_TRACE_SECONDS_PER_UNIT = 1.0

_INPUT_NAMES = (
    "input_tokens", "input", "input_len", "input_length", "prompt_tokens", "prompt_len",
    "num_prefill_tokens", "ContextTokens", "Request tokens",
)  # fmt: skip
_OUTPUT_NAMES = (
    "output_tokens", "output", "output_len", "output_length", "completion_tokens", "decode_len",
    "num_decode_tokens", "GeneratedTokens", "Response tokens",
)  # fmt: skip


def read_lengths(path: Path) -> Lengths:
    """(input, output) lengths from a CSV file (``.csv`` or ``.csv.gz``).

    The columns are found by name, in any case: input, input_tokens, prompt_tokens,
    ContextTokens, ... and output, output_tokens, completion_tokens, GeneratedTokens, ...
    Pairs with a 0 are left out.
    """
    table = read_csv(path)
    input_name = _column(table, _INPUT_NAMES, "input length")
    output_name = _column(table, _OUTPUT_NAMES, "output length")
    pairs = [(row.count(input_name), row.count(output_name)) for row in table.rows]
    kept = [pair for pair in pairs if min(pair) > 0]
    if not kept:
        raise WorkloadFileError(path, None, "no row with an input and an output length above 0")
    return Lengths(tuple(pair[0] for pair in kept), tuple(pair[1] for pair in kept), path.name)


def read_burstgpt(path: Path, model: str | None = None) -> Workload:
    """BurstGPT's CSV: ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``.

    ``Timestamp`` is in seconds. Only the rows of ``model`` (such as ``ChatGPT``) if it is given.
    """
    table = read_csv(path)
    for name in ("Timestamp", "Request tokens", "Response tokens"):
        _column(table, (name,), name)
    if model is not None:
        _column(table, ("Model",), "Model")
        table = table._replace(rows=[row for row in table.rows if row.text("Model") == model])
    source = f"BurstGPT {path.name}" + (f" ({model})" if model else "")
    return _workload(
        path,
        table.rows,
        lambda row: row.number("Timestamp"),
        ("Request tokens", "Response tokens"),
        source,
    )


def read_azure(path: Path) -> Workload:
    """Azure's LLM inference trace, in its own columns or re-based.

    Its own: ``TIMESTAMP,ContextTokens,GeneratedTokens`` with wall-clock times. Re-based:
    ``arrival_s,input_tokens,output_tokens`` in seconds. Further columns are ignored.
    """
    table = read_csv(path)
    source = f"Azure {path.name}"
    if "arrival_s" in table.columns:
        names = ("input_tokens", "output_tokens")
        arrival: Callable[[Row], float] = _arrival_column
    else:
        names = ("ContextTokens", "GeneratedTokens")
        _column(table, ("TIMESTAMP",), "arrival time (TIMESTAMP or arrival_s)")
        arrival = _wall_clock_s
    for name in names:
        _column(table, (name,), name)
    return _workload(path, table.rows, arrival, names, source)


def read_timed_trace(path: Path, seconds_per_unit: float) -> Workload:
    """JSONL of ``timestamp``, ``input_length``, ``output_length``; more fields are ignored.

    But ``hash_ids``, as in Mooncake's traces, names each prompt's blocks of 512 tokens: prompts
    whose first names are equal begin alike. And ``priority``, the lower the sooner.

    One unit of ``timestamp`` is ``seconds_per_unit`` seconds, always said by the caller and
    never guessed: Mooncake's traces are in milliseconds (0.001), plain timed traces in seconds.
    """
    return _workload(
        path,
        read_jsonl(path),
        lambda row: row.number("timestamp") * seconds_per_unit,
        ("input_length", "output_length"),
        f"timed trace {path.name}",
    )


def _workload(
    path: Path,
    rows: list[Row],
    arrival_s: Callable[[Row], float],
    names: tuple[str, str],
    source: str,
) -> Workload:
    read = [
        (
            arrival_s(row),
            row.count(names[0]),
            row.count(names[1]),
            _content(row, names[0]),
            _priority(row),
        )
        for row in rows
    ]
    kept = sorted((row for row in read if min(row[1:3]) > 0), key=lambda row: row[0])
    if not kept:
        raise WorkloadFileError(path, None, "no request with both lengths above 0")
    num_failed = len(read) - len(kept)
    skipped = f" ({num_failed} rows without tokens left out)" if num_failed else ""
    start_s = kept[0][0]
    contents, priorities = tuple(row[3] for row in kept), tuple(row[4] for row in kept)
    lengths = Lengths(
        tuple(row[1] for row in kept),
        tuple(row[2] for row in kept),
        source,
        contents if any(contents) else None,
        priorities if any(priorities) else None,
    )
    return Workload(tuple(row[0] - start_s for row in kept), lengths, source + skipped)


def _priority(row: Row) -> int:
    """What ``priority`` tells of the request, if the row has it."""
    priority = row.values.get("priority", 0)
    if type(priority) is not int or abs(priority) >= MAX_NAME:
        raise WorkloadFileError(row.path, row.line, "'priority' is not a whole number")
    return priority


def _content(row: Row, input_name: str) -> Content | None:
    """What ``hash_ids`` tell of the prompt, if the row has them."""
    names = row.values.get("hash_ids")
    if names is None:
        return None
    if not isinstance(names, list) or not all(type(one) is int for one in names):
        raise WorkloadFileError(row.path, row.line, "'hash_ids' is not a list of whole numbers")
    if not all(0 <= one < MAX_NAME for one in names):
        reason = f"a number of 'hash_ids' is not from 0 to {MAX_NAME - 1}"
        raise WorkloadFileError(row.path, row.line, reason)
    num_tokens = row.count(input_name)
    return Content.of_blocks(names, num_tokens, RUN_TOKENS) if names and num_tokens else None


def _column(table: Table, names: tuple[str, ...], what: str) -> str:
    """The first of ``names`` that the table has, whatever its case."""
    present = {column.lower(): column for column in table.columns}
    for name in names:
        if name.lower() in present:
            return present[name.lower()]
    found = ", ".join(table.columns)
    raise WorkloadFileError(table.path, 1, f"no column for the {what}; the columns are: {found}")


def _arrival_column(row: Row) -> float:
    return row.number("arrival_s")


def _wall_clock_s(row: Row) -> float:
    """Seconds of a wall-clock time such as ``2023-11-16 18:15:46.6805900`` (100 ns digits)."""
    text = row.text("TIMESTAMP")
    whole, _, fraction = text.partition(".")
    digits = fraction.removesuffix("Z").partition("+")[0]
    try:
        moment = datetime.fromisoformat(whole)
        part_s = float(f"0.{digits}") if digits else 0.0
    except ValueError:
        reason = f"TIMESTAMP is not a date and time: {text!r}"
        raise WorkloadFileError(row.path, row.line, reason) from None
    naive = moment.replace(tzinfo=None)
    return (naive - datetime(1970, 1, 1)).total_seconds() + part_s
