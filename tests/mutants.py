"""Breaks the code on purpose, one place at a time, and checks that tests notice.

    python tests/mutants.py [--only WORD] [--list]

A mutant is a plausible mistake: a lost reduction, swapped splits, an unstable sort. Each is made in
a copy of the tracked files, where its tests must fail; before that they must pass in the unchanged
copy. Exits with 1 if a mutant survives, with 2 if one no longer fits the code or tests cannot run.
`tests/test_mutants.py` keeps the list up to date. Each takes half a minute to three.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS_FAILED = 1  # pytest's exit code for it; others mean that nothing was tried


@dataclass(frozen=True)
class Mutant:
    """Describes a change in one place, and the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DISPATCH, DISPATCHERS = (
    "tests/distributed/dispatch/test_dispatch.py",
    "tests/distributed/dispatch/test_dispatchers.py",
)
EVERY_KIND = f"{DISPATCHERS}::test_every_dispatcher_equals_one_rank_on_every_kind_of_routes[fp64]"
ON_FOUR_RANKS = f"{DISPATCH}::test_alltoall_equals_one_rank_bitwise[4]"
GRADIENTS, CHECKPOINT = (
    "tests/distributed/test_gradients.py",
    "tests/distributed/checkpoint/test_checkpointer.py",
)
MASKS, DOCUMENTS = "tests/train/test_micro_batches.py", "tests/model/test_documents.py"
SHARDING, MOVING = "tests/train/test_sharding.py", "tests/distributed/placement/test_move.py"
COUNTS = "satellites/science/tests/analysis/test_counts.py"

