"""The entry point of the outrider command, and `python -m outrider`. It imports next to nothing, so that Ctrl-C is
heeded quietly from the first moment on."""

from outrider.startup import importing


def main() -> None:
    with importing():
        from outrider.cli import main as run
    run()


if __name__ == "__main__":
    main()
