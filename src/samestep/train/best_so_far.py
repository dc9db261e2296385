"""The best evaluation of a training: which checkpoint is the best, and when early stopping ends it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from samestep.config.schema import BestConfig
from samestep.errors import TaskError
from samestep.evaluation.evaluate import Values


@dataclass
class BestSoFar:
    """The best evaluation, and for how many there has been none better: early stopping waits for that many."""

    rule: BestConfig
    value: float | None = None
    step: int | None = None
    waited: int = 0

    def offer(self, values: Values, step: int) -> bool:
        """Return whether this evaluation is the best so far."""
        value = values.get(self.rule.metric)
        if not isinstance(value, (int, float)):
            known = ", ".join(k for k, v in values.items() if isinstance(v, (int, float)))
            raise TaskError(f"best.metric is {self.rule.metric!r}, but the evaluation reports {known or 'nothing'}")
        none_yet = self.value is None or math.isnan(self.value)
        gain = 0.0 if self.value is None else float(value) - self.value
        better = gain > self.rule.min_delta if self.rule.mode == "max" else -gain > self.rule.min_delta
        if self.value is None or better or (none_yet and not math.isnan(value)):
            self.value, self.step, self.waited = float(value), step, 0
            return True
        self.waited += 1
        return False
