"""Suggests the key that a person meant: by the names that others use for it, or by its spelling."""

import difflib
from collections.abc import Iterable, Mapping

# What other frameworks call things, by the last name of a key or by a whole key. A value is a key of
# ours, or what to say instead of one.
_MEANT: Mapping[str, str] = {
    "lr": "optim.learning_rate",
    "max_lr": "optim.learning_rate",
    "min_lr": "optim.final_fraction",
    "warmup": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "lr_decay_iters": "optim.decay_steps",
    "wd": "optim.weight_decay",
    "eps": "optim.epsilon",
    "betas": "optim.beta1",
    "grad_clip": "optim.clip_norm",
    "max_norm": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "optimizer": "AdamW is the only optimizer; optim.* are its settings",
    "optim.name": "AdamW is the only optimizer; optim.* are its settings",
    "optim.kind": "AdamW is the only optimizer; optim.* are its settings",
    "scheduler": "a cosine with warm-up is the only schedule; optim.* are its settings",
    "lr_scheduler": "a cosine with warm-up is the only schedule; optim.* are its settings",
    "bs": "train.global_batch",
    "batch": "train.global_batch",
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "grad_accum": "gradients accumulate over train.global_batch ÷ (ranks × train.micro_batch) passes",
    "gradient_accumulation_steps": "gradients accumulate over train.global_batch ÷ (ranks × "
    "train.micro_batch) passes",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_iters": "train.steps",
    "iterations": "train.steps",
    "epochs": "data.max_epochs",
    "num_epochs": "data.max_epochs",
    "num_train_epochs": "data.max_epochs",
    "dtype": "train.precision",
    "amp": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "mixed_precision": "train.precision",
    "gradient_checkpointing": "train.recompute",
    "activation_checkpointing": "train.recompute",
    "log_interval": "train.log_every",
    "logging_steps": "train.log_every",
    "eval_interval": "train.eval_every",
    "eval_steps": "train.eval_every",
    "wandb": "train.sinks",
    "tensorboard": "train.sinks",
    "logger": "train.sinks",
    "report_to": "train.sinks",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "context_length": "data.seq_len",
    "block_size": "data.seq_len",
    "dataset": "prepare.input",
    "text": "prepare.input",
    "data_path": "prepare.input",
    "data_dir": "data.directory",
    "output_dir": "the run folder is the option --run-dir DIR",
    "out_dir": "the run folder is the option --run-dir DIR",
    "run_dir": "the run folder is the option --run-dir DIR",
    "resume": "moebius resume RUN continues a run, and so does --run-dir with an existing run",
    "layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "depth": "model.num_layers",
    "dim": "model.d_model",
    "width": "model.d_model",
    "hidden_size": "model.d_model",
    "hidden_dim": "model.d_model",
    "n_embd": "model.d_model",
    "heads": "model.attention.num_heads",
    "n_head": "model.attention.num_heads",
    "n_heads": "model.attention.num_heads",
    "num_attention_heads": "model.attention.num_heads",
    "head_dim": "model.attention.d_head",
    "rope_theta": "model.attention.positions.base",
    "ffn_dim": "model.feed_forward.d_feed_forward",
    "d_ff": "model.feed_forward.d_feed_forward",
    "intermediate_size": "model.feed_forward.d_feed_forward",
    "experts": "model.feed_forward.num_experts",
    "n_experts": "model.feed_forward.num_experts",
    "num_local_experts": "model.feed_forward.num_experts",
    "n_routed_experts": "model.feed_forward.num_experts",
    "n_shared_experts": "model.feed_forward.num_shared_experts",
    "topk": "model.feed_forward.router.top_k",
    "k": "model.feed_forward.router.top_k",
    "num_experts_per_tok": "model.feed_forward.router.top_k",
    "aux_loss_coef": "model.feed_forward.router.balance",
    "router_aux_loss_coef": "model.feed_forward.router.balance",
    "router": "model.feed_forward.router.kind",
    "vocab": "prepare.vocab_size",
    "nodes": "job.num_nodes",
    "nnodes": "job.num_nodes",
    "gpus": "job.ranks_per_node",
    "num_gpus": "job.ranks_per_node",
    "nproc_per_node": "job.ranks_per_node",
    "world_size": "job.ranks_per_node",
    "expert_parallel": "mesh.ep",
    "expert_parallel_size": "mesh.ep",
    "dp": "mesh.dp_replicate",
    "fsdp": "mesh.sharding",
    "zero_stage": "mesh.sharding",
    "tp": "there is no tensor parallelism; mesh.ep spreads experts",
    "pp": "there is no pipeline parallelism; mesh.ep spreads experts",
}


def suggest(key: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for an unknown key, another hint, or "" where nothing is like it.

    Args:
        key: dotted, or its last name alone.
        known: dotted keys that there are.
    """
    keys = list(dict.fromkeys(known))
    name = key.lower().replace("-", "_").rpartition(".")[2]
    same = [path for path in keys if path.rpartition(".")[2] == name]
    meant = _MEANT.get(key.lower()) or ("" if same else _MEANT.get(name, ""))
    if meant in keys:
        return f"; did you mean {meant}?"
    if meant and " " in meant:
        return f"; {meant}"
    return _question(same) if same else _by_spelling(key, keys)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question after the known word that is most like `word`; "" if none is like it."""
    return _question(difflib.get_close_matches(word, list(known), n=1, cutoff=0.5))


def _by_spelling(key: str, keys: list[str]) -> str:
    names = {path.rpartition(".")[2] for path in keys}
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.75)
    if close:
        return _question([path for path in keys if path.rpartition(".")[2] == close[0]])
    return nearest(key, keys)


def _question(words: list[str]) -> str:
    return f"; did you mean {' or '.join(words[:3])}?" if words else ""
