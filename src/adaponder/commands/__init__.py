"""The commands as typed functions: each does one job and shows the result; parsing lives in cli/."""
