"""Merge checkpoints of large language models that were RL-trained from one base, out of core."""
