"""One instance's process: its loop, its hold on the front, whom it knows."""
