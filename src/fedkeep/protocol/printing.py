"""Text from outside, made safe to print on a terminal."""

import unicodedata

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of characters that move the cursor, change colours, hide or reorder what is shown."""


def printable(text: str) -> str:
    r"""Escape whatever is not plainly shown: control characters, escape sequences, overrides.

    Parameters
    ----------
    text
        Anything that came from outside.

    Returns
    -------
    str
        The same with each such character as its escape; spaces stay.

    Examples
    --------
    >>> print(printable("a\x1b[31mred\u202e\n"))
    a\x1b[31mred\u202e\n
    """
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in _UNSAFE else one
        for one in text
    )
