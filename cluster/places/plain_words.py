"""What may stand in a manifest or a script that another system reads: plain words, or an error.

Quoting is done for every reader by its own rules (shlex, YAML's dumper), and where a text passes
through several shells nobody can quote it for all of them. So names, paths and values that become
part of a command line are held to letters, digits and a few signs that no shell, YAML or sbatch
takes for anything else.
"""

import re
from pathlib import PurePosixPath

from ..job import JobError

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+%=-]*")
_PATH = re.compile(r"/[A-Za-z0-9_.,:@/+-]*")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|K|M|G|T)?")

MAX_LABEL = 40  # KubeRay adds to a job's name and keeps below Kubernetes' 63


def plain_word(what: str, value: str) -> str:
    """Returns a word that no shell, YAML or sbatch takes for anything else.

    Raises:
        JobError: it holds another sign.
    """
    if not _WORD.fullmatch(value):
        raise JobError(f"{what} {value!r}: letters, digits and _ . , : @ / + % = - only")
    return value


def plain_path(what: str, value: str) -> str:
    """Returns an absolute path of plain signs that leads nowhere back up.

    Raises:
        JobError: it is another one.
    """
    if not _PATH.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise JobError(
            f"{what} {value!r}: an absolute path of letters, digits and _ . , : @ + - is needed"
        )
    return value


def dns_label(what: str, value: str) -> str:
    """Returns a name that Kubernetes takes for an object.

    Raises:
        JobError: it is none, or too long.
    """
    if len(value) > MAX_LABEL or not _DNS_LABEL.fullmatch(value):
        raise JobError(
            f"{what} {value!r}: lower-case letters, digits and '-', at most {MAX_LABEL}, beginning "
            "and ending with a letter or digit"
        )
    return value


def quantity(what: str, value: str) -> str:
    """Returns an amount of memory as Kubernetes and Slurm write it.

    Raises:
        JobError: it is none.
    """
    if not _QUANTITY.fullmatch(value):
        raise JobError(f"{what} {value!r}: a number with its unit, for example 64Gi")
    return value
