"""Our scores and harness model, against the harness's own model class on the same weights.

The tasks are the installed lm-evaluation-harness's, on a few records in the published form. `HFLM`,
its class for Hugging Face models, wraps our network. Wording, tokens, windows, cutting and metrics
are therefore the harness's own.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_run import prepare_bytes, train_bytes
from shared import shared_folder
from small_model import TINY

from moebius.data_pipeline.tokenizers.interface import END_OF_DOCUMENT
from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import Restored, restore
from moebius.evaluation.tasks.choice import ChoiceTask
from moebius.evaluation.tasks.items import read_records
from moebius.evaluation.tasks.table import TASKS
from moebius.evaluation.zero_shot import measure_tasks

pytestmark = pytest.mark.slow  # importing the harness takes seconds
pytest.importorskip("lm_eval", reason="the harness is not installed: pip install moebius[lm-eval]")

LONG = "It was a long way to the router, and the token went on and on from expert to expert. " * 6
FILES = {
    "lambada": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "blimp": "blimp/adjunct_island.yaml",
    "winogrande": "winogrande/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "siqa": "siqa/siqa.yaml",
    "wsc273": "wsc273/default.yaml",
}
"""Tasks of ours, and the harness's files of the same."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a byte-level BPE, which encodes two texts apart and joined differently."""
    place = tmp_path_factory.mktemp("harness")
    folder = prepare_bytes(place, tokenizer="bpe", vocab_size=300)
    model = TINY.changed({"vocab_size": 300})
    return train_bytes(folder, place / "run", model, seq_len=64, tokenizer="bpe")


@pytest.fixture(scope="module")
def restored(run_dir: Path) -> Restored:
    with start_process("cpu") as process:
        return restore(run_dir, process)


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Task files that include the harness's own, with local records."""
    datasets: Any = importlib.import_module("datasets")
    folder = tmp_path_factory.mktemp("tasks")
    for name in FILES:
        write_task(name, scored_records(name), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_task(name: str, records: list[dict[str, Any]], folder: Path) -> None:
    """Writes a task of the harness's on records in the published form."""
    import lm_eval.tasks

    write_lines(folder / f"{name}.records", records)
    lines = {
        "include": Path(lm_eval.tasks.__file__).parent / FILES[name],
        "task": f"own_{name}",
        "tag": "null",
        "dataset_path": "json",
        "dataset_name": "null",
        "dataset_kwargs": f"{{data_files: {{test: {folder / name}.records}}}}",
        "training_split": "null",
        "validation_split": "null",
        "test_split": "test",
    }
    text = "".join(f"{key}: {value}\n" for key, value in lines.items())
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def harness_results(model: object, task_folder: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    harness: Any = importlib.import_module("lm_eval")
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        # its bootstrap would fork, and this process has threads
        patch.setenv("DISABLE_MULTIPROC", "1")
        found = harness.simple_evaluate(
            model=model,
            tasks=[f"own_{name}" for name in FILES],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=10,
        )
    assert found is not None
    return dict(found)


def hugging_face_model(restored: Restored, run_dir: Path) -> Any:
    """The harness's own class around our network, of which it sees only the logits."""
    with pytest.MonkeyPatch.context() as patch:
        # transformers would import our folder kernels/, which is on pytest's path
        root = Path(__file__).resolve().parents[2]
        patch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != root])
        patch.delitem(sys.modules, "kernels", raising=False)
        transformers: Any = pytest.importorskip("transformers", reason="HFLM needs transformers")
        harness_models: Any = importlib.import_module("lm_eval.models.huggingface")
        outputs: Any = importlib.import_module("transformers.modeling_outputs")
        base, config = transformers.PreTrainedModel, transformers.PretrainedConfig  # imported now

    class Wrapped(base):
        config_class = config

        def __init__(self) -> None:
            super().__init__(config())
            self.network = restored.model

        def forward(self, input_ids: torch.Tensor, **others: object) -> object:
            return outputs.CausalLMOutput(logits=self.network(input_ids).logits_BSV)

    folder = Path(restored.config.data.directory)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END_OF_DOCUMENT
    )
    return harness_models.HFLM(
        pretrained=Wrapped(),
        tokenizer=tokenizer,
        backend="causal",
        max_length=64,
        batch_size=2,
        device="cpu",
    )


def own_model(run_dir: Path) -> Any:
    harness: Any = importlib.import_module("moebius.evaluation.lm_eval_model")
    return harness.MoebiusLM(run_dir, device="cpu")


