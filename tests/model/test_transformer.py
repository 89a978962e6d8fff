"""The model as a whole: parameter counts, cached generation, order of layers, causality, precision,
initialisation.
"""

import pytest
import torch
from family import PROGRAMS, program, set_options, some_tokens
from pairwise import slow_but
from parts import layers
from small_model import ODD, VARIANTS

from moebius.model.attention.base import DepthContext
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.precision import forward_in
from moebius.model.initialise import draw, initialise
from moebius.model.layers import rotary_table
from moebius.model.loops.depth import own_depth
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.train.recipes.published import PUBLISHED
from moebius.train.recipes.smoke import RECIPES


def make(config: ModelConfig, seed: int = 0) -> Transformer:
    model = Transformer(config)
    initialise(model, seed)
    return model


def make_any(variant: str) -> Transformer:
    return program(variant) if variant in PROGRAMS else make(VARIANTS[variant])


# Instantiated official code at V = 8000: total, and what lies in the layers.
PUBLISHED_COUNTS = {
    "moeut_44m": (44_345_792, 37_744_968),
    "moeut_126m": (125_669_696, 113_372_160),
    "moeut_244m": (243_326_784, 226_932_736),
    "moeut_319m": (318_107_456, 301_713_408),
    "moeut_728m": (727_424_320, 706_933_760),
    "moeut_1b": (1_040_319_296, 1_015_732_224),
    "dense_44m": (44_544_264, 37_943_440),
    "dense_126m": (125_654_336, 113_356_800),
    "dense_244m": (243_568_700, 227_174_652),
    "dense_319m": (319_293_584, 302_899_536),
    "dense_728m": (728_694_080, 708_203_520),
    "dense_1b": (1_044_300_608, 1_019_713_536),
    "moeut_244m_g1": (243_589_952, 227_195_904),
    **{f"moeut_244m_g{group}": (243_844_928, 227_450_880) for group in (3, 6, 9, 18)},
    "moeut_244m_aabb": (243_326_784, 226_932_736),
    "moeut_244m_pre": (243_326_784, 226_932_736),
    "moeut_244m_post": (243_324_736, 226_932_736),
    "sigma_moe_44m": (44_129_080, None),
    "sigma_moe_126m": (126_069_056, None),
    "sigma_moe_244m": (243_844_928, None),
    "sigma_moe_319m": (319_661_888, None),
    "sigma_moe_728m": (731_228_480, None),
    "sut_44m": (44_657_100, 38_057_100),
    "sut_244m": (244_521_280, 228_129_280),
}
WITHOUT_A_PUBLISHED_COUNT = {"sut_44m_no_act", "sut_244m_no_act"}


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_published_sizes_have_their_published_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(RECIPES[name]().model)
    total = sum(parameter.numel() for parameter in model.parameters())
    parts = [model.group] if model.halting is None else [model.group, model.halting]
    in_layers = sum(parameter.numel() for part in parts for parameter in part.parameters())
    expected_total, expected_in_layers = PUBLISHED_COUNTS[name]
    assert total == expected_total
    assert expected_in_layers in (in_layers, None)


def test_every_published_recipe_is_tested() -> None:
    sized = {
        name for name in PUBLISHED if not name.startswith(("mot_", "gpt_"))
    }  # those: test_mixture.py
    assert sized == PUBLISHED_COUNTS.keys() | WITHOUT_A_PUBLISHED_COUNT


@pytest.mark.quick(3)
@pytest.mark.parametrize("variant", [*slow_but(VARIANTS, *list(VARIANTS)[::3]), *PROGRAMS])
def test_generation_with_the_cache_equals_the_full_pass(variant: str) -> None:
    model = make_any(variant).double().eval()
    tokens, config = some_tokens(2, 17, seed=1), model.config
    for num_loops in (1, config.num_repeats + 1) if not config.loops.is_plain else (None,):
        if num_loops is not None:
            set_options(model, depth=own_depth(config, num_loops))
        torch.manual_seed(0)  # the state before the first loop
        full = model(tokens).logits_BSV
        for pieces in ([17], [1] * 17, [5, 1, 1, 7, 3]):
            cache = model.new_cache(num_loops=num_loops)
            torch.manual_seed(0)
            parts = [model(part, cache).logits_BSV for part in tokens.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-12)
            assert all(entry.length == 17 for entry in cache)


@pytest.mark.parametrize("order", ["abab", "aabb"])
def test_post_norm_in_either_order_equals_its_formulas(order: str) -> None:
    """Embeddings times √D and normalised, a = LN(x + Attention(x)), x = LN(a + FF(a)), no norm at
    the end.
    """
    model = make(ODD.changed({"norm": "post", "order": order})).double().eval()
    tokens = torch.arange(61)[None]
    x = torch.nn.functional.layer_norm(model.embedding[tokens] * 24**0.5, (24,))
    attention = model.config.attention
    positions = torch.arange(61, dtype=x.dtype)
    rotary = rotary_table(positions, attention.rotary_channels, attention.rotary)
    for member in {"abab": "010101", "aabb": "000111"}[order]:
        layer = layers(model)[int(member)]
        a = layer.attention_norm(x + layer.attention(x, x, DepthContext(rotary))[0])
        x = layer.feed_forward_norm(a + layer.feed_forward(a, a)[0])
    assert model.head.bias is not None
    logits = x @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(tokens).logits_BSV, logits, rtol=0, atol=1e-12)


