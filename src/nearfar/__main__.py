"""`python -m nearfar`, for launchers that start modules."""

from nearfar.cli import main

if __name__ == "__main__":
    main()
