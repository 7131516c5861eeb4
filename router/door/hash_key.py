"""`python -m router hash-key`: what to write into a file of keys in place of a key."""

import sys
from typing import Final, TextIO

from router.door.visitor import digest_of

KEY_CHARACTERS_MIN: Final = 16
"""Shorter ones can be found by trying, if their hash becomes known."""

KEY_CHARACTERS_MAX: Final = 4096

EXIT_USAGE: Final = 2


def hash_key(keys: TextIO, out: TextIO) -> int:
    """Read one key and print its hash; exit code 2 for what is no good key."""
    key = keys.read(KEY_CHARACTERS_MAX + 1).rstrip("\r\n")
    if not KEY_CHARACTERS_MIN <= len(key) <= KEY_CHARACTERS_MAX or not key.isascii():
        sys.stderr.write(
            f"error: give one key of {KEY_CHARACTERS_MIN} to {KEY_CHARACTERS_MAX} ASCII characters "
            "on standard input, for example: openssl rand -base64 32 | tee key | python -m router "
            "hash-key\n"
        )
        return EXIT_USAGE
    if key.split() != [key]:
        sys.stderr.write("error: a key holds no white space\n")
        return EXIT_USAGE
    out.write(f"{digest_of(key).hex()}\n")
    return 0
