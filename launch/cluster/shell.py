"""Bash, written by programs: what a launcher does is a script, so that what is shown is what is run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from launch.cluster import exits

PROLOGUE = f"""\
set -Eeuo pipefail
# A command that fails ends the script and is named; what the job itself ended with is passed on by `exit`.
failed() {{
  local command=${{2:-$3}}
  if [ "$1" != {exits.UNLAUNCHED.code} ]; then echo "error: exit code $1 of: ${{command:0:200}}" >&2; fi
  exit {exits.UNLAUNCHED.code}
}}
trap 'failed "$?" "${{FUNCNAME[0]:+${{FUNCNAME[0]}} $*}}" "$BASH_COMMAND"' ERR"""

WORST = f"""\
# The exit code of a job whose hosts ended with those on standard input, one a line.
worst() {{
  local codes code
  codes=$(cat)
  for code in {" ".join(str(row.code) for row in exits.TABLE)}; do
    if grep -qx "$code" <<<"$codes"; then return "$code"; fi
  done
  return {exits.LOST}
}}"""


def words(*parts: str) -> str:
    """A command of literal words, each quoted where it must be."""
    return shlex.join(parts)


def within(environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The words of a command with variables set for it; `env` becomes the command, so that signals reach it."""
    return [*(["env"] if environment else []), *(f"{name}={value}" for name, value in environment.items()), *command]


def lines(*parts: str) -> str:
    """The same with every flag on a line of its own, for people to read."""
    return "".join((" \\\n  " if part.startswith("--") else " ") + shlex.quote(part) for part in parts).lstrip()


def heredoc(command: str, text: str, then: str = "") -> str:
    """A command that reads `text` on standard input; `then` follows on its own line."""
    end = "END"
    while end in text.split("\n"):
        end += "_"
    return f"{command} <<'{end}' {then}".rstrip() + f"\n{text.rstrip()}\n{end}"


def script(*blocks: str) -> str:
    """A script of blocks; empty ones are left out."""
    return "\n\n".join((PROLOGUE, *(block for block in blocks if block))) + "\n"


def either(codes: Sequence[int]) -> str:
    """A pattern of `case`."""
    return " | ".join(map(str, codes))