def responses(results: dict[str, Any], name: str) -> list[list[float]]:
    """The log-likelihoods of every item of a task, in the order of the items."""
    samples = sorted(results["samples"][f"own_{name}"], key=lambda sample: sample["doc_id"])
    return [[float(one[0][0]) for one in sample["resps"]] for sample in samples]


def test_the_same_log_likelihoods_and_scores(
    restored: Restored, run_dir: Path, task_folder: Path, tmp_path: Path
) -> None:
    own = own_model(run_dir)
    own._restored.model.double()  # so that rounding makes no difference
    theirs_model = hugging_face_model(restored, run_dir)
    restored.model.double()
    ours, theirs = harness_results(own, task_folder), harness_results(theirs_model, task_folder)
    restored.model.float()
    for name in FILES:
        for one, other in zip(responses(ours, name), responses(theirs, name), strict=True):
            assert one == pytest.approx(other, abs=1e-6), name
        for metric, value in theirs["results"][f"own_{name}"].items():
            if metric.endswith(",none") and "stderr" not in metric:
                assert ours["results"][f"own_{name}"][metric] == pytest.approx(value), metric
    check_our_tasks(run_dir, theirs, tmp_path)


def check_our_tasks(run_dir: Path, theirs: dict[str, Any], data: Path) -> None:
    """Runs `moebius eval --tasks` on the same records in our file format."""
    for name in FILES:
        write_lines(
            data / f"{name}.jsonl", [in_hub_form(name, one) for one in scored_records(name)]
        )
    report = measure_tasks(run_dir, list(FILES), data)
    assert report is not None
    assert all(result.cut for result in report.tasks if result.name in ("lambada", "piqa"))
    for result in report.tasks:
        found = theirs["results"][f"own_{result.name}"]
        for metric, estimate in result.metrics.items():
            if metric != "paper":
                expected = found[f"{metric},none"]
                assert estimate.value == pytest.approx(expected, rel=1e-5), (result.name, metric)
        if "acc" in result.metrics and result.name != "blimp":
            assert result.metrics["acc"].stderr == pytest.approx(found["acc_stderr,none"])


ODD_TEXTS = [
    "[header] How [title] Sit. [step]  Then  wait [substeps] .",
    "  both ends  ",
    "[step] marked",
    "a [b [c] d] e [f",
    "naïve ﬁne\u00a0\u3000日本語 🙂 e\u0301",
    "\ttabs\nand lines\n",
    "ÉCLAIR and İstanbul",
    "x",
    "{{ braces }} {% and %} & <tags>",
]


def odd_records(name: str) -> list[dict[str, Any]]:
    """Records in the published form, with every odd text in every field."""
    pairs = list(zip(ODD_TEXTS, ODD_TEXTS[1:] + ODD_TEXTS[:1], strict=True))
    if name == "lambada":
        # the harness mistakes a text of another task that is divided elsewhere for the same request
        return [{"text": f"{one}, {other}"} for one, other in pairs if other.rpartition(" ")[2]]
    if name == "blimp":
        return [{"sentence_good": one, "sentence_bad": other} for one, other in pairs]
    if name == "piqa":
        return [{"goal": a, "sol1": a, "sol2": b, "label": n % 2} for n, (a, b) in enumerate(pairs)]
    if name.startswith(("arc", "openbookqa")):
        choices = {"text": ODD_TEXTS[:4], "label": ["A", "B", "C", "D"]}
        asked = "question_stem" if name == "openbookqa" else "question"
        return [{asked: one, "choices": choices, "answerKey": "C"} for one, _ in pairs]
    if name == "winogrande":
        texts = [(f"{a} _{b}", a, b) for a, b in pairs]
        return [{"sentence": s, "option1": a, "option2": b, "answer": "1"} for s, a, b in texts]
    if name == "copa":
        both = [{"premise": a, "choice1": a, "choice2": b, "label": 1} for a, b in pairs]
        return [one | {"question": asked} for one in both for asked in ("cause", "effect")]
    if name == "boolq":
        return [{"passage": a, "question": b, "label": 1} for a, b in pairs]
    if name == "siqa":
        answers = dict(zip(("answerA", "answerB", "answerC"), ODD_TEXTS, strict=False))
        return [{"context": a, "question": b, "label": "2"} | answers for a, b in pairs]
    if name == "wsc273":
        words = ["A", "The man ", "She", "Ann", *ODD_TEXTS[:4]]
        return [
            {"text": f"{a}{mark} {word} x{b}", "pronoun": word, "pronoun_loc": len(a) + 2}
            | {"options": [option, "It  is It"], "label": 0}
            for a, b in pairs
            for mark, word in (("x", "It"), (".", "her"), (" ", "their"))
            for option in words
        ]
    return [
        {"activity_label": a, "ctx_a": a, "ctx_b": b, "endings": ODD_TEXTS[:4], "label": "2"}
        for a, b in (*pairs, *((one, "") for one in ODD_TEXTS))
    ]


