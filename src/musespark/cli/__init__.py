"""The command line. Heavy imports happen inside commands, so that --help answers at once."""
