"""Size classes, buckets and alignments, seen from outside."""

from __future__ import annotations

import pytest
from doubles.memory import CountingBackend
from helpers import MakePool
from hypothesis import given, settings
from hypothesis import strategies as st

import zcpool

KIB, MIB = 1 << 10, 1 << 20

# As likely 100 bytes as 100 MiB, and often at the edge of a class.
SIZES = st.one_of(
    st.integers(1, 2048),
    st.builds(
        lambda power, eighths, off: max(1, (8 + eighths) * (1 << power) // 8 + off),
        st.integers(5, 26),
        st.integers(0, 7),
        st.integers(-2, 2),
    ),
    st.integers(0, 27).flatmap(lambda power: st.integers(1 << power, 2 << power)),
)
few = settings(max_examples=20)


def capacity(backend_name: str, nbytes: int, **options: int) -> int:
    with zcpool.Pool(backend_name, **options) as pool, pool.acquire(nbytes) as buf:
        return buf.capacity


@given(nbytes=SIZES)
def test_the_capacity_holds_the_size_and_is_at_most_an_eighth_or_64_bytes_more(backend_name: str, nbytes: int) -> None:
    assert nbytes <= capacity(backend_name, nbytes) <= nbytes + max(nbytes // 8, 64)


@given(nbytes=SIZES)
def test_asking_for_a_capacity_gives_that_capacity(backend_name: str, nbytes: int) -> None:
    granted = capacity(backend_name, nbytes)
    assert capacity(backend_name, granted) == granted


@given(sizes=st.lists(SIZES, min_size=2, max_size=2))
def test_a_larger_size_has_no_smaller_capacity(backend_name: str, sizes: list[int]) -> None:
    small, large = sorted(sizes)
    assert capacity(backend_name, small) <= capacity(backend_name, large)


@pytest.mark.parametrize("power", range(9, 24))
def test_there_are_eight_classes_to_a_doubling(backend_name: str, power: int) -> None:
    low = 1 << power
    eighth = low // 8
    sizes = [low + i * eighth + extra for i in range(8) for extra in (1, eighth // 2, eighth)]
    assert {capacity(backend_name, n) for n in sizes} == {low + i * eighth for i in range(1, 9)}


@pytest.mark.parametrize(
    ("edge", "below", "above"),
    [(MIB, "small", "medium"), (4 * MIB, "medium", "large"), (16 * MIB, "large", "huge")],
)
def test_the_edge_of_a_bucket_belongs_to_the_upper_one(pool: zcpool.Pool, edge: int, below: str, above: str) -> None:
    class_below = edge // 16 * 15
    assert [pool.acquire(n).bucket for n in (class_below, edge)] == [below, above]


@pytest.mark.parametrize("edge", [MIB, 4 * MIB, 16 * MIB])
def test_the_bucket_follows_the_capacity_and_not_the_size(pool: zcpool.Pool, edge: int) -> None:
    buf = pool.acquire(edge // 16 * 15 + 1)
    assert buf.capacity == edge
    assert buf.bucket == pool.acquire(edge).bucket


def test_a_view_shows_the_bytes_asked_for(pool: zcpool.Pool) -> None:
    for nbytes in (1, 63, 64, 65, 1000, 4097, MIB + 1):
        with pool.acquire(nbytes) as buf:
            assert (buf.nbytes, len(buf), memoryview(buf).nbytes) == (nbytes, nbytes, nbytes)


def test_blocks_in_use_do_not_overlap(pool: zcpool.Pool) -> None:
    held = [pool.acquire(n) for n in (1, 64, 65, 700, 5000, 4096, 100_000, 300_000, MIB, 3 * MIB) * 5]
    spans = sorted((buf.address, buf.address + buf.capacity) for buf in held)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


@pytest.mark.parametrize("alignment", [1, 32, 64, 128, 512, 4 * KIB, 8 * KIB, 64 * KIB, 2 * MIB])
@few
@given(nbytes=SIZES)
def test_a_pool_of_an_alignment_rounds_at_most_to_it_or_by_an_eighth(
    backend_name: str, alignment: int, nbytes: int
) -> None:
    granted = capacity(backend_name, nbytes, alignment=alignment)
    assert granted % alignment == 0
    assert nbytes <= granted <= nbytes + max(nbytes // 8, 64, alignment)


@pytest.mark.parametrize("granularity", [64, 256, 4096, 64 * KIB])
@few
@given(nbytes=SIZES)
def test_a_coarse_backend_rounds_at_most_to_its_granule_or_by_an_eighth(granularity: int, nbytes: int) -> None:
    backend = CountingBackend(granularity=granularity)
    with zcpool.Pool(backend) as pool, pool.acquire(nbytes) as buf:
        assert buf.capacity % granularity == 0
        assert buf.offset % granularity == 0
        assert nbytes <= buf.capacity <= nbytes + max(nbytes // 8, granularity)
    backend.check_empty()


@pytest.mark.parametrize("nbytes", [5 * MIB, 100 * KIB])
def test_a_block_of_the_next_class_serves_before_the_backend_is_asked(
    make_pool: MakePool, counting: CountingBackend, nbytes: int
) -> None:
    pool = make_pool(counting, arena_buckets="none")
    larger = pool.acquire(nbytes)
    address = larger.address
    larger.release()
    calls = counting.calls
    served = pool.acquire(nbytes // 10 * 9)
    assert (served.address, counting.calls) == (address, calls)
    assert served.capacity <= nbytes // 10 * 9 * 1.25 + 64


def test_a_block_two_classes_up_does_not_serve(make_pool: MakePool, counting: CountingBackend) -> None:
    pool = make_pool(counting)
    pool.acquire(8 * MIB).release()
    assert pool.acquire(6 * MIB).capacity == 6 * MIB
    assert counting.allocations == 2


@pytest.mark.parametrize("bad", [0, -1, 3, 96, 4 << 20, 1 << 63, 1 << 64])
def test_an_alignment_that_is_not_a_power_of_two_up_to_2_mib_is_refused(pool: zcpool.Pool, bad: int) -> None:
    with pytest.raises(ValueError, match="alignment"):
        pool.acquire(100, alignment=bad)
    with pytest.raises(ValueError, match="alignment"):
        zcpool.Pool(alignment=bad)


@pytest.mark.parametrize("bad", ["64", 64.0, b"64", [64]])
def test_an_alignment_that_is_not_an_integer_is_a_type_error(pool: zcpool.Pool, bad: object) -> None:
    with pytest.raises(TypeError):
        pool.acquire(100, alignment=bad)  # type: ignore[arg-type, unused-ignore]
