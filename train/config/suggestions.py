"""Suggests the intended key: by its name in other frameworks, or by spelling."""

import difflib
from collections.abc import Iterable, Mapping

from ...plugins import nearest

# Names in other frameworks, by our key or by an answer: the last names of their keys. A dotted name is
# a whole key; a dash stands for a blank. docs/words.md shows this table.
_NAMES: Mapping[str, str] = {
    "moebius pretrains and has no LoRA; export to Hugging Face and use PEFT (docs/train.md)": "lora peft qlora",
    "a sweep is `moebius compare RECIPE --sweep section.key=A,B,… --seeds N`": "sweep seeds grid-search optuna",
    "optim.learning_rate": "lr learning-rate max_lr base_lr optimizer.lr peak_lr",
    "optim.final_fraction": "min_lr min_lr_factor final_lr_frac",
    "optim.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio",
    "optim.decay_steps": "lr_decay_iters lr_decay lr_decay_steps cosine-annealing cooldown cooldown_steps warmdown_ratio",
    "optim.weight_decay": "wd weight-decay",
    "optim.epsilon": "eps adam_epsilon",
    "optim.beta1": "betas adam_beta1",
    "optim.clip_norm": "grad_clip max_norm max_grad_norm gradient-clipping gradient_clip_val",
    "optim.kind": "optimizer optim.name muon moonlight newton-schulz",
    "optim.muon.learning_rate": "muon_lr matrix_lr",
    "optim.weight_decay_on": "no_decay no_weight_decay decay-mask",
    "optim.embedding_rate": "embedding_lr",
    "optim.head_rate": "unembedding_lr lm_head_lr",
    "adamw and muon are built in; optim.kind=module:function names an optimizer of your own": "sgd lion adafactor shampoo",
    "optim.schedule": "scheduler lr_scheduler lr_scheduler_type wsd warmup-stable-decay trapezoidal",
    "optim.kind=module:function can give the group of frozen parameters lr=0": "freeze frozen requires_grad freeze_layers",
    "train.losses": "aux_losses auxiliary_losses custom-loss distillation",
    "train.global_batch": "bs batch batch-size global_batch_size total_batch_size",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size device_batch_size local_batch_size",
    "a smaller train.micro_batch, train.recompute and mesh.sharding save memory": "oom out-of-memory cuda_out_of_memory",
    "gradients accumulate over train.global_batch ÷ (ranks × train.micro_batch) passes": "grad_accum gradient-accumulation "
    "gradient_accumulation_steps accumulate_grad_batches",
    "train.steps": "max_steps num_steps max_iters iterations num_iterations",
    "train.tokens": "max_tokens num_tokens total_tokens train_tokens",
    "train.epochs": "epochs num_epochs num_train_epochs",
    "train.precision": "dtype amp bf16 fp16 autocast mixed-precision half-precision grad-scaler",
    "train.recompute": "gradient-checkpointing activation-checkpointing activation_checkpoint remat",
    "train.compile": "torch_compile torch.compile jit",
    "train.device": "cuda gpu accelerator",
    "train.seed": "seed-everything manual_seed",
    "train.log_every": "log_interval log_freq logging_steps log_every_n_steps",
    "train.eval_every": "eval_interval eval_steps val_check_interval",
    "train.eval_rows": "eval_iters limit_val_batches eval_tokens",
    "train.sinks": "wandb tensorboard mlflow logger report_to",
    "train.skip_spikes": "loss-spikes nan-loss",
    "train.profile": "profiler profiling torch-profiler perfetto trace",
    "moebius.fit(…, on_record=function) calls it per step and evaluation": "callback callbacks early-stopping patience",
    "`moebius.history(RUN).frame()` returns the metrics as a pandas table": "pandas dataframe csv",
    "checkpoint.every": "save_every save_steps save_interval save_strategy",
    "checkpoint.keep_last": "save_total_limit",
    "data.seq_len": "seq_length sequence_length max_seq_len max_length context_length block_size",
    "data.packing": "packed sample-packing",
    "data.document_attention": "document-mask varlen intra_document_masking",
    "data.weights": "data-mix mixture_weights interleave_datasets",
    "prepare.input": "dataset text data_path train_file streaming",
    "prepare.tokenizer": "bpe sentencepiece tiktoken",
    "data.directory": "data_dir",
    "the run folder is the option --run-dir DIR": "output_dir out_dir run_dir default_root_dir",
    "moebius resume RUN continues a run, and so does --run-dir with an existing run": "resume resume_from_checkpoint ckpt_path",
    "--from RUN starts a new run from another run's weights": "from init_from from_pretrained load_from finetune_from warm_start",
    "--from RUN@STEP branches off a run, with its optimizer and data": "branch branch_from fork decay_from",
    "model.num_layers": "layers n_layer n_layers num_hidden_layers depth",
    "model.d_model": "dim width hidden_size hidden_dim n_embd",
    "model.attention.num_heads": "heads n_head n_heads num_attention_heads",
    "model.attention.d_head": "head_dim",
    "model.attention.positions.base": "rope_theta",
    "attention calls torch's scaled_dot_product_attention, which has flash kernels": "flash-attention flash_attn sdpa xformers",
    "model.feed_forward.d_feed_forward": "ffn_dim d_ff intermediate_size",
    "model.feed_forward.num_experts": "experts n_experts num_local_experts n_routed_experts",
    "model.feed_forward.num_shared_experts": "n_shared_experts",
    "model.feed_forward.router.top_k": "topk k num_experts_per_tok",
    "model.feed_forward.router.balance": "aux_loss_coef router_aux_loss_coef load-balancing",
    "model.feed_forward.router.kind": "router gating",
    "prepare.vocab_size": "vocab",
    "job.num_nodes": "nodes nnodes",
    "job.ranks_per_node": "gpus num_gpus multi-gpu ddp devices nproc_per_node world_size",
    "mesh.ep": "expert-parallel expert_parallel_size expert_parallel_degree",
    "mesh.dp_replicate": "dp data_parallel_replicate_degree",
    "mesh.dp_shard": "data_parallel_shard_degree",
    "mesh.sharding": "fsdp zero zero_stage deepspeed strategy",
    "`moebius ckpt export RUN --out DIR` writes a model for others": "safetensors push_to_hub save_pretrained vllm",
    "`moebius eval RUN --tasks …` scores tasks; `moebius lm-eval` runs the harness": "lm_eval lm-evaluation-harness mmlu",
    "`moebius eval RUN --prompt TEXT` generates; --temperature and --top-p choose how": "sampling inference nucleus-sampling",
    "there is no tensor parallelism; mesh.ep spreads experts": "tp tensor-parallel tensor_parallel_degree",
    "there is no pipeline parallelism; mesh.ep spreads experts": "pp pipeline-parallel pipeline_parallel_degree",
    "there is no context parallelism; train.recompute saves memory": "cp context-parallel context_parallel_degree",
    "a recipe or a file that ends in .toml is the first word, without an option": "recipe config config_file",
    "copy and edit examples/slurm.sbatch or examples/kuberay.yaml (docs/cluster.md)": "emit slurm sbatch kuberay kubernetes k8s",
}
_MEANT = {
    name.replace("-", "_"): meant for meant, names in _NAMES.items() for name in names.split()
}


