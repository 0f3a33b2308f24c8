"""Why does this drafter not agree with this target? How its checkpoint was read, how often it is right, and whether
another reading of the same weights is right more often."""

from outrider.doctor.command import doctor_command
from outrider.doctor.diagnosis import Diagnosis
from outrider.doctor.examination import FULL, Effort, examine

__all__ = ["FULL", "Diagnosis", "Effort", "doctor_command", "examine"]
