"""Runs with a checkpoint of a tiny model to export, and our own model's logits."""

import json
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from family import make_uneven, tiny_config
from torch import Tensor

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.distributed.checkpoint.atomic_directory import write_checkpoint
from moebius.distributed.parallelize import expert_names
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, JobConfig, TrainConfig

VOCABULARY, STEP = 257, 7
TOKENS = torch.arange(4 * 20).view(4, 20) * 37 % 256
LENGTHS = (20, 9, 1, 14)  # of the rows, where they are padded
PROMISED = (
    *("dense", "naive_ut", "moeut", "moeut_g1", "moeut_aabb", "moeut_pre", "moeut_post"),
    *("sigma_moe", "sigma_moe_original", "switchhead", "sut", "sut_no_act", "gshard", "top_k"),
    *("deepseek", "x_moe", "mh_moe", "mh_moe_parity"),
    *("huginn_small", "huginn_moe", "parcae_small", "parcae_moe", "ouro_moe"),
    *("moeut_sandwich", "middle_half_twice"),
)


@cache
def model_of(name: str, changes: str = "{}") -> Transformer:
    """Builds a small, opinionated recipe with values in every norm, bias and buffer.

    `changes` is JSON: dotted keys and their values.
    """
    model = Transformer(tiny_config(name, {"vocab_size": VOCABULARY, **json.loads(changes)}))
    initialise(model, 1)
    make_uneven(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", "bias", "relative", "b_up", "b_down")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for buffer in model.buffers():
        buffer.copy_(torch.linspace(-1, 1, buffer.numel()).view_as(buffer))
    model.before_step(STEP)
    return model.eval()


def prepare_bands(folder: Path) -> Path:
    """Returns a prepared folder with a trained tokenizer and a source with a license."""
    text = folder / "text.jsonl"
    lines = [json.dumps({"text": f"the band number {n} closes"}) + "\n" for n in range(60)]
    text.write_text("".join(lines))
    source = SourceConfig(name="bands", input=(str(text),), licence="CC0-1.0")
    config = PrepareConfig(sources=(source,), tokenizer="bpe", vocab_size=VOCABULARY)
    prepare(config, folder / "shards")
    return folder / "shards"


def checkpoint_of(run: Path) -> Path:
    """Returns the checkpoint of a run from `make_run`."""
    return run / "checkpoints" / f"step_{STEP:08d}"


def make_run(
    folder: Path,
    model: Transformer,
    *,
    data: str = "nowhere",
    tokenizer: Literal["bpe", "bytes", "sentencepiece"] = "bytes",
) -> Path:
    """Writes a run folder with one checkpoint and a log of losses, and returns it."""
    config = Config(
        model=model.config,
        data=DataConfig(seq_len=20, directory=data),
        prepare=PrepareConfig(tokenizer=tokenizer, vocab_size=VOCABULARY),
        train=TrainConfig(micro_batch=8, steps=STEP),
        job=JobConfig(name="tiny"),
    )
    folder.mkdir(parents=True)
    config.save(folder / "config.json")
    lines = [
        {"kind": "start", "step": 0},
        {"kind": "eval", "step": 0, "loss": 5.5},
        *({"kind": "train", "step": n, "loss": 6 - n / 4, "tokens": n} for n in range(1, STEP + 2)),
        {"kind": "eval", "step": STEP, "loss": 4.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr'
    (folder / "metrics.jsonl").write_text(text)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    progress = {"step": STEP, "updates": STEP, "samples": 0, "tokens": 1000}
    moment = {"optimizer.exp_avg.head.weight": lambda: torch.zeros(3)}  # which no export has
    write_checkpoint(
        checkpoint_of(folder),
        {f"model.{key}": (lambda tensor=tensor: tensor) for key, tensor in named.items()} | moment,
        step=STEP,
        num_experts={f"model.{key}": len(named[key]) for key in expert_names(model)},
        meta={"progress": progress, "config": config.model_dump(mode="json")},
    )
    return folder


def logits(model: Transformer, tokens: Tensor = TOKENS) -> Tensor:
    """Returns our own model's logits."""
    with torch.no_grad():
        return model(tokens).logits_BSV