def in_hub_form(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The record as it comes from the hub."""
    hub = TASKS[name].hub
    assert hub is not None
    return dict(hub.convert(record, "adjunct_island"))


def scored_records(name: str) -> list[dict[str, Any]]:
    """Some records in the published form, one of them longer than the context."""
    goal = {"goal": LONG, "sol1": "It is far.", "sol2": "It is near, very near.", "label": 0}
    long = {"lambada": [{"text": f"{LONG}Then came the token"}], "piqa": [goal]}
    return odd_records(name)[:4] + long.get(name, [])


def in_our_form(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The record as files in a folder have it: HellaSwag's authors strip both texts."""
    if name == "boolq":
        return {"passage": record["passage"], "question": record["question"], "answer": True}
    if name != "hellaswag":
        return in_hub_form(name, record)
    query = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b']}"
    return {**record, "query": query.strip(), "fragment": record["ctx_b"].rstrip()}


def harness_task(name: str, records: list[dict[str, Any]], folder: Path) -> Any:
    """The harness's task on records in the published form, with its requests built."""
    from lm_eval.tasks import TaskManager

    write_task(name, records, folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = manager.load_task_or_group(f"own_{name}")[f"own_{name}"]
    found.build_all_requests(rank=0, world_size=1)
    return found


def assert_asked_alike(
    name: str, published: list[dict[str, Any]], forms: list[list[dict[str, Any]]], folder: Path
) -> None:
    """Compares context, answers and the right one with the harness's, item by item, in each form."""
    theirs = harness_task(name, published, folder)
    asked: dict[int, list[tuple[str, str]]] = {}
    for request in theirs.instances:
        asked.setdefault(request.doc_id, []).append(request.args)
    for number, (document, *ours) in enumerate(zip(theirs.test_docs(), *forms, strict=True)):
        for record in ours:
            if name == "lambada":
                context, _, word = record["text"].rpartition(" ")
                assert [(context, f" {word}")] == asked[number]
                continue
            task = TASKS[name]
            assert isinstance(task, ChoiceTask)
            found = task.read(record)
            assert [(one.context, one.continuation) for one in found.options] == asked[number]
            if name == "copa":
                right = [one.continuation for one in found.options][found.answer]
                assert right == f" {theirs.doc_to_target(document)}"
            else:  # where the answers are contexts, the harness's "text" is the right one's number
                of = theirs.doc_to_text if theirs.multiple_input else theirs.doc_to_target
                assert found.answer == int(of(document))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("task_folder")  # keeps the harness offline
def test_every_item_is_asked_as_the_harness_asks_it(name: str, tmp_path: Path) -> None:
    published = odd_records(name)
    ours = [[form(name, record) for record in published] for form in (in_our_form, in_hub_form)]
    assert_asked_alike(name, published, ours, tmp_path)


def published_form(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The record of a file as its set is published on the hub; the opposite of the conversion."""
    if name.startswith(("arc", "openbookqa")):
        letters = "ABCDE"[: len(record["choices"])]
        asked = "question_stem" if name == "openbookqa" else "question"
        choices = {"text": record["choices"], "label": list(letters)}
        answer = letters[record["label"]]
        return {asked: record["question"], "choices": choices, "answerKey": answer}
    if name == "hellaswag":
        activity, _, context = record["query"].removesuffix(record["fragment"]).partition(": ")
        begun = {"activity_label": activity, "ctx_a": context.rstrip(), "ctx_b": record["fragment"]}
        return {**record, **begun, "label": str(record["label"])}
    if name == "boolq":
        return {**record, "label": int(record["answer"])}
    if name == "wsc273":
        contexts, rest = record["context_options"], record["continuation"]
        before = os.path.commonprefix(contexts)  # noqa: RUF071 (of texts)
        before = before[: before.rfind(" ") + 1]
        options = [context.removeprefix(before) for context in contexts]
        text = f"{before}it{'' if rest == '.' else ' '}{rest}"
        gold = {"options": options, "label": record["gold"]}
        return {"text": text, "pronoun": "it", "pronoun_loc": len(before), **gold}
    return record


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("task_folder")  # keeps the harness offline
def test_items_of_the_real_sets_are_asked_as_the_harness_asks_them(
    name: str, tmp_path: Path
) -> None:
    folder = shared_folder() / "data" / "eval"
    records = [dict(one) for _, one in read_records(folder, name, TASKS[name])]
    records = records[:: max(1, len(records) // 150)]
    published = [published_form(name, record) for record in records]
    converted = [in_hub_form(name, record) for record in published]
    assert_asked_alike(name, published, [records, converted], tmp_path)


def test_the_same_log_likelihood_of_documents_and_the_same_text(
    restored: Restored, run_dir: Path
) -> None:
    from lm_eval.api.instance import Instance

    own, theirs = own_model(run_dir), hugging_face_model(restored, run_dir)
    own._restored.model.double()
    restored.model.double()
    asked: list[Any] = [
        Instance("loglikelihood_rolling", {}, (text,), n)
        for n, text in enumerate(["the router", LONG, LONG * 2, "17"])
    ]
    found = own.loglikelihood_rolling(asked)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked), abs=1e-6)
    wishes: list[tuple[str, dict[str, Any]]] = [
        ("the token went", {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}),
        (LONG, {"until": [" "], "max_gen_toks": 20}),
        ("expert 17", {"until": ["e"], "max_gen_toks": 9}),
    ]
    written = own.generate_until(
        [Instance("generate_until", {}, wish, n) for n, wish in enumerate(wishes)]
    )
    restored.model.float()
    assert [text for text in written if text], "the model writes nothing at all"
    for text, wish in zip(written, wishes, strict=True):
        assert text == greedy(own, *wish)
        assert not any(stop in text for stop in wish[1]["until"])


def greedy(lm: Any, context: str, wish: dict[str, Any]) -> str:
    """Returns the most likely tokens, with one whole pass for each."""
    tokens = lm.tok_encode(context)[-(64 - wish["max_gen_toks"]) :]
    written: list[int] = []
    text = ""
    for _ in range(wish["max_gen_toks"]):
        with torch.no_grad():
            logits = lm._restored.model(torch.tensor([tokens + written])).logits_BSV[0, -1]
        written.append(int(logits.argmax()))
        text = lm._encoder.tokenizer.decode(written)
        if written[-1] == lm.eot_token_id or any(stop in text for stop in wish["until"]):
            break
    for stop in wish["until"]:
        text = text.split(stop)[0]
    return text


def test_what_cannot_be_generated(run_dir: Path) -> None:
    from lm_eval.api.instance import Instance

    own = own_model(run_dir)
    for wish, message in (
        ({"max_gen_toks": 64}, "leaves no room for a prompt"),
        ({"max_gen_toks": 4, "do_sample": True, "top_p": 0.5}, "unknown generation options top_p"),
    ):
        with pytest.raises(ValueError, match=message):
            own.generate_until([Instance("generate_until", {}, ("a", wish), 0)])
    with pytest.raises(ValueError, match="70 tokens to score exceed the context of 64"):
        own._loglikelihood_tokens([(("a", "b"), [1], list(range(70)))])


@pytest.mark.timeout(900)  # 16 s of processor time, mostly for reading all task files
def test_from_the_command_line(run_dir: Path, task_folder: Path, tmp_path: Path) -> None:
    ended = run_python(
        *("-c", "from moebius.cli.main import main; main()", "lm-eval", "--model", "moebius"),
        *("--model_args", f"path={run_dir}", "--tasks", task_folder / "arc_easy.yaml"),
        *("--output_path", tmp_path / "out"),
    )
    assert "own_arc_easy" in ended
    [file] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert "acc,none" in found["results"]["own_arc_easy"]
    assert found["config"]["model_step"] == 2


def test_a_task_file_of_the_harness_brings_the_model(task_folder: Path, tmp_path: Path) -> None:
    """Without our command, nothing else imports it."""
    brings = "metadata: {version: 1, model: !function moebius.evaluation.lm_eval_model.MoebiusLM}\n"
    text = (task_folder / "arc_easy.yaml").read_text(encoding="utf-8")
    (tmp_path / "task.yaml").write_text(text + brings, encoding="utf-8")
    program = """
import sys
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
TaskManager(include_path=sys.argv[1], include_defaults=False).load_task_or_group("own_arc_easy")
print(get_model("moebius").__name__)
"""
    assert run_python("-c", program, tmp_path).endswith("MoebiusLM\n")


def run_python(*arguments: object) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
