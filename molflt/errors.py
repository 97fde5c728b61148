"""The one error, and the one warning, that a user of molflt is meant to read.

Everything that is the input's fault (a missing file, an unknown key, a damaged record) is raised as
`InputError` with one line that says what is wrong, where, and how to mend it. The command line prints
that line and exits with status 2; anything else is a fault of the library and keeps its traceback.
Input that works but is probably not what was meant gets an `InputWarning`, in the same form.
"""


class InputError(ValueError):
    """Input that molflt refuses: one line, naming what, where and the remedy.

    Input may put line breaks and control characters into its own names; they are shown by their codes.
    """

    def __init__(self, message: str) -> None:
        text = " ".join(message.split())
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


class InputWarning(UserWarning):
    """Input that molflt uses although it looks wrong: one line, as in `InputError`."""
