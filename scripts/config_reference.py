"""Writes docs/config.md and config/keywords.py from the schema: `python scripts/config_reference.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from samestep.config.aliases import ALIASES
from samestep.config.reference import describe_key, schema_keys, section_of
from samestep.config.schema import Config

TARGET = Path(__file__).parents[1] / "docs" / "config.md"
KEYWORDS = Path(__file__).parents[1] / "src" / "samestep" / "config" / "keywords.py"
KEYWORDS_HEAD = '''"""The keywords of `samestep.start`, for editors and type checkers. Written by scripts/config_reference.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class ConfigKeywords(TypedDict, total=False):
    """The keys of a config, each of which `samestep.start` takes; docs/config.md describes them."""

'''

HEAD = """# The config

One YAML or JSON file describes a run. Unknown keys are errors with the nearest valid name. All mistakes are reported at
once, with their lines. Overrides on the command line are `section.key=value`. `task` is relative to the file, `run_dir`
to the working directory. Set exactly one of `global_batch` and `batch_per_rank`, and one of `epochs` and `steps`. A
custom loop can leave `global_batch` to its DataLoader.

Every number has a generous upper bound, so that a typo gives an error message instead of exhausting the machine's
memory. Dates and times such as `2024-01-01` and `12:00:00` are text.

`samestep init` writes a config with comments; its options set the few values that nearly every run sets.
`samestep show CONFIG` prints every value with its origin. `samestep check CONFIG` checks the task's file and class, the
names and arguments of optimizer and schedule, and whether the run can start here.

| key | takes | default | meaning |
|---|---|---|---|
"""

ALIAS_HEAD = """
## Layers

A config can be composed of several files. `include` names one file or several, whose values this file overrides.
`platforms` names files that override this one. Only the file for the present platform is read:

```yaml
# config/train.yaml
include: common.yaml
platforms: {local: env/local.yaml, colab: env/colab.yaml, kaggle: env/kaggle.yaml}
task: ../task.py:Mine
epochs: 12
```

```yaml
# config/env/kaggle.yaml: two T4
distributed: {world_size: 2, backend: nccl}
```

```yaml
# config/smoke.yaml
include: train.yaml
epochs: 1
```

The later wins, key by key: included files in their order, the file itself, its platform's file, overrides on the
command line. Mappings are merged, lists replaced. `schedule: null` removes an included section. Paths are relative to
the file that they are written in.

| platform | is detected by |
|---|---|
| `kaggle` | `KAGGLE_KERNEL_RUN_TYPE` |
| `colab` | `COLAB_RELEASE_TAG` or `COLAB_GPU` |
| `local` | none of these |

The plan names the platform and the keys that it sets; `samestep show CONFIG` shows the file and line of each value. The
run's directory records the merged config. A sweep's file and its `base` are composed in the same way.

## Params that refer to keys

A value `${KEY}` in `params` is the value of that key, after all overrides and with its type:

```yaml
epochs: 12
params:
  total_epochs: ${epochs}
  batch: ${global_batch}
  head: {width: "${params.width}"}      # inside of {} it needs quotes
  width: 64
```

Unknown keys, keys that are not set, sections and cycles are errors. Other texts with `${...}`, such as `${HOME}`, are
left as they are.

## Other names

Names that other projects use for these keys are accepted and reported by `samestep show CONFIG`.
Setting a key by two names is an error.

| name | means |
|---|---|
"""


def reference() -> str:
    rows = [
        f"| `{key}` | {_without_bounds(takes)} | {default} | {meaning} |\n"
        for key, takes, default, meaning in map(describe_key, schema_keys())
    ]
    aliases = [f"| `{name}` | `{key}` |\n" for name, key in ALIASES.items()]
    return HEAD + "".join(rows) + ALIAS_HEAD + "".join(aliases)


def _without_bounds(takes: str) -> str:
    """What a key takes, without upper bounds that no run comes near, and in the words of a table."""
    bound = r"(?:at most|below) (?:1e\d+|\d{4,}|1000)(?: entries)?"
    takes = re.sub(rf", {bound}|\({bound}\)|{bound}, ", "", takes)
    takes = takes.replace("a whole number", "integer").replace("a number", "number").replace("true or false", "bool")
    takes = re.sub(
        r", one line, not empty(, one line, not empty)?|one line, not empty, |\(one line, not empty\)", "", takes
    )
    takes = re.sub(r"one of ([\w., -]+)", r"\1", takes)
    return re.sub(r"\(\)|\s+$|^a ", "", takes.replace("  ", " ")).strip()


def keywords() -> str:
    """The module with a typed keyword per key of a config; sections are mappings."""
    lines = []
    for name, field in Config.model_fields.items():
        lines.append(f"    {name}: {_type_text(field.annotation)}\n")
        if field.description:
            lines.append(f'    """{field.description[0].upper()}{field.description[1:]}."""\n')
    formatting = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={KEYWORDS}", "-"]
    text = KEYWORDS_HEAD + "".join(lines)
    return subprocess.run(formatting, input=text, check=True, capture_output=True, text=True).stdout


def _type_text(annotation: Any) -> str:
    """An annotation as source, without limits."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(inside[0])
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(one) for one in inside)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type_text, inside)))
    if origin in (dict, Mapping) or section_of(annotation) is not None:
        return "Mapping[str, Any]"
    return "None" if annotation is type(None) else "Any" if annotation is Any else str(annotation.__name__)


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    TARGET.write_text(reference(), encoding="utf-8")
