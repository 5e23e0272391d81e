"""The commands as typed functions: each does one job and shows the result; ``cli.py`` parses the command line."""
