"""The short form of the trials in `fuzz`; `make fuzz` is the long one."""

import pytest

from fuzz import kernel_calls
from sparsevd import kernels


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not built here")
def test_kernels_take_what_fits_and_refuse_the_rest():
    trial = kernel_calls.run(600, seed=0)
    assert trial.inputs == 600
    assert trial.refused > 100
