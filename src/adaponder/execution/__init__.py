"""How the rows of a recurrence are computed and kept: all of them with masks, or only the active ones."""
