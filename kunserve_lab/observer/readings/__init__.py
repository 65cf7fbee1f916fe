"""What servers say of themselves: pages, files, Prometheus; and what changed between two looks."""
