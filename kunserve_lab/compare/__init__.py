"""Comparisons: several systems under the same requests, in the real or in the simulated world.

One `System`, one result record, one table, one set of figures and one report serve both worlds.
``kunserve demo``, ``kunserve simulate`` and ``kunserve compare FILE.toml`` all end here.

**An experiment is a TOML file.** Unknown keys are errors. Every key has a default::

    title = "End to end: LongBench lengths, Qwen2.5-14B on 8 A800"
    claim = "What the paper says, for the report."
    world = "simulated"            # or "real": starts `kunserve serve` once per run
    base = "longbench_14b.toml"    # optional; this file's keys are laid over that file's
    systems = ["recompute", "swap", "static-pp", "migrate", "drop"]
    loads = [0.36, 0.4, 0.44]      # factors on the workload's rate; default [1.0]
    seeds = [0]                    # of arrivals and lengths; several give a range
    rounds = 1                     # real only (default 3): runs of each system, in turns (ABBA)

    [workload]                     # compare.settings.WorkloadSettings
    trace = "azure-2023-conv"      # omitted: the built-in bursty window
    lengths = "longbench"
    max_total_tokens = 32768
    start_s = 20.0
    end_s = 220.0

    [setup]                        # compare.settings.SimulatedSetup or RealSetup, by the world
    model = "Qwen/Qwen2.5-14B"
    device = "a800"
    num_instances = 8

    [others.vllm]                  # real only: compare.others.OtherServers, any OpenAI-compatible
    command = "$VENV/bin/vllm serve $MODEL --port {port}"      # server; or urls = ["http://..."]
    replicas = 2                   # requests go to them in turn

    [variants.drop-no-restore]     # a system that only this experiment needs: one of ours, with
    of = "drop"                    # other settings of compare.systems.System
    overload = { restore_below = 0.0 }

A ``[workload]`` with ``burst_s`` draws one burst instead: loads are then its heights in X, what the
cluster sustains when its memory is full, and X is found from step times (`simulated.full_rate`).

A base is named relative to the file that names it, and may have a base of its own. Tables
(``[workload]``, ``[setup]``) are merged key by key; everything else is replaced whole.

A trace or lengths are a data set that ``kunserve data`` lists, by its name, or a file, relative
to the TOML file. A data set that is not on this machine is an error that says how to get it.

**A run is one line of results.jsonl**, written as soon as the run ends. Its key is (world, system,
load, seed, round, digest of settings and workload). A run whose key is there is not run again.
Its requests are in SYSTEM-loadF-seedN-roundN.jsonl, always in the real world, and its steps in the
``.trace.json`` of that name. Tables, figures and the report are of the latest call.

**Reading results**::

    from kunserve_lab.compare.results import load
    from kunserve_lab.compare.output.table import table

    results = load(Path("out/results.jsonl"))   # list[RunResult]; reads older files too
    print(table(results))                       # one table per load, then where each system helps

``RunResult.percentile_s("ttft", 99.0)`` is one number of one run; `table.cells` gives the median
over seeds and rounds with its range.
"""
