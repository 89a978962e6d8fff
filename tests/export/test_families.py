"""Families of published models: recorded folders give the recorded numbers, in both dialects."""

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published_case import (
    AWKWARD,
    DENSE,
    MIXTURES,
    RECORDED,
    arrays_of,
    config_in,
    folder_of,
    recorded_model,
    unbalanced_model,
)
from torch import Tensor

from moebius.distributed.checkpoint.pieces import cut
from moebius.model.config.attention_config import YarnConfig
from moebius.model.documents import Documents, mark_documents
from moebius.model.transformer import Transformer
from moebius.train.config.keys import known_keys
from moebius.train.config.run_config import Config
from moebius.train.families.family import Arrangement, Family, Rule, same_function
from moebius.train.families.keys import ConfigKey, UnfitError
from moebius.train.families.table import FAMILIES, FAMILY, family_of, open_family, pieces_of
from moebius.train.recipes.hub import HUB_SMALL

LOGITS, GRADIENTS = 2e-5, 5e-6
POOLED = tuple(name for name in MIXTURES if not any(each in name for each in ("deepseek", "glm4")))


def near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED + AWKWARD)
def test_logits_are_the_recorded_ones(name: str) -> None:
    recorded = arrays_of(name)
    with torch.no_grad():
        near(recorded_model(name)(recorded["ids"]).logits_BSV, recorded["logits"], LOGITS)


def trained_pass(model: Transformer, ids: Tensor, labels: Tensor, mask: Tensor | None) -> Any:
    """Returns a pass in training mode whose targets are the next labels."""
    after = torch.cat((labels[:, 1:], torch.full((len(ids), 1), -100)), 1)
    documents = None if mask is None else documents_of(mask)
    return model.train()(
        ids, targets_BS=after.clamp_min(0), loss_mask_BS=after >= 0, documents=documents
    )


def documents_of(mask: Tensor) -> Documents:
    return mark_documents(mask - 1, torch.device("cpu"), attention=True, balance=False)


def published_gradients(model: Transformer, family: Family) -> Iterator[tuple[str, Any, Tensor]]:
    """Yields every piece's key, its place in the published tensor, and its gradient."""
    named = dict(model.named_parameters())
    for piece in pieces_of(family, model.config):
        if piece.name in named:
            gradient = named[piece.name].grad
            gradient = torch.zeros(named[piece.name].shape) if gradient is None else gradient
            yield piece.key, (..., slice(piece.phase, None, piece.step)), cut(gradient, piece)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("backend", ["auto", "segments", "reference"])  # auto: the CPU kernels
def test_loss_and_all_gradients_are_the_recorded_ones(name: str, backend: str) -> None:
    recorded = arrays_of(name)
    model = unbalanced_model(name, backend=backend)
    out = trained_pass(model, recorded["ids"], recorded["labels"], None)
    mean = out.cross_entropy / (recorded["labels"][:, 1:] >= 0).sum()
    near(mean.detach(), recorded["ce"], GRADIENTS)
    mean.backward()
    family = family_of(model.config)
    assert family is not None
    compared = set()
    for key, place, gradient in published_gradients(model, family):
        near(gradient, recorded[f"g/{key}"][place], GRADIENTS)
        compared.add(f"g/{key}")
    assert compared == {key for key in recorded if key.startswith("g/")}


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", POOLED)
def test_the_pooled_balancing_loss_and_its_gradients_are_the_recorded_ones(name: str) -> None:
    recorded = arrays_of(name)
    router = "feed_forward__router__"
    pool = {f"{router}balance_pool": True, f"{router}balance": 1.0}
    pool[f"{router}balance_scope"] = "micro_batch"
    model = recorded_model(name, **pool)
    out = trained_pass(model, recorded["ids"], recorded["labels"], None)
    near(out.auxiliary["load_balancing"].mean(), recorded["aux"], GRADIENTS)
    out.regularisation_B.mean().backward()
    family = family_of(model.config)
    assert family is not None
    found = published_gradients(model, family)
    compared = {key: (place, gradient) for key, place, gradient in found if f"ga/{key}" in recorded}
    assert len(compared) == sum(key.startswith("ga/") for key in recorded)
    for key, (place, gradient) in compared.items():
        near(gradient, recorded[f"ga/{key}"][place], GRADIENTS)
    for side in ("left", "right"):
        padded = {key: recorded[f"pad/{side}/{key}"] for key in ("ids", "labels", "mask", "aux")}
        out = trained_pass(model, padded["ids"], padded["labels"], padded["mask"])
        near(out.auxiliary["load_balancing"].mean(), padded["aux"], GRADIENTS)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", MIXTURES)
