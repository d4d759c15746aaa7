"""What is launched, and what every kind of cluster can do with it."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NoReturn, Protocol

from aamoe_jax.config import ConfigError, in_bucket
from launch.cluster.exits import Retry

READERS = ("evaluate", "choose", "generate", "inspect")
FOLDER_FLAGS = {"launch.train": "--run_dir", **{f"launch.{name}": "--checkpoint" for name in READERS}}
"""The programs that can be launched, and the flag of each that names the run folder."""


def refuse(owner: Any, field: str, wanted: str) -> NoReturn:
    """Raises a ConfigError that names a field, its value and what to do."""
    raise ConfigError(f"--{field} = {getattr(owner, field)!r}: {wanted}")


ONE_LINE = "must be one line of printable characters"


def require_one_line(owner: Any, besides: str | None = None) -> None:
    """Refuses fields of text with line breaks and other characters that a script cannot show; `besides`: but one."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, str) and field.name != besides and not value.isprintable():
            refuse(owner, field.name, ONE_LINE)


def check_name(name: str | None) -> str:
    """The name of a job, if it can be one: nodes, pods and folders are named after it."""
    if name is None or not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(f"--name = {name!r}: must be small letters, digits and dashes, at most 40, a letter first")
    return name


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a program on every host of a cluster."""

    program: str
    """A name in FOLDER_FLAGS."""
    arguments: tuple[str, ...]
    """Its flags."""
    name: Annotated[str, "Name of the job: small letters, digits and dashes, at most 40, a letter first."]
    python: Annotated[str, "Python interpreter on the hosts."] = "python3"
    workdir: Annotated[str, "Folder of this repository on the hosts."] = "/opt/aamoe_jax"
    min_free_gib: Annotated[int, "GiB that must be free in the run folder's file system before the start."] = 20
    max_retries: Annotated[int, "Retries after failures that may pass; preemptions are not counted."] = 3

    def __post_init__(self) -> None:
        require_one_line(self)
        for argument in self.arguments:
            if not argument.isprintable():
                raise ConfigError(f"{argument!r}: {ONE_LINE}")
        check_name(self.name)
        if self.program not in FOLDER_FLAGS:
            close = difflib.get_close_matches(self.program, FOLDER_FLAGS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(FOLDER_FLAGS)}"
            raise ConfigError(f"{self.program!r} is not a program that can be launched; {hint}")
        for field in ("max_retries", "min_free_gib"):
            if getattr(self, field) < 0:
                refuse(self, field, "must be at least 0")
        flag, folder = FOLDER_FLAGS[self.program], self.run_dir
        if not in_bucket(flag, folder) and not folder.startswith("/"):
            raise ConfigError(
                f"{flag} = {folder!r}: must begin with /, in a file system that all hosts share, or gs://"
            )

    @property
    def run_dir(self) -> str:
        """The run folder, as all hosts see it."""
        flag = FOLDER_FLAGS[self.program]
        given = [argument for argument in self.arguments if argument.startswith(f"{flag}=")]
        if not given:
            raise ConfigError(f"{flag} is missing: add {flag}=FOLDER, on a file system that all hosts share, after --")
        return given[-1].removeprefix(f"{flag}=")

    def command(self, processes: int) -> list[str]:
        """What every process of the job runs."""
        command = [self.python, "-m", self.program, *self.arguments]
        return command if processes == 1 else [*command, "--distributed=auto"]

    def probe(self, devices: int) -> list[str]:
        """The health probe of a host that must have so many JAX devices."""
        return [
            *(self.python, "-m", "launch.cluster.probe", f"--devices={devices}", f"--run_dir={self.run_dir}"),
            f"--min_free_gib={self.min_free_gib}",
        ]


class Cluster(Protocol):
    """One kind of cluster. Its settings are the fields of a frozen dataclass; what it does is bash."""

    supervised: ClassVar[frozenset[Retry]]
    """What the supervisor must see to; the cluster sees to the rest by itself."""

    @property
    def devices(self) -> int:
        """`jax.device_count()` of the job."""
        ...

    @property
    def slices(self) -> int | None:
        """How many TPU slices these are; None: they are no TPUs."""
        ...

    def run(self, job: Job, avoided: Sequence[str]) -> str:
        """A script that probes every host, runs the job to its end and exits with the job's exit code.

        It prints `unhealthy NAME: why` for what the next attempt must avoid, and leaves out what is in `avoided`. Where
        the job already runs, the script waits for its end.
        """
        ...

    def health(self, job: Job) -> str:
        """A script that probes every host and starts nothing."""
        ...

    def logs(self, name: str) -> str:
        """A script that follows what the first process of the job called `name` prints."""
        ...

    def status(self, name: str) -> str:
        """A script that shows how the job and its hosts are."""
        ...

    def stop(self, name: str) -> str:
        """A script that stops the job, saved, and gives back what was taken for it."""
        ...
