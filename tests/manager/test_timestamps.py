"""Outputs say when each token came, where that was asked for."""

from __future__ import annotations

import cbgen
from tests.helpers.models import tiny_model


def test_outputs_without_timestamps_say_so():
    outputs = cbgen.generate_batch(tiny_model("llama"), [[1, 2]], max_new_tokens=1)
    assert outputs["req_0"].timestamps is None


def test_timestamps_are_given_where_they_are_asked_for():
    outputs = cbgen.generate_batch(
        tiny_model("llama"), [[1, 2]], max_new_tokens=4, record_timestamps=True
    )
    output = outputs["req_0"]
    assert len(output.timestamps) == 4
    assert output.timestamps == sorted(output.timestamps)
    assert output.created_time < output.timestamps[0] <= output.timestamps[-1]
