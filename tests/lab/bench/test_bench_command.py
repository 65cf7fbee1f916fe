"""`kunserve bench` from its flags to its files."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kunserve_lab.bench.bench_command import bench_command
from kunserve_lab.bench.runfile import read_run
from tests.conftest import wait_until

QUICK = ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "4"]


def bench(*args: str) -> Result:
    return CliRunner().invoke(bench_command, list(args), catch_exceptions=False)


def test_a_run_prints_vllms_block_and_saves_everything(server, tmp_path: Path) -> None:
    result = bench(
        "--base-url", server.url, *QUICK, "--request-rate", "100", "--ignore-eos",
        "--goodput", "ttft:5000", "tpot:5000", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path / "out"), "--result-filename", "one.json",
        "--plot", str(tmp_path / "figs" / "one.png"), "--metadata", "gpu=none", "try=1",
        "--metric-percentiles", "50,99",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "============ Serving Benchmark Result ============" in lines
    assert f"{'Successful requests:':<40} 6" in lines
    assert any(line.startswith("Request goodput (req/s):") for line in lines)
    assert any(line.startswith("P99 TTFT (ms):") for line in lines)
    saved = json.loads((tmp_path / "out" / "one.json").read_text())
    for key in (
        "completed", "failed", "request_throughput", "output_throughput", "request_goodput",
        "total_token_throughput", "mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_e2el_ms",
        "duration", "total_input_tokens", "total_output_tokens", "ttfts", "itls",
    ):  # fmt: skip
        assert key in saved, key
    assert (saved["completed"], saved["total_output_tokens"], saved["gpu"]) == (6, 24, "none")
    run = read_run(tmp_path / "out" / "one.jsonl")
    assert len(run.records) == 6 and run.samples
    assert "Poisson" in run.provenance
    assert dict(run.environment)["python"]
    assert (tmp_path / "figs" / "one.png").stat().st_size > 10_000
    assert all(body["ignore_eos"] for body in server.bodies)


def test_saved_runs_are_reported_and_compared(server, tmp_path: Path) -> None:
    for name in ("a", "b"):
        bench(
            "--base-url", server.url, *QUICK, "--save-result", "--label", name,
            "--result-dir", str(tmp_path), "--result-filename", f"{name}.json",
        )  # fmt: skip
    figure = tmp_path / "both.svg"
    result = bench(
        "--load-result", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--plot", str(figure)
    )
    assert result.exit_code == 0 and result.output.count("Serving Benchmark Result") == 2
    assert "<svg" in figure.read_text()


def test_what_was_measured_is_saved_wherever_that_is_to_be(server, tmp_path: Path) -> None:
    """Else the end of a long run would be its loss."""
    to = ("--base-url", server.url, *QUICK, "--save-result", "--result-dir", str(tmp_path))
    result = bench(*to, "--label", "ours/at/2")
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("ours-at-2-*.jsonl"))) == 1
    result = bench(*to, "--result-filename", "some/where.json")
    assert result.exit_code == 0, result.output
    assert read_run(tmp_path / "some" / "where.jsonl").records


def test_what_is_infinite_is_saved_as_json_that_anybody_reads(server, tmp_path: Path) -> None:
    to = ("--base-url", server.url, *QUICK, "--save-result", "--result-dir", str(tmp_path))
    for name, flags, rate, burstiness in (
        ("a", ("--request-rate", "inf"), "inf", None),
        ("b", ("--request-rate", "500", "--burstiness", "inf"), 500.0, "inf"),
    ):
        result = bench(*to, *flags, "--result-filename", f"{name}.json")
        assert result.exit_code == 0, result.output
        text = (tmp_path / f"{name}.json").read_text()
        saved = json.loads(text, parse_constant=pytest.fail)
        assert (saved["request_rate"], saved["burstiness"]) == (rate, burstiness)


def test_several_servers_and_chat(server, second_server) -> None:
    result = bench(
        "--backend", "openai-chat", "--base-url", server.url, second_server.url + "/v1/", *QUICK
    )
    assert result.exit_code == 0, result.output
    assert len(server.bodies) == len(second_server.bodies) == 3


def test_the_bursty_workload_needs_no_file(server) -> None:
    result = bench(
        "--base-url", server.url, "--dataset-name", "bursty", "--request-rate", "30",
        "--bursty-duration", "1", "--length-scale", "0.02", "--disable-tqdm",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "two spikes" in result.output


def test_failures_are_counted_with_reasons(server) -> None:
    server.behaviour.status = 503
    result = bench("--base-url", server.url, *QUICK)
    assert result.exit_code == 1
    assert "6 x HTTP 503: as told" in result.output


def test_ctrl_c_ends_a_warm_up(server) -> None:
    server.behaviour.hang = True

    def interrupt() -> None:
        wait_until(lambda: bool(server.bodies))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = bench("--base-url", server.url, *QUICK, "--num-warmups", "1", "--disable-tqdm")
    thread.join()
    assert result.exit_code == 130 and len(server.bodies) == 1
    assert "Interrupted before the first request." in result.output


def test_short_outputs_are_pointed_out(server) -> None:
    server.behaviour.raw = (
        b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    )
    result = bench("--base-url", server.url, *QUICK)
    assert "--ignore-eos" in result.output


def test_an_absent_server_is_one_line_and_exit_code_2() -> None:
    result = bench("--port", "9", *QUICK, "--ready-check-timeout-sec", "0")
    assert result.exit_code == 2
    assert "no server at http://127.0.0.1:9: connection refused" in result.output
    assert "Traceback" not in result.output and result.output.count("\n") <= 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--no-such-flag"], "No such option"),
        (["--dataset-name", "sharegpt"], "is not one of"),
        (["--request-rate", "0"], "range"),
        (["--request-rate", "nan"], "request rate"),
        (["--num-prompts", "0"], "range"),
        (["--seed", "-1"], "range"),
        (["--goodput", "speed:3"], "--goodput speed:3"),
        (["--goodput", "ttft"], "--goodput ttft"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--metric-percentiles", "x"], "0 to 100"),
        (["--percentile-metrics", "speed"], "expected some of"),
        (["--dataset-name", "burstgpt"], "give its path"),
        (["--dataset-name", "azure", "--dataset-path", "/nowhere.csv"], "no such file"),
        (["--trace-scale", "2"], "does not apply"),
        (["--base-url", "127.0.0.1:8000"], "expected http://"),
        (["--plot", "figure"], "expected a .png"),
        (["--plot", "/proc/nowhere/f.png"], "cannot make the folder"),
        (["--save-result", "--result-filename", "/proc/nowhere/r.json"], "cannot make the folder"),
        (["--extra-body", "{"], "--extra-body"),
        (["--backend", "openai-chat", "--prompt-format", "token-ids"], "text only"),
        (["--load-result", "/nowhere.jsonl"], "cannot read"),
        (["stray"], "unexpected extra argument"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(args: list[str], words: str) -> None:
    result = bench("--ready-check-timeout-sec", "0", *args)
    assert result.exit_code == 2
    assert words in result.output, result.output
    assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = bench("--help").output
    for words in ("Server:", "Workload:", "Client:", "Report:", "Examples", "bursty"):
        assert words in text


def test_importing_the_command_is_cheap() -> None:
    code = (
        "import sys, kunserve_lab.bench.bench_command as c; "
        "print([m for m in ('numpy', 'aiohttp', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
