"""Defines each command as a typed function that does one job and shows the result; ``cli.py`` parses the arguments."""
