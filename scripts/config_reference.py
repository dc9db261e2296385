"""Writes docs/config.md and config/keywords.py from the schema: `python scripts/config_reference.py`."""

from __future__ import annotations

import json
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
memory. A file has at most a million characters (with YAML aliases expanded), 100 levels and 2,000 keys, and is composed
of at most 50 files. Dates and times such as `2024-01-01` and `12:00:00` are text.

`samestep init` writes a config with comments, and `--ask` asks for the few values that nearly every run sets.
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
command line. `params` and other mappings with free names are merged value by value; lists are replaced. `schedule:
null` removes an included section. Paths (`task`, `fold.file`, `trackers.classes`, and the layers themselves) are
relative to the file that they are written in.

| platform | is detected by |
|---|---|
| `kaggle` | `KAGGLE_KERNEL_RUN_TYPE` |
| `colab` | `COLAB_RELEASE_TAG` or `COLAB_GPU` |
| `local` | none of these |

Nothing changes silently. The plan names the platform, the reason, the file and the keys that it sets. `samestep
show CONFIG` shows the file and line of each value. Missing files (also of other platforms), files that include
themselves and unknown keys are reported together. The run's directory records the merged config, so `samestep
resume` needs none of the files. A sweep's file and its `base` are composed in the same way.

## Params that refer to keys

Set once what both the task and the config need: a value `${KEY}` in `params` is the value of that key, after all
overrides and with its type. A sweep that tries other `epochs` then gives the task the right number, too.

```yaml
epochs: 12
params:
  total_epochs: ${epochs}
  batch: ${global_batch}
  head: {width: "${params.width}"}      # inside of {} it needs quotes
  width: 64
```

`samestep show CONFIG` shows the values and the keys they come from. Unknown keys, keys that are not set, sections and
cycles are errors, with the line. Other texts with `${...}`, such as `${HOME}` or `${epochs}.pt`, are left as they are.
Keys of `launch` cannot be referred to.

## Other names

Names that other projects use for these keys are accepted and reported by `samestep show CONFIG`.
Setting a key by two names is an error.

| name | means |
|---|---|
"""


def reference() -> str:
    rows = [
        f"| `{key}` | {takes} | {default} | {meaning} |\n"
        for key, takes, default, meaning in map(describe_key, schema_keys())
    ]
    aliases = [f"| `{name}` | `{alias.key}` |\n" for name, alias in ALIASES.items()]
    return HEAD + "".join(rows) + ALIAS_HEAD + "".join(aliases)


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
