"""The short form of the trial in fuzz/checkpoints.py."""

import pytest

from fuzz import checkpoints


@pytest.mark.usefixtures("one_thread")
def test_changed_checkpoints_are_read_or_refused():
    trial = checkpoints.run(inputs=250, seed=0)
    assert trial.refused > 50
    assert trial.counts["restored"] > 0
