"""A custom reward function: the response should be the prompt's digit, repeated `times` times."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict, times: int
) -> dict[str, float]:
    """Fraction of correct digits; `acc` is 1 if all are. `times` comes from reward_kwargs.

    >>> compute_score("repeat", "774", "7", {}, times=4)
    {'score': 0.5, 'acc': 0.0}
    """
    wanted = ground_truth * times
    right = sum(said == digit for said, digit in zip(solution_str, wanted))
    return {"score": right / max(len(wanted), len(solution_str)), "acc": float(solution_str == wanted)}
