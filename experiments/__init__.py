"""The paper's claims as a queue of training runs: which have a record, which come next, and what they cost."""
