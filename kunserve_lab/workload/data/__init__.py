"""Public traces and length sets by name: shipped here, downloaded once, or generated."""
