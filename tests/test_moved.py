"""The old module names of the first edition: they still lead to the same things, and say where these are now."""

import importlib
import sys

import pytest

from sparsevd.moved import MOVED


@pytest.mark.parametrize(
    ("old", "name"), [("convert", "prune"), ("data", "load"), ("models", "MODELS"), ("pack", "save")]
)
def test_old_modules_lead_to_the_new_ones(old, name):
    module = importlib.import_module(f"sparsevd.{old}")
    new = importlib.import_module(MOVED[f"sparsevd.{old}"][0])
    with pytest.warns(DeprecationWarning, match=f"sparsevd.{old}.{name} is now {new.__name__}"):
        found = getattr(module, name)
    assert found is getattr(new, name)


def test_from_import_works_and_warns():
    with pytest.warns(DeprecationWarning, match=r"sparsevd.models.lenet_300_100 is now"):
        from sparsevd.models import lenet_300_100
    assert callable(lenet_300_100)
    assert "sparsevd.data" in sys.modules


def test_what_never_was_there_is_an_attribute_error():
    from sparsevd import data

    with pytest.raises(AttributeError):
        _ = data.no_such_thing
