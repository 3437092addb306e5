"""Counting and Prometheus' text format."""

import math

from hypothesis import given
from hypothesis import strategies as st

from openinfer_server.observability.exposition import Histogram, render_family, render_histogram


@given(st.lists(st.floats(0, 20)))
def test_histogram_counts_values_up_to_each_bound(values):
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    lines = list(render_histogram("h", "text", histogram))
    for bound, line in zip((0.1, 1.0, 10.0, math.inf), lines[2:6], strict=True):
        assert int(line.rsplit(" ", 1)[1]) == sum(value <= bound for value in values)
    assert float(lines[6].split(" ")[1]) == histogram.total
    assert lines[7] == f"h_count {len(values)}"


def test_same_value_several_times_is_one_call():
    once, often = Histogram((1.0,)), Histogram((1.0,))
    often.observe(0.5, 3)
    for _ in range(3):
        once.observe(0.5)
    assert (once.counts, once.total) == (often.counts, often.total)


def test_labels_are_escaped():
    lines = list(render_family("m", "gauge", "text", [((("a", 'x"\\\n'), ("b", "")), 1)]))
    assert lines[2] == 'm{a="x\\"\\\\\\n",b=""} 1'


def test_labels_of_a_histogram_stand_before_the_bound():
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    assert list(render_histogram("h", "text", histogram, (("model_name", "m"),)))[2:] == [
        'h_bucket{model_name="m",le="1.0"} 1',
        'h_bucket{model_name="m",le="+Inf"} 1',
        'h_sum{model_name="m"} 0.5',
        'h_count{model_name="m"} 1',
    ]
