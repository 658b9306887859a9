"""The commands of `nearfar`, one file a group; each group has a `register` that adds it to the app."""

__all__: list[str] = []