def words_known_elsewhere() -> dict[str, list[str]]:
    """Returns words of other frameworks, by our key or by an answer."""
    return {
        meant: [name.replace("-", " ") for name in names.split()] for meant, names in _NAMES.items()
    }


def meant_by(words: str) -> str:
    """Returns the key, or the answer, for words of other frameworks; "" if there is none."""
    return _MEANT.get("_".join(words.lower().replace("-", " ").split()), "")


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
    section = key.rpartition(".")[0]
    beside = {path.rpartition(".")[2]: path for path in keys if path.rpartition(".")[0] == section}
    if meant in keys:
        return f"; did you mean {beside.get(meant.rpartition('.')[2], meant)}?"
    if close := difflib.get_close_matches(name, beside, n=1, cutoff=0.75):
        return f"; did you mean {beside[close[0]]}?"
    if meant and " " in meant:
        return f"; {meant}"
    return _question(same, key) if same else _by_spelling(key, keys)


def _by_spelling(key: str, keys: list[str]) -> str:
    names = {path.rpartition(".")[2] for path in keys}
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.75)
    if close:
        return _question([path for path in keys if path.rpartition(".")[2] == close[0]], key)
    return nearest(key, keys)


def _question(paths: list[str], key: str) -> str:
    """Asks for keys of one name: for that of the same section, or else for that of a whole one."""
    section = key.rpartition(".")[0]
    near = [path for path in paths if path.rpartition(".")[0] == section]
    near = near or [path for path in paths if path.count(".") == 1] or paths
    return f"; did you mean {' or '.join(near[:3])}?"
