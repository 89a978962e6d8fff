"""TensorBoard's files, read by TensorBoard's own reader."""

import io
import time
from pathlib import Path

import numpy as np
import pytest
from fake_sink import facts_of, line_of_loads, read_board
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer import event_file_writer

from moebius.train.metrics.records import Record
from moebius.train.sinks.heat_map import draw_load
from moebius.train.sinks.tensorboard import TensorBoard


def losses(found: EventAccumulator) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars("loss/train")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    run_dir = tmp_path_factory.mktemp("run")
    board = TensorBoard(facts_of(run_dir), first_step=1)
    board.write([Record("start", 0, 100.0, {"world_size": 2, "resumed_from_step": None})])
    board.write([line_of_loads(1), line_of_loads(2), line_of_loads(3), line_of_loads(4)])
    board.close("finished")
    return read_board(run_dir)


def test_curves_have_their_groups_and_times(written: EventAccumulator) -> None:
    assert losses(written) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert written.Scalars("loss/train")[0].wall_time == 101.0
    worst = [
        (event.step, event.value) for event in written.Scalars("experts/max_violation/feed_forward")
    ]
    assert worst == [(step, 0.5) for step in (1, 2, 3, 4)]
    second = written.Scalars("experts_by_depth/max_violation/feed_forward/depth_02")
    assert [(event.step, event.value) for event in second] == [(1, 0.25), (4, 0.25)]


def test_the_load_is_a_picture(written: EventAccumulator) -> None:
    pictures = written.Images("experts/load/feed_forward")
    assert [picture.step for picture in pictures] == [1, 3]
    with Image.open(io.BytesIO(pictures[0].encoded_image_string)) as picture:
        assert picture.width == 640


def test_hyper_parameters_lie_in_the_same_folder(written: EventAccumulator, tmp_path: Path) -> None:
    summary = written.summary_metadata["_hparams_/session_start_info"]
    given = metadata.parse_session_start_info_plugin_data(summary.plugin_data.content).hparams
    assert given["train.steps"].number_value == 9
    assert given["train.start_when"].string_value == "none"
    assert "_hparams_/session_end_info" in written.summary_metadata
    folder = Path(written.path)
    assert all(file.is_file() for file in folder.iterdir())


def test_events_and_the_configuration_are_texts(written: EventAccumulator) -> None:
    (event,) = written.Tensors("events/text_summary")
    assert event.tensor_proto.string_val == [b"started with 2 ranks"]
    (text,) = written.Tensors("configuration/text_summary")
    assert b'"d_model": 16' in text.tensor_proto.string_val[0]


def test_what_the_run_has_left_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files are read by name: second, host, process, number. Here all are of one second and process,
    # and a process's tenth file would come before its ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    board = TensorBoard(facts_of(tmp_path), first_step=1)
    board.write([line_of_loads(step) for step in (1, 2, 3)])
    board.go_back_to(1)
    board.write([line_of_loads(2, 5.0)])
    board.close("failed")
    # another process goes on from the checkpoint of step 1
    board = TensorBoard(facts_of(tmp_path), first_step=2)
    board.write([line_of_loads(2, 7.0)])
    board.close("stopped")
    assert losses(read_board(tmp_path)) == [(1, 1.0), (2, 7.0)]


def test_a_sink_that_is_opened_anew_after_a_failure_hides_nothing(tmp_path: Path) -> None:
    TensorBoard(facts_of(tmp_path), first_step=1).write([line_of_loads(1)])
    # the files of one second are read in the order of their numbers as text, where 10 comes before 9
    time.sleep(1)
    board = TensorBoard(facts_of(tmp_path), first_step=None)
    board.write([line_of_loads(2)])
    board.close("finished")
    assert losses(read_board(tmp_path))[-1] == (2, 1.0)


def test_pictures_can_be_switched_off(tmp_path: Path) -> None:
    board = TensorBoard(facts_of(tmp_path, heat_map_every=0), first_step=1)
    board.write([line_of_loads(1)])
    board.close("stopped")
    assert read_board(tmp_path).Tags()["images"] == []


def test_a_dead_expert_is_dark_and_a_full_one_bright() -> None:
    even = draw_load([[0.25] * 4] * 2, (1, 3), title="even")
    uneven = draw_load([[1.0, 0.0, 0.0, 0.0]] * 2, (1, 3), title="even")
    assert even.dtype == np.uint8
    assert even.shape == uneven.shape
    row = even.shape[0] // 2 - 10
    left, right = even.shape[1] // 6, even.shape[1] // 2
    assert uneven[row, left].sum() > even[row, left].sum() > uneven[row, right].sum()
