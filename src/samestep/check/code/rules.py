"""All rules, by their names."""

from __future__ import annotations

from samestep.check.code import agreement, devices, loading, measuring, modules, output, seeds
from samestep.check.code.rule import Rule
from samestep.errors import PlanError

_FAMILIES = (devices, loading, seeds, output, measuring, modules, agreement)
RULES: dict[str, Rule] = {rule.name: rule for family in _FAMILIES for rule in family.RULES}


def chosen_rules(wanted: str, ignored: str) -> list[Rule]:
    """Return the rules to look for.

    Raises:
        PlanError: A name is none of a rule.
    """
    only, without = _names(wanted), _names(ignored)
    unknown = [name for name in (*only, *without) if name not in RULES]
    if unknown:
        raise PlanError(f"there is no rule {', '.join(unknown)}: there are {', '.join(RULES)}")
    found = [rule for rule in RULES.values() if rule.name in (only or RULES) and rule.name not in without]
    if not found:
        raise PlanError("no rule is left to look for: --ignore has all of them")
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
