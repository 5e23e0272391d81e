"""Contains one folder per operation; all its implementations have the signature of the plain one."""
