"""Ranks of an instance on several GPUs, which meet through NCCL."""
