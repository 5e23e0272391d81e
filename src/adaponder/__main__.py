"""``python -m adaponder`` runs the command line, also where the command ``adaponder`` is not installed."""

from adaponder.cli import main

if __name__ == "__main__":
    main()
