"""`python -m ramstream`."""

from ramstream.cli import main

if __name__ == "__main__":
    main()
