"""Tokens: who may ask for what. A file keeps names, scopes and digests, never a token itself.

::

    # name  scope  digest of the token                      end, a UTC date or time (none: until the line is removed)
    ci      build  sha256:9f86d081884c7d659a2feaa0c55ad015…
    ci      build  sha256:60303ae22b998861bce3b28f33eec1be…  2027-01-31

One name may stand on several lines, so that an old token and its successor are valid side by side.

A digest is a plain SHA-256. A slow or salted hash protects passwords, which can be guessed; a token made here is 256
random bits, and no search finds those. A slow hash would only let strangers spend this machine's time.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, Self, get_args

from mlaprep.templates.errors import FieldProblem, SpecError

Scope = Literal["read", "build", "admin"]
"""What a caller may do. Each includes those before it."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MAX_TOKENS: Final = 256
"""Tokens of one file: each is compared with what a request brings."""
PREFIX: Final = "mlaprep_"
"""What a token made here starts with, so that scanners for leaked secrets know one."""

_LINE: Final = "a name, a scope (read, build or admin), sha256: and 64 hexadecimal digits, and perhaps a date"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """One line of a token file. ``expires`` is the time from which the token is no longer taken, in UTC."""

    name: str
    scope: Scope
    digest: str
    """SHA-256 of the token, 64 hexadecimal digits."""
    expires: datetime | None = None

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def is_valid(self, now: datetime | None = None) -> bool:
        return self.expires is None or (now or datetime.now(UTC)) < self.expires

    def line(self) -> str:
        """As it stands in a token file."""
        end = "" if self.expires is None else f"  {_spelled(self.expires)}"
        return f"{self.name}  {self.scope}  sha256:{self.digest}{end}"


@dataclass(frozen=True, slots=True)
class TokenList:
    """What a token file says, and which of its lines say nothing that is understood."""

    tokens: tuple[Token, ...] = ()
    faults: tuple[FieldProblem, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Each line for itself: a broken one is a fault and no token. No line is repeated in a fault."""
        tokens, faults = [], []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                tokens.append(_parse(words))
            except ValueError as error:
                faults.append(FieldProblem(f"line {number}", str(error), _LINE))
        if len(tokens) > MAX_TOKENS:
            faults.append(FieldProblem("lines", "too many tokens, those at the end have no effect", f"{MAX_TOKENS}"))
        return cls(tuple(tokens[:MAX_TOKENS]), tuple(faults))


def make_token(name: str, scope: str, expires: str | None = None) -> tuple[str, Token]:
    """A new token of 256 random bits, and what a token file keeps of it.

    Args:
        expires: a UTC date such as ``2027-01-31``, or a time such as ``2027-01-31T12:00:00Z``; None for no end.

    Raises:
        SpecError: a name, scope or end that cannot be.
    """
    problems = []
    if not _NAME.fullmatch(name):
        problems.append(
            FieldProblem("name", "text that is no name", "1 to 64 letters, digits, dots, dashes, underscores")
        )
    if scope not in SCOPES:
        problems.append(FieldProblem("scope", "a word that is no scope", "read, build or admin"))
    end = None
    try:
        end = None if expires is None else _time(expires)
    except ValueError as error:
        problems.append(FieldProblem("expires", str(error), "a date such as 2027-01-31, or 2027-01-31T12:00:00Z"))
    if end is not None and end <= datetime.now(UTC):
        problems.append(FieldProblem("expires", "a time that is past", "a time to come"))
    if problems or scope not in SCOPES:
        raise SpecError(problems)
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, Token(name, scope, digest_of(secret), end)


def digest_of(secret: str | bytes) -> str:
    """What a token file keeps of a token."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).hexdigest()


def find_token(secret: bytes, tokens: Iterable[Token]) -> Token | None:
    """The token that a request brought; None where it is unknown or past its end.

    All are compared, none of them in a time that depends on the digits: how long it takes tells nothing.
    """
    digest, now = digest_of(secret), datetime.now(UTC)
    found: Token | None = None
    for token in tokens:
        if hmac.compare_digest(digest, token.digest) and token.is_valid(now):
            found = token if found is None or token.allows(found.scope) else found
    return found


def _parse(words: Sequence[str]) -> Token:
    """Raises ValueError that says what is wrong, without the words."""
    if not 3 <= len(words) <= 4:
        raise ValueError(f"{len(words)} words")
    name, scope, digest = words[:3]
    matched = _DIGEST.fullmatch(digest)
    if not _NAME.fullmatch(name):
        raise ValueError("a first word that is no name")
    if scope not in SCOPES:
        raise ValueError("a second word that is no scope")
    if matched is None:
        raise ValueError("a third word that is no digest")
    return Token(name, scope, matched[1], _time(words[3]) if len(words) == 4 else None)


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("text that is no time") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _spelled(time: datetime) -> str:
    whole_day = (time.hour, time.minute, time.second, time.microsecond) == (0, 0, 0, 0)
    return time.strftime("%Y-%m-%d" if whole_day else "%Y-%m-%dT%H:%M:%SZ")
