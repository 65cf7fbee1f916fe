"""The flags of ``kunserve serve``, one file for each group of them. Imports nothing heavy."""
