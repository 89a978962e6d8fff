"""Every command that a page shows is typed as it stands there, in the page's order.

Each page has a folder of its own, where small things have the names of its examples. All is real but
the ranks: a pretended node trains in this process, and makes one step for each checkpoint. What
cannot be typed here is in `ELSEWHERE`, with who tests it.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_folder import folder_of
from fake_hub import COMMIT
from hub_sets import task_files
from safetensors.torch import load_file, save_file
from small_corpus import sentencepiece_model, sentences
from test_docs import ROOT, blocks, documents

from moebius.cluster.job import Launch
from moebius.cluster.nodes.assignment import AgentReport
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.data_pipeline.make.pools import SerialPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.layout import MeshConfig
from moebius.evaluation.while_training import Examiner
from moebius.model.transformer import Transformer
from moebius.train import loop
from moebius.train.config.run_config import Config, JobConfig
from moebius.train.metrics.dry_run import dry_run
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import StepResult
from tests.cluster.pretended import OK, PretendedNode
from tests.export.test_published import released

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What is not typed, by how it begins -> where it is tested, or the program that is not ours.
ELSEWHERE = {
    "make ": "Makefile",
    "source .venv": "a shell",
    "pip": "pip",
    "ray ": "Ray",
    "sbatch": "Slurm",
    "docker": "Docker",
    "kubectl": "Kubernetes",
    "tar": "tar",
    "sed": "sed",
    "python -m pytest": "pytest",
    "moebius cluster": "tests/cluster/places/test_standing.py",
    "moebius doctor": "tests/cluster/check/test_doctor.py",
    "moebius chat": "tests/evaluation/test_chat.py",
    "moebius lm-eval": "tests/evaluation/test_lm_eval_model.py",
    "moebius dashboard": "satellites/dashboard/tests/test_serve.py",
    "moebius compare": "satellites/science/tests/compare/test_compare.py",
    "moebius tasks runs/compare": "satellites/science/tests/compare/test_compare.py",
    "moebius tasks runs/p_hop_moeut ": "satellites/science/docs/tasks.md",
    "python -m moebius_science.loops": "satellites/science/tests/test_loops.py",
    "python -m moebius_science.growth": "satellites/science/tests/test_growth.py",
    "python -m moebius_science.optimizers": "satellites/science/tests/test_optimizers.py",
    "python -m moebius_conform": "satellites/conform/tests/test_conform.py",
}
# What the reader of a page has done before.
OLMOE = (  # of no recipe's size
    "moebius train olmoe_small model.feed_forward.num_experts=24 --run-dir runs/other",
    "moebius ckpt export runs/other --out OLMoE-1B-7B-0924",
)
MINE = ("moebius train own_text train.steps=2000 --run-dir runs/mine",)
BEFORE = {
    "docs/cluster.md": (
        "moebius train own_text --run-dir runs/first",
        "moebius train smoke --run-dir /shared/runs/night",
    ),
    "docs/data.md": ("moebius config own_text > mine.toml",),
    "docs/evaluate.md": (
        "moebius train own_text prepare.tokenizer=./chat train.average=ema --run-dir runs/mine",
    ),
    "docs/export.md": (
        'moebius prepare --input "texts/*.txt" --output shards prepare.tokenizer=c4.model',
        "moebius train own_text data.directory=shards --run-dir runs/mine",
    ),
    "docs/extend.md": (
        "moebius train mixtral_small --run-dir runs/other",
        "moebius ckpt export runs/other --out Nimbus-8x1B",
    ),
    "docs/families.md": OLMOE,
    "docs/train.md": OLMOE,
    "satellites/science/README.md": MINE,
    "satellites/science/docs/analysis.md": MINE,
}


def commands(page: str) -> list[list[str]]:
    """Returns the commands of each of a page's blocks, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = (block.replace("\\\n", "").splitlines() for block in blocks(text, "sh"))
    return [[line for line in lines if shlex.split(line, comments=True)] for lines in found]


PAGES = [page for page in documents() if commands(page)]


# The stage ------------------------------------------------------------------------------------------


