"""How fast, in how much memory: ours and the plain version in one run, with a record."""
