"""Each way of feeding ranks reads every token of the made-up data, and its cost is counted."""

import pytest

from benchmarks import data_server


@pytest.mark.slow
def test_both_ways_read_all_tokens_and_say_what_they_cost(tmp_path):
    data = data_server.make_data(tmp_path, data_server.SHARD_TOKENS)
    alone, served = (data_server.measure(data, 2, served=served) for served in (False, True))
    rows = (data_server.SHARD_TOKENS - 1) // data_server.SEQ_LEN
    tokens = rows // data_server.GLOBAL_BATCH * data_server.GLOBAL_BATCH * data_server.SEQ_LEN
    assert alone["mtokens"] == served["mtokens"] == round(tokens / 1e6, 1)
    assert alone["server_s"] == 0 < served["server_s"]
    assert min(alone["ranks_s"], served["ranks_s"]) > 0
