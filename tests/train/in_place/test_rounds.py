"""What a rank does when it fails: it waits for an order where another rank may have died."""

import threading

import pytest

from moebius.distributed.process.diagnosis import CollectiveError
from moebius.train.config.run_config import ConfigError
from moebius.train.in_place import rounds as rounds_module
from moebius.train.in_place.orders import RoundOrder, read_readiness, write_order
from moebius.train.in_place.rounds import Rounds, open_rounds, tells_of_a_lost_rank

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def rounds(tmp_path):
    listening = Rounds(tmp_path, rank=1)
    listening.say_ready()
    yield listening
    listening.end()
    assert read_readiness(tmp_path, 1) is None


def test_an_order_follows_the_loss_of_a_connection(rounds, tmp_path):
    assert read_readiness(tmp_path, 1) == ""
    writer = threading.Thread(target=write_order, args=(tmp_path, RoundOrder(1, (2,))))
    writer.start()
    assert rounds.order_after(LOST) == RoundOrder(1, (2,))
    writer.join()
    assert rounds.number == 1
    write_order(tmp_path, RoundOrder(2, (0,)))
    assert rounds.order_after(LOST) == RoundOrder(2, (0,))


def test_a_refusal_lets_the_rank_raise_its_error(rounds, tmp_path):
    write_order(tmp_path, RoundOrder(1, refused="there is no spare left"))
    assert rounds.order_after(LOST) is None


@pytest.mark.parametrize(
    "error", [ValueError("a bug of the rank's own"), ConfigError("gloo is no device")]
)
def test_a_ranks_own_error_is_raised_at_once(rounds, error):
    assert rounds.order_after(error) is None


def test_without_an_order_the_error_is_raised(rounds, monkeypatch):
    monkeypatch.setattr(rounds_module, "_HOLD_S", 0.01)
    assert rounds.order_after(LOST) is None


def test_there_are_no_rounds_where_nobody_orders_any(tmp_path):
    rounds = open_rounds({"RANK": "0", "MOEBIUS_HEARTBEATS": str(tmp_path)})
    assert not rounds.is_active
    assert rounds.order_after(LOST) is None
    rounds.say_ready()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_take_part_says_why(tmp_path):
    rounds = Rounds(tmp_path, rank=0)
    rounds.say_ready("mesh.sharding=fsdp keeps its process groups")
    assert read_readiness(tmp_path, 0) == "mesh.sharding=fsdp keeps its process groups"
    assert rounds.order_after(LOST) is None


def test_what_tells_of_a_lost_rank():
    wrapped = CollectiveError("all_reduce no. 3 did not complete")
    wrapped.__cause__ = LOST
    assert tells_of_a_lost_rank(LOST)
    assert tells_of_a_lost_rank(wrapped)
    assert not tells_of_a_lost_rank(RuntimeError("shapes do not match"))
