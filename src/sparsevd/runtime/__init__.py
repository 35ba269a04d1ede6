"""Running a pruned network on an ordinary CPU."""
