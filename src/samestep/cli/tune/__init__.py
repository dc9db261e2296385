"""`samestep tune`: measures which settings suit a training on this machine."""

from samestep.cli.tune import lanes, lr, settings

__all__ = ["lanes", "lr", "settings"]
