"""Suggests the intended key: by its name in other frameworks, or by spelling."""

import difflib
from collections.abc import Iterable, Mapping

from ...own_parts import nearest

# Names in other frameworks, by our key or by an answer: the last names of their keys. A dotted name is
# a whole key.
_NAMES: Mapping[str, str] = {
    "moebius pretrains and has no LoRA; export to Hugging Face and use PEFT (docs/train.md)": "lora peft",
    "a sweep is `moebius compare RECIPE --sweep section.key=A,B,… --seeds N`": "sweep seeds",
    "optim.learning_rate": "lr max_lr",
    "optim.final_fraction": "min_lr",
    "optim.warmup_steps": "warmup warmup_iters",
    "optim.decay_steps": "lr_decay_iters",
    "optim.weight_decay": "wd",
    "optim.epsilon": "eps",
    "optim.beta1": "betas",
    "optim.clip_norm": "grad_clip max_norm max_grad_norm gradient_clipping",
    "optim.kind": "optimizer optim.name",
    "adamw is built in; optim.kind=module:function names an optimizer of your own": "muon sgd lion adafactor",
    "optim.schedule": "scheduler lr_scheduler",
    "train.losses": "aux_losses auxiliary_losses",
    "train.global_batch": "bs batch batch_size global_batch_size",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size",
    "gradients accumulate over train.global_batch ÷ (ranks × train.micro_batch) passes": "grad_accum gradient_accumulation_steps",
    "train.steps": "max_steps num_steps max_iters iterations",
    "data.max_epochs": "epochs num_epochs num_train_epochs",
    "train.precision": "dtype amp bf16 fp16 mixed_precision",
    "train.recompute": "gradient_checkpointing activation_checkpointing",
    "train.log_every": "log_interval logging_steps",
    "train.eval_every": "eval_interval eval_steps",
    "train.sinks": "wandb tensorboard logger report_to",
    "checkpoint.every": "save_every save_steps save_interval",
    "checkpoint.keep_last": "save_total_limit",
    "data.seq_len": "seq_length sequence_length max_seq_len max_length context_length block_size",
    "prepare.input": "dataset text data_path",
    "data.directory": "data_dir",
    "the run folder is the option --run-dir DIR": "output_dir out_dir run_dir",
    "moebius resume RUN continues a run, and so does --run-dir with an existing run": "resume",
    "model.num_layers": "layers n_layer n_layers num_hidden_layers depth",
    "model.d_model": "dim width hidden_size hidden_dim n_embd",
    "model.attention.num_heads": "heads n_head n_heads num_attention_heads",
    "model.attention.d_head": "head_dim",
    "model.attention.positions.base": "rope_theta",
    "model.feed_forward.d_feed_forward": "ffn_dim d_ff intermediate_size",
    "model.feed_forward.num_experts": "experts n_experts num_local_experts n_routed_experts",
    "model.feed_forward.num_shared_experts": "n_shared_experts",
    "model.feed_forward.router.top_k": "topk k num_experts_per_tok",
    "model.feed_forward.router.balance": "aux_loss_coef router_aux_loss_coef",
    "model.feed_forward.router.kind": "router",
    "prepare.vocab_size": "vocab",
    "job.num_nodes": "nodes nnodes",
    "job.ranks_per_node": "gpus num_gpus nproc_per_node world_size",
    "mesh.ep": "expert_parallel expert_parallel_size",
    "mesh.dp_replicate": "dp",
    "mesh.sharding": "fsdp zero_stage",
    "there is no tensor parallelism; mesh.ep spreads experts": "tp",
    "there is no pipeline parallelism; mesh.ep spreads experts": "pp",
}
_MEANT = {name: meant for meant, names in _NAMES.items() for name in names.split()}


def suggest(key: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for an unknown key, another hint, or "" if nothing is close.

    Args:
        key: dotted, or its last name alone.
        known: the existing dotted keys.
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


def _by_spelling(key: str, keys: list[str]) -> str:
    names = {path.rpartition(".")[2] for path in keys}
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.75)
    if close:
        return _question([path for path in keys if path.rpartition(".")[2] == close[0]])
    return nearest(key, keys)


def _question(words: list[str]) -> str:
    return f"; did you mean {' or '.join(words[:3])}?" if words else ""
