"""The names of all recipes, which the command line offers without importing the model.

tests/train/config/test_config.py keeps them equal to RECIPES, in order.
"""

RECIPE_NAMES = (
    "smoke", "own_text",
    "dense", "naive_ut", "moeut", "moeut_g1", "moeut_aabb", "moeut_pre", "moeut_post",
    "sigma_moe", "sigma_moe_original", "switchhead", "sut", "sut_no_act", "switch",
    "switch_causal", "gshard", "top_k", "deepseek", "x_moe", "x_moe_torchscale",
    "expert_choice", "expert_choice_flat", "mixture_of_tokens", "soft_moe", "transition",
    "mh_moe", "mh_moe_parity",
    "moeut_44m", "moeut_126m", "moeut_244m", "moeut_319m", "moeut_728m", "moeut_1b",
    "moeut_244m_g1", "moeut_244m_g3", "moeut_244m_g6", "moeut_244m_g9", "moeut_244m_g18",
    "moeut_244m_aabb", "moeut_244m_pre", "moeut_244m_post", "sigma_moe_44m", "sigma_moe_126m",
    "sigma_moe_244m", "sigma_moe_319m", "sigma_moe_728m", "dense_44m", "dense_126m",
    "dense_244m", "dense_319m", "dense_728m", "dense_1b", "sut_44m", "sut_44m_no_act",
    "sut_244m", "sut_244m_no_act", "gpt_medium", "mot_medium_8e", "mot_medium_32e_1",
    "mot_medium_32e_8", "mot_medium_32e_16", "mot_medium_32e_32", "mot_medium_128e", "gpt_base",
    "mot_base_32e", "mot_base_64e_16", "mot_mini",
)  # fmt: skip
