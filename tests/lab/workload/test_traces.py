"""Trace and length files in their published formats, and files that are wrong."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from kunserve_lab.workload.files import WorkloadFileError
from kunserve_lab.workload.traces import read_azure, read_burstgpt, read_lengths, read_timed_trace

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,100,10,110,Conversation log
45,GPT-4,200,0,200,Conversation log
118,GPT-4,300,30,330,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.6805900,374,44
2023-11-17 00:00:01.1805900,396,109
"""
REBASED = "arrival_s,input_tokens,output_tokens,service\n0.5,10,1,conv\n0.25,20,2,code\n"
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    "\n"
    '{"timestamp": 3500, "input_length": 7, "output_length": 5}\n'
)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["burst.csv", "burst.csv.gz"])
def test_burstgpt(tmp_path: Path, name: str) -> None:
    workload = read_burstgpt(write(tmp_path, name, BURSTGPT))
    assert workload.arrival_s == (0.0, 113.0)
    assert workload.input_tokens == (100, 300)
    assert workload.output_tokens == (10, 30)
    assert name in workload.provenance and "1 rows without tokens" in workload.provenance


def test_burstgpt_of_one_model(tmp_path: Path) -> None:
    workload = read_burstgpt(write(tmp_path, "burst.csv", BURSTGPT), model="GPT-4")
    assert workload.input_tokens == (300,)


def test_azure_wall_clock_over_midnight(tmp_path: Path) -> None:
    workload = read_azure(write(tmp_path, "azure.csv", AZURE))
    assert workload.arrival_s == pytest.approx((0.0, 1.5), abs=1e-6)
    assert workload.output_tokens == (44, 109)


def test_azure_rebased_is_put_in_order(tmp_path: Path) -> None:
    workload = read_azure(write(tmp_path, "azure.csv", REBASED))
    assert workload.arrival_s == (0.0, 0.25)
    assert workload.input_tokens == (20, 10)


def test_timed_trace_in_the_unit_given(tmp_path: Path) -> None:
    path = write(tmp_path, "trace.jsonl", MOONCAKE)
    assert read_timed_trace(path, 0.001).arrival_s == (0.0, 0.5)
    assert read_timed_trace(path, 1.0).arrival_s == (0.0, 500.0)


@pytest.mark.parametrize(
    "header", ["input,output", "Input_Tokens,Output_Tokens", "idx,prompt_len,completion_tokens"]
)
def test_length_columns_are_found_by_name(tmp_path: Path, header: str) -> None:
    row = "7,3" if header.count(",") == 1 else "0,7,3"
    lengths = read_lengths(write(tmp_path, "lengths.csv", f"{header}\n{row}\n"))
    assert (lengths.input_tokens, lengths.output_tokens) == ((7,), (3,))


BAD_CSV = [
    ("", 1, "empty"),
    ("a,b\n1,2\n", 1, "no column"),
    (BURSTGPT + "x,ChatGPT,1,1,2,log\n", 5, "not a number"),
    (BURSTGPT + "1,ChatGPT,1\n", 5, "3 values where the header has 6"),
    (BURSTGPT + "1,ChatGPT,-4,1,2,log\n", 5, "at least 0"),
    (BURSTGPT + "1,ChatGPT,1.5,1,2,log\n", 5, "whole number"),
    (BURSTGPT + "inf,ChatGPT,1,1,2,log\n", 5, "not finite"),
    (BURSTGPT + "1,ChatGPT,,1,2,log\n", 5, "no value"),
    (BURSTGPT + "1,ChatGPT,1e300,1,2,log\n", 5, "too large"),
    ("Timestamp,Model,Request tokens,Request tokens\n", 1, "two columns are called 'Request"),
    (BURSTGPT.splitlines()[0] + "\n", None, "no request"),
]


@pytest.mark.parametrize(("text", "line", "reason"), BAD_CSV)
def test_a_bad_csv_names_file_line_and_reason(
    tmp_path: Path, text: str, line: int | None, reason: str
) -> None:
    path = write(tmp_path, "bad.csv", text)
    with pytest.raises(WorkloadFileError) as caught:
        read_burstgpt(path)
    assert (caught.value.path, caught.value.line) == (path, line)
    assert "bad.csv" in str(caught.value) and reason in str(caught.value)
    assert line is None or f"line {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 4}', "no value for 'output_length'"),
        ('{"timestamp": true, "input_length": 4, "output_length": 1}', "'timestamp'"),
        ('{"timestamp": [1], "input_length": 4, "output_length": 1}', "not a number"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"timestamp": 1, "input_length": {10**400}, "output_length": 1}}', "not a number"),
    ],
)
def test_a_bad_jsonl_names_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, "bad.jsonl", MOONCAKE + text + "\n")
    with pytest.raises(WorkloadFileError, match="line 4") as caught:
        read_timed_trace(path, 1.0)
    assert reason in str(caught.value)


@pytest.mark.parametrize("read", [read_burstgpt, read_azure, read_lengths])
def test_unreadable_files(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(WorkloadFileError, match="no such file"):
        read(tmp_path / "absent.csv")
    with pytest.raises(WorkloadFileError, match="directory"):
        read(tmp_path)
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(WorkloadFileError, match="cannot be read"):
        read(broken)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(WorkloadFileError):
        read(binary)


def test_a_bad_azure_time(tmp_path: Path) -> None:
    path = write(tmp_path, "azure.csv", AZURE + "yesterday,1,1\n")
    with pytest.raises(WorkloadFileError, match="line 4.*not a date"):
        read_azure(path)
