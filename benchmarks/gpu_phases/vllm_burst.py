"""P11: a burst of Azure's trace against two replicas of vLLM, and our server with its classes.

The same model with random weights, as much memory for KV, the same kernels: only who decides
differs. Each system is a part, and a run that is done is kept.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.machine import GIB, MIB, Machine
from benchmarks.gpu_phases.models import serving_model, write_model
from benchmarks.gpu_phases.vllm_identity import config_of, not_there
from benchmarks.report import Report
from kunserve.model.spec import ModelSpec
from kunserve_lab.compare import results
from kunserve_lab.compare.experiment_file import read_experiment

SYSTEMS = ("vllm-rr", "vllm-body", "vllm-body-drop")
_LOAD = 0.5
_KV_SHARE = 0.15
"""As P7 has it: a burst shall fill it."""


def run(machine: Machine, report: Report) -> None:
    """One run of each."""
    machine.do(*(Part(name, partial(_play, machine, report, name)) for name in SYSTEMS))


def write_experiment(machine: Machine, spec: ModelSpec, kv_bytes: int) -> Path:
    """The file that `kunserve compare` reads; the Python of this process has vLLM."""
    folder = write_model(spec, machine.folder / spec.name)
    device = "cuda" if machine.is_real else "cpu"
    memory = spec.weights_bytes + kv_bytes
    stock = f"""{sys.executable} -m vllm.entrypoints.openai.api_server --port {{port}}
  --host 127.0.0.1 --model {folder} --served-model-name m --load-format dummy --dtype bfloat16
  --skip-tokenizer-init --kv-cache-memory-bytes {kv_bytes} --max-num-batched-tokens 2048"""
    ours = f"""{sys.executable} -m kunserve.cli serve {folder} --engine vllm --device {device}
  --port {{port}} --load-format dummy --served-model-name m --num-instances 2
  --instance-memory {memory} --max-num-batched-tokens 2048 --overload-policy"""
    path = machine.folder / "P11.toml"
    path.write_text(
        f"""title = "A burst on vLLM's classes"
world = "real"
systems = ["recompute"]
loads = [{_LOAD}]
rounds = 1

[setup]
model = "{folder}"

[workload]
trace = "azure-2023-merged-640s"
start_s = {390.0 if machine.is_real else 415.0}
end_s = {460.0 if machine.is_real else 419.0}

[others.vllm-rr]
replicas = 2
command = '''{stock}'''

[others.vllm-body]
command = '''{ours} recompute'''

[others.vllm-body-drop]
command = '''{ours} drop'''
""",
        encoding="utf-8",
    )
    return path


def _play(machine: Machine, report: Report, name: str) -> None:
    spec, _ = serving_model(machine)
    kv_bytes = max(2 * MIB, int(spec.weights_bytes * _KV_SHARE))
    path = write_experiment(machine, spec, kv_bytes)
    assert name in read_experiment(path).others
    why = not_there(config_of(machine, spec))
    if why is None and not machine.is_real:
        why = "a rehearsal starts no servers of vLLM: experiments/overload_vllm_body.toml does"
    if why is not None:
        report.add("not there", None, "", system=name, memory_gib=kv_bytes / GIB, why=why)
        return
    out = machine.folder / "P11.runs"
    command = [sys.executable, "-m", "kunserve.cli", "compare", str(path)]
    subprocess.run([*command, "--systems", name, "-o", str(out)], check=True)
    for result in results.load(out / "results.jsonl"):
        if result.system == name:
            for kind in ("ttft", "tpot"):
                for percentile in (50.0, 99.0):
                    value = result.percentile_s(kind, percentile) * 1e3
                    report.add(f"{kind.upper()} P{percentile:g}", value, "ms", system=name)
            report.add("failed", result.num_failed, "", system=name)
