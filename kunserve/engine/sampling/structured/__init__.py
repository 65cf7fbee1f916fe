"""Outputs of a form: which tokens may come next, computed beside the steps. No torch here."""
