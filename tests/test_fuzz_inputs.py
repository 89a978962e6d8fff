"""Feeds moebius seeded nonsense: it must answer correctly or with one clear error.

It must never answer with a traceback or a hang, or start anything unrequested. A case is a seed's
number, so `fuzz(N, 1)` repeats case N. Surfaces take turns:

    toml        a configuration file, broken as text and as values
    override    `section.key=value` of a command line
    command     whole command lines; read-only commands are executed
    journal     journal.jsonl, metrics.jsonl and the other files that `moebius status` reads: torn
    config      config.json of a continued run
    checkpoint  a checkpoint's small files: damaged as by a bad disk, and forged with valid sums

Everything runs in this process, in the current folder.
"""

import collections
import contextlib
import io
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import STRANGE, STRANGE_TEXT, broken_name, broken_text, broken_value
from damage import reseal

from moebius.cli.main import main
from moebius.cluster.job import Journal, State
from moebius.cluster.report.live import View, render
from moebius.distributed.checkpoint.format import (
    CheckpointError,
    CheckpointMeta,
    CorruptCheckpointError,
)
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.checkpoint.writing import seal, write_tensors
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.local_shard import whole_shard
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run

MAX_WORDS = 100_000  # of an error, in characters
COMMANDS: str = """
status
status runs/mine
status runs/mine --json
status runs --all --json
watch runs/mine
logs runs/mine
logs runs/mine --rank 0 --tail 2
logs runs/mine --json --generation 1
stop runs/mine
models
models smoke
models mine.toml
ckpt ls runs/mine
ckpt verify runs/mine --step 4
ckpt export runs/mine --out new --dtype bf16
--version
--help
"""
OPTIONS = (
    "--json", "--all", "--rank", "--tail", "--generation", "--step",
    "--world-size", "--ep", "--dp-shard", "--out", "--run-dir", "--help", "--x", "-1",
    "--", "-", "--dtype", "--sharding", "runs/mine", "runs", "mine.toml", "circle/x",
    "file/below", "x" * 300, "n/" * 3000, "99999999999999999999", "2147483648", "1e9", "nan", "-5", "0",
    "8", "bf16", "fsdp", "2020-01-01", "10m", "99999999999999d", "always", "\udcff", "a\x00b", "[/x]",
    "train.steps=1", "=", "a=b", "",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (0, 120),
        *(pytest.param(10_000 + 2_500 * n, 2_500, marks=pytest.mark.nightly) for n in range(4)),
    ],
)
def test_nonsense_is_refused_or_read_rightly(
    seed: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = fuzz(seed, count)
    assert sum(outcomes.values()) == count
    for surface in ("toml", "override", "config"):  # nonsense is nonsense, and not all of it is
        assert outcomes[f"{surface}: refused"] > 0
        assert outcomes[f"{surface}: accepted"] > 0
    assert outcomes["command: exit 0"] > 0
    assert outcomes["checkpoint: refused"] > 0


def fuzz(seed: int, count: int) -> collections.Counter[str]:
    """Runs `count` cases in the current folder, and counts the outcomes.

    Raises:
        AssertionError: a case failed or took too long; its cause is attached.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    Path("circle").symlink_to("back")
    Path("back").symlink_to("circle")
    Path("file").write_text("a file\n")
    bench = Bench(Path.cwd())
    surfaces = (
        *(bench.toml, bench.override, bench.command),
        *(bench.journal, bench.config, bench.checkpoint),
    )
    for case in range(seed, seed + count):
        surface = surfaces[case % len(surfaces)]
        try:
            outcomes[f"{surface.__name__}: {surface(random.Random(case))}"] += 1
        except (Exception, pytest.fail.Exception) as error:  # pytest-timeout fails the test
            raise AssertionError(f"case {case}, {surface.__name__}") from error
    return outcomes


class Bench:
    """A folder with an intact run, which every case takes and breaks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "mine"
        self.smoke = RECIPES["smoke"]().model_dump(mode="json")
        self.leaves = [path for path, _ in leaves(self.smoke)]
        self.files = _write_run(self.run_dir)
        self.saved = self.run_dir / "checkpoints" / "step_00000004"
        self.tensors = _write_checkpoint(self.saved)

    def toml(self, rng: random.Random) -> str:
        """Reads a configuration file, which is refused or becomes what runs."""
        values: Any = {}
        for path in rng.sample(self.leaves, rng.randint(0, 4)):
            holder = values
            for section in path[:-1]:
                holder = holder.setdefault(section, {})
            holder[path[-1]] = _at(self.smoke, path)
        values = _without_none(values)
        if rng.random() < 0.6:
            values = broken_value(rng, values)
        top = {"recipe": rng.choice(("smoke", "own_text", "moeut", "smoke", "x", 1, None))}
        top |= values if isinstance(values, dict) else {"x": values}
        if top["recipe"] is None or rng.random() < 0.2:
            del top["recipe"]
        text = "".join(f"{json.dumps(key)} = {as_toml(each)}\n" for key, each in top.items())
        data = text.encode("utf-8", "surrogatepass")
        if rng.random() < 0.4:
            data = broken_text(rng, data)
        file = self.folder / "mine.toml"
        file.write_bytes(data)
        config = _or_refused(lambda: resolve(str(file), [], RECIPES), "mine.toml")
        if config is None:
            return "refused"
        _check_taken(config, tomllib.loads(data.decode()))
        return "accepted"

    def override(self, rng: random.Random) -> str:
        """Applies overrides, which are refused or become what runs."""
        overrides = []
        for _ in range(rng.randint(1, 3)):
            path = ".".join(rng.choice(self.leaves))
            if rng.random() < 0.2:
                path = broken_name(rng, path)
            value: Any = rng.choice(STRANGE)
            if rng.random() < 0.4:
                value = _at(self.smoke, tuple(path.split(".")))
            word = value if isinstance(value, str) and rng.random() < 0.5 else as_toml(value)
            overrides.append(f"{path}{rng.choice(('=', '=', '=', '=', ''))}{word}")
        config = _or_refused(lambda: resolve("smoke", overrides, RECIPES), "")
        if config is None:
            return "refused"
        _check_numbers(config)
        return "accepted"

    def command(self, rng: random.Random) -> str:
        """Runs a command line, which returns an exit code and words."""
        words = rng.choice(COMMANDS.strip().splitlines()).split()
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(1, len(words) + 1)
            word = rng.choice(OPTIONS) if rng.random() < 0.9 else str(rng.choice(STRANGE))
            match rng.randrange(4):
                case 0:
                    words[at : at + 1] = [word]
                case 1:
                    del words[at : at + 1]
                case _:
                    words.insert(at, word)
        code, said = _run_command(words)
        assert code in (0, 1, 2), (words, code, said[:500])
        assert code != 2 or said.strip(), f"{words} is refused without a word"
        assert "Traceback (most" not in said, (words, said[:500])
        return f"exit {code}"

    def journal(self, rng: random.Random) -> str:
        """Reads the files that tell how a run stands: torn, edited, or with lines of nonsense."""
        for name, whole in self.files.items():
            lines = whole.splitlines(keepends=True)
            if name == "config.json":
                lines = [broken_text(rng, whole)]
            elif (way := rng.randrange(3)) == 0:
                torn = rng.randrange(len(lines))
                lines[torn] = lines[torn][: rng.randrange(len(lines[torn]))]
            elif way == 1:
                at = rng.randrange(len(lines))
                entry = json.loads(lines[at])
                entry[rng.choice([*entry])] = rng.choice(STRANGE)
                lines[at] = json.dumps(entry).encode() + b"\n"
            else:
                nonsense = [*STRANGE_TEXT, *(json.dumps(each).encode() for each in STRANGE)]
                lines.insert(rng.randrange(len(lines) + 1), rng.choice(nonsense) + b"\n")
            (self.run_dir / name).write_bytes(b"".join(lines))
        try:
            code, said = _run_command(["status", "runs/mine", *rng.choice(([], ["--json"]))])
            assert code in (0, 1, 2), said[:500]
            view = View(self.run_dir)
            view.refresh()
            render(view)
        finally:
            for name, whole in self.files.items():
                (self.run_dir / name).write_bytes(whole)
        return f"exit {code}"

    def config(self, rng: random.Random) -> str:
        """Continues a run with a broken config.json, which must never be overwritten."""
        run_dir = self.folder / "continued"
        run_dir.mkdir(exist_ok=True)
        damaged = _damaged(rng, json.dumps(self.smoke, indent=2).encode(), as_text=0.4)
        file = run_dir / "config.json"
        file.write_bytes(damaged)
        saved = _or_refused(lambda: Config.load(file), "config.json")
        opened = _or_refused(lambda: open_run(RECIPES["smoke"](), run_dir) or True, "")
        untouched = opened is None and file.read_bytes() == damaged
        assert saved is not None or untouched, "a config.json that cannot be read was overwritten"
        if saved is not None:
            _check_numbers(saved)
        return "refused" if opened is None else "accepted"

    def checkpoint(self, rng: random.Random) -> str:
        """Loads a checkpoint with broken small files; damage and forgery are always errors."""
        small = {file.name: file.read_bytes() for file in self.saved.glob("*.json")}
        name, sealed = rng.choice(sorted(small)), rng.random() < 0.5
        damaged = _damaged(rng, small[name], as_text=0.3 if sealed else 1.0)
        (self.saved / name).write_bytes(damaged)
        is_forged = sealed and name != "manifest.json"
        if is_forged:
            reseal(self.saved)
        into = {key: torch.full_like(tensor, 7) for key, tensor in self.tensors.items()}
        try:
            load(self.saved, into)
        except CorruptCheckpointError as error:
            _check_words(str(error), self.saved.name)
            return "sealed: refused" if sealed else "refused"
        except CheckpointError:
            if not sealed:  # damage is called something else
                raise
            return "sealed: refused"
        finally:
            for each, content in small.items():
                (self.saved / each).write_bytes(content)
        if not is_forged:
            assert json.loads(damaged) == json.loads(small[name]), f"{name} was damaged, and read"
            assert all(torch.equal(into[key], self.tensors[key]) for key in into)
        return "sealed: read" if sealed else "read"


def _damaged(rng: random.Random, whole: bytes, *, as_text: float) -> bytes:
    """Returns a JSON file broken as text, with this probability, or as a value."""
    if rng.random() < as_text:
        return broken_text(rng, whole)
    return json.dumps(broken_value(rng, json.loads(whole))).encode()


# Intact things to break ----------------------------------------------------------------------------


def _write_run(run_dir: Path) -> dict[str, bytes]:
    """Writes a finished job's run folder, and returns the files that cases break."""
    logs = run_dir / "logs" / "g001" / "node0"
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_text("one\ntwo [/x]\n")
    journal = Journal(run_dir)
    cause = {"summary": "rank 1 was killed", "rank": 1, "node": 0, "exit_code": -9}
    for state, details in (
        (State.SUBMITTED, {"name": "mine"}),
        (State.RUNNING, {"first_step": 1}),
        (State.RECOVERING, {"root_cause": cause, "step": 3}),
        (State.RUNNING, {"first_step": 3}),
        (State.SUCCEEDED, {}),
    ):
        journal.append(state, generation=1, reason="said so", details=details)
    train = {"kind": "train", "loss": 1.0, "tokens_per_s": 10.0, "tokens": 5}
    train |= {"expert_load": [[0.5, 0.5]], "max_violation": [0.0], "effective_experts": [2.0]}
    source = {"name": "text", "done": 1, "total": 2, "tokens": 5, "segments": 1, "eta_s": 1.0}
    lines = {
        "metrics.jsonl": [
            {"kind": "start", "generation": 1, "resumed_from_step": None, "steps": 9},
            *(train | {"step": step} for step in (1, 2, 3)),
            {"kind": "start", "generation": 2, "resumed_from_step": 2},
            {"kind": "eval", "step": 3, "loss": 2.0, "perplexity": 7.4, "tokens": 9},
            {"kind": "checkpoint", "step": 4, "seconds": 0.1, "error": None},
            {"kind": "data_wait", "step": 4, "seconds": 0.1, "reason": "slow"},
        ],
        "preparation.jsonl": [
            {"kind": "preparation", "stage": "tokenise", "tokens_per_s": 2.0, "news": "begun"}
            | source
            | {"sources": [source, source | {"name": "more"}]}
        ],
    }
    for name, entries in lines.items():
        text = "".join(json.dumps(entry | {"time": 1e9}) + "\n" for entry in entries)
        (run_dir / name).write_text(text)
    RECIPES["smoke"]().save(run_dir / "config.json")
    (run_dir / "result.json").write_text('{"state": "finished", "step": 4}\n')
    names = ("journal.jsonl", "metrics.jsonl", "config.json", "preparation.jsonl")
    return {name: (run_dir / name).read_bytes() for name in names}


def _write_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of one rank, and returns its tensors."""
    path.mkdir(parents=True)
    tensors = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5)}
    file = path / "__0_0.distcp"
    whole = ((name, tensor, whole_shard(tensor.shape)) for name, tensor in tensors.items())
    index, file_sum = write_tensors(file, whole)
    meta = CheckpointMeta(
        step=4,
        generation=1,
        layout=plan_layout(MeshConfig(), 1),
        num_experts={},
        versions={},
        meta={"progress": {"step": 4}},
    )
    seal(path, index, meta, {file.name: file_sum})
    return tensors


# What may come out ---------------------------------------------------------------------------------


def _or_refused(act: Callable[[], Any], named: str) -> Any:
    """Returns what `act` returns, or None if it refuses in clear words that name a file."""
    try:
        return act()
    except ConfigError as error:
        _check_words(str(error), named)
        return None


def _check_words(message: str, named: str) -> None:
    """Checks that an error is not empty or endless and names the file."""
    assert message.strip(), "refused without a word"
    assert len(message) < MAX_WORDS, "an error that nobody reads"
    assert named in message, f"{named} is not named: {message[:300]}"


def as_toml(value: Any) -> str:
    """Returns a value as TOML, or as some text if TOML cannot express it."""
    match value:
        case bool() | str():
            return json.dumps(value)
        case int() | float():
            return str(value)
        case list():
            return f"[{', '.join(map(as_toml, value))}]"
        case dict():
            inner = ", ".join(f"{json.dumps(key)} = {as_toml(each)}" for key, each in value.items())
            return f"{{{inner}}}"
    return '"none"'


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value of nested sections with its path."""
    if isinstance(value, dict) and (value or not path):
        for key, each in value.items():
            yield from leaves(each, (*path, str(key)))
    else:
        yield path, value


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _without_none(value: Any) -> Any:
    """Returns a value without None, which TOML cannot express."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value


def _check_numbers(config: Config) -> None:
    """Checks that every number is usable and reads the same everywhere."""
    for path, value in leaves(config.model_dump(mode="json")):
        if isinstance(value, float):
            assert math.isfinite(value), f"{'.'.join(path)} = {value}"
        if isinstance(value, int):
            assert abs(value) < 2**63, f"{'.'.join(path)} = {value}"


def _check_taken(config: Config, asked: dict[str, Any]) -> None:
    """Checks that a file's values are what runs: no key dropped, no number read as a boolean."""
    _check_numbers(config)
    resolved = config.model_dump(mode="json")
    for path, value in leaves({key: each for key, each in asked.items() if key != "recipe"}):
        found = _at(resolved, path)
        if isinstance(value, bool) or isinstance(found, bool):
            assert found is value, f"{'.'.join(path)} = {value!r} is read as {found!r}"
        elif isinstance(value, int | float | str) and isinstance(found, int | float | str):
            same = found == value or str(found) == str(value)
            assert same or float(found) == float(value), f"{path} = {value!r}: {found!r}"


def _run_command(words: list[str]) -> tuple[int, str]:
    """Returns a command's exit code and output."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as ended,
    ):
        main(words)
    return int(ended.value.code or 0), printed.getvalue()
