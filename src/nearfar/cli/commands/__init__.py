"""The commands of `nearfar`, one file for each group; `nearfar.cli.main` lists them all."""
