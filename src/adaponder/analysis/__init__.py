"""Tables in, figures out: nothing in this room runs a model to draw."""
