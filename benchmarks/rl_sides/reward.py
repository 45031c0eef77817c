"""What a completion earns, on both sides: a number that differs from one completion to the next, and costs nothing."""


def score(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """In TRL's convention. In thousands, so that what is added to a group's deviation (1e-6 here, 1e-4 in TRL) is lost
    in rounding."""
    return [float(sum(tokens) % 9973) for tokens in completion_ids]
