"""More is asked for at once than can be done. Nothing is wrong with what was asked: it may be asked again."""


class OverloadError(Exception):
    """`retry_after`: seconds after which it may go better."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after
