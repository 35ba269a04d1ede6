"""What the commands do: train in a folder, read it again, compress it, compare methods."""
