"""`python -m nearfar`, for launchers that start modules."""

from nearfar.cli.main import main

if __name__ == "__main__":
    main()
