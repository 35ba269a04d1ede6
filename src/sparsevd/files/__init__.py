"""Files that are whole or not there: atomic writes, locks, and what is read checked."""
