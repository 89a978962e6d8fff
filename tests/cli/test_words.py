"""Words of other frameworks find their keys, and of many runs a few are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebius import ConfigError, JobError, load_config, status
from moebius.cli.models import config
from moebius.train.recipes.smoke import RECIPES


def test_of_many_runs_a_few_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"no such folder; there is no run here: `moebius train smo"):
        status("mine")
    for number in range(30):
        (tmp_path / "runs" / f"{number:06}" / "checkpoints").mkdir(parents=True)
    with pytest.raises(JobError, match=r"runs here: (runs/\d{6},? ){10}and 20 more$"):
        status("mine")
    with pytest.raises(ConfigError, match=r"is not a run folder .*; did you mean runs/000013\?"):
        load_config("runs/00001333")


ELSEWHERE = """
dropout attention_dropout hidden_dropout label_smoothing fp8 fp8_format quantization_config int8 lora qlora
adapter dpo rlhf sft grpo tp pp cp tensor_model_parallel_size pipeline_parallel_degree context_parallel_size mtp
num_nextn_predict_layers mup clip_qkv final_logit_softcapping offload rampup_batch_size diloco gguf beam-search
mamba = not here, because
keep_latest_k save_total_limit save_top_k = checkpoint.keep_last
load_best_model_at_end = checkpoint.keep_best
keep_period = checkpoint.keep_every
save_steps save_interval checkpoint_period ModelCheckpoint = checkpoint.every
enable_wandb report_to wandb_project WandbLogger enable_tensorboard tensorboard-dir = train.sinks
nccl_timeout ddp_timeout distributed-timeout-minutes = train.timeout_s
tie_word_embeddings untie-embeddings-and-output-weights logits_via_embedding = model.tied_head
gqa num_key_value_heads num-query-groups base_num_kv_heads n_kv_head = model.attention.num_kv_heads
mla multi-latent-attention = model.attention.kind
kv_lora_rank = model.attention.kv_rank
q_lora_rank = model.attention.q_rank
load_balance_coeff moe-router-bias-update-rate aux-loss-free = model.feed_forward.router.bias_rate
EarlyStopping early_stopping_patience callbacks LearningRateMonitor compute_metrics = moebius.fit(…, on_record=function)
max_steps train-iters num_iterations max_iters = train.steps
per_device_train_batch_size device_batch_size micro-batch-size training.local_batch_size = train.micro_batch
total_batch_size global-batch-size = train.global_batch
gradient_accumulation_steps accumulate_grad_batches = gradients accumulate
learning_rate lr max_lr = optim.learning_rate
min_lr min_lr_factor final_lr_frac cosine_learning_rate_final_fraction = optim.final_fraction
warmup_ratio lr-warmup-iters warmup_steps_fraction = optim.warmup_steps
warmdown_ratio lr-wsd-decay-iters lr_decay_iters = optim.decay_steps
lr-decay-style lr_scheduler_type wsd = optim.schedule
weight_decay adam_weight_decay = optim.weight_decay
adam_beta1 adam_b1 adam-beta1 = optim.beta1
adam_beta2 adam_b2 = optim.beta2
adam_eps adam-eps = optim.epsilon
clip-grad gradient_clip_val max_grad_norm gradient_clipping_threshold = optim.clip_norm
matrix_lr = optim.muon.learning_rate
unembedding_lr = optim.head_rate
embedding_lr = optim.embedding_rate
lion adafactor shampoo sgd = module:function names an optimizer of your own
num_train_epochs max_epochs = train.epochs
bf16 fp16 torch_dtype mixed-precision = train.precision
gradient_checkpointing remat_policy recompute-granularity activation_checkpoint = train.recompute
torch_compile = train.compile
log_every_n_steps logging_steps log-interval log_period = train.log_every
ema swa lawa = train.average
ema_decay ema_half_life = train.average_decay
eval_strategy val_check_interval evals_per_epoch eval-interval = train.eval_every
eval-iters limit_val_batches eval_tokens = train.eval_rows
val_set_size split = prepare.validation_fraction
profiler use-pytorch-profiler enable_profiling = train.profile
async-save async_mode = in the background
seq-length max_target_length sequence_len block_size max_seq_len = data.seq_len
sample_packing = data.packing
reset-attention-mask = data.document_attention
num-workers dataloader_num_workers pin_memory = memory-mapped shards
data-path dataset_name pretraining_dataset = prepare.input
tokenizer-model vocab-file = prepare.tokenizer
eos_token_id special_tokens = prepare.end_of_document
output_dir default_root_dir base_output_directory dump_folder = --run-dir
resume_from_checkpoint load_step ckpt_path = moebius resume RUN
base_model finetune initial_load_path load_parameters_path = --from RUN
num_hidden_layers n_layer base_num_decoder_layers depth = model.num_layers
hidden_size n_embd base_emb_dim = model.d_model
num_attention_heads base_num_query_heads n_head = model.attention.num_heads
head_dim kv-channels = model.attention.d_head
rope_theta rotary-base rope_max_timescale = model.attention.positions.base
rope_scaling yarn = model.attention.positions.yarn
max_position_embeddings = model.attention.positions.max_positions
position-embedding-type = model.attention.positions.kind
partial_rotary_factor = model.attention.positions.width
qk-layernorm = model.attention.qk_norm
sliding_window = model.attention.window
layer_types window_pattern = model.attention.window_layers
flash_attention use-flash-attn attn_implementation = scaled_dot_product_attention
rms_norm_eps norm-epsilon = model.norm_eps
initializer_range init-method-std = model.initialisation.std
hidden_act swiglu mlp_activations = model.feed_forward.activation
intermediate_size ffn-hidden-size base_mlp_dim = model.feed_forward.d_feed_forward
num_local_experts n_routed_experts num_experts = model.feed_forward.num_experts
moe_intermediate_size moe-ffn-hidden-size = model.feed_forward.d_expert
n_shared_experts = model.feed_forward.num_shared_experts
first_k_dense_replace decoder_sparse_step moe-layer-freq = model.feed_forward.sparse_layers
num_experts_per_tok moe-router-topk = model.feed_forward.router.top_k
router_aux_loss_coef moe-aux-loss-coeff load_balance_loss_weight = model.feed_forward.router.balance
router_z_loss_coef moe-z-loss-coeff = model.feed_forward.router.z_loss
scoring_func moe-router-score-function = model.feed_forward.router.scores
norm_topk_prob = model.feed_forward.router.renormalise
routed_scaling_factor = model.feed_forward.router.route_scale
n_group moe-router-num-groups = model.feed_forward.router.num_groups
topk_group = model.feed_forward.router.kept_groups
moe-expert-capacity-factor = model.feed_forward.router.capacity_factor
moe-grouped-gemm megablox use_liger_kernel = kernels.backend
moe-token-dispatcher-type = mesh.dispatcher
expert-model-parallel-size ici_expert_parallelism = mesh.ep
fsdp zero_stage use-distributed-optimizer = mesh.sharding
nproc_per_node devices = job.ranks_per_node
nnodes = job.num_nodes
run_name = job.name
deterministic = train.seed
fast_dev_run mock-data = prepare.input=embedded
lm_eval core_metric_every = moebius eval RUN --tasks
push_to_hub hub_model_id = moebius ckpt export
"""


def test_words_of_other_frameworks_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first row of `moebius config WORD`, which no other answer precedes."""
    rows: list[Any] = []
    monkeypatch.setattr(config, "_table", lambda titles, found: rows.append([*found]) or "table")
    asked = [
        (word, told)
        for words, _, told in (
            line.partition(" = ") for line in ELSEWHERE.split("\n") if "=" in line
        )
        for word in words.split()
    ]
    lines = " ".join(ELSEWHERE.split()).split(" = not here, because ")[0].split()
    asked += [(word, "not here, because") for word in lines]
    assert len(asked) > 230
    for word, told in asked:
        assert config._search(word, RECIPES), word
        key, _, meaning = rows[-1][0]
        assert told in (key, meaning) or told in meaning, (word, rows[-1])
    for word in ("zzz", "ffffs", "het"):
        assert config._search(word, RECIPES) is None, word


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lr"], "optim.learning_rate"),
        (["learning rate"], "optim.learning_rate"),
        (["gradient", "checkpointing"], "train.recompute"),
        (["mixed-precision"], "train.precision"),
        (["muon"], "optim.kind"),
        (["oom"], "a smaller train.micro_batch, train.recompute"),
        (["early stopping"], "moebius.fit(…, on_record=function)"),
        (["flash"], "attention calls torch's scaled_dot_product_attention"),
        (["decay iters"], "optim.decay_steps"),
        (["second moment"], "optim.beta2"),
        (["tokens"], "more words find fewer keys"),
    ],
)
def test_words_find_their_keys(
    words: list[str],
    told: str,
    moebius: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the key's name, by its description, and by what other frameworks call it."""
    monkeypatch.setenv("COLUMNS", "400")
    answer = moebius("config", *words)
    assert (answer.code, told in answer.text) == (0, True), answer.text
    assert len(answer.out.splitlines()) <= 13


def test_the_name_alone_shows_the_commands(moebius: Callable[..., Any]) -> None:
    answer = moebius()
    assert answer.code == 0
    assert "submit" in answer.out