class Node(PretendedNode):
    """Trains in this process."""

    def __init__(self, launch: Launch):
        super().__init__(Path(launch.run_dir), [self.trains])
        self.config_file, self.is_dry = launch.config_file, "--dry-run" in launch.command

    def trains(self, run_dir: Path) -> AgentReport:
        config = Config.load(run_dir / self.config_file)
        if config.train.start_when is not None:
            prepare(config.prepare, config.data.directory)
        whole = config.train.model_copy(update={"micro_batch": config.train.global_batch})
        one_rank = {"mesh": MeshConfig(), "job": JobConfig(), "train": whole}
        os.environ["MOEBIUS_GENERATION"] = str(self.runs[0])
        try:
            alone = config.model_copy(update=one_rank)
            if self.is_dry:
                assert dry_run(alone, run_dir) == "finished"
            else:
                assert loop.train(alone, run_dir, examine=Examiner()) == "finished"
        finally:
            del os.environ["MOEBIUS_GENERATION"]
        return OK


def leaping(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Returns a step after which the next checkpoint that stays is due."""

    def leap(run: Any, *given: Any, **options: Any) -> StepResult:
        result, last = step(run, *given, **options), run.config.train.steps
        every, kept = run.config.checkpoint.every, run.config.checkpoint.keep_last
        due = max(-(-run.progress.step // every), last // every - kept + 1) * every
        number = min(due, last)
        run.state.progress = replace(run.progress, step=number, updates=number)
        return replace(result, is_last=result.is_last or number == last)

    return leap


def small(recipe: Callable[[], Config]) -> Callable[[], Config]:
    """Returns a recipe of a model that trains in no time, on the same mesh."""

    def build() -> Config:
        config = recipe()
        model = {"vocab_size": 512, "d_model": 24, "attention.d_head": 6}
        if config.model.attention.kind != "switchhead":
            model = {}  # already small, or never trained here
        elif config.model.experts is not None:
            experts = min(config.model.experts.num_experts, 64)
            model |= {"feed_forward.d_expert": 8, "feed_forward.num_experts": experts}
        batch = min(config.train.global_batch, 64)
        train = {"eval_every": 0, "eval_rows": 8, "global_batch": batch}
        sections = {
            "model": config.model.changed(model),
            "data": config.data.model_copy(update={"seq_len": 64}),
            "prepare": config.prepare.model_copy(update={"vocab_size": 512}),
            "train": config.train.model_copy(update=train),
        }
        return config.model_copy(update=sections)

    build.__doc__ = recipe.__doc__
    return build


def code_of(page: str, part: str) -> str:
    """Returns the Python block of a page that has this part."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return next(block for block in blocks(text, "python") if part in block)


def become_nimbus(folder: Path) -> None:
    """Renames what the page's family has under other names than Mixtral."""
    file, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    weights["model.wte.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, file, metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"mixtral"', '"nimbus"'))


def in_cache_of_hub(folder: Path, cache: Path) -> None:
    """Puts a folder into the hub's cache, as if it had been fetched."""
    place = cache / f"models--allenai--{folder.name}"
    shutil.copytree(folder, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def put_things_into(folder: Path) -> None:
    """Makes what the pages' examples name, except runs."""
    for name in ("texts", "other"):
        (folder / name).mkdir()
        text = "\n\n".join(sentences(len(name), 200))
        (folder / name / "a.txt").write_text(text, encoding="utf-8")
    folder_of(folder / "chat")
    shutil.copytree(ROOT / "examples", folder / "examples")
    mine = code_of("docs/data.md", "def pages") + "def page(number):\n    return f'page {number}'\n"
    (folder / "my_texts.py").write_text(mine)
    (folder / "my_family.py").write_text(code_of("docs/extend.md", "NIMBUS ="))
    chats = [{"question": text, "answer": text} for text in sentences(3, 40)]
    write_lines(folder / "chats.jsonl", chats)
    shutil.copytree(folder / "chat", folder / "tok")
    np.full(999, 5, np.uint16).tofile(folder / "train.bin")
    (folder / "eval").mkdir()
    for name, records in {**task_files(), "set": [{"text": " ".join(map(str, range(20)))}]}.items():
        write_lines(folder / "eval" / f"{name}.jsonl", records)
    (folder / "c4.model").write_bytes(sentencepiece_model(sentences(4, 100), vocab_size=300))
    weights = released(Transformer(small(RECIPES["moeut_244m"])().model))
    torch.save(weights, folder / "moeut_244m.pth")


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    """Writes a file of JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def on_one_node(launch: Launch) -> None:
    """Runs a submitted job here, in place of its supervisor on the cluster."""
    supervise(replace(launch, num_nodes=1, min_nodes=None, layouts=None), Node(launch))


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("things")
    put_things_into(folder)
    return folder


@pytest.fixture
def stage(things: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replaces ranks, the cluster, pictures and what is large, and goes to a folder of small things."""
    part = [(n, " ".join(sentences(n, 3))) for n in range(20)]
    for name, value in {
        "cluster.local.ThisMachine": Node,
        "cluster.local.BackgroundData": lambda *given: None,
        "cluster.submit._connected": lambda *given: nullcontext(),
        "cluster.submit.RayPool": lambda **given: nullcontext(),
        "cluster.report.summary.draw_summary": lambda run_dir: run_dir / "summary.png",
        "cluster.supervise.actor.start_supervisor": on_one_node,
        "cluster.launch._cluster_gpus": lambda config: 0,
        "data_pipeline.make.pools.LocalPool": lambda workers: nullcontext(SerialPool()),
        "data_pipeline.sources.embedded.embedded_part": lambda number: part,
        "train.loop.step": leaping(loop.step),
    }.items():
        monkeypatch.setattr(f"moebius.{name}", value)
    for name, recipe in list(RECIPES.items()):
        monkeypatch.setitem(RECIPES, name, small(recipe))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(things, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    for name, module in list(sys.modules.items()):  # other tests may have modules of this name
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


class Shell:
    """Types commands as a shell does, and collects what went wrong."""

    def __init__(self, moebius: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
        self.moebius, self.monkeypatch = moebius, monkeypatch
        self.shared = Path.cwd() / "shared"  # /shared of the pages
        self.wrong: list[str] = []

    def type(self, line: str) -> None:
        line, _, file = line.partition(" > ")
        words = shlex.split(line.replace("/shared/", f"{self.shared}/"), comments=True)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            self.set(words.pop(0))
        if words[0] == "torchrun":
            words = words[words.index("--no-python") + 1 :]
        if words[0] == "cd":
            self.monkeypatch.chdir(words[1])
        elif words[0] == "export":
            for word in words[1:]:
                self.set(word)
        elif words[0] == "moebius":
            if "data.override_position=true" in words:
                self.move_last_checkpoint_away(Path(words[words.index("--run-dir") + 1]))
            done = self.moebius(*words[1:])
            if done.code:
                self.wrong.append(f"{line}\n    {done.code}: {done.text[-600:]}")
            if file:
                Path(file).write_text(done.out)
        else:
            self.wrong.append(f"{line}\n    is neither typed nor in ELSEWHERE")

    def move_last_checkpoint_away(self, run_dir: Path) -> None:
        """Does what the page says before the command."""
        shutil.rmtree(max((run_dir / "checkpoints").iterdir()))

    def set(self, word: str) -> None:
        name, _, value = word.partition("=")
        self.monkeypatch.setenv(name, value)
        if name == "PYTHONPATH":
            self.monkeypatch.syspath_prepend(value)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_can_be_typed(page, stage, moebius, monkeypatch):
    shell = Shell(moebius, monkeypatch)
    for line in BEFORE.get(page, ()):
        shell.type(line)
    for folder in stage.glob("Nimbus*"):
        become_nimbus(folder)
    for folder in stage.glob("OLMoE*"):
        in_cache_of_hub(folder, stage / "hub")
    for block in commands(page):
        monkeypatch.chdir(stage)
        for folder in re.findall(r"--output (\S+)", "\n".join(block)):
            shutil.rmtree(folder, ignore_errors=True)  # blocks are alternatives
        for line in block:
            if " --dry-run " in line or not line.startswith(tuple(ELSEWHERE)):
                shell.type(line)
    assert not shell.wrong, "\n" + "\n".join(shell.wrong)


def test_a_command_that_nobody_tests_is_found(moebius, monkeypatch):
    shell = Shell(moebius, monkeypatch)
    shell.type("moebius train nothing")
    shell.type("cargo build")
    assert "did you mean" in shell.wrong[0] or "no recipe" in shell.wrong[0], shell.wrong
    assert "neither typed" in shell.wrong[1]


def test_what_is_tested_elsewhere_is_shown() -> None:
    shown = [line for page in PAGES for block in commands(page) for line in block]
    for start, where in ELSEWHERE.items():
        assert any(line.startswith(start) for line in shown), start
        assert "/" not in where or (ROOT / where).is_file(), where
