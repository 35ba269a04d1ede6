"""The loop that trains a network, the recipe it follows, and the state it can go on from."""
