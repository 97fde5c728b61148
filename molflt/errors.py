"""The one error a user of molflt is meant to read.

Everything that is the input's fault (a missing file, an unknown key, a damaged record) is raised as
`InputError` with one line that says what is wrong, where, and how to mend it. The command line prints
that line and exits with status 2; anything else is a fault of the library and keeps its traceback.
"""


class InputError(ValueError):
    """Input that molflt refuses: one line, naming what, where and the remedy."""
