"""What the search looks through: layouts, chunks, schedules, places of the stash."""
