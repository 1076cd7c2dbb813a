"""The one error a user sees."""


class FedstrideError(ValueError):
    """Bad input: one sentence that says what is wrong, where, and what would be right."""
