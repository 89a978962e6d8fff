"""Tests `moebius scale`."""

import json
from pathlib import Path

import pytest

from moebius.cluster.job import (
    THIS_MACHINE,
    JobError,
    Journal,
    Launch,
    State,
    begin_submission,
)
from moebius.cluster.supervise.placing import request_scale, scale_requested
from moebius.train.config.run_config import Config
from moebius.train.config.validation import validated


def begun(run_dir: Path, **job) -> Path:
    begin_submission(Launch(str(run_dir), where="simulated"))
    values = {
        "prepare": {"tokenizer": "bytes", "vocab_size": 257},
        "model": {"vocab_size": 257},
        "train": {"global_batch": 8, "micro_batch": 2},
        "job": job,
    }
    validated(Config, values, origin="test").save(run_dir / "config.json")
    return run_dir


def test_a_number_that_fits_is_asked_for(tmp_path, moebius):
    done = moebius("scale", begun(tmp_path), 2)
    assert done.code == 0
    assert "2 node(s) requested" in done.text
    asked = scale_requested(tmp_path)
    assert asked is not None
    assert (asked.num_nodes, asked.layouts) == (2, {1: {}, 2: {}})


def test_a_number_that_does_not_fit_is_answered_with_those_that_do(tmp_path):
    with pytest.raises(JobError, match=r"does not fit 3 node\(s\) .* up to 6 that fit: 1, 2, 4"):
        request_scale(begun(tmp_path), 3)
    assert scale_requested(tmp_path) is None


def test_what_has_ended_or_has_no_cluster_is_not_scaled(tmp_path):
    with pytest.raises(JobError, match="no job was started"):
        request_scale(tmp_path, 2)
    run_dir = begun(tmp_path / "ended")
    Journal(run_dir).append(State.STOPPED, generation=1, reason="")
    with pytest.raises(
        JobError, match=r"has ended \(STOPPED\); continue it on 2 node\(s\) with `moebius resume"
    ):
        request_scale(run_dir, 2)
    begin_submission(Launch(str(tmp_path / "here"), where=THIS_MACHINE))
    with pytest.raises(JobError, match="runs on one machine"):
        request_scale(tmp_path / "here", 2)
    with pytest.raises(JobError, match="at least 1 node"):
        request_scale(begun(tmp_path / "none"), 0)


def test_without_a_configuration_any_number_will_do(tmp_path):
    begin_submission(Launch(str(tmp_path)))
    request_scale(tmp_path, 3)
    assert json.loads((tmp_path / "scale.json").read_text()) == {"num_nodes": 3, "layouts": None}


def test_the_next_submission_goes_by_the_configuration(tmp_path):
    request_scale(begun(tmp_path), 2)
    Journal(tmp_path).append(State.STOPPED, generation=1, reason="")
    begin_submission(Launch(str(tmp_path)))
    assert scale_requested(tmp_path) is None
