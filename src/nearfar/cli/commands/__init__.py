"""The commands of `nearfar`, one file per group; each has a `register` that adds its commands to the app."""

__all__: list[str] = []
