"""Lists network failures beyond F1–F30, on machines whose switch delays, loses and cuts (tests/network/).

`make chaos` runs and shows these rows with the others.
"""

from tests.chaos.matrix import Fault

NETWORK = (
    Fault(
        "N1",
        "50 ms of delay in each direction, everywhere",
        "slower, in one generation; samples and losses bit for bit",
        """
        tests/network/test_jobs.py::test_a_network_with_50_ms_of_delay_changes_no_bit
        """,
    ),
    Fault(
        "N2",
        "5 % of all frames lost",
        "slower, in one generation; samples and losses bit for bit",
        """
        tests/network/test_jobs.py::test_a_network_that_loses_5_percent_changes_no_bit
        """,
    ),
    Fault(
        "N3",
        "a node's link cut for 10 s, less than Ray waits for it",
        "the ranks wait, and go on in the same generation",
        """
        tests/network/test_jobs.py::test_a_cut_of_10_s_is_waited_out
        """,
    ),
    Fault(
        "N4",
        "a node's link cut until Ray has given the node up, then healed",
        "PLACING until it is back, its old ranks ended, none of their checkpoints taken; the curve bit for bit",
        """
        tests/network/test_jobs.py::test_a_node_that_was_cut_off_comes_back_and_nobody_trains_twice
        """,
    ),
    Fault(
        "N5",
        "the node of rank 0 cut off for good, fewer nodes are enough",
        "goes on without it; the ranks that are cut off end by themselves",
        """
        tests/network/test_jobs.py::test_a_node_that_stays_cut_off_is_done_without
        """,
    ),
    Fault(
        "N6",
        "no network between two nodes that the head reaches both",
        "the hang is named with the two nodes, charged to infrastructure; waits for the network",
        """
        tests/network/test_jobs.py::test_nodes_that_do_not_reach_each_other_are_named
        """,
    ),
    Fault(
        "N7",
        "a stranger on the network who knocks at all ports of ranks and agents",
        "they listen on the cluster's address and the loopback alone; the store hangs up on him",
        """
        tests/network/test_jobs.py::test_ranks_listen_on_the_cluster_s_addresses_alone
        """,
    ),
)
