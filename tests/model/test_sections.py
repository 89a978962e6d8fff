"""A section of the configuration is read by its kind, and what cannot be read is said."""

import pytest

from moebius.model.config import ModelConfig


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (["dense"], r"attention=\['dense'\]: the attention is a section; write its kind"),
        (7, r"attention=7: the attention is a section; .* model\.attention\.kind="),
        ("switchhead", r"the attention is a section; .*model\.attention\.kind=switchhead"),
        ({}, r"the attention has no kind \(keys: \); there are .*dense"),
        ({"num_heads": 2}, r"the attention has no kind \(keys: num_heads\)"),
        ({"kind": "densee"}, r"kind='densee' is no attention; there are .*dense"),
        ({"kind": ["dense"]}, r"kind=\['dense'\] is no attention"),
        (
            {"kind": "dense", "num_head": 2},
            r"the attention 'dense' has no key 'num_head'; .*did you",
        ),
        (
            {"kind": "dense", "num_heads": "two"},
            r"num_heads='two': Input should be a valid integer",
        ),
    ],
)
def test_what_is_no_section_is_explained(attention: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({"attention": attention})
