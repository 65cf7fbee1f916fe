"""lm-eval's answers over our server beside those of transformers in its own process.

    python -m benchmarks.serving.lm_eval --lm-eval VENV/bin/lm_eval --model DIR [--dtype float32]

EleutherAI's lm-evaluation-harness runs unmodified, from an environment of its own
(``pip install lm_eval accelerate``): once as ``local-completions`` against ``kunserve serve``, once
with its ``hf`` model on the same Hugging Face folder. The tasks are ours (``lm_eval_tasks``): fifty
questions by log-likelihood, twenty sequences by generation. With ``--num-instances 2`` and
``--drop`` the first run is served by a pipeline.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from kunserve_lab.bench.server_process import ServerProcess

TASKS_FOLDER = Path(__file__).parent / "lm_eval_tasks"
FACTS, SEQUENCES = "kunserve_facts", "kunserve_sequences"
NAME = "model"


@dataclass(frozen=True)
class Answers:
    """What one run of lm-eval found."""

    accuracy: dict[str, float]
    logprobs: list[list[float]]
    """Per question: of each answer."""
    generated: list[str]
    seconds: float

    @property
    def choices(self) -> list[int]:
        """Per question: the likeliest answer."""
        return [row.index(max(row)) for row in self.logprobs]

    @property
    def margins(self) -> list[float]:
        """Per question: how far the likeliest answer is before the next."""
        ordered = [sorted(row) for row in self.logprobs]
        return [row[-1] - row[-2] for row in ordered]


def run(command: Sequence[str], output: Path) -> Answers:
    """Run lm-eval and read what it wrote."""
    began_s = time.monotonic()
    arguments = ["--tasks", f"{FACTS},{SEQUENCES}", "--include_path", ".", "--batch_size", "8"]
    arguments += ["--output_path", str(output), "--log_samples"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=TASKS_FOLDER,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(output / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    seconds = time.monotonic() - began_s
    (results,) = output.glob("*/results_*.json")
    found = json.loads(results.read_text())["results"]
    facts, sequences = (_samples(output, task) for task in (FACTS, SEQUENCES))
    return Answers(
        accuracy={
            FACTS: found[FACTS]["acc,none"],
            SEQUENCES: found[SEQUENCES]["exact_match,first-word"],
        },
        logprobs=[[float(answer[0][0]) for answer in one["resps"]] for one in facts],
        generated=[one["resps"][0][0] for one in sequences],
        seconds=seconds,
    )


def _samples(output: Path, task: str) -> list[dict[str, Any]]:
    (path,) = output.glob(f"*/samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def ours(options: argparse.Namespace, folder: Path) -> Answers:
    """Served by this checkout."""
    flags = [options.model, "--served-model-name", NAME, "--dtype", options.dtype]
    flags += ["--num-instances", str(options.num_instances)]
    flags += ["--instance-memory", options.instance_memory]
    if options.drop:
        flags.append("--enable-admin")
    server = ServerProcess.serving(flags, folder / "server.log")
    try:
        server.wait_ready()
        if options.drop:
            request = urllib.request.Request(f"{server.url}/kunserve/drop", b"{}")
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request) as answer:
                print(json.loads(answer.read())["result"], file=sys.stderr)
        model = f"model={NAME},base_url={server.url}/v1/completions,num_concurrent=4"
        if options.tokenizer:
            model += f",tokenizer={options.tokenizer}"
        command = [options.lm_eval, "--model", "local-completions", "--model_args", model]
        return run(command, folder / "ours")
    finally:
        server.stop()


def transformers(options: argparse.Namespace, folder: Path) -> Answers:
    """lm-eval's own engine."""
    model = f"pretrained={options.model},dtype={options.dtype}"
    command = [options.lm_eval, "--model", "hf", "--device", "cpu", "--model_args", model]
    return run(command, folder / "hf")


def main() -> None:
    """Run both and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lm-eval", required=True, help="lm-eval's command")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--tokenizer", help="a folder; without it the server is asked")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-instances", type=int, default=1)
    parser.add_argument("--instance-memory", default="1200MiB")
    parser.add_argument("--drop", action="store_true", help="merge the instances first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Report("lm_eval", dtype=options.dtype) as report:
        folder = Path(name)
        both = {"kunserve": ours(options, folder), "transformers": transformers(options, folder)}
        for engine, answers in both.items():
            for task, accuracy in answers.accuracy.items():
                report.add("accuracy", accuracy, "", engine=engine, task=task)
            report.add("time of lm-eval", answers.seconds, "s", engine=engine, task="both")
        mine, theirs = both.values()
        pairs = zip(mine.choices, theirs.choices, strict=True)
        texts = zip(mine.generated, theirs.generated, strict=True)
        report.add("same answers", sum(a == b for a, b in pairs), f"of {len(mine.choices)}")
        report.add("same texts", sum(a == b for a, b in texts), f"of {len(mine.generated)}")
        differences = [
            abs(a - b)
            for row, other in zip(mine.logprobs, theirs.logprobs, strict=True)
            for a, b in zip(row, other, strict=True)
        ]
        report.add("largest difference of a log-likelihood", max(differences), "")
        report.add("smallest margin between two answers", min(theirs.margins), "")


if __name__ == "__main__":
    main()
