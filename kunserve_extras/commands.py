"""The extras' commands of ``kunserve``, as ``kunserve_lab.commands`` has the laboratory's."""

COMMANDS = {
    "doctor": (
        "kunserve_extras.doctor",
        "doctor_command",
        "What this machine can do, and what would stop a server.",
    ),
}
"""Name -> module, object, one line."""
