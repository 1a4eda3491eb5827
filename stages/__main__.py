# SPDX-License-Identifier: Apache-2.0
"""`flash-ladder` and `python -m flash_ladder`."""


def main() -> None:
    """Run the command line."""
    from .common.cli import app

    app()


if __name__ == "__main__":
    main()
