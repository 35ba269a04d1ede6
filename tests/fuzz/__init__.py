"""Hostile and broken input, wrong shapes, two writers, kills and full disks, in numbers.

Each module has `run(inputs, seed)`, which makes inputs from the seed, gives them to the product and returns a `Trial`.
`tests/test_fuzz.py` runs a few of each; `make fuzz` runs the long form: see `__main__.py`.
"""
