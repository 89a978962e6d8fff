"""Reads published sets from the Hugging Face hub and converts their records to ours.

Names, configurations and splits follow the harness's task files (0.4.13). The harness lacks the
Children's Book Test, for which they follow the set's own card.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from .task import HubSet, Record, TaskError


def hub_records(name: str, found: HubSet | None) -> Iterator[tuple[str, Record]]:
    """Yields a published set's records, each with a description of its location.

    They are downloaded once into the library's cache; with HF_HUB_OFFLINE=1 only the cache is read.

    Raises:
        TaskError: the task is not on the hub, the library is missing, or the download fails.
    """
    if found is None:
        raise TaskError(
            f"task {name!r} is not on the hub; pass a folder with its file (--data, or evaluate.data of a run)"
        )
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskError("tasks from the hub need a package: pip install 'moebius[hub]'") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would fill log files
    for configuration in found.configurations or ("",):
        try:
            records = datasets.load_dataset(
                found.repository, configuration or None, split=found.split
            )
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            reason = " ".join(str(error).split())
            raise TaskError(
                f"task {name!r}: {found.repository} cannot be fetched from the hub "
                f"({type(error).__name__}: {reason[:300]}); check your network and access "
                "(HF_TOKEN), or pass a folder with its file (--data, or evaluate.data of a run)"
            ) from error
        for number, record in enumerate(records):
            where = f"{found.repository} {configuration or found.split}: record {number}"
            try:
                converted = found.convert(record, configuration)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise TaskError(
                    f"{where}: task {name!r} cannot read its fields {', '.join(map(str, record))} "
                    f"({type(error).__name__}: {error})"
                ) from error
            yield where, converted


def _of_cbt(record: Record, configuration: str) -> Record:
    return {
        "kind": configuration,
        "context": record["sentences"],
        "question": record["question"],
        "answer": record["answer"],
        "candidates": [option for option in record["options"] if option],
    }


def _of_hellaswag(record: Record, configuration: str) -> Record:
    fragment = record["ctx_b"]
    query = f"{record['activity_label']}: {record['ctx_a']} {fragment}"
    return {**record, "query": query, "fragment": fragment}


def _of_arc(record: Record, configuration: str) -> Record:
    choices = record["choices"]
    return {
        "question": record.get("question", record.get("question_stem")),  # OpenBookQA's name
        "choices": list(choices["text"]),
        "label": list(choices["label"]).index(record["answerKey"].lstrip()),
    }


def _of_wsc273(record: Record, configuration: str) -> Record:
    """Puts each option in the pronoun's place, which was counted before blanks are merged."""
    text, place = record["text"].replace("  ", " "), record["pronoun_loc"]
    rest, contexts = f" {text[place + len(record['pronoun']) :]}", []
    is_owner = record["pronoun"].lower() in ("my", "his", "her", "our", "their")
    for option in record["options"]:
        word = (option := option + "'s" * is_owner).split()[0]
        if text[place - 2] != "." and word in _LOWERED:
            option = option.replace(word, word.lower())
        contexts.append(text[:place] + option)
    return {"context_options": contexts, "continuation": rest, "gold": record["label"]}


_LOWERED = ("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their")
LAMBADA = HubSet("EleutherAI/lambada_openai", "test", ("default",))
HELLASWAG = HubSet("Rowan/hellaswag", "validation", (), _of_hellaswag)
PIQA = HubSet("baber/piqa", "validation")
ARC_EASY = HubSet("allenai/ai2_arc", "test", ("ARC-Easy",), _of_arc)
ARC_CHALLENGE = HubSet("allenai/ai2_arc", "test", ("ARC-Challenge",), _of_arc)
WINOGRANDE = HubSet("allenai/winogrande", "validation", ("winogrande_xl",))
COPA = HubSet("aps/super_glue", "validation", ("copa",))
OPENBOOKQA = HubSet("allenai/openbookqa", "test", ("main",), _of_arc)
BOOLQ = HubSet("aps/super_glue", "validation", ("boolq",))
SIQA = HubSet("lighteval/siqa", "validation")
WSC273 = HubSet("lighteval/winograd_wsc", "test", ("wsc273",), _of_wsc273)
CBT = HubSet("cam-cst/cbt", "test", ("V", "P", "NE", "CN"), _of_cbt)
BLIMP_PHENOMENA = (
    "adjunct_island", "anaphor_gender_agreement", "anaphor_number_agreement", "animate_subject_passive",
    "animate_subject_trans", "causative", "complex_NP_island",
    "coordinate_structure_constraint_complex_left_branch",
    "coordinate_structure_constraint_object_extraction", "determiner_noun_agreement_1",
    "determiner_noun_agreement_2", "determiner_noun_agreement_irregular_1",
    "determiner_noun_agreement_irregular_2", "determiner_noun_agreement_with_adj_2",
    "determiner_noun_agreement_with_adj_irregular_1", "determiner_noun_agreement_with_adj_irregular_2",
    "determiner_noun_agreement_with_adjective_1", "distractor_agreement_relational_noun",
    "distractor_agreement_relative_clause", "drop_argument", "ellipsis_n_bar_1", "ellipsis_n_bar_2",
    "existential_there_object_raising", "existential_there_quantifiers_1",
    "existential_there_quantifiers_2", "existential_there_subject_raising",
    "expletive_it_object_raising", "inchoative", "intransitive", "irregular_past_participle_adjectives",
    "irregular_past_participle_verbs", "irregular_plural_subject_verb_agreement_1",
    "irregular_plural_subject_verb_agreement_2", "left_branch_island_echo_question",
    "left_branch_island_simple_question", "matrix_question_npi_licensor_present", "npi_present_1",
    "npi_present_2", "only_npi_licensor_present", "only_npi_scope", "passive_1", "passive_2",
    "principle_A_c_command", "principle_A_case_1", "principle_A_case_2", "principle_A_domain_1",
    "principle_A_domain_2", "principle_A_domain_3", "principle_A_reconstruction",
    "regular_plural_subject_verb_agreement_1", "regular_plural_subject_verb_agreement_2",
    "sentential_negation_npi_licensor_present", "sentential_negation_npi_scope",
    "sentential_subject_island", "superlative_quantifiers_1", "superlative_quantifiers_2",
    "tough_vs_raising_1", "tough_vs_raising_2", "transitive", "wh_island", "wh_questions_object_gap",
    "wh_questions_subject_gap", "wh_questions_subject_gap_long_distance", "wh_vs_that_no_gap",
    "wh_vs_that_no_gap_long_distance", "wh_vs_that_with_gap", "wh_vs_that_with_gap_long_distance",
)  # fmt: skip
BLIMP = HubSet("nyu-mll/blimp", "train", BLIMP_PHENOMENA, lambda one, name: {"UID": name, **one})
