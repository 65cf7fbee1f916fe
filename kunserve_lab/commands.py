"""The laboratory's commands of ``kunserve``: module, object and one line of each.

``kunserve.cli`` finds them by the entry point group ``kunserve.commands``.
"""

COMMANDS = {
    "demo": (
        "kunserve_lab.compare.demo",
        "demo_command",
        "The story on a real model, on this machine.",
    ),
    "bench": (
        "kunserve_lab.bench.bench_command",
        "bench_command",
        "Load any OpenAI server and measure it.",
    ),
    "profile": (
        "kunserve_lab.profile.command",
        "profile_command",
        "Measure what steps cost here.",
    ),
    "compare": (
        "kunserve_lab.compare.compare_command",
        "compare_command",
        "Several systems under the same requests, real or simulated, from a TOML file.",
    ),
    "simulate": (
        "kunserve_lab.compare.simulate_command",
        "simulate_command",
        "What would happen: real decisions over modelled GPUs.",
    ),
    "observe": (
        "kunserve_lab.observer.command",
        "observe_command",
        "What drops would do for servers of other makers, from their metrics.",
    ),
    "data": (
        "kunserve_lab.workload.data.command",
        "data_command",
        "Traces and lengths that can be asked for by name.",
    ),
}
"""Name -> module, object, one line. Imported only when used, so that ``--help`` stays fast."""
