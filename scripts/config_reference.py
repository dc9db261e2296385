"""Writes docs/config.md from the schema: `python scripts/config_reference.py`."""

from __future__ import annotations

from pathlib import Path

from samestep.config.aliases import ALIASES
from samestep.config.reference import describe_key, schema_keys

TARGET = Path(__file__).parents[1] / "docs" / "config.md"

HEAD = """# The config

One YAML or JSON file describes a run. Unknown keys are errors with the nearest valid name, and
all mistakes are reported at once, with their lines. Overrides on the command line are
`section.key=value`, and nothing else. `task` is relative to the file, `run_dir` to the working
directory. Exactly one of `global_batch` (which a custom loop can leave to its DataLoader) and `batch_per_rank`, and one of `epochs` and `steps`, must be set.

Every count has limits that no run comes near, so that a slip of the hand is a message and not a machine without
memory. A file has at most a million characters (counting a YAML alias as what it stands for), 100 levels and 2,000
keys, and is composed of at most 50 files. Dates and times such as `2024-01-01` and `12:00:00` are text. Text holds no null character.

`samestep init` writes a config with comments, and `--ask` asks for the few values that nearly every run sets.
`samestep show CONFIG` prints every value with its origin. `samestep check CONFIG` also looks whether the task's file is there
and has the class, whether the installed torch has the optimizer and the schedule with such arguments, and whether the run can start here.

| key | takes | default | meaning |
|---|---|---|---|
"""

ALIAS_HEAD = """
## Layers

A config can be composed of several files. `include` names a file, or a list of them, that lie below the file that names them; `platforms` names
files that lie above it, of which only the one for the platform that this runs on is read:

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

The later wins, key by key: what is included, in its order; then the file itself; then its platform's file; then overrides on the command line.
`params` and other mappings with names of your own are merged value by value, lists are replaced. `schedule: null` removes a section that lies below.
Paths to files (`task`, `fold.file`, `trackers.classes`, and the layers themselves) are relative to the file that they are written in.

| platform | is detected by |
|---|---|
| `kaggle` | `KAGGLE_KERNEL_RUN_TYPE` |
| `colab` | `COLAB_RELEASE_TAG` or `COLAB_GPU` |
| `local` | none of these |

Nothing changes silently: the plan of a run and of a launch names the platform, the reason, the file and the keys that it sets, and `samestep show CONFIG`
shows for each value the file and the line that it comes from. Files that are missing, also those of other platforms, files that include themselves and unknown keys are mistakes,
reported together. The run's directory records the merged config, so that `samestep resume` needs none of the files. A sweep's file is composed in the same way, and its
`base` may be, too.

## Params that refer to keys

What both the task and the config need is set once: a value of `params` that is `${KEY}`, as a whole, is the value of that key, after all overrides and with its type.
A sweep that tries other `epochs` then gives the task the right number, too.

```yaml
epochs: 12
params:
  total_epochs: ${epochs}
  batch: ${global_batch}
  head: {width: "${params.width}"}      # inside of {} it needs quotes
  width: 64
```

`samestep show CONFIG` shows the values, and with the origin of `params` which keys they are from. Unknown keys, keys that are not set, sections and circles are mistakes, with the line.
Other texts with `${...}` in them, such as `${HOME}` or `${epochs}.pt`, are left as they are. Keys of `launch` cannot be referred to.

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


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
