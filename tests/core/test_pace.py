"""What a load takes, from what was measured, and how much of one is worth waiting for."""

from __future__ import annotations

import pytest

from engine.core import Connector
from engine.core.pace import Line, Pace


def measured(*pairs):
    line = Line()
    for size, seconds in pairs:
        line.add(size, seconds)
    return line


def test_a_line_tells_latency_and_seconds_a_unit_apart_where_sizes_differ():
    line = measured(*[(size, 0.5 + 0.01 * size) for size in (10, 200, 30, 100, 80)])
    assert line.fitted() == pytest.approx((0.5, 0.01))
    assert line.predict(1000) == pytest.approx(10.5)


def test_a_line_goes_by_the_unit_where_all_sizes_were_alike_and_is_free_where_there_were_none():
    assert measured((100, 2.0), (100, 4.0)).fitted()[0] == 0.0
    assert measured((100, 3.0)).predict(50) == pytest.approx(1.5)
    assert Line().predict(100) == 0.0
    assert not Line()
    assert measured((10, 5.0), (100, 1.0)).predict(100) >= 0.0, "noise makes nothing cheaper than it is large"


def test_the_newest_measurements_count_most():
    line = measured(*[(100, 10.0)] * 20, *[(100, 1.0)] * 20)
    assert line.predict(100) == pytest.approx(1.0, rel=0.2)


@pytest.fixture
def pace():
    """A token takes 0.1 s to compute."""
    one = Pace()
    one.committed(0.0, 16, 1)
    one.committed(1.6, 16, 1)
    return one


@pytest.mark.parametrize(
    ("cached", "costs", "upto"),
    [
        (0, ((160, 0.1), (320, 0.2)), 320),
        (0, ((160, 0.1), (320, 99.0)), 160),
        (0, ((160, 50.0), (320, 50.1)), 0),
        (0, ((160, 20.0), (320, 20.1)), 320),  # what follows makes up for it
        (160, ((160, 50.0), (320, 50.1)), 320),  # what is here need not be loaded
        (160, ((160, 0.1), (320, 50.0)), 160),
        (80, ((160, 0.1), (320, 99.0)), 160),
        (320, ((160, 0.1), (320, 0.2)), 320),
    ],
)
def test_of_a_load_from_several_tiers_that_part_is_chosen_which_has_the_prompt_soonest(pace, cached, costs, upto):
    assert pace.worth(Connector(), cached, 320, costs) == upto


def test_a_load_that_needs_its_latency_is_worth_it_for_many_tokens_only(pace):
    source = Connector()
    for tokens in (20, 200, 50, 400):
        pace.loaded(source, 5.0 + 0.001 * tokens, tokens)
    assert pace.worth(source, 0, 32) == 0
    assert pace.worth(source, 0, 64) == 64
    assert pace.worth(source, 48, 64) == 48
    stats = pace.stats_of(source)
    assert stats["load_latency_seconds"] == pytest.approx(5.0)
    assert pace.stats() == {"computing_seconds_per_token": pytest.approx(0.1)}


def test_what_was_never_measured_is_tried(pace):
    assert pace.worth(Connector(), 0, 160) == 160
    assert Pace().worth(Connector(), 0, 160, ((160, 1000.0),)) == 160
