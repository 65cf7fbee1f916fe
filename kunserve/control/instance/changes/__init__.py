"""What an instance does while its group changes: drops, restores, migrations, a new form."""
