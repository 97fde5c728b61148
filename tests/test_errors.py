"""Errors about input are one printable line, whatever the input's own names hold."""

from molflt.errors import InputError


def test_line_breaks_and_control_characters_are_shown_by_their_codes() -> None:
    message = str(InputError("unknown key 'a\nb\x1b[31m\x00' in Å-ö.yaml"))
    assert message == "unknown key 'a b\\x1b[31m\\x00' in Å-ö.yaml"
