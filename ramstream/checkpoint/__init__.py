"""Open checkpoints as people have them; validate every header before a byte of weights is read."""

from ramstream.checkpoint.opening import Checkpoint, open_all

__all__ = ["Checkpoint", "open_all"]
