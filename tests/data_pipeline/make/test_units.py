"""Units contain each split once, interleave sources, and share the sample fairly."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.make import units as plan
from moebius.data_pipeline.make.units import Unit, interleaved, plan_units, sample_shares
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.data_pipeline.sources.documents import InputSplit, Role


def split(source: str, number: int, num_bytes: int, role: Role = "both") -> InputSplit:
    return InputSplit(
        source, f"/{source}/{number}.txt", ".txt", 0, num_bytes, num_bytes, role, num_bytes
    )


def units(sizes: dict[str, list[int]], role: Role = "both") -> list[Unit]:
    return [
        Unit(source, number, (split(source, number, size, role),))
        for source, all_sizes in sizes.items()
        for number, size in enumerate(all_sizes)
    ]


SIZES = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 1000), min_size=1, max_size=12), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_sources_are_interleaved_by_what_is_done_of_each(sizes):
    """At any position, the fractions of two sources differ by less than a unit of each."""
    found = interleaved(units(sizes))
    assert sorted(found, key=lambda unit: (list(sizes).index(unit.source), unit.number)) == units(
        sizes
    )
    done = dict.fromkeys(sizes, 0.0)
    steps = {
        name: max(size + 1 for size in of) / sum(s + 1 for s in of) for name, of in sizes.items()
    }
    numbers = dict.fromkeys(sizes, 0)
    for unit in found:
        assert unit.number == numbers[unit.source], "in the order of its source"
        numbers[unit.source] += 1
        total = sum(size + 1 for size in sizes[unit.source])
        done[unit.source] += (unit.num_bytes + 1) / total
        for one in sizes:
            for other in sizes:
                assert done[one] - done[other] <= (steps[one] + steps[other]) / 2 + 1e-9


def test_small_files_of_a_source_of_many_share_units(monkeypatch):
    monkeypatch.setattr(plan, "MAX_SPLITS_APART", 4)
    sizes = [30, 30, 30, 200, 10, 10, 80, 1]
    splits = [split("a", number, size) for number, size in enumerate(sizes)]
    bundles = list(plan._bundles(splits, 100))
    found = [[one.num_bytes for one in bundle] for bundle in bundles]
    assert found == [[30, 30, 30], [200], [10, 10, 80], [1]]
    splits[1] = replace(splits[1], role="validation")
    assert [len(bundle) for bundle in plan._bundles(splits, 100)] == [1, 1, 1, 1, 3, 1]
    assert [len(bundle) for bundle in plan._bundles(splits[:4], 100)] == [1, 1, 1, 1]
    unit = Unit("a", 0, bundles[2])
    assert unit.num_bytes == 100
    assert unit.label == "/a/4.txt[0:10] to /a/6.txt[0:80] (3 files)"
    assert unit.local_label == "4.txt[0:10] to 6.txt[0:80] (3 files)"


def test_validation_comes_first_and_equal_sources_take_turns_in_their_order(tmp_path):
    for name in ("t1", "t2", "v"):
        (tmp_path / f"{name}.txt").write_text(name)
    first = SourceConfig(name="a", input=(f"{tmp_path}/t1.txt",))
    second = SourceConfig(
        name="b", input=(f"{tmp_path}/t2.txt",), validation_input=(f"{tmp_path}/v.txt",)
    )
    config = PrepareConfig(sources=(first, second))
    found = [(unit.source, unit.number, unit.role) for unit in plan_units(config)]
    assert found == [("b", 0, "validation"), ("a", 0, "both"), ("b", 1, "train")]
    for names in ("ab", "ba"):
        alike = interleaved(units({name: [10, 10, 10] for name in names}))
        assert [unit.source for unit in alike] == list(names * 3)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, sample_bytes=st.integers(1, 5000))
def test_the_sample_is_as_large_as_was_asked_for_and_from_all(sizes, sample_bytes):
    planned = units(sizes)
    shares = sample_shares(planned, sample_bytes)
    assert shares.keys() == set(range(len(planned)))
    total = sum(unit.num_bytes for unit in planned)
    assert sum(shares.values()) >= min(sample_bytes, total)
    assert sum(shares.values()) <= sample_bytes + 2 * len(planned)  # at least one byte of each
    largest = max(unit.num_bytes for unit in planned)
    for index, unit in enumerate(planned):
        for other, beside in enumerate(planned):
            if unit.num_bytes >= beside.num_bytes:
                assert shares[index] >= shares[other] - 1
        assert unit.num_bytes == largest or shares[index] <= max(1, unit.num_bytes)


def test_the_sample_is_of_no_validation_and_of_so_many_units_at_most(monkeypatch):
    monkeypatch.setattr(plan, "MAX_SAMPLED_UNITS", 5)
    planned = units({"v": [9] * 3}, "validation") + units({"a": [50] * 20})
    shares = sample_shares(planned, 100)
    assert sorted(shares) == [3, 7, 11, 15, 19]  # spread over all units
    assert set(shares.values()) == {20}
    assert sample_shares(units({"v": [9]}, "validation"), 100) == {}
