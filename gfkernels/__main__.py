"""`python -m gfkernels`: the command line."""

from gfkernels.cli import main

if __name__ == "__main__":
    main()
