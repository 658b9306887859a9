"""The command line: `main` has the application, `commands` one file per group of commands."""