def test_an_imported_balancing_loss_is_what_the_folder_s_class_adds(name: str) -> None:
    recorded, config = arrays_of(name), config_in(folder_of(name))
    family = FAMILY.get(config["model_type"])
    for is_on, alpha in ((False, 0.0), (True, 0.5)):  # DeepSeek's own key, which no class reads
        asked = {"output_router_logits": is_on} | ({"aux_loss_alpha": alpha} if alpha else {})
        asked = asked if name not in POOLED else {"output_router_logits": is_on}
        read, notes = family.read(config | asked)
        assert sum(note.startswith("balancing loss: ") for note in notes) == 1
        router = read.feed_forward.router  # type: ignore[attr-defined]
        changes = {key: getattr(router, key) for key in ("balance", "balance_pool")}
        model = recorded_model(
            name, **{f"feed_forward__router__{k}": v for k, v in changes.items()}
        )
        out = trained_pass(model, recorded["ids"], recorded["labels"], None)
        added = (
            is_on * config.get("router_aux_loss_coef", 0.0) * recorded.get("aux", torch.zeros(()))
        )
        near(out.regularisation_B.mean().detach(), added, GRADIENTS)
        written = family.write(read, 64)
        assert family.read(written)[0] == read
        for layer_by_layer in (False, True) if name in POOLED else ():
            scale = (
                router.top_k if layer_by_layer else 1
            )  # per layer the loss is 1 at balance, and K there
            key = "feed_forward.router.balance"
            other = family.write(
                read.changed({key: 0.3 * scale, f"{key}_pool": not layer_by_layer}), 64
            )
            assert other["router_aux_loss_coef"] == pytest.approx(0.3)
            assert other["output_router_logits"]


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_and_gates_are_the_recorded_ones(name: str) -> None:
    recorded, model = arrays_of(name), recorded_model(name)
    sparse, routings = model.config.sparse_members, []
    for member in sparse:
        router = model.get_submodule(f"group.{member}.feed_forward.router")
        router.register_forward_hook(lambda _, __, routing: routings.append(routing))
    with torch.no_grad():
        model(recorded["ids"])
    for layer, routing in enumerate(routings):
        experts_TK = recorded[f"experts/{layer}"]
        assert torch.equal(routing.wanted_TK.sort(-1).values, experts_TK.sort(-1).values)
        if f"gates/{layer}" in recorded:
            gates_TK = recorded[f"gates/{layer}"]
            kept_TK = routing.routes.weight_N.view(gates_TK.shape)
            order, theirs = routing.wanted_TK.argsort(-1), experts_TK.argsort(-1)
            near(kept_TK.gather(1, order), gates_TK.gather(1, theirs), GRADIENTS)
    assert len(routings) == len(sparse)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_position(name: str, side: str) -> None:
    recorded, model = arrays_of(name), unbalanced_model(name)
    ids, mask, labels, wanted = (
        recorded[f"pad/{side}/{key}"] for key in ("ids", "mask", "labels", "logits")
    )
    if side == "left":  # transformers lets the last padding predict the first token
        labels = labels.masked_fill(torch.cat((mask[:, :1], mask[:, :-1]), 1) == 0, -100)
    with torch.no_grad():
        logits = model(ids, documents=documents_of(mask)).logits_BSV
        near(logits[mask == 1], wanted[mask == 1], LOGITS)
        out = trained_pass(model, ids, labels, mask)
    ce = F.cross_entropy(wanted[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    near(out.cross_entropy / (labels[:, 1:] >= 0).sum(), ce, LOGITS)
    if side == "right":
        near(ce, recorded["pad/right/ce"], GRADIENTS)


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
def test_greedy_tokens_are_the_recorded_ones(name: str) -> None:
    recorded, model = arrays_of(name), recorded_model(name)
    prompts, masks = recorded["gen/prompt"], recorded["gen/mask"]
    for prompt, mask, out in zip(prompts, masks, recorded["gen/out"], strict=True):
        cache, new, tokens = model.new_cache(), prompt[mask == 1], []
        while len(tokens) < len(out) - len(prompt):
            with torch.no_grad():
                logits = model(new[None], cache).logits_BSV[0, -1]
            logits[2] = -torch.inf  # was forbidden
            tokens.append(int(logits.argmax()))
            new = torch.tensor(tokens[-1:])
        assert tokens == out[len(prompt) :].tolist()


# config.json -------------------------------------------------------------------------------------


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
def test_both_dialects_describe_one_model_and_writing_gives_it_back(name: str) -> None:
    folder = folder_of(name)
    plan = open_family(folder)
    family = FAMILY.get(plan.family)
    assert family.read(config_in(folder, "config_hub.json"))[0] == plan.model
    assert [note for note in plan.notes if "is missing" in note] == [], "the folder has every key"
    # a plain dense model is a Llama and a Mistral
    assert family_of(plan.model, plan.family if name in DENSE else None) is family
    written = family.write(plan.model, 64)
    assert family.read(written)[0] == plan.model
    for kept in ("rope_parameters", "rope_theta"):  # either dialect alone is enough
        other = {"rope_parameters"} if kept == "rope_theta" else {"rope_theta", "rope_scaling"}
        half = {key: value for key, value in written.items() if key not in other}
        assert same_function(family.read(half)[0], plan.model)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_types[0])
def test_defaults_are_those_of_the_class_of_transformers(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty config.json gives the class's own sizes, and the report says so."""
    monkeypatch.setitem(
        sys.modules, "kernels", None
    )  # this repository's is no library of that name
    transformers = pytest.importorskip("transformers")
    needed = {
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},  # its class has none
        "Glm4MoeForCausalLM": {"head_dim": 128},  # that of its class is odd
    }.get(family.architecture, {})
    theirs = transformers.AutoConfig.for_model(family.model_types[0], **needed)
    ours, notes = family.read(needed)
    assert {ours.vocab_size, ours.d_model} <= {theirs.vocab_size, theirs.hidden_size}
    of_theirs, _ = family.read(theirs.to_dict() | {"head_dim": getattr(theirs, "head_dim", None)})
    assert same_function(ours, of_theirs)
    assert any(note.startswith("vocab_size is missing") for note in notes)


LLAMA3 = {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4}}
LLAMA3["rope_parameters"] |= {"high_freq_factor": 4, "original_max_position_embeddings": 32}


