"""Whatever a name, path, override or value holds, a shell hands it on and runs nothing of it.

Every script goes through a real bash, with srun, mpirun, ssh, module and the interpreter replaced
by a recorder of what it was given. The recorder of ssh hands its last argument to a second shell
in a bare environment, as sshd does.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samestep.config import Config, load_config
from samestep.config.secrets import referred
from samestep.environment.interpreter import interpreter_words
from samestep.environment.node_lists import rendezvous_ports
from samestep.errors import ConfigError, LaunchError
from samestep.launch.commands.mpirun import mpirun_command
from samestep.launch.commands.rank_command import RankCommand, quoted
from samestep.launch.commands.size import Size, parse_hosts
from samestep.launch.commands.slurm import directives, slurm_job
from samestep.launch.commands.ssh import ssh_commands
from samestep.launch.commands.torchrun import torchrun_command
from samestep.parsing.plain_yaml import parse_yaml

few = settings(max_examples=20)

NASTY = [
    "$(touch pwned)", "`touch pwned`", ";touch pwned;", "&touch pwned&", "\ntouch pwned\n",
    ">pwned", "|", "<", "$HOME", "${IFS}", "$", "'", '"', "\\", "\n", "\t", "\r", " ", "*", "?",
    "[a-z]", "~", "!", "#", " #", "^", "{a,b}", "%", "-", "--", "=", ":", ",", "ü", "漢", "😀", "a", "7",
]  # fmt: skip
PIECES = st.lists(st.sampled_from(NASTY), min_size=1, max_size=6).map("".join)
ODD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
WORDS = PIECES | ODD
"""All that an argument can be."""


def has_control_characters(text: str) -> bool:
    return any(ord(character) < 32 or ord(character) == 127 for character in text)


LINES = WORDS.filter(lambda text: text != "" and not has_control_characters(text))
"""All that a value of `launch:` can be."""
NAMES = WORDS.map(lambda text: "x" + text.replace("/", "|")) | st.just("-rf") | st.just("--help")
"""All that a folder's name can be; the first letter keeps it from being a dot or nothing."""
RUN_NAMES = NAMES.map(
    lambda text: "".join(c for c in text if c != "\\" and unicodedata.category(c) != "Cc").lstrip("-")
)
VALUES = LINES.filter(lambda text: referred(text) is None)
ENVIRONMENTS = st.dictionaries(st.sampled_from(["_a", "B7", "LONG_NAME"]), VALUES, max_size=2)

RECORDER = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$PWD" "$@" > "$SEEN/$$"
env -0 > "$SEEN/$$.env"
"""
SSH = (
    RECORDER
    + """for last; do :; done
