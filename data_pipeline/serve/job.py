"""For which ranks, of which run, a data server is."""

import hashlib

from pydantic import BaseModel, ConfigDict, Field

from ..data_config import DataConfig


class ServerJob(BaseModel):
    """Says for which ranks of which run a data server is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: DataConfig
    global_batch: int = Field(ge=1)
    num_ranks: int = Field(ge=1)  # of the run
    first_rank: int = Field(ge=0)  # of the node
    ranks_here: int = Field(ge=1)
    start_sample: int = Field(ge=0)

    @property
    def data_sha256(self) -> str:
        """Returns the hash of the data's configuration, which server and rank must share."""
        return config_sha256(self.data)


def config_sha256(data: DataConfig) -> str:
    """Returns a hash of all of a configuration."""
    return hashlib.sha256(data.model_dump_json().encode()).hexdigest()
