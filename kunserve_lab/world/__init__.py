"""A whole cluster in one process, and bodies without a model: for tests, and to try policies."""