@pytest.mark.needs_shared
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not computed"),
        ("mixtral", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not computed"),
        ("mixtral", {"num_experts_per_tok": 1}, "^num_experts_per_tok=1 makes every gate weight 1"),
        (
            "mixtral",
            {"num_experts_per_tok": None, "num_local_experts": 1},
            "num_experts_per_tok=2 is",
        ),
        ("deepseek_v3", {"n_group": 3}, "^n_group=3 does not divide n_routed_experts=8$"),
        (
            "deepseek_v3",
            {"n_group": 8, "topk_group": 4},
            "^the family needs groups of at least two experts, and n_group=8",
        ),
        ("glm4_moe", {"head_dim": 6}, "^partial_rotary_factor=0.5, head_dim=6: channels rotate in"),
        ("mixtral", {"new_trick": 3}, "new_trick=3: moebius does not know"),
        ("mixtral", {"hidden_size": "32"}, "hidden_size='32' must be a whole number"),
        ("mixtral", {"num_experts": 9}, "name the same thing and differ"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not computed"),
        ("olmoe", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope': only"),
        ("olmoe", {"rope_parameters": {"strange": 1}}, "strange=1"),
        ("olmoe", {"rope_theta": 5.0}, "rope_theta=5.0 and 10000.0 differ"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not computed"),
        ("gpt_oss", {"layer_types": ["chunked"] * 3}, "must name 3 layers"),
        ("gpt_oss", {"sliding_window": None}, r"layers \[0, 2\] have a sliding window"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not computed"),
        ("deepseek_v3", {"rope_interleave": "no"}, "rope_interleave='no' must be a bool"),
        ("deepseek_v2", {"topk_method": "noisy"}, "'noisy' is none of"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not computed"),
        *(
            (name, {"rope_parameters": {"rope_type": kind}}, f"rope_type='{kind}': only default")
            for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2")
            for kind in ("linear", "dynamic")
        ),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not computed"),
        ("llama", LLAMA3, "low_freq_factor=4.0.* low_freq_factor below high_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
        ("mistral", {"attention_bias": True}, "attention_bias=True: moebius does not know"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types=.* does not know"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True: moebius does not know"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, r"layers \[0, 1, 2\] have a sliding"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not computed"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    family = FAMILY.get(name)
    config = config_in(folder_of(f"hf_{name}_a")) | change
    with pytest.raises(UnfitError, match=message):
        family.read(config)


OURS = {key.rpartition(".")[2] for key, _ in known_keys(Config) if key.startswith("model.")}


def refusal(family: Family, config: dict[str, Any]) -> str:
    """Returns why a config.json is refused; "" if it is not."""
    try:
        family.read(config)
    except UnfitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HUB_SMALL)
def test_refusals_speak_of_config_json_alone(name: str) -> None:
    """Each key is broken in turn; neither our keys nor advice about them nor pydantic's words appear."""
    model = HUB_SMALL[name][1]().model
    family = family_of(model)
    assert family is not None
    config, refused = family.write(model, 128), 0
    for key, value in config.items():
        for broken in (0, 1, -1.0) if isinstance(value, int | float) else ():
            said = refusal(family, config | {key: broken})
            refused += said != ""
            words = {*re.findall(r"\w+", said)}
            assert words & config.keys() or not said
            assert not {word for word in words & OURS - config.keys() if "_" in word}, said
            assert not re.search("Value error|Input should|renormalise|FIXED", said), said
    assert refused > 20


def test_null_and_a_missing_key_are_told_apart() -> None:
    for config, words in (({}, "is missing"), ({"rms_norm_eps": None}, "is null")):
        notes = FAMILY.get("mixtral").read(config)[1]
        assert f"rms_norm_eps {words}: 1e-05, the default of transformers' class" in notes
    with pytest.raises(UnfitError, match="num_experts_per_tok is null and has no default"):
        FAMILY.get("deepseek_v2").read({"num_experts_per_tok": None})


@pytest.mark.needs_shared
def test_windows_of_qwen_follow_the_switch_and_the_layer() -> None:
    qwen2 = config_in(folder_of("hf_qwen2_moe_a"), "config_hub.json")
    del qwen2["layer_types"]
    windowed = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    model, _ = FAMILY.get("qwen2_moe").read(qwen2 | windowed)
    assert (model.attention.window, model.attention.window_layers) == (7, (0,))  # type: ignore[attr-defined]
    assert family_of(model) is FAMILY.get("qwen2_moe")
    qwen3 = config_in(folder_of("hf_qwen3_moe_a"), "config_hub.json")
    model, _ = FAMILY.get("qwen3_moe").read(qwen3 | windowed)
    assert (model.attention.window, model.attention.window_layers) == (7, (0, 1, 2))  # type: ignore[attr-defined]
    assert family_of(model) is FAMILY.get("qwen3_moe")


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_dense_qwen_begin_at_a_layer(name: str) -> None:
    family = FAMILY.get(name)
    config = config_in(folder_of(f"hf_{name}_a")) | {"layer_types": None}
    config |= {"use_sliding_window": True, "sliding_window": 7}
    for first in range(4):
        model, _ = family.read(config | {"max_window_layers": first})
        wanted = (7, tuple(range(first, 3))) if first < 3 else (None, "all")
        assert (model.attention.window, model.attention.window_layers) == wanted  # type: ignore[attr-defined]
        written = family.write(model, 64)
        assert family_of(model) is family
        for lacking in ("layer_types", "max_window_layers"):  # either alone is enough
            half = {key: value for key, value in written.items() if key != lacking}
            assert same_function(family.read(half)[0], model)
    unlimited = config | {"sliding_window": None, "max_window_layers": 0}
    assert family.read(unlimited)[0].attention.window is None  # type: ignore[attr-defined]


def test_rotations_slow_as_in_llama_3() -> None:
    """The three cases of its released code; between them, the speed follows the wavelength."""
    sizes = {"factor": 4, "original_positions": 64, "beta_slow": 1.5, "beta_fast": 6}
    scaling = YarnConfig.model_validate(sizes | {"ramp": "turns"})
    met = set()
    for pair, share in enumerate(scaling.speeds(24, 700.0)):
        wavelength = 2 * math.pi * 700 ** (2 * pair / 24)
        between = (64 / wavelength - 1.5) / (6 - 1.5)
        case = "slow" if wavelength > 64 / 1.5 else "fast" if wavelength < 64 / 6 else "between"
        wanted = {"slow": 1 / 4, "fast": 1.0, "between": (1 - between) / 4 + between}
        assert share == pytest.approx(wanted[case])
        met.add(case)
    assert len(met) == 3


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", DENSE)
def test_planted_errors_move_the_logits(name: str) -> None:
    wanted = arrays_of(name)["logits"]
    errors: dict[str, Any] = {"norm_eps": 0.1, "attention__positions__base": 1e4}
    if "mistral" in name:
        errors["attention__window"] = 6
    for key, value in errors.items():
        with torch.no_grad():
            logits = recorded_model(name, **{key: value})(arrays_of(name)["ids"]).logits_BSV
        assert (logits - wanted).abs().max() > 100 * LOGITS, key


@pytest.mark.needs_shared
def test_sparse_layers_of_ernie_lie_at_intervals() -> None:
    family = FAMILY.get("ernie4_5_moe")
    config = config_in(folder_of("hf_ernie4_5_moe_a")) | {"num_hidden_layers": 9}
    for interval, start, end, wanted in (
        (2, 3, -1, (3, 5, 7)),
        (3, 0, 6, (2, 5)),
        (1, 2, 4, (2, 3, 4)),
    ):
        keys = ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")
        model, _ = family.read(config | dict(zip(keys, (interval, start, end), strict=True)))
        assert model.sparse_members == wanted
        assert family_of(model) is family


def test_imports_from_the_former_place_still_work() -> None:
    from moebius.export.families import family, keys, mixtral

    assert (family.Rule, family.Layout, keys.Key) == (Rule, Arrangement, ConfigKey)
    assert mixtral.MIXTRAL is FAMILY.get("mixtral")


def test_kimi_is_deepseek_and_a_model_of_moebius_is_of_no_family() -> None:
    from family import tiny_config

    assert FAMILY.get("kimi_k2") is FAMILY.get("deepseek_v3")
    assert family_of(tiny_config("moeut", {})) is None


@pytest.mark.needs_shared
def test_training_may_differ_within_a_family_and_nothing_else() -> None:
    model = open_family(folder_of("hf_glm4_moe_a")).model
    family = FAMILY.get("glm4_moe")
    router = "feed_forward.router."
    assert family.fits(model.changed({f"{router}bias_rate": 0.001, f"{router}z_loss": 0.1}))
    assert not family.fits(model.changed({f"{router}scores": "softmax"}))
    assert not family.fits(model.changed({"norm": "sandwich"}))
    assert not family.fits(model.changed({"attention.positions.pairs": "neighbours"}))
