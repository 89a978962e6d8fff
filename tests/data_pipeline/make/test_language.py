"""The hook's answer decides; whatever is wrong with a hook is one clear error."""

import pickle

import pytest
from pydantic import ValidationError

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.language import LanguageFilter
from moebius.data_pipeline.prepare_config import LanguageConfig

HOOK = """
def by_article(text):
    return "en" if " the " in f" {text} " else "fr"
def breaks(text):
    return 1 / 0
def counts(text):
    return len(text)
class Model:
    def language(self, text):
        return "en"
model = Model()
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch) -> None:
    (tmp_path / "hooks_of_a_test.py").write_text(HOOK)
    (tmp_path / "hooks_with_a_need.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "hooks_that_break.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


def language_filter(name: str, module: str = "hooks_of_a_test") -> LanguageFilter:
    return LanguageFilter(LanguageConfig(function=f"{module}:{name}", allow=("en", "de")))


@pytest.mark.usefixtures("hooks")
def test_allowed_languages_stay():
    found = language_filter("by_article")
    assert found.reason_to_drop("on the table") is None
    assert found.reason_to_drop("sur la table") == "language: fr"
    assert language_filter("model.language").reason_to_drop("sur la table") is None


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("not_there_at_all", "language", "no module 'not_there_at_all': install it, or put"),
        ("hooks_with_a_need", "f", "no module 'a_package_that_is_not_there': hooks_with_a_need im"),
        ("hooks_that_break", "f", "hooks_that_break cannot be imported: ZeroDivisionError"),
        ("hooks_of_a_test", "nothing", "hooks_of_a_test has no 'nothing'"),
        ("hooks_of_a_test", "model.nothing", "hooks_of_a_test has no 'model.nothing'"),
        ("hooks_of_a_test", "model", "'model' is a Model, which cannot be called"),
    ],
)
def test_a_hook_that_is_not_there_is_one_clear_error(module, name, message):
    with pytest.raises(InputError, match=message) as caught:
        language_filter(name, module)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", r"hooks_of_a_test:breaks raised ZeroDivisionError .* begins 'sur la table'"),
        ("counts", r"hooks_of_a_test:counts returned 12 for a document that begins 'sur la"),
    ],
)
def test_a_hook_that_fails_on_a_document_names_it(name, message):
    with pytest.raises(InputError, match=message):
        language_filter(name).reason_to_drop("sur la table")


@pytest.mark.parametrize("path", ["", "module", "module:", ":function", "a b:c", "a.:b", "a:b()"])
def test_what_is_no_path_is_refused_at_once(path):
    with pytest.raises(ValidationError, match=r"write package\.module:function"):
        LanguageConfig(function=path, allow=("en",))


def test_an_empty_allow_list_is_refused():
    with pytest.raises(ValidationError, match="allow"):
        LanguageConfig(function="a:b", allow=())
