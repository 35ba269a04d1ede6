"""The short form of the trials of writers; the long form is `make fuzz`."""

from fuzz import writers


def test_killed_writers_leave_a_whole_file_and_nothing_else():
    assert writers.run_kills(8, seed=0).inputs == 8


def test_writers_at_one_time_do_not_disturb_each_other():
    assert writers.run_concurrent(48, seed=0).inputs >= 48


def test_full_disks_leave_whole_files_and_nothing_else():
    assert writers.run_full_disk(40, seed=0, mount=False).refused > 20