cd / && env -i PATH="$PATH" SEEN="$SEEN" HOME="$HOME" sh -c "$last"
"""
)
PYTHON = 'it\'s a $(touch pwned) `touch pwned` "python" *'


@dataclass(frozen=True)
class Case:
    """What a person brings with them."""

    config_file: str
    name: str
    folder: str
    overrides: tuple[str, ...]
    environment: dict[str, str]
    modules: tuple[str, ...]


CASES = st.builds(
    Case,
    config_file=WORDS.filter(bool),
    name=RUN_NAMES,
    folder=NAMES,
    overrides=st.lists(WORDS, max_size=3).map(tuple),
    environment=ENVIRONMENTS,
    modules=st.lists(LINES, max_size=1).map(tuple),
)
WORST = Case(
    "-c $(touch pwned)\n.yaml",
    'it\'s "mine" #1',
    "a b\n$(touch pwned)'",
    ("-x", "--", "name='a b'", "p=`touch pwned`\n*", "params.ü=漢"),
    {"_a": "$(touch pwned)' \"\\"},
    ("cuda/12.4; touch pwned",),
)
HARMLESS = Case("run.yaml", "run", "place", ("seed=1",), {"_a": "b"}, ())


@dataclass(frozen=True)
class Call:
    """One program that was started, as it saw it."""

    program: str
    folder: str
    arguments: list[str]
    environ: dict[str, str]


class Shell:
    """A place to run scripts in, where every program that they name writes down its arguments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = str(root / "bin" / PYTHON)
        self._numbers = itertools.count()
        (root / "bin").mkdir()
        for name in ("srun", "mpirun", "module", PYTHON):
            self._program(name, RECORDER)
        self._program("ssh", SSH)
        self._program("sleep", "#!/bin/sh\n")

    def _program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def rank_command(self, case: Case, **launch: Any) -> RankCommand:
        folder = self.root / f"place {next(self._numbers)}" / case.folder
        folder.mkdir(parents=True)
        config = load_config(
            {
                "task": "t.py:T",
                "epochs": 1,
                "global_batch": 8,
                "name": case.name,
                "distributed": {"threads_per_rank": 2},
                "launch": {"python": self.python, "environment": case.environment, "modules": case.modules, **launch},
            }
        )
        return RankCommand(config, Path(case.config_file), case.overrides, folder=folder)

    def run(self, script: str, **variables: str) -> list[Call]:
        """What the script started, and in which order; fails if it left any file behind."""
        with tempfile.TemporaryDirectory() as seen:
            file = self.root / "script.sh"
            file.write_text(script, encoding="utf-8")
            # What a login shell finds, as on a site whose profile sets up its modules.
            profile = f"PATH={shlex.quote(str(self.root / 'bin'))}:$PATH\n"
            (self.root / ".bash_profile").write_text(profile, encoding="utf-8")
            before = self._files()
            path = f"{self.root / 'bin'}:{os.environ['PATH']}"
            home = {"PATH": path, "SEEN": seen, "HOME": str(self.root), **variables}
            done = subprocess.run(
                ["bash", str(file)], env=home, cwd=self.root, capture_output=True, timeout=30, check=False
            )
            assert done.returncode == 0, done.stderr.decode()
            assert done.stderr == b""
            assert self._files() == before, "something in the script was run"
            found = sorted(Path(seen).glob("*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
            return [self._call(path) for path in found]

    def _files(self) -> set[Path]:
        return set(self.root.rglob("*"))

    @staticmethod
    def _call(path: Path) -> Call:
        program, folder, *arguments = path.read_bytes().decode().split("\0")[:-1]
        variables = path.with_suffix(".env").read_bytes().decode(errors="replace")
        environ = dict(line.split("=", 1) for line in variables.split("\0") if "=" in line)
        return Call(program, folder, arguments, environ)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    return Shell(tmp_path_factory.mktemp("shell").resolve())


def loads_modules(calls: list[Call], case: Case) -> list[Call]:
    """Look at what was loaded first, and give back the rest."""
    loads = [call for call in calls if call.program == "module"]
    assert [call.arguments for call in loads] == [["load", name] for name in case.modules]
    return [call for call in calls if call.program != "module"]


def everything_arrived(call: Call, case: Case, rank_command: RankCommand) -> None:
    assert call.folder == str(rank_command.working_folder)
    assert case.environment.items() <= call.environ.items()


def file_of(case: Case) -> str:
    """The config's path, which must not look like an option."""
    path = str(Path(case.config_file))
    return f"./{path}" if path.startswith("-") else path


def ranks(case: Case) -> list[str]:
    return [*interpreter_words(), "train", file_of(case), *case.overrides]


def agents(case: Case) -> list[str]:
    return [*interpreter_words(), "launch", file_of(case), *case.overrides]


@few
@given(CASES)
@example(WORST)
def test_torchrun_gets_what_was_meant(shell: Shell, case: Case) -> None:
    rank_command = shell.rank_command(case)
    launch = torchrun_command(rank_command, 2, nodes=Size(1, 2), rendezvous="n0:29500")
    [call] = loads_modules(shell.run(launch.script()), case)
    everything_arrived(call, case, rank_command)
    assert call.program == PYTHON
    assert call.arguments == [
        "-m", "torch.distributed.run", "--nnodes=1:2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=n0:29500", f"--rdzv-id=samestep-{case.name}", "--nproc-per-node=2",
        "-m", "samestep", *ranks(case)[len(interpreter_words()) :],
    ]  # fmt: skip
    assert call.environ["OMP_NUM_THREADS"] == "2"


@few
@given(CASES)
@example(WORST)
def test_mpirun_gets_what_was_meant(shell: Shell, case: Case) -> None:
    rank_command = shell.rank_command(case)
    launch = mpirun_command(rank_command, "hydra", 2, (), "job", {}, cpus=8, as_root=False)
    [call] = loads_modules(shell.run(launch.script()), case)
    everything_arrived(call, case, rank_command)
    assert call.program == "mpirun"
    assert call.arguments == ["-n", "2", "-bind-to", "none", "-genvall", shell.python, *ranks(case)]


def slurm(rank_command: RankCommand, case: Case, **more: Any) -> str | None:
    """The job's script; none if Slurm could not write the job's output where it is to go."""
    job = slurm_job(rank_command, Size(2, 2), 2, **more)
    if has_control_characters(f"{case.folder}{case.name}"):
        with pytest.raises(LaunchError, match="must be one line"):
            job.script()
        return None
    return job.script()


SLURM_WORST = Case(**{**vars(WORST), "folder": "a b $(touch pwned)'"})


@pytest.mark.parametrize("style", ["srun", "torchrun", "mpirun"])
@few
@given(CASES)
@example(SLURM_WORST)
@example(WORST)
def test_a_slurm_job_starts_what_was_meant(shell: Shell, style: str, case: Case) -> None:
    rank_command = shell.rank_command(case, slurm={"style": style})
    script = slurm(rank_command, case, max_restarts=3 if style == "torchrun" else 0)
    if script is None:
        return
    [call] = loads_modules(shell.run(script), case)
    everything_arrived(call, case, rank_command)
    srun = ["--kill-on-bad-exit=1", shell.python]
    on_nodes = ["--via", "torchrun", "--nproc", "2", "--nodes", "2", "--max-restarts", "3"]
    assert (call.program, call.arguments) == {
        "srun": ("srun", [*srun, *ranks(case)]),
        "torchrun": ("srun", [*srun, *agents(case), *on_nodes]),
        "mpirun": (PYTHON, [*agents(case), "--via", "mpirun", "--nproc", "4"]),
    }[style]


@few
@given(CASES, WORDS, WORDS)
@example(SLURM_WORST, "'", "$(touch pwned)")
def test_a_task_of_an_array_gets_its_number(shell: Shell, case: Case, before: str, after: str) -> None:
    case = Case(**{**vars(case), "overrides": (*case.overrides, f"{before}{{array}}{after}")})
    script = slurm(shell.rank_command(case, slurm={"array": "0-9"}), case)
    if script is not None:
        [call] = loads_modules(shell.run(script, SLURM_ARRAY_TASK_ID="7"), case)
        *first, own = call.arguments[2:]
        wanted = [override for override in ranks(case) if not override.startswith("run_dir=")]
        assert first == [word.replace("{array}", "7") for word in wanted]
        assert own.startswith("run_dir=")


@pytest.mark.parametrize("name", ["plain", "two words", "[x]", "'q'", "{y}", "& all", "* all", "ü", "exp #3", "a: b"])
def test_a_task_of_an_array_gets_a_directory_of_its_own(shell: Shell, name: str) -> None:
    case = Case(**{**vars(HARMLESS), "name": name})
    rank_command = shell.rank_command(case, slurm={"array": "0-9"})
    [call] = shell.run(slurm_job(rank_command, None, 2).script(), SLURM_ARRAY_TASK_ID="7")
    key, _, text = call.arguments[-1].partition("=")
    assert key == "run_dir"
    assert parse_yaml(text) == f"runs/{name}/7", "as the rank reads it"


@settings(few, max_examples=15)
@given(CASES)
@example(WORST)
def test_a_host_gets_through_ssh_what_was_meant(shell: Shell, case: Case) -> None:
    rank_command = shell.rank_command(case, ssh="ssh -p 2222 -o 'User=some one'")
    calls = loads_modules(
        shell.run(ssh_commands(rank_command, parse_hosts("a:2,b:4", None), "job").script()),
        Case(**{**vars(case), "modules": case.modules * 2}),
    )
    port = rendezvous_ports("job")[0]
    for node, (host, nproc) in enumerate([("a", 2), ("b", 4)]):
        [ssh] = [call for call in calls if call.program == "ssh" and call.arguments[-2] == host]
        assert ssh.arguments[:-1] == ["-p", "2222", "-o", "User=some one", "--", host]
        numbered = ["--node-rank", str(node)]
        [agent] = [c for c in calls if c.program == PYTHON and c.arguments[-8:-6] == numbered]
        everything_arrived(agent, case, rank_command)
        assert agent.arguments == [
            *agents(case), "--read-secret", "--via", "torchrun", "--nodes", "2", *numbered, "--nproc", str(nproc),
            "--master-addr", "a", "--master-port", str(port),
        ]  # fmt: skip
    assert len(calls) == 4


def test_the_script_over_ssh_ends_when_its_agents_do(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "ssh").chmod(0o755)
    launch = ssh_commands(shell.rank_command(HARMLESS), parse_hosts("a:2,b:2", None), "job")
    script.write_text(launch.script())
    process = subprocess.Popen(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.wait(3) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("it continues after all agents have ended")
    finally:
        with_its_children(process.pid, "KILL")
        process.wait()


def with_its_children(group: int, name: str) -> None:
    """The whole group that the test started, if something of it is left."""
    subprocess.run(["kill", f"-{name}", "--", f"-{group}"], capture_output=True, check=False)


def test_the_script_over_ssh_fails_when_an_agent_does(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    for name, text in (("ssh", "exit 3"), ("sleep", "exit 0"), ("tail", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    launch = ssh_commands(shell.rank_command(HARMLESS), parse_hosts("a:2,b:2", None), "job")
    script.write_text(launch.script())
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", str(script)], env={"PATH": path}, cwd=tmp_path, timeout=20, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("before", ["false || true", "if true; then true; fi", "true  # why", "sleep 0 &"])
def test_commands_before_the_ranks_are_lines_of_their_own(shell: Shell, before: str) -> None:
    rank_command = shell.rank_command(HARMLESS, before=[before, "export SEEN_BEFORE=yes"])
    for script in (
        torchrun_command(rank_command, 2).script(),
        slurm_job(rank_command, None, 2).script(),
        ssh_commands(rank_command, parse_hosts("a:2", None), "job").script(),
    ):
        call = next(c for c in shell.run(script) if c.program in ("srun", PYTHON))
        assert call.environ["SEEN_BEFORE"] == "yes"
        assert call.folder == str(rank_command.working_folder)


def test_a_host_without_the_working_folder_starts_nothing(shell: Shell) -> None:
    """Whatever comes before the command: `a && b || true && c` does c even if a has failed."""
    rank_command = shell.rank_command(HARMLESS, before=["false || true"])
    remote = ssh_commands(rank_command, parse_hosts("a:2", None), "job").remote(0)
    rank_command.working_folder.rmdir()
    with tempfile.TemporaryDirectory() as seen:
        done = subprocess.run(
            ["sh", "-c", remote],
            env={"PATH": f"{shell.root / 'bin'}:{os.environ['PATH']}", "SEEN": seen},
            cwd=shell.root,
            capture_output=True,
            check=False,
        )
        assert done.returncode != 0
        assert list(Path(seen).iterdir()) == []


def test_a_null_character_is_refused() -> None:
    with pytest.raises(LaunchError, match="null character, which no command can"):
        quoted(["a\0b"])


# What goes into the lines of a job script


def read_directive(text: str) -> list[str]:
    """The words of a line as sbatch reads it: both quotes, and a backslash before any character."""
    words: list[str] = []
    word, quote, escaped, begun = "", "", False, False
    for character in text:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = begun = True
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "\"'":
            quote, begun = character, True
        elif character == "#":
            break
        elif character in " \t\v\f\r":
            if begun:
                words.append(word)
            word, begun = "", False
        else:
            word, begun = word + character, True
    assert not quote, f"sbatch would refuse an unmatched {quote}"
    return [*words, word] if begun else words


def lines_of(script: str) -> list[str]:
    """The directives, which all come before the first command, one on a line."""
    lines = script.split("\n")
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    marked = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert marked
    assert max(marked) < first_command
    return [lines[n].removeprefix("#SBATCH ") for n in marked]


OPTIONS = ("partition", "time", "account", "mem")


@settings(few, max_examples=60)
@given(RUN_NAMES, NAMES, st.fixed_dictionaries(dict.fromkeys(OPTIONS, LINES)), st.lists(LINES, max_size=2))
def test_sbatch_reads_the_options_that_were_meant(
    name: str, folder: str, options: dict[str, str], extra: list[str]
) -> None:
    rank_command = in_folder({"name": name, "launch": {"slurm": {**options, "extra": extra}}}, folder)
    job = slurm_job(rank_command, None, 2)
    if has_control_characters(f"{name}{folder}"):
        with pytest.raises(LaunchError, match="must be one line"):
            job.script()
        return
    lines = lines_of(job.script())
    assert len(lines) == len(directives(job))
    words = [read_directive(line) for line in lines]
    assert all(len(found) == 1 for found in words), "a line is one option"
    found = [word for [word] in words]
    output = f"/data/{folder}/runs/{name}/slurm".replace("%", "%%")
    wanted = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    assert {*wanted, f"--output={output}/%j.out", *extra} <= set(found)


def in_folder(values: dict[str, Any], folder: str = "place") -> RankCommand:
    return RankCommand(tiny(values), Path("run.yaml"), folder=Path("/data") / folder)


def tiny(values: dict[str, Any]) -> Config:
    return load_config({"task": "t.py:T", "epochs": 1, "global_batch": 8, **values})


LAUNCH_VALUES: dict[str, Callable[[str], dict[str, Any]]] = {
    **{key: lambda text, key=key: {key: text} for key in ("python", "mpirun", "ssh")},  # type: ignore[misc]
    **{key: lambda text, key=key: {key: ["a", text]} for key in ("modules", "before")},  # type: ignore[misc]
    "environment": lambda text: {"environment": {"A": text}},
    **{
        f"slurm.{key}": lambda text, key=key: {"slurm": {key: text}}  # type: ignore[misc]
        for key in (*OPTIONS, "array")
    },
    "slurm.extra": lambda text: {"slurm": {"extra": ["--nice", text]}},
}


@pytest.mark.parametrize("text", ["a\nb", "a\n", "\nb", "a\rb", "a\0b", "\x1b[2J", "a\x7f"])
@pytest.mark.parametrize("key", LAUNCH_VALUES)
def test_control_characters_in_the_launch_section_are_refused(key: str, text: str) -> None:
    tiny({"launch": LAUNCH_VALUES[key]("a")})
    with pytest.raises(ConfigError) as caught:
        tiny({"launch": LAUNCH_VALUES[key](text)})
    assert f"launch.{key}" in str(caught.value)


@pytest.mark.parametrize("name", ["a-b", "1a", "", "a b", "a=b", "$(x)", "a\n", "漢", "Aü", "A٣"])
def test_a_variable_that_no_shell_can_set_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.environment.*is not a variable's name"):
        tiny({"launch": {"environment": {name: "x"}}})


@pytest.mark.parametrize("line", ["ssh -o 'x", 'ssh "', "ssh \\"])
def test_an_ssh_command_that_cannot_be_split_is_refused(line: str) -> None:
    def script() -> str:
        rank_command = in_folder({"launch": {"ssh": line}})
        return ssh_commands(rank_command, parse_hosts("a:2", None), "job").script()

    with pytest.raises((ConfigError, LaunchError), match="ssh"):
        script()
