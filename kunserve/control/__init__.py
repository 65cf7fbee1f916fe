"""The brain: three deciders, sans-I/O. One room each: ``cluster``, ``group`` and ``instance``."""
