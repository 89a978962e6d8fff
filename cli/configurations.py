"""The configuration that a command line names: a recipe, a TOML file or a run's config.json."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..train.config.run_config import Config


def resolve_config(name: str, overrides: list[str]) -> "Config":
    """Returns the configuration of a recipe, a TOML file or a run's config.json, changed.

    Raises:
        ConfigError: there is none of this name, it cannot be read, or a change is not valid.
    """
    from ..train.config.resolve import resolve
    from ..train.config.run_config import Config, ConfigError
    from ..train.recipes.smoke import RECIPES

    if not name.endswith(".json"):
        return resolve(name, overrides, RECIPES)

    def load() -> Config:
        try:
            return Config.load(Path(name))
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{name}: is not valid JSON: {error}") from None

    return resolve(name, overrides, {name: load})
