"""The proof that speculative output is what the target alone says: run it on any target with any drafter."""

from outrider.certify.certificate import Certificate
from outrider.certify.command import certify_command
from outrider.certify.proof import certify
from outrider.certify.questions import FULL, QUICK, Effort

__all__ = ["FULL", "QUICK", "Certificate", "Effort", "certify", "certify_command"]
