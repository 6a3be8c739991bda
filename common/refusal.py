"""What ends a run at a step that must not be made. No torch in here."""


class StepRefused(RuntimeError):
    """A step was refused before anything was changed; the message names the cause and the cure.

    Every rank raises it, so what was learned until then can still be saved.
    """
