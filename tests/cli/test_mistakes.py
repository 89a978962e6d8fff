"""Tests beginners' mistakes: each is answered by one line that names the mistake and the way out.

Nothing is trained or prepared here: a mistake that is noticed late makes its test slow.
"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebius import ConfigError, JobError, load_config, status
from moebius.cli.models import config
from moebius.train.recipes.smoke import RECIPES

MISTAKES = """
trainn                                          | did you mean train?
sumbit smoke                                    | did you mean submit?
export runs/mine                                | did you mean ckpt export?
generate runs/mine                              | did you mean eval RUN --prompt TEXT?
sweep smoke                                     | did you mean compare RECIPE --sweep section.key=A,B,…?
tokenize text.txt                               | did you mean prepare?
train                                           | arguments are required: RECIPE|FILE.toml, or --from SOURCE
train optim.learning_rate=1                       | there is no recipe
train smoke --from runs/nowhere                 | --from runs/nowhere: there is no such folder
train --from nowhere@100 smoke                  | --from nowhere@100: there is no such folder
train smoke --draw-anew embedding               | --draw-anew and --family need --from SOURCE
train smok                                      | there is no recipe 'smok'; did you mean smoke?
train nothere.toml                              | nothere.toml: cannot be read (No such file or directory)
train smoke --steps 10                          | did you mean train.steps? Keys are written section.key=value
train smoke --learning-rate 1e-3                | did you mean optim.learning_rate? Keys are written
train smoke --lr=1e-3                           | did you mean optim.learning_rate? Keys are written
train smoke --batch-size 8                      | did you mean train.global_batch? Keys are written
train smoke --gpus 2                            | did you mean job.ranks_per_node? Keys are written
train smoke --epochs 3                          | did you mean train.epochs? Keys are written
train smoke --sweep optim.learning_rate=1,2     | a sweep is `moebius compare RECIPE --sweep
train smoke --stepz=3                           | unrecognized arguments: --stepz=3
train smoke --resume                            | moebius resume RUN continues a run
train smoke steps=10                            | there is no key 'steps'; did you mean train.steps?
train smoke lr=1e-3                             | there is no key 'lr'; did you mean optim.learning_rate?
train smoke learning_rate=1e-3                  | did you mean optim.learning_rate?
train smoke batch_size=8                        | did you mean train.global_batch?
train smoke wandb=true                          | did you mean train.sinks?
train smoke optim.lr=1e-3                       | optim.lr: unknown key; did you mean optim.learning_rate?
train smoke optim.learning_rate=fast            | optim.learning_rate: must be a number > 0, for example
train smoke model.hidden_size=64                | did you mean model.d_model?
train smoke model.n_layers=4                    | did you mean model.num_layers?
train smoke model.d_modle=64                    | did you mean model.d_model?
train smoke model.d_model                       | write section.key=value, for example train.steps=200
train smoke model.d_model=                      | model.d_model: must be an integer > 0
train smoke model.d_model=abc                   | (given: 'abc')
train smoke model.d_model=-4                    | model.d_model: must be an integer > 0, for example model.d_model=128 (given: -4)
train smoke model.num_layers=5                  | choose num_layers=4 or 6
train smoke model.feed_forward.top_k=2          | has no key 'top_k'; it has
train smoke model.feed_forward.router.kind=topk | kind='topk' is no router; there are sigmoid
train smoke model.feed_forward.router.top_k=999 | router.top_k=999 is more than num_experts=16
train smoke train.num_epochs=3                  | did you mean train.epochs?
train smoke train.precision=fp8                 | must be one of float32, bfloat16, bfloat16_only
train smoke train.steps=1.5                     | train.steps: must be an integer > 0
train smoke train.steps=-1                      | train.steps: must be an integer > 0
train smoke train.sinks=wandbb                  | must be a list of one of tensorboard, wandb, mlflow, for example
train smoke kernels.backend=cuda                | kernels.backend: must be one of auto, reference
train smoke mesh.tp=2                           | there is no tensor parallelism; mesh.ep spreads experts
train smoke mesh.ep=3                           | mesh.ep may be one of [2], or start 6 ranks
train smoke job.num_nodes=1                     | 4 ranks, but the world has 2; mesh.ep may be one of [1]
train smoke job.gpus=8                          | did you mean job.ranks_per_node?
train smoke data.input=text.txt                 | did you mean prepare.input
train smoke prepare.input=nothere.txt           | input 'nothere.txt' does not exist
train smoke prepare.input=empty                 | is a folder without readable files
train smoke prepare.tokenizer=gpt2              | tokenizer='gpt2' is unknown: give 'bpe', 'bytes',
train runs/folder                               | for text own_text prepare.input=runs/folder
train runs/mine                                 | `moebius resume runs/mine` continues it, `moebius eval runs/mine` measures it
train runs/text                                 | runs/text: there is no file or run folder 'runs/text'; runs here: runs/mine
plan runs/mein                                  | no file or run folder 'runs/mein'; did you mean runs/mine?
status runs/mine                                | has checkpoints and config.json but no journal.jsonl, so no job was started here
submit runs/mine                                | is a run, not a recipe; `moebius resume runs/mine`
models runs/mine                                | is a run, not a recipe; `moebius resume runs/mine`
plan text.txt                                   | a configuration's name ends in .toml
train text.txt                                  | and text is given as own_text prepare.input=text.txt
train --recipe smoke                            | a recipe or a file that ends in .toml is the first word
train --config mine.toml                        | a recipe or a file that ends in .toml is the first word
train smoke train=3                             | train is a section; `moebius config train` lists its keys
train smoke data.seq_len=10,000,000             | digits are grouped by underscores, as in 10_000_000
train smoke train.steps 100                     | write section.key=value, for example train.steps=200
train smoke context_parallel=2                  | there is no context parallelism
train smoke gradient_checkpointing=true         | did you mean train.recompute?
train smoke --freeze embedding                  | can give the group of frozen parameters lr=0
chat runs/mine                                  | did you mean eval RUN --prompt TEXT?
train mine.yaml                                 | moebius reads TOML, not YAML
config zzz                                      | there is no recipe 'zzz'. `moebius models`
train smoke optim.kind=lion                     | 'lion' is not an optimizer: choose adamw, muon
train smoke train.sinks=none                    | train.sinks: must be a list of one of tensorboard, wandb, mlflow
train smoke data.max_epochs=3                   | must be a table of integers ≥ 0, for example data.max_epochs={"books" = 4}
train smoke train.tokens=2Q                     | must be an integer > 0 or none, for example train.tokens=2e9
train smoke model.attention.qk_norm=z           | qk_norm='z': must be true or false
train smoke --dropout 0.1                       | not here, because the models have no dropout
train --from gpt2                               | hf://org/gpt2
train --from Qwen/Qwen3-0.6B                    | hf://Qwen/Qwen3-0.6B
train smoke --early-stopping 3                  | moebius.fit(…, on_record=function) calls it per step
train smoke --flash-attention                   | attention calls torch's scaled_dot_product_attention
train moeut mesh.ep=2                           | mesh.ep may be one of [1]. 2 ranks or a multiple fit: set job.ranks_per_node=2
train smoke mesh.ep=8                           | 16 ranks fit: set job.ranks_per_node=8
train moeut job.num_nodes=2 mesh.ep=3           | 3 ranks or a multiple fit: set job.num_nodes=1 job.ranks_per_node=3
train own:no_config                             | 'given': it must be a function without arguments that returns a Config
train own:number                                | own:number returned a int, not a Config
train smoke optim.kind=own:no_config            | own:no_config(given) cannot be called: too many positional arguments: it must be
train smoke optim.schedule=own:number           | optim.schedule: own:number() cannot be called: too many positional arguments
train smoke optim.kind=own:two?lrr=3            | cannot be called: got an unexpected keyword argument 'lrr'
train smoke 'train.losses={"own:two"=1.0}'      | train.losses: own:two(named, config) cannot be called
train smoke model.feed_forward.activation=own:two | model.feed_forward.activation: own:two(named, config) cannot be called
train smoke optim.kind=own:nothere              | own has no 'nothere': check the name
train smoke optim.kind=nothere:own              | there is no module 'nothere': start from the folder that holds it
ckpt ls --step 3                                | usage: moebius ckpt ls
ckpt verify runs/mine --deep                    | usage: moebius ckpt verify
status runs --verbose                           | usage: moebius status
submit smoke --emit slurm --run-dir out         | --emit slurm; copy and edit examples/slurm.sbatch or examples/kuberay.yaml
resume nothere                                  | nothere: there is no such folder; runs here: runs/mine
status nothere                                  | nothere: there is no such folder; runs here: runs/mine
logs run model.d_model=8                        | unrecognized arguments: model.d_model=8
logs nothere                                    | they would be in logs/g001/node0/rank0.log …); runs here: runs/mine
stop minne                                      | minne: there is no such folder; did you mean runs/mine?
watch runs                                      | (it has no journal.jsonl); runs here: runs/mine
scale runs/mein 4                               | runs/mein: there is no such folder; did you mean runs/mine?
eval nothere                                    | nothere: there is no such folder; runs here: runs/mine
ckpt ls mine                                    | there is no such folder; did you mean runs/mine?
ckpt export mine --out out                      | did you mean runs/mine?
eval nothere --prompt hello --tokens -3         | num_tokens=-3 must be at least 1
eval nothere --prompt hello --temperature -1    | temperature=-1.0 must be finite and at least 0
eval nothere --prompt a --score b               | --score and --prompt cannot be combined: choose one
eval nothere --tasks piqa                       | --tasks needs --data: the folder of the task files, or hub
eval nothere --data eval                        | --data needs --tasks: add it, or leave --data out
eval nothere --draws 4                          | --draws needs --tasks or --score: add it, or leave --draws out
eval nothere --seed 0                           | --seed needs --tasks or --score or --prompt
eval nothere --score a --temperature 0          | --temperature needs --prompt: add it, or leave
models smok                                     | did you mean smoke?
config optim.lr                                 | no key or section optim.lr; did you mean optim.learning_rate?
config train.stepz                              | did you mean train.steps?
config nonsense                                 | there is no recipe 'nonsense'
config runs/folder                              | for prepared data write own_text data.directory=runs/folder
train smoke lora.r=8                            | has no LoRA; export to Hugging Face and use PEFT
prepare                                         | arguments are required: --output
prepare --input nothere.txt --output out        | 'nothere.txt' does not exist
prepare --input text.txt --output out --tokenizer gpt5 | tokenizer='gpt5' is unknown: give 'bpe', 'bytes',
data nothere                                    | invalid choice: 'nothere' (choose from 'ls', 'peek', 'verify')
data verify nothere                             | nothere
ckpt verify nothere                             | there is no such folder; runs here: runs/mine
ckpt import nothere --run-dir x                 | nothere: is not a file or folder
cluster down                                    | no simulated cluster is up; start one with `moebius cluster up
models nothere.toml                             | nothere.toml: cannot be read
submit smoke --detach                           | --detach needs --address
plan smok                                       | did you mean smoke?
simulate smok                                   | did you mean smoke?
submit smoke --address nowhere                  | address 'nowhere': must be host:port of the cluster's head
prepare --output out prepare.vocab_siz=3        | prepare.vocab_siz: unknown key; did you mean prepare.vocab_size
prepare --output out prepare.split_bytes=few    | prepare.split_bytes
prepare --output out train.steps=3              | write prepare.key=value
prepare --output out data.directory=x           | write prepare.key=value
prepare --output out --input text.txt train.steps=3 | only takes the section prepare
prepare --output out --input text.txt text_field=content | write the whole key, prepare.text_field=
prepare --output out text_field=content --input text.txt | write the whole key, prepare.text_field=
prepare --output out --input text.txt prepare.txt_field=q | did you mean prepare.text_field
prepare --output out corpus.jsonl               | to prepare text, write --input corpus.jsonl
prepare --output out prepare.prompt_field=q     | belong together
prepare --output out --config nothere.toml      | nothere.toml: cannot be read
prepare --output out --tokenizer bytes prepare.vocab_size=9000 | not vocab_size=9000: set vocab_size=257
prepare --output out --workers -1               | --workers -1: must be at least 1
prepare --output out --workers 0                | --workers 0: must be at least 1
prepare --output out --input 'zip://*.txt::none.zip' | 'zip://*.txt::none.zip'
prepare --output out --input 'zip://*.txt::text.txt' | not a zip file
data peek nothere                               | holds no prepared data and is no run folder
"""

OWN = """
def no_config(given): ...
def number(): return 3
def two(named, config): ...
"""


@pytest.mark.parametrize(
    "line", MISTAKES.strip().splitlines(), ids=lambda line: line.split(" | ")[0].strip()
)
def test_a_mistake_is_told_with_the_way_out(
    line: str,
    tmp_path: Path,
    moebius: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs/mine/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/folder").mkdir()
    (tmp_path / "runs/mine/config.json").write_text("{}\n")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = set(Path("runs").rglob("*"))
    words, _, told = line.rpartition(" | ")
    answer = moebius(*shlex.split(words))
    assert answer.code == 2, answer.text
    assert told.strip() in answer.text
    assert set(Path("runs").rglob("*")) == before


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
dropout attention_dropout hidden_dropout label_smoothing ema swa fp8 fp8_format quantization_config int8 lora qlora
adapter dpo rlhf sft grpo tp pp cp tensor_model_parallel_size pipeline_parallel_degree context_parallel_size mtp
num_nextn_predict_layers mup clip_qkv final_logit_softcapping offload rampup_batch_size diloco gguf beam-search
mamba = not here, because
keep_latest_k save_total_limit save_top_k = checkpoint.keep_last
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
