"""What people read about a network."""
