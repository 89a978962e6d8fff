"""What a configuration may not hold in any place, whatever the types of its fields let pass."""

import math
from collections.abc import Iterator
from typing import Any

MAX_WHOLE = 2**63 - 1  # of any number: torch and Arrow hold no larger one


def unusable_values(given: Any, built: Any, where: str = "") -> Iterator[str]:
    """Yields what pydantic lets pass: truths taken for numbers, numbers beyond use.

    Args:
        given: the values as they were written.
        built: the same after validation, as values of JSON.
        where: the name of the place, "train.steps".
    """
    if isinstance(built, dict):
        given = given if isinstance(given, dict) else {}
        for key, value in built.items():
            yield from unusable_values(
                given.get(key), value, f"{where}.{key}" if where else str(key)
            )
    elif isinstance(built, list):
        given = given if isinstance(given, list | tuple) else []
        for number, value in enumerate(built):
            yield from unusable_values(given[number] if number < len(given) else None, value, where)
    elif isinstance(given, bool) != isinstance(built, bool) and given is not None:
        wanted = "true or false" if isinstance(built, bool) else "not a truth value"
        yield f"  {where}: must be {wanted} (given: {given!r})"
    elif isinstance(built, float) and not math.isfinite(built):
        yield f"  {where}: must be a finite number (given: {given!r})"
    elif isinstance(built, int) and abs(built) > MAX_WHOLE:
        yield f"  {where}: must be at most {MAX_WHOLE:,} (given: {given!r})"
