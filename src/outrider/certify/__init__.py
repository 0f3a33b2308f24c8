"""The proof that speculative output is what the target alone says: run it on any target with any drafter."""

from outrider.certify.certificate import Certificate
from outrider.certify.command import certify_command
from outrider.certify.proof import certify

__all__ = ["Certificate", "certify", "certify_command"]