@pytest.mark.quick(12)
@pytest.mark.parametrize("variant", [*VARIANTS, *PROGRAMS])
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    model = make_any(variant)
    tokens = torch.arange(61).repeat(2, 1)
    output = model(tokens, targets_BS=tokens)
    (output.cross_entropy + output.regularisation_B.mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_bfloat16_products_stay_close_to_float32_and_train_float32_weights() -> None:
    model = make(ODD)
    tokens = some_tokens(2, 16, seed=3)
    exact, rough = model(tokens).logits_BSV, forward_in(model, torch.bfloat16, tokens).logits_BSV
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert (exact - rough).norm() / exact.norm() < 2e-2
    rough.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().sum() > 0, name


WIDE = ModelConfig(
    vocab_size=400,
    d_model=128,
    num_layers=18,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=4, d_head=48, num_experts=10),
    feed_forward=ExpertsConfig(num_experts=64, router=SigmoidConfig(top_k=8), d_expert=32),
)


def drawn(name: str, config: ModelConfig) -> torch.Tensor:
    with torch.device("meta"):
        model = Transformer(config)
    return draw(name, model.get_parameter(name), seed=0)


@pytest.mark.parametrize("initialisation", ["paper", "release"])
@pytest.mark.parametrize("axis_norm", [False, True])
def test_starting_values_have_the_published_spread(initialisation: str, axis_norm: bool) -> None:
    config = WIDE.changed(
        {"initialisation.kind": initialisation, "initialisation.expert_axis_norm": axis_norm}
    )
    std = {name: parameter.std().item() for name, parameter in make(config).named_parameters()}
    c = (2 / 18) ** 0.5
    expected = {
        "embedding": 128**-0.5,
        "head.weight": 128**-0.5 / 3**0.5,
        "group.0.attention.query.weight": c * 128**-0.5,
        "group.1.attention.value.experts.weight": c * 128**-0.5,
        "group.0.attention.output.experts.weight": c * (4 * 48) ** -0.5,
        "group.0.attention.value_router.weight": c * 128**-0.5,
        "group.0.feed_forward.router.weight": c * 128**-0.5,
        "group.1.feed_forward.sparse.experts.w_up": c * 128**-0.5,
        "group.0.feed_forward.sparse.experts.w_down": c * (64 * 32) ** -0.5,
    }
    for name, value in expected.items():
        assert std[name] == pytest.approx(value, rel=0.03), name


def test_release_and_paper_differ_where_they_should() -> None:
    name = "group.0.feed_forward.router.weight"
    norms = {
        kind: drawn(name, WIDE.changed({"initialisation.kind": kind})).norm(dim=1)
        for kind in ("paper", "release")
    }
    assert norms["release"].std() < 1e-6
    assert norms["paper"].std() > 1e-3
    name = "group.0.attention.output.experts.weight"
    value = drawn(name, WIDE.changed({"initialisation.expert_axis_norm": True})).norm(dim=0)
    assert value.std() / value.mean() < 1e-6


def test_dense_layers_start_at_exactly_the_published_spread() -> None:
    config = RECIPES["dense_44m"]().model
    value = drawn("group.3.feed_forward.down.weight", config)
    assert value.std().item() == pytest.approx((2 / (16 * 2053)) ** 0.5, rel=1e-5)
    assert drawn("group.3.feed_forward.down.bias", config).abs().max() == 0


def test_every_tensor_has_its_own_stream_and_every_seed_another() -> None:
    first, again, other = (dict(make(ODD, seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name in first if "norm" not in name]
    assert all(not torch.equal(first[name], other[name]) for name in random)
    assert not torch.equal(
        first["group.0.attention.query.weight"], first["group.1.attention.query.weight"]
    )


def test_more_positions_than_were_learned_are_refused() -> None:
    positions = {"attention.positions.kind": "learned", "attention.positions.max_positions": 5}
    model = make(ODD.changed(positions))
    assert model(torch.zeros(1, 5, dtype=torch.int64)).logits_BSV.shape[1] == 5
    with pytest.raises(ValueError, match="6 positions exceed max_positions=5"):
        model(torch.zeros(1, 6, dtype=torch.int64))


def test_a_parameter_without_a_rule_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"'extra' of shape \(2, 3\) has no initializer: create it"
    ):
        draw("extra", torch.nn.Parameter(torch.zeros(2, 3)), seed=0)
