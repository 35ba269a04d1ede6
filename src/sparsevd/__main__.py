"""`python -m sparsevd`, as torchrun starts it: the command line."""

from sparsevd.cli import main

main()
