"""Lists the failure matrix, F1–F30 and N1–N7: what is injected, what is expected, and the tests that show it.

`make chaos` runs these tests and prints the table (report.py). A row without tests, or with `missing`, says
what is not tested.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    id: str
    injected: str
    expected: str
    node_ids: str  # of its tests, a line each, without parameters
    missing: str = ""  # what no test shows, and why

    @property
    def tests(self) -> tuple[str, ...]:
        """Returns the node ids of its tests."""
        return tuple(self.node_ids.split())


MATRIX = (
    Fault(
        "F1",
        "kill -9 a rank",
        "a new generation from the last checkpoint; curve bit for bit that of an undisturbed run",
        """
        tests/cluster/supervise/test_actor.py::test_a_killed_rank_is_recovered_from_and_the_curve_is_as_if_nothing_had_happened
        tests/test_main_job.py::test_a_killed_rank_leaves_no_trace_in_the_curve
        """,
    ),
    Fault(
        "F2",
        "a rank raises at the same step every time",
        "FAILED after three times, with rank, step and traceback; a mistake ends the job at once",
        """
        tests/cluster/supervise/test_job_supervisor.py::test_how_a_job_ends
        tests/cluster/watch/test_real_ranks.py::test_the_same_error_at_the_same_step_ends_the_run
        """,
    ),
    Fault(
        "F3",
        "a rank exits 0 early",
        "no success: named as the cause, a new generation",
        """
        tests/cluster/supervise/test_job_supervisor.py::test_how_a_job_ends
        tests/cluster/watch/test_real_ranks.py::test_a_rank_that_leaves_early_is_the_cause
        """,
    ),
    Fault(
        "F4",
        "kill -9 an agent",
        "its ranks die, a new generation",
        """
        tests/cluster/supervise/test_actor.py::test_whoever_is_killed_the_job_goes_on
        tests/cluster/nodes/test_agent.py::test_every_layer_dies_with_the_one_above
        tests/cluster/nodes/test_agent_warm.py::test_a_forked_agent_is_what_a_program_is
        """,
    ),
    Fault(
        "F5",
        "kill -9 a node's actor",
        "a new actor, a new generation",
        """
        tests/cluster/supervise/test_actor.py::test_whoever_is_killed_the_job_goes_on
        """,
    ),
    Fault(
        "F6",
        "power off a node, a spare is there",
        "goes on on the spare, charged to infrastructure; the curve as undisturbed",
        """
        tests/cluster/supervise/test_node_loss.py::test_f6_a_spare_takes_the_place_and_f8_without_one_the_job_waits
        """,
    ),
    Fault(
        "F7",
        "power off a node, no spare, fewer nodes are enough",
        "goes on with fewer after the wait, grows again; digests equal on 2, 1 and 2 ranks",
        """
        tests/cluster/supervise/test_node_loss.py::test_f7_no_spare_it_goes_on_with_fewer_and_takes_back_the_others
        tests/cluster/supervise/test_node_loss.py::test_f7_the_samples_are_the_same_on_any_number_of_nodes
        tests/cluster/supervise/test_placing.py::test_with_a_number_that_fits_the_run
        """,
    ),
    Fault(
        "F8",
        "power off a node, no spare, all are needed",
        "PLACING until a node joins, then goes on",
        """
        tests/cluster/supervise/test_node_loss.py::test_f6_a_spare_takes_the_place_and_f8_without_one_the_job_waits
        tests/cluster/places/test_standing.py::test_a_job_on_a_cluster_that_stays_loses_a_node_and_gets_another
        tests/cluster/supervise/test_placing.py::test_with_too_few_it_waits_for_ever
        """,
    ),
    Fault(
        "F9",
        "power off the node of rank 0, which holds the store",
        "as F6",
        """
        tests/chaos/test_node_of_rank_0.py::test_a_spare_takes_its_place
        """,
    ),
    Fault(
        "F10",
        "kill -9 the supervisor",
        "restarted by Ray; takes over the generation that goes on, and nobody trains twice",
        """
        tests/cluster/supervise/test_actor.py::test_whoever_is_killed_the_job_goes_on
        tests/cluster/supervise/test_actor.py::test_a_node_that_died_with_the_supervisor_costs_a_generation
        tests/cluster/supervise/test_actor.py::test_nodes_whose_supervisor_was_ended_for_good_end_themselves
        tests/cluster/supervise/test_job_supervisor.py::test_a_restarted_supervisor_takes_over_the_generation_that_goes_on
        tests/cluster/supervise/test_job_supervisor.py::test_a_supervisor_with_a_successor_ends_nothing
        tests/cluster/supervise/test_job_supervisor.py::test_a_restarted_supervisor_goes_on_and_remembers_the_failures
        tests/cluster/supervise/test_job_supervisor.py::test_a_supervisor_with_a_successor_ends_nothing
        """,
    ),
    Fault(
        "F11",
        "kill -9 the command that submitted",
        "the job goes on, and `status` knows it",
        """
        tests/cluster/supervise/test_node_loss.py::test_f11_the_command_that_watches_is_killed_and_the_job_goes_on
        tests/cluster/test_submit.py::test_a_detached_job_outlives_its_submitter_and_can_be_stopped
        """,
    ),
    Fault(
        "F12",
        "SIGSTOP a rank",
        "found by the limit of its phase, stacks kept, the rank named, a new generation",
        """
        tests/cluster/watch/test_real_ranks.py::test_a_stopped_rank_is_named_and_the_run_goes_on
        tests/cluster/watch/test_watcher.py::test_a_stall_ends_the_generation_with_rank_operation_and_place
        """,
    ),
    Fault(
        "F13",
        "the store blocks",
        "waited for and told; nobody is killed",
        """
        tests/data_pipeline/read/test_loader.py::test_a_store_that_blocks_is_waited_for_and_named
        tests/data_pipeline/read/test_loader.py::test_all_ranks_wait_at_the_same_step_and_say_what_for
        tests/cluster/watch/test_real_ranks.py::test_a_loader_that_blocks_is_told_and_not_killed
        """,
    ),
    Fault(
        "F14",
        "freeze a generation, thaw it when a newer one was announced",
        "no commit, no word in the journal, its ranks end",
        """
        tests/chaos/test_split_brain.py::test_a_frozen_generation_that_thaws_late_changes_nothing
        tests/distributed/checkpoint/test_checkpointer.py::test_a_stale_generation_may_not_commit
        tests/distributed/checkpoint/test_checkpointer.py::test_a_stale_generation_cleans_nothing_up
        """,
    ),
    Fault(
        "F15",
        "kill a rank in each phase of writing a checkpoint",
        "the last committed one loads; what was left is removed",
        """
        tests/distributed/checkpoint/test_checkpointer.py::test_a_crash_leaves_the_last_good_one
        tests/distributed/checkpoint/test_checkpointer.py::test_leftovers_are_cleaned_but_not_those_of_a_later_generation
        tests/distributed/checkpoint/test_checkpointer.py::test_a_crash_between_the_two_renames_of_a_replacement_is_undone
        tests/chaos/test_checkpoint_faults.py::test_f15_a_rank_is_killed_in_each_phase_of_a_save
        """,
    ),
    Fault(
        "F16",
        "flip a byte of a checkpoint, truncate or delete a file",
        "found by its hash, set aside; the one before is used, and the journal says so",
        """
        tests/distributed/checkpoint/test_recovery.py::test_the_one_before_is_taken_by_all_ranks
        tests/distributed/checkpoint/test_recovery.py::test_several_damaged_ones_are_passed_over
        tests/distributed/checkpoint/test_recovery.py::test_with_none_left_nothing_is_moved_and_the_error_lists_all
        tests/train/test_damaged_checkpoint.py::test_the_losses_do_not_notice
        tests/cluster/supervise/test_job_supervisor.py::test_trouble_with_checkpoints_and_spikes_is_in_the_journal
        tests/chaos/test_checkpoint_faults.py::test_f16_the_newest_checkpoint_is_damaged_and_a_rank_killed
        """,
    ),
    Fault(
        "F17",
        "flip a bit of a token batch, truncate or delete a shard",
        "read again, then from a copy; without a whole one the run ends, and the error names the batch",
        """
        tests/data_pipeline/read/test_corruption.py::test_damage_without_a_whole_copy_ends_the_run_and_is_named
        tests/data_pipeline/read/test_corruption.py::test_a_replica_heals_and_nobody_notices
        """,
    ),
    Fault(
        "F18",
        "kill tokenising tasks, their node, the preparing process",
        "shards and manifest byte for byte as undisturbed",
        """
        tests/cluster/test_ray_tasks.py::test_killed_tasks_and_a_killed_driver_change_no_byte
        tests/cluster/test_ray_tasks.py::test_a_killed_node_changes_no_byte
        tests/data_pipeline/make/test_same_bytes.py::test_killing_the_whole_preparation_at_any_moment_changes_nothing
        tests/data_pipeline/make/test_same_bytes.py::test_killing_workers_at_any_moment_changes_nothing
        """,
    ),
    Fault(
        "F19",
        "poison documents and files",
        "quarantined; the rest is complete and its order defined",
        """
        tests/cluster/test_ray_tasks.py::test_poison_is_quarantined_and_the_rest_has_the_same_bytes
        tests/data_pipeline/make/test_poison.py::test_a_crash_of_the_process_is_quarantined_after_three_tries
        tests/data_pipeline/make/test_poison.py::test_a_unit_that_fails_when_it_is_tokenised_leaves_the_order_as_it_was
        """,
    ),
    Fault(
        "F20",
        "F18 while ranks train on what is sealed",
        "samples, losses and weights as when prepared first",
        """
        tests/cluster/test_train_while_tokenising.py::test_submit_trains_while_workers_and_the_preparing_process_are_killed
        tests/data_pipeline/read/test_growth.py::test_training_while_workers_are_killed_is_training_after
        """,
    ),
    Fault(
        "F21",
        "a user's stop, a notice of preemption",
        "a checkpoint at the step boundary, STOPPED or PREEMPTED; resumed exactly",
        """
        tests/cluster/test_local_jobs.py::test_ctrl_c_ends_a_run_at_a_step_boundary_and_the_next_one_goes_on
        tests/cluster/supervise/test_job_supervisor.py::test_how_a_job_ends
        tests/train/test_parity.py::test_a_stop_ends_all_ranks_at_one_step_with_a_checkpoint
        tests/train/test_parity.py::test_resumed_equals_uninterrupted_bit_for_bit
        tests/chaos/test_preemption.py::test_sigterm_preempts_and_resume_makes_the_same_run
        """,
    ),
    Fault(
        "F22",
        "the disk is full when a checkpoint is written",
        "goes on or stops as configured, with a clear message; the one before stays",
        """
        tests/train/test_damaged_checkpoint.py::test_a_full_disk_costs_a_checkpoint_and_not_the_run
        tests/distributed/checkpoint/test_checkpointer.py::test_a_full_disk_spares_the_previous_one_and_all_ranks_hear
        tests/chaos/test_checkpoint_faults.py::test_f22_the_disk_is_full_for_a_while
        tests/chaos/test_checkpoint_faults.py::test_f22_a_job_may_be_told_to_end_then
        """,
    ),
    Fault(
        "F23",
        "resume with another layout, batch, seed or data",
        "layout: equal digests; anything that changes the run: refused with the difference",
        """
        tests/train/test_parity.py::test_resumed_on_another_layout_gives_the_same_losses
        tests/data_pipeline/read/test_loader.py::test_any_number_of_ranks_sees_the_same_samples
        tests/data_pipeline/read/test_loader.py::test_a_position_of_another_order_is_refused_with_the_difference
        """,
    ),
    Fault(
        "F24",
        "a request that cannot be met, nodes that lack something",
        "FAILED in time, before a rank is started, with what is missing and where",
        """
        tests/cluster/supervise/test_actor.py::test_what_the_cluster_cannot_hold_fails_in_time_and_says_what_is_missing
        tests/cluster/supervise/test_actor.py::test_nodes_must_run_the_same_software
        tests/cluster/supervise/test_job_supervisor.py::test_a_node_that_lacks_something_ends_the_job_before_a_rank_is_started
        """,
    ),
    Fault(
        "F25",
        "two jobs of one name on one cluster, one fails",
        "the other does not notice",
        """
        tests/cluster/supervise/test_actor.py::test_two_jobs_share_a_cluster_and_the_failure_of_one_is_not_the_other_s
        """,
    ),
    Fault(
        "F26",
        "a rank ignores SIGTERM, or hangs in the kernel",
        "named with its line and killed; a node with what cannot be killed is not used again",
        """
        tests/cluster/watch/test_real_ranks.py::test_a_rank_that_hangs_deaf_to_sigterm_is_named_with_its_line
        tests/cluster/nodes/test_unkillable.py::test_it_is_named_by_the_node_on_which_it_was_started
        tests/cluster/nodes/test_unkillable.py::test_a_job_of_one_machine_ends_and_says_why
        tests/cluster/supervise/test_job_supervisor.py::test_a_node_with_a_rank_that_cannot_be_killed_is_not_used_again
        tests/cluster/supervise/test_node_loss.py::test_f26_a_node_with_a_rank_that_cannot_be_killed_is_left_out
        """,
    ),
    Fault(
        "F27",
        "no token, a wrong token",
        "refused, and told what to set",
        """
        tests/cluster/places/test_simulated.py::test_a_stranger_is_refused_and_told_what_to_set
        tests/cluster/places/test_simulated.py::test_who_has_the_token_is_let_in
        """,
    ),
    Fault(
        "F28",
        "torch's elastic restarts in place, with its shared store",
        "not used: an agent never restarts by itself, and the store is not shared",
        """
        tests/cluster/nodes/test_agent.py::test_ranks_get_nothing_of_ray_and_everything_of_ours
        """,
        missing="the defect of torch itself has no test here: generations are static",
    ),
    Fault(
        "F29",
        "ranks that write fast, logs of many generations followed across restarts, a full disk",
        "complete and in order; a full disk costs lines, which are counted, and no rank",
        """
        tests/cluster/report/test_logs.py::test_logs_are_followed_across_generations_until_the_job_ends
        tests/cluster/report/test_logs.py::test_the_tail_of_a_rank_reaches_back_over_its_restarts
        tests/cluster/report/test_logs.py::test_the_tail_of_a_log_longer_than_a_block
        tests/train/record/test_process_log.py::test_a_rank_that_writes_fast_is_followed_line_by_line
        tests/train/record/test_process_log.py::test_a_full_disk_costs_lines_and_says_how_many
        """,
    ),
    Fault(
        "F30",
        "a clock that jumps, ranks without CPU",
        "nobody is taken for dead: life is judged by change, phases by the monotonic clock",
        """
        tests/cluster/test_liveness.py::test_a_clock_that_jumped_since_the_last_beat_deceives_nobody
        tests/cluster/test_liveness.py::test_who_watches_judges_by_change_alone
        tests/train/record/test_heartbeat.py::test_the_clock_on_the_wall_does_not_matter
        tests/cluster/watch/test_real_ranks.py::test_a_rank_without_cpu_is_slow_and_no_hang
        tests/cluster/watch/test_heartbeats.py::test_what_a_rank_waits_for_a_cpu_counts_for_its_phase_from_the_look_before
        """,
    ),
)

# Failures of a network that delays, loses and cuts (tests/network/).
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