MUTANTS = (
    Mutant(
        "the loss is divided by this rank's sequences, not by all ranks'", "train/loss.py",
        "output.cross_entropy / (global_sequences * "
        "micro_batch.inputs_BS.shape[1])", "output.cross_entropy / micro_batch.inputs_BS.numel()",
        ("tests/train/test_parity.py::test_a_step_is_what_the_formulas_say",),
    ),
    Mutant(
        "gradients are averaged, not summed", "distributed/gradients.py",
        "            "
        "bucket.unpack()\n", "            bucket.flat /= dist.get_world_size()\n            bucket.unpack()\n",
        (f"{GRADIENTS}::test_sums_norm_and_clipping_equal_one_process",),
    ),
    Mutant(
        "experts' gradients are summed over all ranks", "distributed/gradients.py",
        "(experts, mesh.expert_replica_group)", "(experts, mesh.world_group)",
        (f"{GRADIENTS}::test_sums_norm_and_clipping_equal_one_process",),
    ),
    Mutant(
        "the norm counts every copy of an expert", "distributed/gradients.py",
        "shard.copy_index(rank) == "
        "0", "True", (f"{GRADIENTS}::test_sums_norm_and_clipping_equal_one_process",),
    ),
    Mutant(
        "what is sent and what is received change places", "distributed/dispatch/exchange.py",
        "received, sent, self.received, self.sent,", "received, sent, self.sent, self.received,",
        (ON_FOUR_RANKS,),
    ),
    Mutant(
        "the backward pass sends as the forward pass did", "distributed/dispatch/exchange.py",
        "return AllToAll(self.group, self.received, "
        "self.sent)", "return AllToAll(self.group, self.sent, self.received)",
        (ON_FOUR_RANKS,),
    ),
    Mutant(
        "a closed ReLU lets gradients through in C++", "kernels/cpu/brgemm.cpp",
        "s = x <= 0 ? 0 : 1", "s = 1",
        ("tests/kernels/test_backends.py::test_mlp_equals_the_reference[random-relu-no bias-brgemm-float32]",),
    ),
    Mutant(
        "the last of an odd number of columns is forgotten in "
        "bfloat16", "kernels/cpu/brgemm.cpp",
        "even = up(k, pair)", "even = k / pair * pair",
        ("tests/kernels/test_backends.py::test_mlp_equals_the_reference[odd widths-relu-no bias-brgemm-bfloat16]",),
    ),
    Mutant(
        "the next expert's rows are in a weight gradient", "kernels/segments.py",
        "_clear_surplus(count, dy, gated, x, d_z)", "_clear_surplus(count, gated)",
        ("tests/kernels/test_backends.py::test_mlp_equals_the_reference[random-relu-no bias-segments-float32]",),
    ),
    Mutant(
        "the next expert's NaN is multiplied by zero, not cleared", "kernels/segments.py",
        "_clear_surplus(count, dy, gated, x, d_z)", "_clear_surplus(count, gated, d_z)",
        ("tests/kernels/test_backends.py::test_rows_that_are_not_finite_spoil_no_other_experts_gradients",),
    ),
    Mutant(
        "rows of odd widths begin anywhere in memory", "kernels/segments.py",
        "return -(-width // step) * step", "return width", ("tests/kernels/test_slots.py",),
    ),
    Mutant(
        "a repeat's weight gradient replaces the one before", "kernels/segments.py",
        "_add_product(grad_down[expert], gated.T, dy)", "torch.mm(gated.T, dy, out=grad_down[expert])",
        ("tests/kernels/test_gradients.py",),
    ),
    Mutant(
        "what a broken backward pass left behind is added to the next", "kernels/gradients.py",
        "if task != self._task:", "if self._task == -1:", ("tests/kernels/test_gradients.py",),
    ),
    Mutant(
        "a gate's gradient is taken before the activation in "
        "Triton", "kernels/triton/grouped_gemm.py",
        "d_gate = tl.sum(value * d_hidden, "
        "1)", "d_gate = tl.sum(z * d_hidden, 1)", ("tests/kernels/triton/test_interpreted.py",),
    ),
    Mutant(
        "sorting by expert is not stable", "kernels/permute.py",
        "return torch.argsort(keys_N, stable=True)",
        "return len(keys_N) - 1 - torch.argsort(keys_N.flip(0), stable=True)",
        (ON_FOUR_RANKS, "tests/kernels/test_backend.py"),
    ),
    Mutant(
        "answers are not brought back into the order of the "
        "routes", "distributed/dispatch/alltoall.py",
        "            back.wait(),\n            self.order_N,\n", "            back.wait(),\n            None,\n",
        (ON_FOUR_RANKS,),
    ),
    Mutant(
        "dedup adds answers up as they came, not by their "
        "rows", "kernels/sends.py",
        "return _sum_by_row(rows_MD, pairs.by_row_N, pairs.first_U)",
        "return _sum_by_row(rows_MD, torch.arange(len(rows_MD)).int(), pairs.first_U)",
        (EVERY_KIND,),
    ),
    Mutant(
        "dedup takes source rows for target rows", "kernels/cpu/lists.cpp",
        "out[2] = static_cast<Word>(number_PT[v * T + target_N[n]]);",
        "out[2] = static_cast<Word>(number_PU[v * U + source_N[n]]);",
        (EVERY_KIND,),
    ),
    Mutant(
        "gate weights lose their gradient on the way", "kernels/sends.py",
        "return grads[0][:, 3].index_select(0, place_N), None, None", "return None, None, None",
        (EVERY_KIND,),
    ),
    Mutant(
        "dedup sends every row to every rank", "kernels/cpu/lists.cpp",
        "std::fill(number_PU, number_PU + P * U, -1);",
        "std::fill(number_PU, number_PU + P * U, 0);",
        (f"{DISPATCHERS}::test_dedup_sends_every_row_once_to_every_rank_that_serves_it_and_not_once_more[token]",),
    ),
    Mutant(
        "a rank that sends and gets nothing stays away", "distributed/dispatch/exchange.py",
        "        sent, received = rows.detach(), rows.new_empty(sum(self.received)",
        "        if not sum(self.sent) + sum(self.received):\n            return "
        "Pending(rows.clone(), None, None)\n"
        "        sent, received = rows.detach(), rows.new_empty(sum(self.received)",
        ("tests/distributed/dispatch/test_promises.py::"
         "test_no_rank_stays_away_from_an_exchange_in_which_it_has_nothing_to_say",),
    ),
    Mutant(
        "what arrives empty leaves the graph, and so this rank leaves the backward "
        "exchange", "distributed/dispatch/exchange.py",
        "        return self._received  # pyright",
        "        return self._received if len(self._received) else self._received.detach()  # pyright",
        (ON_FOUR_RANKS,),
    ),
    Mutant(
        "checks do not compare what is sent with what is "
        "expected", "distributed/dispatch/exchange.py",
        "if sends[pair] != expects[pair]", "if False",
        (f"{DISPATCHERS}::test_ranks_that_disagree_about_a_split_all_say_so[dedup-1]",),
    ),
    Mutant(
        "checks do not look at the rows", "distributed/dispatch/exchange.py",
        "wrong = (expected != "
        "marks).any(1).nonzero()", "wrong = (expected != expected).any(1).nonzero()",
        (f"{DISPATCHERS}::test_rows_that_change_under_way_are_noticed_on_all_ranks",),
    ),
    Mutant(
        "every rank says that its block of experts is the first", "distributed/local_shard.py",
        "slice_.offsets[dim] + start, *slice_.offsets", "slice_.offsets[dim], *slice_.offsets",
        ("tests/distributed/checkpoint/test_any_layout.py::test_every_layout_loads_every_other",),
    ),
    Mutant(
        "checksums of a checkpoint are not compared", "distributed/checkpoint/format.py",
        "if found != "
        "expected.blake2b:", "if False:", (f"{CHECKPOINT}::test_a_damaged_file_is_found",),
    ),
    Mutant(
        "a resumed optimizer forgets how many steps it made", "train/state.py",
        "step + (updates - 1)", "step",
        ("tests/train/test_parity.py::test_resumed_equals_uninterrupted_bit_for_bit",),
    ),
    Mutant(
        "sharded gradients are not summed over replicas", "distributed/sharding.py",
        'axes = (axis,) if mesh.layout.dp_replicate == 1 else ("dp_replicate", '
        'axis)', "axes = (axis,)",
        (f"{SHARDING}::test_sharded_weights_make_the_same_steps[4-mesh1]",),
    ),
    Mutant(
        "what was gathered before an update is used after it", "distributed/sharding.py",
        "        free_gathered(model)\n", "",
        (f"{SHARDING}::test_a_pass_without_a_backward_leaves_nothing_gathered_in_a_checkpoint[repeated]",),
    ),
    Mutant(
        "a recomputed step routes anew", "model/execution/recompute.py",
        "index = save_decision(lambda: greatest(scores.detach(), count))", "index = greatest(scores.detach(), count)",
        ("tests/model/test_recompute.py::test_a_second_run_that_rounds_otherwise_decides_as_the_first[x_moe-full]",),
    ),
    Mutant(
        "a recomputed router's kernel chooses anew", "model/execution/recompute.py",
        "return choose(saved.save(lambda: None))", "return choose(None)",
        ("tests/kernels/fused/test_router.py::test_a_second_run_takes_the_first_ones_experts[selective]",),
    ),
    Mutant(
        "experts that move leave their moments behind", "distributed/placement/move.py",
        "state[key] = plan.exchange(state[key])", "state[key] = torch.zeros_like(parameter)",
        (f"{MOVING}::test_weights_and_moments_go_together_wherever_they_go[2]",),
    ),
    Mutant(
        "copies of an expert keep their own gradients", "distributed/placement/replicas.py",
        "pending.append(dist.all_reduce(shared.sum_X, group=self._group, "
        "async_op=True))", "pending.append(None)",
        (f"{MOVING}::test_copies_answer_as_the_one_expert_would[dedup]",),
    ),
    Mutant(
        "the loss is divided by this rank's counted targets, not by all ranks'", "train/micro_batches.py",
        "    dist.all_reduce(total)\n", "",
        (f"{MASKS}::test_the_loss_is_the_mean_over_counted_targets_on_every_layout",),
    ),
    Mutant(
        "padding is a target", "train/micro_batches.py", " & (of_targets_BS >= 0)", "",
        (f"{MASKS}::test_documents_train_as_if_each_were_alone_on_every_layout",),
    ),
    Mutant(
        "positions go on across documents", "model/documents.py",
        "(torch.arange(num_rows) - first_X[run_T])", "(torch.arange(num_rows) % length)",
        (f"{DOCUMENTS}::test_a_document_is_what_it_would_be_alone[moeut-learned]",),
    ),
    Mutant(
        "a position sees its whole document, later ones too", "model/documents.py", ".tril_()", "",
        (f"{DOCUMENTS}::test_a_document_is_what_it_would_be_alone[dense-rotary]",),
    ),
    Mutant(
        "padding takes places in a capacity", "model/routers/capacity.py",
        "asked_TK = real_TK if asked_TK is None else asked_TK & real_TK", "pass",
        (f"{DOCUMENTS}::test_padding_takes_no_place_in_a_capacity",),
    ),
    Mutant(
        "documents weigh alike in a loss, whatever their length", "model/balance.py",
        'rows_DB = sums["document_rows"].to(', 'rows_DB = (sums["document_rows"] > 0).to(',
        (f"{DOCUMENTS}::test_a_loss_over_documents_is_the_mean_of_their_own",),
    ),
    Mutant(
        "a prompt's tokens are learned", "data_pipeline/make/tasks.py",
        "num_prompt_tokens=sum(map(len, prompt))", "num_prompt_tokens=0",
        ("tests/data_pipeline/make/test_prompts.py",),
    ),
    Mutant(
        "documents that differ in their prompts alone are repeats", "data_pipeline/make/tasks.py",
        "    if document.prompt:\n", "    if False:\n",
        ("tests/data_pipeline/make/test_prompts.py::test_a_repeat_is_of_both_parts_and_where_they_meet",),
    ),
    Mutant(
        "a line at the border of two splits is lost", "data_pipeline/sources/lines.py",
        "file.seek(offset - 1)", "file.seek(offset)",
        ("tests/data_pipeline/sources/test_sources.py::test_lines_that_begin_where_splits_do",),
    ),
    Mutant(
        "a read that failed goes on where the file stands, not where it stood", "data_pipeline/sources/remote.py",
        "        self._go_to(self._position)\n", "",
        ("tests/data_pipeline/sources/test_remote.py::test_a_read_goes_on_where_it_stood",),
    ),
    Mutant(
        "analysis: similarity over the experts of both",
        "satellites/science/analysis/similarity.py",
        "either_TRR = size_TR[:, :, None] + size_TR[:, None, :] - both_TRR",
        "either_TRR = size_TR[:, :, None] + size_TR[:, None, :]",
        (f"{COUNTS}::test_similarity_and_kept_experts",),
    ),
    Mutant(
        "analysis: kept experts relative to those before",
        "satellites/science/analysis/similarity.py",
        "both_TRR / size_TR[:, :, None]",
        "both_TRR / size_TR[:, None, :]",
        (f"{COUNTS}::test_similarity_and_kept_experts",),
    ),
    Mutant(
        "analysis: a token's number counts padding",
        "satellites/science/analysis/banks.py",
        "number_T = counted_T.cumsum(0) - 1",
        "number_T = torch.arange(len(counted_T)) % int(counted_T.sum())",
        (f"{COUNTS}::test_different_experts_of_an_item",),
    ),
    Mutant(
        "analysis: two experts in one bit",
        "satellites/science/analysis/items.py",
        "np.uint8(1 << bit)",
        "np.uint8(1)",
        (f"{COUNTS}::test_different_experts_of_an_item",),
    ),
    Mutant(
        "analysis: halted tokens are updated",
        "satellites/science/analysis/updates.py",
        "kept_T = counted_T & active_BS.flatten()",
        "kept_T = counted_T",
        (f"{COUNTS}::test_updates_are_those_of_a_plain_loop",),
    ),
    Mutant(
        "analysis: one quantile for all experts",
        "satellites/science/analysis/usage.py",
        "np.quantile(plain_RE, quantile, axis=0)",
        "np.quantile(plain_RE, quantile)",
        (f"{COUNTS}::test_experts_are_sorted_by_the_papers_rule",),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="mutants with this word in their name")
    parser.add_argument("--list", action="store_true", help="print their names and end")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.list or not chosen:
        print(
            "\n".join(mutant.name for mutant in chosen)
            or f"no mutant has {options.only!r} in its name"
        )
        raise SystemExit(0 if options.list else 2)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        raise SystemExit(try_all(chosen, copy_to(Path(folder) / "moebius")))


def try_all(mutants: list[Mutant], copy: Path) -> int:
    """Tries mutants and returns the exit code."""
    if misfits := [problem for mutant in mutants if (problem := misfit(mutant, copy))]:
        print("\n".join(misfits))
        return 2
    if (
        code := run_tests(sorted({test for mutant in mutants for test in mutant.tests}), copy)
    ) != 0:
        print(f"the tests do not pass without a mutant (exit code {code})")
        return 2
    worst = 0
    for mutant in mutants:
        started, file = time.monotonic(), copy / mutant.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
        code = run_tests(mutant.tests, copy, stop_early=True)
        file.write_text(whole, encoding="utf-8")
        verdict = {TESTS_FAILED: "killed", 0: "SURVIVED"}.get(
            code, f"tests cannot be run (exit code {code})"
        )
        worst = max(worst, {TESTS_FAILED: 0, 0: 1}.get(code, 2))
        print(f"{verdict:<9} {mutant.name}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants: " + ("all killed" if worst == 0 else "see above"))
    return worst


def misfit(mutant: Mutant, root: Path) -> str | None:
    """Returns why the mutant cannot be made, if so."""
    count = (root / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    return (
        None
        if count == 1
        else f"{mutant.name}: {mutant.old!r} is {count} times in {mutant.file}, not once"
    )


def copy_to(copy: Path) -> Path:
    """Copies the tracked files, and links the satellites beside them as packages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for satellite in copy.glob("satellites/*/pyproject.toml"):
        folder = satellite.parent
        (copy.parent / f"moebius_{folder.name}").symlink_to(folder)
    return copy


def run_tests(tests: tuple[str, ...] | list[str], copy: Path, *, stop_early: bool = False) -> int:
    """Returns pytest's exit code, with the copy as the package `moebius`."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",  # slow ones too
        *(["-x"] if stop_early else []),
        *tests,
    ]
    folders = [
        copy.parent,
        *copy.glob("satellites/*/tests"),
    ]  # the satellites' tests import helpers of theirs
    paths = os.pathsep.join(map(str, folders))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, TESTS_FAILED) or (done.returncode and not stop_early):
        print(done.stdout[-3000:], done.stderr[-2000:])
    return done.returncode


if __name__ == "__main__":
    main()
