"""Mixed precision in one class: the step engine behind a `training_step(batch)`."""

from samestep.amp.config import AMPConfig, detect_bf16_support, get_optimal_dtype
from samestep.amp.distributed import DistributedAMPTrainer
from samestep.amp.trainer import AMPTrainer

__all__ = ["AMPConfig", "AMPTrainer", "DistributedAMPTrainer", "detect_bf16_support", "get_optimal_dtype"]
