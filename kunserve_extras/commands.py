"""The extras' commands of ``kunserve``, as ``kunserve_lab.commands`` has the laboratory's."""

COMMANDS = {
    "scale": (
        "kunserve_extras.scale_command",
        "scale_command",
        "Change the number of a running server's instances.",
    ),
    "doctor": (
        "kunserve_extras.doctor",
        "doctor_command",
        "What this machine can do, and what would stop a server.",
    ),
}
"""Name -> module, object, one line."""
