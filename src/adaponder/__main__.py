"""``python -m adaponder`` is the command line, installed or not."""

from adaponder.cli import main

if __name__ == "__main__":
    main()
