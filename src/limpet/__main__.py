"""`python -m limpet`, the same as the command `limpet`."""

from limpet.cli import main

if __name__ == "__main__":
    main()
