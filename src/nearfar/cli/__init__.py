"""The command line, one file a command family; `main` holds the application."""

__all__: list[str] = []
