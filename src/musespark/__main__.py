"""`python -m musespark`."""

from musespark.cli.main import main

if __name__ == "__main__":
    main()
